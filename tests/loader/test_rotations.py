"""Rotations and affine changes: pixels compared with torchvision v2; boxes, masks and keypoints with the image's own motion."""

import itertools

import numpy as np
import penstock as ps
import pytest
import torch
from penstock import transforms as T
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

NUMBER = itertools.count()
SIDES = [(90, 121), (33, 64), (50, 50), (1, 1), (1, 9)]


def _images(height, width):
    rng = np.random.default_rng(0)
    smooth = np.add.outer(np.linspace(0, 150, height), np.linspace(0, 60, width))[:, :, None] + rng.integers(0, 20, (height, width, 3))
    return [smooth.clip(0, 255).astype(np.uint8), rng.integers(0, 256, (height, width, 3), dtype=np.uint8)]


def _ours(images, transform):
    ds = ps.create(f"memory://rotations-{next(NUMBER)}", {"image": ps.Image()})
    ds.append({"image": images})
    [batch] = ds.loader(batch_size=len(images), transform=[transform])
    return torch.from_numpy(np.asarray(batch["image"])).permute(0, 3, 1, 2).int()


def _close(ours, theirs, bilinear):
    """Positions have 64 bits here and 32 there. Of the nearest pixels, a few differ; mixed pixels differ by a level."""
    assert ours.shape == theirs.shape
    differences = (ours - theirs.int()).abs()
    if bilinear:
        assert differences.max() <= 1 and (differences > 0).float().mean() <= 0.01
    else:
        assert (differences > 0).float().mean() <= 0.01


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("sides", SIDES)
def test_rotations_are_those_of_torchvision(sides, expand, interpolation):
    images = _images(*sides)
    plain = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
    for angle, center, fill in [(0, None, 0), (17.3, None, 0), (-48.1, None, 90), (90, None, 0), (180, None, 7), (270, None, (9, 200, 31)), (33, (10, 20), 5)]:  # fmt: skip
        if expand and center is not None:
            continue  # This is refused: torchvision moves the picture out of the result.
        transform = T.RandomRotation((angle, angle), interpolation=interpolation, expand=expand, center=center, fill=fill)
        fill = [float(value) for value in fill] if isinstance(fill, tuple) else float(fill)
        theirs = F.rotate(plain, angle, InterpolationMode(interpolation), expand, None if center is None else list(center), fill)
        if angle in (90, 270) and not expand and sides[0] != sides[1] and (sides[0] - sides[1]) % 2:
            continue  # All positions lie in the middle between two pixels, and the last bit decides.
        _close(_ours(images, transform), theirs, interpolation == "bilinear")


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
@pytest.mark.parametrize("sides", SIDES[:3])
def test_affine_changes_are_those_of_torchvision(sides, interpolation):
    images = _images(*sides)
    plain = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
    for angle, scale, shear in [(0, 1.37, (0, 0)), (31, 0.71, (0, 0)), (-12, 1.1, (14.2, 0)), (5, 0.93, (-21, 33)), (0, 1, (0, -40))]:
        transform = T.RandomAffine(
            (angle, angle), scale=(scale, scale), shear=(shear[0], shear[0], shear[1], shear[1]), interpolation=interpolation, fill=50
        )
        theirs = F.affine(plain, angle, [0, 0], scale, list(shear), InterpolationMode(interpolation), 50.0)
        _close(_ours(images, transform), theirs, interpolation == "bilinear")


def test_angles_shifts_and_scales_are_drawn_evenly_and_shifts_are_whole():
    """A single point shows what was drawn."""
    ds = ps.create("memory://drawn", {"image": ps.Image(), "points": ps.Keypoints(points=2, of="image")})
    rows = 2000
    ds.append({"image": [np.zeros((101, 201, 3), np.uint8)] * rows, "points": [np.array([[[100, 50], [110, 50]]], np.float32)] * rows})
    on = ("image", "points")

    def points(transform):
        [batch] = ds.loader(batch_size=rows, columns=list(on), seed=3, transform=[transform])
        return np.stack([np.asarray(points)[0, :, :2] for points in batch["points"]])

    turned = points(T.RandomRotation(30, on=on))
    angles = np.degrees(np.arctan2(*(turned[:, 0] - turned[:, 1])[:, ::-1].T * [[1], [-1]]))
    assert np.allclose(turned[:, 0], (100, 50), atol=1e-3), "the centre stays"
    assert -30 <= angles.min() < -29 and 29 < angles.max() <= 30 and abs(angles.mean()) < 1
    moved = points(T.RandomAffine(0, translate=(0.1, 0.2), on=on))[:, 0] - (100, 50)
    assert np.allclose(moved, moved.round(), atol=1e-3) and set(np.abs(moved).max(axis=0).round()) == {20}
    assert len(set(moved[:, 0].round())) == 41 and abs(moved.mean()) < 1
    scaled = points(T.RandomAffine(0, scale=(0.5, 1.5), on=on))
    lengths = (scaled[:, 1] - scaled[:, 0])[:, 0] / 10
    assert 0.5 <= lengths.min() < 0.52 and 1.48 < lengths.max() <= 1.5
    sheared = points(T.RandomAffine(0, shear=(0, 0, -45, 45), on=on))
    slopes = (sheared[:, 1] - sheared[:, 0])[:, 1] / 10
    assert -1 <= slopes.min() < -0.9 and 0.9 < slopes.max() <= 1


TURNS = {
    "rotated": lambda on: T.RandomRotation(180, on=on),
    "rotated and larger": lambda on: T.RandomRotation(180, expand=True, on=on),
    "about a corner": lambda on: T.RandomRotation(30, center=(20, 10), on=on),
    "affine": lambda on: T.RandomAffine(40, translate=(0.1, 0.1), scale=(0.7, 1.4), shear=(-15, 15, -10, 10), on=on),
}


@pytest.mark.parametrize("turn", TURNS)
def test_boxes_masks_and_keypoints_follow_within_half_a_pixel(turn):
    """The image shows a white disc, whose centre and extent can be measured. Its mask and its centre must move as the disc does."""
    ds = ps.create(
        f"memory://follow-{next(NUMBER)}",
        {"image": ps.Image(), "boxes": ps.Boxes(of="image"), "mask": ps.Mask(of="image"), "points": ps.Keypoints(points=1, of="image")},
    )
    height, width, radius, (x, y) = 140, 180, 12, (70, 80)
    rows = 60
    disc = np.hypot(*np.ogrid[-y : height - y, -x : width - x]) <= radius
    image = np.repeat(np.uint8(255) * disc[:, :, None], 3, axis=2)
    ds.append({"image": [image] * rows, "boxes": [[[x - radius, y - radius, x + radius + 1, y + radius + 1]]] * rows,
               "mask": [disc.astype(np.uint8)] * rows, "points": [np.array([[[x, y]]], np.float32)] * rows})  # fmt: skip
    on = ("image", "boxes", "mask", "points")
    ragged = ["image", "mask"] if "larger" in turn else []
    [batch] = ds.loader(batch_size=rows, columns=list(on), seed=5, transform=[TURNS[turn](on)], ragged=ragged)
    seen = 0
    for image, boxes, mask, points in zip(batch["image"], batch["boxes"], batch["mask"], batch["points"], strict=True):
        white = np.asarray(image)[:, :, 0] > 127
        assert np.asarray(mask).shape == white.shape and np.array_equal(np.asarray(mask) > 0, white)
        inside = boxes[0][0] > 0 and boxes[0][1] > 0 and boxes[0][2] < white.shape[1] and boxes[0][3] < white.shape[0]
        if not inside:
            continue
        seen += 1
        ys, xs = np.nonzero(white)
        assert np.abs(np.array([xs.mean(), ys.mean()]) - np.asarray(points)[0, 0, :2]).max() <= 0.5
        # The box around the turned corners contains the disc, and has the same centre.
        left, top, right, bottom = boxes[0]
        assert left - 0.5 <= xs.min() and xs.max() + 1 <= right + 0.5 and top - 0.5 <= ys.min() and ys.max() + 1 <= bottom + 0.5
        assert abs((left + right) / 2 - (xs.mean() + 0.5)) <= 0.5 and abs((top + bottom) / 2 - (ys.mean() + 0.5)) <= 0.5
    assert seen > rows / 3


def test_boxes_of_rotations_are_those_of_torchvision():
    """For a rotation about the centre. torchvision places the larger image by its corner, which is up to a pixel away from its own pixels."""
    from torchvision import tv_tensors

    boxes = np.array([[10, 20, 50, 60], [0, 0, 120, 90], [100, 80, 119, 89]], np.float32)
    ds = ps.create("memory://boxes-of-rotations", {"image": ps.Image(), "boxes": ps.Boxes(of="image")})
    ds.append({"image": [np.zeros((90, 120, 3), np.uint8)], "boxes": [boxes]})
    on = ("image", "boxes")
    for angle, expand in [(25, False), (-70, False), (25, True), (90, True)]:
        [batch] = ds.loader(batch_size=1, columns=list(on), transform=[T.RandomRotation((angle, angle), expand=expand, on=on)])
        theirs = F.rotate(tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(90, 120)), angle, expand=expand)
        height, width = np.asarray(batch["image"][0]).shape[:2]
        assert F.rotate(torch.zeros((3, 90, 120), dtype=torch.uint8), angle, expand=expand).shape[1:] == (height, width)
        clamped = np.clip(theirs.numpy(), 0, [width, height, width, height])
        assert np.abs(batch["boxes"][0] - clamped).max() <= (1 if expand else 1e-3)


def test_deep_images_floats_and_masks_turn_too():
    rng = np.random.default_rng(2)
    deep, floats = rng.integers(0, 65536, (20, 30, 1), dtype=np.uint16), rng.normal(size=(20, 30, 5)).astype(np.float32)
    ds = ps.create("memory://deep-turns", {"deep": ps.Image(mode="I;16"), "heat": ps.Tensor((20, 30, 5), "float32"), "mask": ps.Mask()})
    mask = rng.integers(0, 5, (20, 30), dtype=np.uint8)
    ds.append({"deep": [deep], "heat": [floats], "mask": [mask]})
    on = ("deep", "heat", "mask")
    turned = T.RandomRotation((30, 30), interpolation="bilinear", fill=1000, mask_fill=255, on=on)
    [batch] = ds.loader(batch_size=1, transform=[turned])
    wanted = F.rotate(torch.from_numpy(deep.astype(np.float32)).permute(2, 0, 1), 30, InterpolationMode.BILINEAR, fill=1000.0)
    assert np.abs(np.asarray(batch["deep"][0]).astype(float) - wanted.permute(1, 2, 0).numpy()).max() <= 1
    wanted = F.rotate(torch.from_numpy(floats).permute(2, 0, 1), 30, InterpolationMode.BILINEAR, fill=1000.0).permute(1, 2, 0).numpy()
    assert np.abs(np.asarray(batch["heat"][0]) - wanted).max() <= 0.01
    found = np.asarray(batch["mask"][0])
    assert set(np.unique(found)) == {0, 1, 2, 3, 4, 255} and (found == 255)[0, 0]


def test_a_crop_and_a_resize_before_and_after_a_rotation():
    rng = np.random.default_rng(3)
    picture = rng.integers(0, 256, (60, 80, 3), dtype=np.uint8)
    ds = ps.create("memory://around-turns", {"image": ps.Image()})
    ds.append({"image": [picture]})
    turn = T.RandomRotation((20, 20), interpolation="bilinear")
    [batch] = ds.loader(
        batch_size=1, transform=[T.CenterCrop(40), T.RandomHorizontalFlip(1), turn, T.Resize((24, 24)), T.Normalize([0], [1])]
    )
    plain = torch.from_numpy(np.ascontiguousarray(picture[10:50, 20:60][:, ::-1])).permute(2, 0, 1)
    wanted = F.resize(F.rotate(plain, 20, InterpolationMode.BILINEAR, fill=0.0), [24, 24]).permute(1, 2, 0).numpy()
    assert np.abs(batch["image"][0] * 255 - wanted).max() <= 2


@pytest.mark.parametrize(
    ("transform", "words"),
    [
        (lambda: T.RandomRotation(-5), "degrees"),
        (lambda: T.RandomRotation((5, -5)), "degrees"),
        (lambda: T.RandomRotation((1, 2, 3)), "degrees"),
        (lambda: T.RandomRotation(float("nan")), "finite"),
        (lambda: T.RandomRotation(5, interpolation="bicubic"), "nearest, bilinear"),
        (lambda: T.RandomRotation(5, center=5), "center"),
        (lambda: T.RandomRotation(5, fill=(1, 2)), "fill"),
        (lambda: T.RandomAffine(5, translate=(2, 0)), "translate"),
        (lambda: T.RandomAffine(5, scale=(0, 1)), "scale"),
        (lambda: T.RandomAffine(5, scale=2), "scale"),
        (lambda: T.RandomAffine(5, shear=90), "shear"),
        (lambda: T.RandomAffine(5, shear=(1, 2, 3)), "shear"),
        (lambda: T.RandomAffine("5"), "degrees"),
        (lambda: T.RandomRotation(5, expand=True, center=(1, 1)), "leave it out"),
        (lambda: T.RandomRotation(5, center=(1e20, 1)), "center"),
        (lambda: T.RandomRotation(5, fill=-5), "fill=-5"),
        (lambda: T.RandomRotation(5, fill=300), "fill=300"),
        (lambda: T.RandomRotation(5, mask_fill=-1, on=("image", "mask")), "mask_fill=-1"),
        (lambda: T.RandomAffine(5, scale=(1e-162, 1)), "scale"),
        (lambda: T.RandomAffine(5, shear=89.999), "shear"),
    ],
)
def test_wrong_parameters_are_refused(transform, words):
    ds = ps.create(f"memory://refused-turns-{next(NUMBER)}", {"image": ps.Image(), "mask": ps.Mask(of="image")})
    with pytest.raises(ps.InvalidInputError, match=words):
        ds.loader(batch_size=1, transform=[transform()])


def test_columns_that_do_not_fit_are_refused():
    ds = ps.create(
        "memory://unfit-turns", {"vector": ps.Tensor((4,), "float32"), "grid": ps.Tensor((4, 4, 1), "int64"), "image": ps.Image()}
    )
    for name in ("vector", "grid"):
        with pytest.raises(ps.InvalidInputError, match=f"RandomRotation.* `{name}`"):
            ds.loader(batch_size=1, columns=[name], transform=[T.RandomRotation(5, on=name)])
    with pytest.raises(ps.InvalidInputError, match="before ToDtype"):
        ds.loader(batch_size=1, columns=["image"], transform=[T.Normalize([0], [1]), T.RandomAffine(5)])


def test_a_box_that_is_not_a_number_stays_none():
    ds = ps.create("memory://nan-boxes", {"image": ps.Image(), "boxes": ps.Boxes(of="image")})
    ds.append({"image": [np.zeros((9, 9, 3), np.uint8)], "boxes": [[[np.nan, 1, 2, 3], [1, 1, 5, 5]]]}, boxes="keep")
    on = ("image", "boxes")
    turn = T.RandomRotation((30, 30), on=on)
    [batch] = ds.loader(batch_size=1, transform=[turn])
    assert np.isnan(batch["boxes"][0][0]).all() and np.isfinite(batch["boxes"][0][1]).all()
    [batch] = ds.loader(batch_size=1, transform=[turn, T.SanitizeBoundingBoxes(on="boxes")])
    assert batch["boxes"][0].shape == (1, 4)


@pytest.mark.parametrize(
    "make",
    [
        lambda: (
            ps.Tensor((1, 20_000, 3), "float32"),
            np.zeros((1, 20_000, 3), np.float32),
            T.RandomRotation((45, 45), expand=True, on="t"),
        ),
        lambda: (ps.Tensor((None, None, 1), "uint8"), np.zeros((10, 10, 1), np.uint8), T.Pad(6000, on="t")),
        lambda: (ps.Tensor((None, None, 3), "uint8"), np.zeros((3000, 3000, 3), np.uint8), T.GaussianBlur(5, on="t")),
    ],
)
def test_tensors_that_grow_count_against_the_budget(make):
    kind, value, transform = make()
    ds = ps.create(f"memory://growing-{next(NUMBER)}", {"t": kind})
    ds.append({"t": [value]})
    with pytest.raises(ps.Error, match="cannot load a batch: it needs"):
        next(iter(ds.loader(batch_size=1, memory_bytes=64 << 20, transform=[transform])))

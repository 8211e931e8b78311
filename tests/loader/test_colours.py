"""Colours, blurring and erasing, compared with torchvision v2."""

import itertools

import numpy as np
import penstock as ps
import pytest
import torch
from penstock import transforms as T
from torchvision.transforms.v2 import functional as F

NUMBER = itertools.count()
SIDES = [(90, 121), (1, 1), (33, 64)]


def _images(height, width):
    rng = np.random.default_rng(0)
    smooth = np.add.outer(np.linspace(0, 200, height), np.linspace(0, 50, width))[:, :, None] + rng.integers(0, 40, (height, width, 3))
    extremes = rng.choice(np.array([0, 1, 127, 254, 255], np.uint8), (height, width, 3))
    noise = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    grey = np.repeat(noise[:, :, :1], 3, axis=2)
    return [smooth.clip(0, 255).astype(np.uint8), extremes, noise, grey, np.zeros_like(noise), np.full_like(noise, 255)]


def _dataset(images):
    ds = ps.create(f"memory://colours-{next(NUMBER)}", {"image": ps.Image(), "n": "int64"})
    ds.append({"image": images, "n": range(len(images))})
    return ds


def _ours(ds, *transform, **options):
    [batch] = ds.loader(batch_size=len(ds), columns=["image"], transform=list(transform), **options)
    return torch.from_numpy(batch["image"]).permute(0, 3, 1, 2)


def _differ(ours, theirs):
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    differences = (ours.int() - theirs.int()).abs()
    return int(differences.max()), float((differences > 0).float().mean())


FACTORS = (0.0, 0.31, 1.0, 1.7, 4.0)
STEPS = {
    "brightness": (lambda f: T.ColorJitter(brightness=(f, f)), F.adjust_brightness, FACTORS),
    "contrast": (lambda f: T.ColorJitter(contrast=(f, f)), F.adjust_contrast, FACTORS),
    "saturation": (lambda f: T.ColorJitter(saturation=(f, f)), F.adjust_saturation, FACTORS),
    "hue": (lambda f: T.ColorJitter(hue=(f, f)), F.adjust_hue, (-0.5, -0.21, 0.1, 0.33, 0.5)),
    "grey": (lambda f: T.Grayscale(f), F.rgb_to_grayscale, (1, 3)),
    "random grey": (lambda f: T.RandomGrayscale(p=1.0), lambda image, f: F.rgb_to_grayscale(image, 3), (0,)),
}  # fmt: skip


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("step", STEPS)
def test_colours_are_those_of_torchvision(step, sides):
    """At most one level differs, in at most 3 % of the values: where torchvision's fused additions round differently."""
    ours, theirs, factors = STEPS[step]
    images = _images(*sides)
    ds, plain = _dataset(images), torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
    for factor in factors:
        most, share = _differ(_ours(ds, ours(factor)), theirs(plain, factor))
        assert most <= 1 and share <= 0.03, (factor, most, share)


@pytest.mark.parametrize(("kernel", "sigma"), [(3, 0.5), (5, 1.2), ((7, 3), 2.0), ((1, 9), 0.1), (23, 5.0)])
def test_blurring_is_that_of_torchvision(kernel, sigma):
    images = _images(60, 81)
    ds, plain = _dataset(images), torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
    sizes = [kernel, kernel] if isinstance(kernel, int) else list(kernel)
    most, share = _differ(_ours(ds, T.GaussianBlur(kernel, sigma)), F.gaussian_blur(plain, sizes, [sigma, sigma]))
    assert most <= 1 and share <= 0.001


def test_the_steps_come_in_random_order():
    """The order is found by trying all of them with torchvision. Later steps amplify differences of a level."""
    images = _images(40, 50)[:3]
    ds, plain = _dataset(images), torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
    steps = [(F.adjust_brightness, 1.2), (F.adjust_contrast, 0.7), (F.adjust_saturation, 1.4), (F.adjust_hue, 0.1)]
    seen = set()
    for seed in range(20):
        ours = _ours(ds, T.ColorJitter((1.2, 1.2), (0.7, 0.7), (1.4, 1.4), (0.1, 0.1)), seed=seed)
        for image, mine in zip(plain, ours, strict=True):
            found = {}
            for order in itertools.permutations(range(4)):
                made = image
                for number in order:
                    made = steps[number][0](made, steps[number][1])
                found[order] = float((made.int() - mine.int()).abs().float().mean())
            best = min(found, key=found.get)
            assert found[best] < 0.5 < 3 * sorted(found.values())[8]
            seen.add(best)
    assert len(seen) >= 12, "the order of the steps is random"


def test_factors_are_drawn_evenly():
    ds = _dataset([np.full((2, 2, 3), 100, np.uint8)] * 2000)
    values = _ours(ds, T.ColorJitter(brightness=0.5), seed=1)[:, 0, 0, 0].numpy()
    assert values.min() in (50, 51) and values.max() in (149, 148) and abs(values.mean() - 99.5) < 2
    parts = np.histogram(values, 10, (50, 150))[0]
    assert parts.min() > 140 and parts.max() < 260
    grey = _ours(_dataset([np.array([[[200, 0, 0]]], np.uint8)] * 2000), T.RandomGrayscale(p=0.3), seed=1)
    assert 520 < int((grey[:, 1, 0, 0] > 0).sum()) < 680


@pytest.mark.parametrize("value", [7, (1, 2, 3)])
def test_erased_boxes(value):
    images = [np.full((50, 80, 3), 100, np.uint8)] * 400
    erased = _ours(_dataset(images), T.RandomErasing(0.5, value=value), seed=2).permute(0, 2, 3, 1).numpy()
    wanted = np.broadcast_to(np.array(value, np.uint8), 3)
    areas, ratios, tops, lefts = [], [], [], []
    for image in erased:
        inside = (image != 100).any(axis=2)
        if not inside.any():
            continue
        rows, columns = np.flatnonzero(inside.any(axis=1)), np.flatnonzero(inside.any(axis=0))
        box = image[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        assert (box == wanted).all() and (image[~inside] == 100).all()
        areas.append(box.shape[0] * box.shape[1] / 4000)
        ratios.append(box.shape[0] / box.shape[1])
        tops.append(rows[0])
        lefts.append(columns[0])
    assert 150 < len(areas) < 250 and 0.015 < min(areas) < 0.05 and 0.28 < max(areas) < 0.36
    assert 0.25 < min(ratios) < 0.5 and 2 < max(ratios) < 4 and max(tops) > 30 and max(lefts) > 50


def test_erasing_after_normalize_uses_values_of_the_result():
    images = [np.full((50, 80, 3), 100, np.uint8)] * 20
    normalize = T.Normalize([0.5] * 3, [0.25] * 3)
    for dtype in ("float32", "float16"):
        erased = _ours(_dataset(images), T.ToDtype(dtype, scale=True), normalize, T.RandomErasing(1.0, value=(9, -8, 7))).numpy()
        plain = (100 / 255 - 0.5) / 0.25
        for channel, value in enumerate((9, -8, 7)):
            inside = erased[:, channel] == value
            assert inside.any(axis=(1, 2)).all() and np.allclose(erased[:, channel][~inside], plain, atol=2e-3)
    before = _ours(_dataset(images), T.RandomErasing(1.0, value=0), T.ToDtype("float32", scale=True), normalize).numpy()
    assert before.min() == -2, "before, the value is one of the image"
    sizes = [np.full((50 + row, 80, 3), 100, np.uint8) for row in range(3)]
    erasing = [normalize, T.RandomErasing(1.0, value=5)]
    [batch] = _dataset(sizes).loader(batch_size=3, columns=["image"], transform=erasing, ragged=["image"])
    assert [image.shape for image in batch["image"]] == [(50, 80, 3), (51, 80, 3), (52, 80, 3)] and all(
        (image == 5).any() for image in batch["image"]
    )


def test_boxes_and_masks_stay_and_images_change_together():
    ds = ps.create("memory://colours-joint", {"a": ps.Image(), "b": ps.Image(), "boxes": ps.Boxes(of="a"), "mask": ps.Mask(of="a")})
    image = _images(20, 30)[2]
    ds.append({"a": [image] * 4, "b": [image] * 4, "boxes": [[[1, 2, 3, 4]]] * 4, "mask": [image[:, :, 0]] * 4})
    on = ("a", "b", "boxes", "mask")
    transform = [
        T.RandomHorizontalFlip(1.0, on=on),
        T.ColorJitter(0.5, 0.5, 0.5, 0.5, on=on),
        T.GaussianBlur(3, on=on),
        T.RandomErasing(1.0, on=on),
    ]
    [batch] = ds.loader(batch_size=4, transform=transform)
    assert (batch["a"] == batch["b"]).all() and not (batch["a"][0] == batch["a"][1]).all()
    assert (np.stack(batch["mask"]) == image[:, ::-1, 0]).all() and batch["boxes"][0].tolist() == [[27, 2, 29, 4]]


def test_tensors_of_the_shape_of_images_and_grey_images():
    noise = _images(16, 16)[2]
    ds = ps.create("memory://colours-tensors", {"x": ps.Tensor((16, 16, 3), "uint8"), "grey": ps.Image(mode="L")})
    ds.append({"x": [noise], "grey": [noise[:, :, 0]]})
    [batch] = ds.loader(
        batch_size=1, transform=[T.ColorJitter(hue=(0.2, 0.2), on="x"), T.ColorJitter((2, 2), saturation=(3, 3), on="grey")]
    )
    assert _differ(torch.from_numpy(batch["x"][0]), F.adjust_hue(torch.from_numpy(noise).permute(2, 0, 1), 0.2).permute(1, 2, 0))[0] <= 1
    assert (batch["grey"][0, :, :, 0] == np.minimum(noise[:, :, 0].astype(int) * 2, 255)).all()
    [batch] = ds.loader(batch_size=1, transform=[T.Grayscale(1, on="x"), T.Grayscale(3, on="grey")])
    assert (
        batch["x"].shape == (1, 16, 16, 1) and batch["grey"].shape == (1, 16, 16, 3) and (batch["grey"][0, :, :, 2] == noise[:, :, 0]).all()
    )


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: T.ColorJitter(brightness=-1), "at least 0"), (lambda: T.ColorJitter(contrast=(2, 1)), "the range"), (lambda: T.ColorJitter(hue=0.6), "the range"),
        (lambda: T.ColorJitter(saturation=(1, 2, 3)), "a number or"), (lambda: T.ColorJitter(brightness="x"), "expected a number"), (lambda: T.Grayscale(2), "expected 1 or 3"),
        (lambda: T.RandomGrayscale(2.0), "p=2"), (lambda: T.GaussianBlur(4), "odd"), (lambda: T.GaussianBlur(3, (2, 1)), "low"), (lambda: T.GaussianBlur(3, 0), "low"),
        (lambda: T.GaussianBlur(99), "does not fit an image"), (lambda: T.RandomErasing(value="random"), "expected a number"), (lambda: T.RandomErasing(value=(1, 2)), "1 or 3 channels"),
        (lambda: T.RandomErasing(scale=(0.5, 2)), "scale"), (lambda: T.RandomErasing(ratio=(0, 1)), "scale"), (lambda: T.ColorJitter(0.1, on="n"), "does not fit `n`"),
    ],
)  # fmt: skip
def test_wrong_parameters_are_refused(make, says):
    ds = _dataset(_images(20, 30))
    with pytest.raises(ps.InvalidInputError, match=says):
        next(iter(ds.loader(batch_size=2, transform=[make()])))
    with pytest.raises(ps.InvalidInputError, match="must come before ToDtype and Normalize"):
        ds.loader(batch_size=2, transform=[T.ToDtype("float32"), T.ColorJitter(0.1)])


def test_state_and_ranks_do_not_change_the_colours():
    ds = _dataset(_images(20, 30) * 4)

    def make(**options):
        transform = [T.ColorJitter(0.4, 0.4, 0.4, 0.1), T.RandomErasing()]
        return ds.loader(global_batch_size=4, transform=transform, shuffle=True, **options)

    whole = {int(n): image for batch in make(rank=0, world_size=1) for n, image in zip(batch["n"], batch["image"], strict=True)}
    for rank in range(2):
        for batch in make(rank=rank, world_size=2, threads=1):
            assert all((whole[int(n)] == image).all() for n, image in zip(batch["n"], batch["image"], strict=True))

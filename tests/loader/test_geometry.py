"""Transforms that move an image together with its annotations."""

import numpy as np
import penstock as ps
import pytest
from penstock import transforms as T


@pytest.mark.local
@pytest.mark.parametrize("flip", [T.RandomHorizontalFlip, T.RandomVerticalFlip])
def test_boxes_masks_and_points_follow_flips_in_both_directions(tmp_path, flip):
    """The box, mask, and points must match the white rectangle in the image, whether or not it is flipped."""
    ds = ps.create(
        tmp_path / "set",
        {"image": ps.Image(), "boxes": ps.Boxes(of="image"), "mask": ps.Mask(of="image"), "points": ps.Keypoints(points=1, of="image")},
    )
    image, mask = np.zeros((40, 30, 3), np.uint8), np.zeros((40, 30), np.uint8)
    image[5:12, 3:8], mask[5:12, 3:8] = 255, 1
    rows = 40
    ds.append({"image": [image] * rows, "boxes": [np.array([[3, 5, 8, 12]], "float32")] * rows, "mask": [mask] * rows,
               "points": [np.array([[[3, 5]]], "float32")] * rows})  # fmt: skip
    on = ("image", "boxes", "mask", "points")
    places = set()
    for batch in ds.loader(batch_size=rows, seed=0, columns=list(on), transform=[flip(0.5, on=on)]):
        for index in range(rows):
            (x1, y1, x2, y2), (x, y) = batch["boxes"][index][0], batch["points"][index][0][0]
            ys, xs = np.nonzero(np.asarray(batch["image"][index])[:, :, 0])
            assert (xs.min(), ys.min(), xs.max() + 1, ys.max() + 1) == (x1, y1, x2, y2)
            assert np.array_equal(np.asarray(batch["mask"][index]) > 0, np.asarray(batch["image"][index])[:, :, 0] > 0)
            assert (x in (x1, x2 - 1)) and (y in (y1, y2 - 1)) and (x == x1) == (x1 == 3) and (y == y1) == (y1 == 5)
            places.add((x1, y1))
    assert places == ({(3, 5), (22, 5)} if flip is T.RandomHorizontalFlip else {(3, 5), (3, 28)})


@pytest.mark.local
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "lanczos"])
def test_a_crop_of_an_enlarged_image_equals_that_part_of_it(tmp_path, interpolation):
    """The filter reads pixels outside the crop even when it enlarges the image. Lanczos reads 3 source pixels on each side."""
    rng = np.random.default_rng(0)
    picture = rng.integers(0, 256, (24, 24, 3), dtype=np.uint8)
    ds = ps.create(tmp_path / "set", {"image": ps.Image()})
    ds.append({"image": [picture]})
    resize = T.Resize((96, 96), interpolation=interpolation, on="image")
    [whole] = ds.loader(batch_size=1, transform=[resize])
    for size in (10, 30, 64):
        [part] = ds.loader(batch_size=1, transform=[resize, T.CenterCrop(size, on="image")])
        begin = (96 - size) // 2
        expected = np.asarray(whole["image"][0])[begin : begin + size, begin : begin + size].astype(int)
        assert np.abs(np.asarray(part["image"][0]).astype(int) - expected).max() <= 1, size


def test_what_is_declared_to_be_of_an_image_follows_it_without_on():
    """Boxes that stay behind would be wrong without any sign of it."""
    kinds = {
        "image": ps.Image(),
        "boxes": ps.Boxes(of="image"),
        "mask": ps.Mask(of="image"),
        "points": ps.Keypoints(1, of="image"),
    }
    ds = ps.create("memory://follows", kinds)
    box = [[[1, 2, 4, 6]]]
    ds.append(
        {
            "image": [np.zeros((10, 20, 3), np.uint8)],
            "boxes": box,
            "mask": [np.eye(10, 20, dtype=np.uint8)],
            "points": [[[[1, 2]]]],
        }
    )
    steps = [T.RandomHorizontalFlip(1.0), T.ColorJitter(0.2), T.Resize((20, 40)), T.Normalize([0.5], [0.5])]
    [batch] = ds.loader(batch_size=1, transform=steps)
    assert batch["boxes"][0].tolist() == [[32, 4, 38, 12]]
    assert np.asarray(batch["mask"][0]).shape == (20, 40) and np.asarray(batch["points"][0]).tolist() == [[[36, 4]]]
    assert np.array_equal(np.asarray(batch["mask"][0])[::2, ::2], np.eye(10, 20, dtype=np.uint8)[:, ::-1])
    [batch] = ds.loader(
        batch_size=1, columns=["image", "boxes"], outputs={"picture": "image", "boxes": "boxes"}, transform=[T.RandomHorizontalFlip(1.0)]
    )
    assert batch["boxes"][0].tolist() == [[16, 2, 19, 6]]
    [batch] = ds.loader(batch_size=1, columns=["image", "boxes"], transform=[T.RandomHorizontalFlip(1.0, on="image")])
    assert batch["boxes"][0].tolist() == [[1, 2, 4, 6]], "on= decides"

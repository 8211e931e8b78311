"""Penstock, with its default settings."""

from __future__ import annotations

from typing import Any

import drawn
import numpy as np
import penstock as ps
from penstock import transforms as T

MEAN, STD = [125.3 / 255, 123.0 / 255, 113.9 / 255], [51.6 / 255, 50.8 / 255, 51.3 / 255]


def photos_write(o: Any) -> Any:
    files = drawn.photographs(o)
    return lambda: len(ps.create(f"{o.place}/penstock", {"image": ps.Image()}).append({"image": files}).row_ids)


def photos(o: Any) -> Any:
    """Options: decode is fast (the default of random crops: large boxes are decoded at half size or less) or exact."""
    crop = T.RandomResizedCrop(224, decode=o.decode)
    loader = ps.open(f"{o.place}/penstock").loader(
        batch_size=o.batch, shuffle=True, transform=[crop, T.RandomHorizontalFlip()], threads=o.threads
    )
    return lambda: (batch["image"] for batch in loader.stream(1))


TRANSFORMS = {
    "rotation, nearest": T.RandomRotation(30, on="image"),
    "rotation, bilinear": T.RandomRotation(30, interpolation="bilinear", on="image"),
    "affine, bilinear": T.RandomAffine(15, (0.1, 0.1), (0.8, 1.2), 10, interpolation="bilinear", on="image"),
    "colour jitter": T.ColorJitter(0.4, 0.4, 0.4, 0.1, on="image"),
    "colour jitter without hue": T.ColorJitter(0.4, 0.4, 0.4, on="image"),
    "grayscale": T.Grayscale(3, on="image"),
    "blur, 9 × 9": T.GaussianBlur(9, on="image"),
    "erasing": T.RandomErasing(1.0, on="image"),
}


def transforms_write(o: Any) -> Any:
    images = np.load(f"{o.place}/images.npy")
    return lambda: len(ps.create(f"{o.place}/penstock", {"image": ps.Tensor(images.shape[1:], "uint8")}).append({"image": images}).row_ids)


def transforms(o: Any) -> Any:
    """One transform of images in memory, in batches."""
    loader = ps.open(f"{o.place}/penstock").loader(batch_size=o.batch, transform=[TRANSFORMS[o.case]], threads=o.threads)
    return lambda: (batch["image"] for batch in loader.stream(1))


def small_images(o: Any) -> Any:
    """Crop with padding, flip and normalise 32 × 32 images to float32."""
    steps = [T.RandomHorizontalFlip(on="x"), T.RandomCrop(32, padding=4, on="x"), T.Normalize(MEAN, STD, on="x")]
    loader = ps.open(f"{o.place}/penstock").loader(batch_size=o.batch, shuffle=True, transform=steps, threads=o.threads)
    return lambda: (batch["x"] for batch in loader.stream(1))


def small_images_write(o: Any) -> Any:
    images, labels = np.load(f"{o.place}/x.npy", mmap_mode="r"), np.load(f"{o.place}/y.npy")
    schema = {"x": ps.Tensor((32, 32, 3), "uint8"), "label": "int64"}
    return lambda: len(ps.create(f"{o.place}/penstock", schema).append({"x": images, "label": labels}).row_ids)

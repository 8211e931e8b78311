"""Transforms that move pixels. Boxes, masks and keypoints move along."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from penstock.errors import InvalidInputError
from penstock.transforms.base import On, Transform, numbers_of, padding_of, sizes_of

INTERPOLATIONS = ("nearest", "nearest-exact", "bilinear", "bicubic", "lanczos")


@dataclasses.dataclass(frozen=True)
class Resize(Transform):
    """Resize to (height, width). One number sets the shorter side and keeps the aspect ratio. Masks use the nearest pixel.

    `interpolation`: nearest (the pixel at the corner), nearest-exact (at the centre) and bilinear match torchvision. Bicubic
    (a = -0.5, as in Pillow) and lanczos run the vertical pass first. Their results on noise therefore differ from torchvision and
    Pillow by up to 20 levels where a pass overshoots white or black. `decode`: "exact", or "fast". If a JPEG is much larger than the
    result, "fast" decodes it at half, a quarter or an eighth of its size.
    """

    size: int | Sequence[int]
    interpolation: str = "bilinear"
    max_size: int | None = None
    antialias: bool = True
    decode: str = "exact"
    on: On = None
    op = "resize"

    def declared(self) -> dict[str, Any]:
        return {
            "size": sizes_of(self.size, "size", False), "max_size": self.max_size, "interpolation": _interpolation(self.interpolation), "antialias": self.antialias,
            "fast": _fast(self.decode),
        }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class CenterCrop(Transform):
    """Crop the centre. `size` is (height, width), or one number for a square. Smaller inputs are padded with zeros."""

    size: int | Sequence[int]
    on: On = None
    op = "center-crop"

    def declared(self) -> dict[str, Any]:
        return {"size": sizes_of(self.size, "size", True)}


@dataclasses.dataclass(frozen=True)
class RandomCrop(Transform):
    """Crop a box at a random position, after padding. `size` is (height, width), or one number per dimension of a tensor."""

    size: int | Sequence[int]
    padding: int | Sequence[int] | None = None
    pad_if_needed: bool = False
    fill: float = 0
    on: On = None
    op = "random-crop"

    def declared(self) -> dict[str, Any]:
        padding = None if self.padding is None else padding_of(self.padding)
        return {
            "size": sizes_of(self.size, "size", True),
            "padding": padding,
            "pad_if_needed": self.pad_if_needed,
            "fill": float(self.fill),
        }


@dataclasses.dataclass(frozen=True)
class RandomResizedCrop(Transform):
    """Crop a box of random area (`scale`, relative to the image) and aspect ratio (`ratio`), and resize it.

    Cost: for a JPEG, decodes only the box. `decode="fast"` decodes the box at half, a quarter or an eighth of its size if the result
    is not larger than that. PSNR against an exact decode is 43 dB (median) and 29.6 dB (worst) on photographs.
    "exact" decodes the box at full size.
    """

    size: int | Sequence[int]
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    interpolation: str = "bilinear"
    antialias: bool = True
    decode: str = "fast"
    on: On = None
    op = "random-resized-crop"

    def declared(self) -> dict[str, Any]:
        scale, ratio = numbers_of(self.scale, "scale"), numbers_of(self.ratio, "ratio")
        if len(scale) != 2 or len(ratio) != 2:
            raise InvalidInputError(f"scale={self.scale!r}, ratio={self.ratio!r}, expected (low, high) for each", code="invalid-argument")
        return {
            "size": sizes_of(self.size, "size", True)[:2], "scale": [float(s) for s in scale], "ratio": [float(r) for r in ratio],
            "interpolation": _interpolation(self.interpolation), "antialias": self.antialias, "fast": _fast(self.decode),
        }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RandomHorizontalFlip(Transform):
    """Flip horizontally with probability p."""

    p: float = 0.5
    on: On = None
    op = "random-horizontal-flip"

    def declared(self) -> dict[str, Any]:
        return {"p": float(self.p)}


@dataclasses.dataclass(frozen=True)
class RandomVerticalFlip(Transform):
    """Flip vertically with probability p."""

    p: float = 0.5
    on: On = None
    op = "random-vertical-flip"

    def declared(self) -> dict[str, Any]:
        return {"p": float(self.p)}


@dataclasses.dataclass(frozen=True)
class Pad(Transform):
    """Add borders filled with `fill`. `padding` is one number, (left and right, top and bottom), or (left, top, right, bottom).

    For tensors with more dimensions, `padding` contains two numbers per dimension, before and after.
    """

    padding: int | Sequence[int]
    fill: float = 0
    on: On = None
    op = "pad"

    def declared(self) -> dict[str, Any]:
        return {"padding": padding_of(self.padding), "fill": float(self.fill)}


def _interpolation(name: Any) -> str:
    text = str(getattr(name, "value", name)).lower()
    if text not in INTERPOLATIONS:
        raise InvalidInputError(f"interpolation={name!r}", code="invalid-argument", hint=f"valid values: {', '.join(INTERPOLATIONS)}")
    return text


def _fast(decode: Any) -> bool:
    if decode not in ("exact", "fast"):
        raise InvalidInputError(f"decode={decode!r}", code="invalid-argument", hint="one of exact, fast")
    return bool(decode == "fast")

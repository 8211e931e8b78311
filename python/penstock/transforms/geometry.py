"""Transforms that move pixels. Boxes, masks and keypoints move along."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from penstock.errors import InvalidInputError
from penstock.transforms.base import On, Range, Transform, numbers_of, padding_of, range_of, sizes_of

TURNED = ("nearest", "bilinear")
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
    moves = True

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
    moves = True

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
    moves = True

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
    moves = True

    def declared(self) -> dict[str, Any]:
        scale, ratio = numbers_of(self.scale, "scale"), numbers_of(self.ratio, "ratio")
        if len(scale) != 2 or len(ratio) != 2:
            raise InvalidInputError(f"scale={self.scale!r}, ratio={self.ratio!r}, expected (low, high) for each")
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
    moves = True

    def declared(self) -> dict[str, Any]:
        return {"p": float(self.p)}


@dataclasses.dataclass(frozen=True)
class RandomVerticalFlip(Transform):
    """Flip vertically with probability p."""

    p: float = 0.5
    on: On = None
    op = "random-vertical-flip"
    moves = True

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
    moves = True

    def declared(self) -> dict[str, Any]:
        if isinstance(self.fill, list | tuple | str):
            raise InvalidInputError(f"fill={self.fill!r}, expected one number", hint="write fill=0")
        return {"padding": padding_of(self.padding), "fill": float(self.fill)}


@dataclasses.dataclass(frozen=True)
class RandomRotation(Transform):
    """Turn by a random angle in degrees: `degrees` is (low, high), or one number x for (-x, x). Positive angles turn anticlockwise.

    `interpolation`: nearest or bilinear; masks use the nearest pixel. `expand`: enlarge the result so that nothing is cut off. `center`:
    the fixed point (x, y), by default the centre of the image. `fill`: the value beyond the border, one number or one per channel;
    `mask_fill` is the one of masks. A box becomes the box around its turned corners, cut at the borders. Keypoints may leave the image.
    Bilinear values differ from torchvision's on uint8 tensors by at most one level. With nearest, a pixel in 50,000 may be a neighbour.
    """

    degrees: Range
    interpolation: str = "nearest"
    expand: bool = False
    center: Sequence[float] | None = None
    fill: float | Sequence[float] = 0
    mask_fill: float = 0
    on: On = None
    op = "random-affine"
    moves = True

    def declared(self) -> dict[str, Any]:
        return {"rotation": True, "expand": bool(self.expand), **_turned(self)}


@dataclasses.dataclass(frozen=True)
class RandomAffine(Transform):
    """Turn, shift, scale and shear at random, and keep the size. Positive angles turn clockwise, as in torchvision.

    `degrees`: (low, high), or one number x for (-x, x). `translate`: the largest shifts, relative to width and height. `scale`: (low, high).
    `shear`: angles in degrees: one number x for (-x, x) along x, (low, high) along x, or two ranges (low, high, low, high) along x and y.
    The other parameters, and boxes, masks and keypoints, are those of `RandomRotation`.
    """

    degrees: Range
    translate: Sequence[float] | None = None
    scale: Sequence[float] | None = None
    shear: Range | None = None
    interpolation: str = "nearest"
    fill: float | Sequence[float] = 0
    center: Sequence[float] | None = None
    mask_fill: float = 0
    on: On = None
    op = "random-affine"
    moves = True

    def declared(self) -> dict[str, Any]:
        shear = None if self.shear is None else [float(number) for number in numbers_of(self.shear, "shear")]
        if shear is not None and len(shear) not in (1, 2, 4):
            raise InvalidInputError(f"shear={self.shear!r}, expected 1, 2 or 4 numbers")
        if shear is not None:
            shear = [-shear[0], shear[0]] if len(shear) == 1 else shear
            shear = [*shear, 0.0, 0.0][:4]
        return {
            "rotation": False, "expand": False, "translate": _pair(self.translate, "translate"), "scale": _pair(self.scale, "scale"),
            "shear": None if shear is None else [shear[:2], shear[2:]], **_turned(self),
        }  # fmt: skip


def _turned(transform: RandomRotation | RandomAffine) -> dict[str, Any]:
    """Return what the two transforms share."""
    interpolation = _interpolation(transform.interpolation, TURNED)
    return {
        "degrees": range_of(transform.degrees, "degrees", 0, -math.inf), "bilinear": interpolation == "bilinear", "center": _pair(transform.center, "center"),
        "fill": [float(value) for value in numbers_of(transform.fill, "fill")], "mask_fill": float(transform.mask_fill),
    }  # fmt: skip


def _pair(value: Any, what: str) -> list[float] | None:
    if value is None:
        return None
    numbers = [float(number) for number in numbers_of(value, what)]
    if len(numbers) != 2:
        raise InvalidInputError(f"{what}={value!r}, expected two numbers")
    return numbers


def _interpolation(name: Any, valid: Sequence[str] = INTERPOLATIONS) -> str:
    text = str(getattr(name, "value", name)).lower()
    if text not in valid:
        raise InvalidInputError(f"interpolation={name!r}", hint=f"valid values: {', '.join(valid)}")
    return text


def _fast(decode: Any) -> bool:
    if decode not in ("exact", "fast"):
        raise InvalidInputError(f"decode={decode!r}", hint="one of exact, fast")
    return bool(decode == "fast")

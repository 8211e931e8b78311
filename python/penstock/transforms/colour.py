"""Transforms that change the colours of images, blur them or erase parts. Boxes, masks and keypoints in `on` stay as they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from penstock.errors import InvalidInputError
from penstock.transforms.base import On, Range, Transform, numbers_of, range_of, sizes_of


def _factors(value: Any, what: str, centre: float, least: float) -> list[float] | None:
    """Return (low, high), or None if nothing changes."""
    numbers = range_of(value, what, centre, least)
    return None if numbers == [centre, centre] else numbers


@dataclasses.dataclass(frozen=True)
class ColorJitter(Transform):
    """Change brightness, contrast, saturation and hue, in random order. One number x means (max(0, 1 - x), 1 + x). For hue, it
    means (-x, x), where 0.5 is half of the colour circle.

    Values follow torchvision on uint8 tensors; each step differs from it by at most one level.
    """

    brightness: Range = 0
    contrast: Range = 0
    saturation: Range = 0
    hue: Range = 0
    on: On = None
    op = "color-jitter"

    def declared(self) -> dict[str, Any]:
        factors = ("brightness", "contrast", "saturation")
        return {**{name: _factors(getattr(self, name), name, 1, 0) for name in factors}, "hue": _factors(self.hue, "hue", 0, -0.5)}


@dataclasses.dataclass(frozen=True)
class Grayscale(Transform):
    """Remove the colours. Values are those of torchvision on uint8 tensors, up to one level."""

    num_output_channels: int = 1
    on: On = None
    op = "grayscale"

    def declared(self) -> dict[str, Any]:
        channels = self.num_output_channels
        if channels not in (1, 3) or isinstance(channels, bool):
            raise InvalidInputError(f"num_output_channels={channels!r}, expected 1 or 3")
        return {"channels": int(channels), "p": 1.0}


@dataclasses.dataclass(frozen=True)
class RandomGrayscale(Transform):
    """Remove the colours with probability p. The number of channels stays the same."""

    p: float = 0.1
    on: On = None
    op = "grayscale"

    def declared(self) -> dict[str, Any]:
        return {"channels": 3, "p": float(self.p)}


@dataclasses.dataclass(frozen=True)
class GaussianBlur(Transform):
    """Blur with a Gaussian kernel of `kernel_size` pixels: (width, height), or one odd number. `sigma` is drawn from (low, high), or fixed.

    Borders are mirrored. Values are those of torchvision on uint8 tensors, up to one level.
    """

    kernel_size: int | Sequence[int]
    sigma: float | Sequence[float] = (0.1, 2.0)
    on: On = None
    op = "gaussian-blur"

    def declared(self) -> dict[str, Any]:
        sigma = [float(number) for number in numbers_of(self.sigma, "sigma")]
        sizes = sizes_of(self.kernel_size, "kernel_size", True)
        if len(sizes) != 2 or len(sigma) > 2:
            raise InvalidInputError(f"kernel_size={self.kernel_size!r}, sigma={self.sigma!r}, expected one or two numbers for each")
        return {"kernel": sizes, "sigma": sigma * 2 if len(sigma) == 1 else sigma}


@dataclasses.dataclass(frozen=True)
class RandomErasing(Transform):
    """Fill a random box with `value` (one number, or one per channel), with probability p. `scale`: the area of the box, relative to the
    image; `ratio`: its height relative to its width. After ToDtype or Normalize, `value` is one of the result, and no other conversion may follow.
    """

    p: float = 0.5
    scale: tuple[float, float] = (0.02, 0.33)
    ratio: tuple[float, float] = (0.3, 3.3)
    value: float | Sequence[float] = 0
    on: On = None
    op = "random-erasing"

    def declared(self) -> dict[str, Any]:
        if isinstance(self.value, str):
            raise InvalidInputError(f"value={self.value!r}, expected a number, or one per channel", hint="write value=0")
        ranges = {name: [float(number) for number in numbers_of(getattr(self, name), name)] for name in ("scale", "ratio")}
        if any(len(numbers) != 2 for numbers in ranges.values()):
            raise InvalidInputError(f"scale={self.scale!r}, ratio={self.ratio!r}, expected (low, high) for each")
        return {"p": float(self.p), **ranges, "value": [float(number) for number in numbers_of(self.value, "value")]}

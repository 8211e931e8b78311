"""What all transforms of the core share: their base class, and checks of their parameters."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from penstock.errors import InvalidInputError

# The maximum number of pixels per side, or of elements per dimension.
MOST = 1 << 16

On = str | Sequence[str] | None
Range = float | Sequence[float]


def numbers_of(value: Any, what: str) -> list[Any]:
    """Return one number, or a sequence of numbers, as a list."""
    if isinstance(value, numbers.Number) and not isinstance(value, bool):
        value = [value]
    try:
        values = [None] if isinstance(value, str | bytes) else list(value)
    except TypeError:
        values = [None]
    if not values or not all(isinstance(number, numbers.Number) and not isinstance(number, bool) for number in values):
        raise InvalidInputError(f"{what}={value!r}, expected a number or a sequence of numbers")
    return [number.item() if isinstance(number, np.generic) else number for number in values]


def range_of(value: Any, what: str, centre: float, least: float) -> list[float]:
    """Return (low, high). One number is the distance to both sides of the centre."""
    numbers = [float(number) for number in numbers_of(value, what)]
    if len(numbers) == 1:
        if numbers[0] < 0:
            raise InvalidInputError(f"{what}={value!r}, expected a number of at least 0")
        numbers = [max(least, centre - numbers[0]), centre + numbers[0]]
    if len(numbers) != 2:
        raise InvalidInputError(f"{what}={value!r}, expected a number or (low, high)")
    return numbers


def sizes_of(value: Any, what: str, square: bool) -> list[int]:
    sizes = numbers_of(value, what)
    if not all(isinstance(size, int) and 0 < size <= MOST for size in sizes):
        raise InvalidInputError(f"{what}={value!r}, expected whole numbers from 1 to {MOST}")
    return sizes * 2 if square and len(sizes) == 1 else sizes


def padding_of(value: Any) -> list[int]:
    """Parse torchvision's padding: one number for all sides, (left and right, top and bottom), or (left, top, right, bottom). For tensors,
    the padding may also contain two numbers per dimension, before and after.
    """
    sides = numbers_of(value, "padding")
    if not all(isinstance(side, int) and abs(side) <= MOST for side in sides) or len(sides) not in (1, 2, 4, 6, 8):
        raise InvalidInputError(f"padding={value!r}, expected 1, 2, 4, 6 or 8 whole numbers")
    return {1: sides * 4, 2: sides * 2}.get(len(sides), sides)


@dataclasses.dataclass(frozen=True)
class Transform:
    """Base class for the transforms that the core applies."""

    op: ClassVar[str]
    # Whether it moves pixels, so that boxes, masks and keypoints must follow.
    moves: ClassVar[bool] = False

    def declared(self) -> dict[str, Any]:
        """Return the transform's description for the core, without `on`."""
        raise NotImplementedError

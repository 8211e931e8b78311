"""Converts what callers write in brackets, and lists of positions, row ids and columns."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import InvalidInputError, NotFoundError, OutOfRangeError

_INT64 = np.dtype(np.int64)
_MOST = np.iinfo(np.int64).max


def positions_of(key: Any, length: int) -> npt.NDArray[np.int64]:
    """Convert a list, tuple, range, slice or array of whole numbers, or a mask of `length` bools, to int64 positions."""
    if (chosen := _range_of(key, length)) is not None:
        return np.arange(chosen.start, chosen.stop, chosen.step, dtype=np.int64)
    if type(key) is np.ndarray and key.dtype is _INT64 and key.ndim == 1:
        return key
    array = _whole_numbers(key, "position")
    if array.dtype == bool:
        if array.shape != (length,):
            raise InvalidInputError(f"the mask has shape {array.shape}, expected ({length},)")
        return np.flatnonzero(array).astype(np.int64)
    if array.dtype == np.uint64 and len(beyond := np.flatnonzero(array > _MOST)):
        place = int(beyond[0])
        raise OutOfRangeError(f"cannot take position {array[place]}: no dataset has that many samples", rows=[place])
    return np.ascontiguousarray(array, dtype=np.int64)


def _range_of(key: Any, length: int) -> range | None:
    """Return a slice or range as a range, and None for other keys, or if the numbers do not fit int64."""
    if isinstance(key, slice):
        start, stop, step = key.indices(length)
        # A longer step than all of the samples chooses the first one.
        key = range(start, stop, max(-length - 1, min(step, length + 1)))
    return key if isinstance(key, range) and all(-_MOST <= bound <= _MOST for bound in (key.start, key.stop, key.step)) else None


def chosen_of(key: Any, length: int) -> tuple[int, int, int] | npt.NDArray[np.int64] | npt.NDArray[np.bool_]:
    """Convert what `positions_of` accepts to what the core selects without a list: a range (first, step, count), a mask, or positions."""
    if (chosen := _range_of(key, length)) is not None:
        return chosen.start, chosen.step, max(0, -((chosen.start - chosen.stop) // chosen.step))
    if isinstance(key, np.ndarray) and key.dtype == bool and not isinstance(key, np.ma.MaskedArray) and key.shape == (length,):
        return key
    return positions_of(key, length)


def span_of(key: slice, length: int) -> tuple[int, int] | npt.NDArray[np.int64]:
    """Convert a slice to the form that the core reads fastest: a range of positions, or else the positions."""
    start, stop, step = key.indices(length)
    return (start, max(start, stop)) if step == 1 else np.arange(start, stop, step, dtype=np.int64)


def row_ids_of(key: Any) -> npt.NDArray[np.int64]:
    """Convert a list, tuple, range or array of row ids to an int64 array."""
    array = _whole_numbers(key, "row id")
    if array.dtype == bool:
        raise InvalidInputError("row ids are bools, expected whole numbers", hint="pass a mask as positions")
    if array.dtype == np.uint64 and len(beyond := np.flatnonzero(array > _MOST)):
        raise NotFoundError(f"cannot find row id {array[beyond[0]]}: it does not fit int64", code="row-id-not-found")
    return np.ascontiguousarray(array, dtype=np.int64)


def _whole_numbers(key: Any, what: str) -> npt.NDArray[Any]:
    """Return a one-dimensional array of whole numbers or bools."""
    if isinstance(key, np.ma.MaskedArray):
        raise InvalidInputError(f"{what}s are a masked array", hint="leave out the masked elements first")
    try:
        array = np.asarray(key)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidInputError(f"{what}s do not form an array: {error}") from error
    if array.size == 0 and array.dtype != bool:
        return np.empty(0, np.int64)
    if isinstance(key, str):
        hint = 'with a condition, write ds.select(ds["n"] > 3) or ds.filter(function); for a column, ds[name]'
        raise InvalidInputError(f"{what}s are the text {key[:80]!r}, expected whole numbers", hint=hint)
    if array.dtype.kind in "UOT" and array.ndim == 1 and all(isinstance(name, str) for name in array.tolist()):
        names = ", ".join(f'"{name}"' for name in array.tolist()[:5])
        raise InvalidInputError(f"{what}s are text, expected whole numbers", hint=f"for columns, write ds[[{names}]]")
    if array.dtype != bool and (array.dtype.kind not in "iu" or array.ndim != 1):
        one = f"write a list: [{array}]" if array.ndim == 0 and array.dtype.kind in "iu" else None
        raise InvalidInputError(f"{what}s are an array {array.shape} of {array.dtype}, expected whole numbers (N,)", hint=one)
    return array


def one_position(key: Any) -> int | None:
    """Return the key as a single position, or None if it is not a whole number."""
    if isinstance(key, bool | np.bool_):
        raise InvalidInputError(f"cannot take {key}: expected a whole number", hint="a mask is an array with one bool per sample")
    try:
        position = operator.index(key)
    except TypeError:
        return None
    if not -(2**63) <= position < 2**63:
        raise OutOfRangeError(f"cannot take position {position}: no dataset has that many samples", rows=[0])
    return position


def names_of(columns: Sequence[str] | None) -> list[str] | None:
    if isinstance(columns, str):
        raise InvalidInputError(f"columns={columns!r}, expected a list of names", hint=f"write columns=[{columns!r}]")
    names = list(columns) if isinstance(columns, Iterable) else []
    if columns is not None and not (isinstance(columns, Iterable) and all(isinstance(name, str) for name in names)):
        raise InvalidInputError(f"columns={columns!r}, expected a list of names")
    return None if columns is None else names


def slice_of(key: tuple[Any, ...], shape: Sequence[int]) -> tuple[list[tuple[int, int]], tuple[Any, ...]]:
    """Find the smallest slice containing the elements that NumPy would return for this key, and the key that picks them from that slice.

    >>> slice_of((3, slice(10, 2, -4)), (5, 20, 7))
    ([(3, 4), (6, 11), (0, 7)], (0, slice(4, None, -4)))
    """
    key = tuple(np.asarray(part) if isinstance(part, list) and part else part for part in key)
    named = sum(_axes_of(part) for part in key)
    box: list[tuple[int, int]] = []
    inner: list[Any] = []
    for part in key:
        axes = len(shape) - named if part is Ellipsis else _axes_of(part)
        if len(box) + axes > len(shape):
            raise OutOfRangeError(f"cannot read {key}: it has more indices than the {len(shape)} dimensions of the sample", rows=[])
        if axes != 1 or part is Ellipsis:  # Masks of several dimensions, and None, True and False, which consume no dimension.
            box += [(0, size) for size in shape[len(box) : len(box) + axes]]
            inner.append(part)
            continue
        size = shape[len(box)]
        low, high, within = _along(part, size)
        box.append((low, high))
        inner.append(within)
    box += [(0, size) for size in shape[len(box) :]]
    return box, tuple(inner)


def _axes_of(part: Any) -> int:
    """Return how many dimensions one index consumes."""
    if part is None or part is Ellipsis or isinstance(part, bool | np.bool_):
        return 0
    return part.ndim if isinstance(part, np.ndarray) and part.dtype == bool else 1


def _along(part: Any, size: int) -> tuple[int, int, Any]:
    """Return the range of one dimension that an index needs, and the index relative to that range."""
    if isinstance(part, slice):
        chosen = range(size)[part]
        if not chosen:
            return 0, 0, slice(0, 0)
        low, high = min(chosen[0], chosen[-1]), max(chosen[0], chosen[-1]) + 1
        return low, high, slice(None, None, chosen.step) if chosen.step > 0 else slice(chosen[0] - low, None, chosen.step)
    try:
        index = operator.index(part)
    except TypeError:
        chosen_ones = np.asarray(part)
        if chosen_ones.dtype == bool or chosen_ones.ndim != 1 or chosen_ones.size == 0:
            return 0, size, part  # NumPy later accepts or refuses this index.
        if chosen_ones.dtype.kind not in "iu":
            raise InvalidInputError(f"cannot read {part!r}: found {chosen_ones.dtype}, expected whole numbers, slices or masks") from None
        bad = (chosen_ones < -size) | (chosen_ones >= size)
        if bad.any():
            raise _outside(chosen_ones[bad][0], size) from None
        chosen_ones = chosen_ones.astype(np.int64)
        ones = np.where(chosen_ones < 0, chosen_ones + size, chosen_ones)
        return int(ones.min()), int(ones.max()) + 1, ones - ones.min()
    if not -size <= index < size:
        raise _outside(index, size)
    return index % size, index % size + 1, 0


def _outside(index: Any, size: int) -> OutOfRangeError:
    return OutOfRangeError(f"cannot read index {index}: the dimension has {size} elements", rows=[])

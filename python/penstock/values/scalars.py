"""Converts lists of numbers and times to arrays."""

from __future__ import annotations

import datetime
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from penstock import _core
from penstock.values.checks import Array, fail, holds_bool, is_whole, shown, without_dimensions
from penstock.values.dtypes import cast, check_whole_numbers, numpy_dtype, whole_bits
from penstock.values.times import TIMES, stack_times


def stack(items: list[Any], shape: tuple[int, ...], dtype: str) -> Array:
    """Stack non-null Python values into one array."""
    for row, item in enumerate(items if shape else ()):
        if (item.shape if type(item) is np.ndarray else np.shape(item)) != shape:
            raise fail(f"has the shape {np.shape(item)}, expected {shape}", row)
        if dtype != "bool" and holds_bool(item):
            raise fail(f"contains a bool, expected {dtype}", row)
    if dtype in TIMES and not shape:
        return stack_times(items, dtype)
    wanted = numpy_dtype(dtype)
    if not shape and wanted.kind in "iu":
        return np.array([whole_number(item, row, dtype) for row, item in enumerate(items)], dtype=wanted)
    if not shape:
        kinds = (
            bool | np.bool_ | np.ndarray
            if wanted.kind == "b"
            else int | float | complex | np.number | np.ndarray
            if wanted.kind == "c"
            else int | float | np.integer | np.floating | np.ndarray  # NumPy would drop the imaginary part of complex numbers.
        )
        for row, item in enumerate(items):
            unfit = isinstance(item, np.ndarray) and (item.ndim or (item.dtype.kind == "c" and wanted.kind != "c"))
            unfit = unfit or (wanted.kind != "b" and holds_bool(item))
            if unfit or not isinstance(item, kinds | ml_dtypes.bfloat16) or isinstance(item, np.timedelta64):
                raise fail(f"is {shown(item)}, expected {dtype}", row)
            if isinstance(item, int) and item.bit_length() > 1024:
                raise fail(f"is {str(item)[:80]}, which is out of the range of {dtype}", row)
    try:
        # Python floats fit float64; arrays keep their own dtype.
        array = (
            np.asarray(items)
            if shape or wanted.kind == "b" or any(getattr(item, "dtype", None) in (np.longdouble, np.clongdouble) for item in items)
            else np.array(items, dtype=np.complex128 if wanted.kind == "c" else np.float64)
        )
    except (ValueError, TypeError, OverflowError) as error:
        raise fail(f"values do not form an array of {dtype}: {error}") from error
    if array.dtype.kind in "fc" and not _all_of(items, array.dtype):
        check_whole_numbers(items, array, dtype, None)
    if array.dtype.kind == "O" and shape:
        for row, item in enumerate(array):
            if any(part is None for part in item.flat):
                raise fail("contains None, expected numbers", row, hint="make the whole sample null, or none of it")
    return array


def _all_of(items: list[Any], dtype: np.dtype[Any]) -> bool:
    """Return whether all values are NumPy arrays of a dtype, so that none of their numbers was converted."""
    return {getattr(item, "dtype", None) for item in items} == {dtype} and set(map(type, items)) == {np.ndarray}


def plain_numbers(items: list[Any], dtype: str) -> tuple[Array, npt.NDArray[np.bool_] | None] | None:
    """Convert a list of plain Python numbers and None in one call. Returns None if that fails, so that the caller can find the bad row."""
    wanted = numpy_dtype(dtype)
    kind = "u" if dtype == "uint64" else "i" if wanted.kind in "iu" else wanted.kind
    found = _core.numbers(items, kind, whole_bits(dtype)) if items and kind in "iufb" else None
    if found is None:
        return None
    array, validity = found
    if kind == "f":
        array = cast(array, dtype)
    elif array.dtype != wanted:
        if not np.iinfo(wanted).min <= int(array.min()) <= int(array.max()) <= np.iinfo(wanted).max:
            return None
        array = array.astype(wanted, copy=False)
    return array, validity


def whole_number(item: Any, row: int, dtype: str) -> int:
    """Return an integer that fits the dtype."""
    item = without_dimensions(item)
    if not is_whole(item):
        duration = isinstance(item, datetime.timedelta | np.timedelta64)
        hint = "choose a unit, as in item // numpy.timedelta64(1, 'ms'), or make the column duration" if duration else None
        raise fail(f"is {shown(item)}, expected {dtype}", row, hint)
    info = np.iinfo(numpy_dtype(dtype))
    if not info.min <= int(item) <= info.max:
        raise fail(f"is {str(item)[:80]}, out of the range of {dtype}, {info.min} to {info.max}", row)
    return int(item)

"""Converts lists of numbers and times to arrays."""

from __future__ import annotations

import datetime
import re
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from penstock import _core
from penstock.errors import InvalidInputError
from penstock.values.checks import Array, fail, is_whole, shown, without_dimensions
from penstock.values.dtypes import cast, numpy_dtype

ISO_8601 = re.compile(r"(\d{4}|-\d{4,6})(-\d\d(-\d\d([T ]\d\d(:\d\d(:\d\d(\.\d{1,9})?)?)?)?)?)?")


def stack(items: list[Any], shape: tuple[int, ...], dtype: str) -> Array:
    """Stack non-null Python values into one array."""
    for row, item in enumerate(items if shape else ()):
        if np.shape(item) != shape:
            raise fail(f"has the shape {np.shape(item)}, expected {shape}", row)
    if dtype == "timestamp" and not shape:
        return np.array([timestamp(without_dimensions(item), row) for row, item in enumerate(items)], dtype="datetime64[us]")
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
    if array.dtype.kind == "O" and shape:
        for row, item in enumerate(array):
            if any(part is None for part in item.flat):
                raise fail("contains None, expected numbers", row, hint="make the whole sample null, or none of it")
    return array


def plain_numbers(items: list[Any], dtype: str) -> tuple[Array, npt.NDArray[np.bool_] | None] | None:
    """Convert a list of plain Python numbers and None in one call. Returns None if that fails, so that the caller can find the bad row."""
    wanted = numpy_dtype(dtype)
    kind = "u" if dtype == "uint64" else "i" if wanted.kind in "iu" else wanted.kind
    found = _core.numbers(items, kind) if items and kind in "iufb" else None
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
    if not is_whole(item) and not isinstance(item, bool | np.bool_):
        duration = isinstance(item, datetime.timedelta | np.timedelta64)
        raise fail(f"is {shown(item)}, expected {dtype}", row, "pass durations as whole numbers of one unit" if duration else None)
    info = np.iinfo(numpy_dtype(dtype))
    if not info.min <= int(item) <= info.max:
        raise fail(f"is {str(item)[:80]}, out of the range of {dtype}, {info.min} to {info.max}", row)
    return int(item)


def timestamp(item: Any, row: int) -> np.datetime64:
    """Convert a datetime, date, string, datetime64, or whole number of microseconds since 1970 to datetime64[us]."""
    try:
        if is_whole(item):
            return np.datetime64(int(item), "us")
        if isinstance(item, datetime.datetime) and item.tzinfo is not None:
            item = item.astimezone(datetime.UTC).replace(tzinfo=None)
        if isinstance(item, str):
            # Look for the minus sign of a UTC offset only after the date, which also contains dashes.
            offset = item[-1:] in ("Z", "z") or "+" in item or "-" in item[11:]
            parsed = datetime.datetime.fromisoformat(item) if offset else None
            item = parsed.astimezone(datetime.UTC).replace(tzinfo=None) if parsed is not None and parsed.tzinfo is not None else item
        if isinstance(item, str) and not ISO_8601.fullmatch(item):  # NumPy would also accept "", "now" and "202001".
            raise ValueError("expected ISO 8601, such as 2026-01-31T12:00:00Z")
        whole, _, decimals = item.partition(".") if isinstance(item, str) else (item, "", "")
        made = np.datetime64(cast(np.array([np.datetime64(whole)]), "timestamp", row)[0], "us")
        # With nine decimals, years beyond 2262 would overflow in NumPy and wrap around.
        return made + np.timedelta64(int(decimals[:6].ljust(6, "0")), "us")
    except (ValueError, TypeError, OverflowError) as error:
        if isinstance(error, InvalidInputError):
            raise
        raise fail(f"is {str(item)[:80]!r}, which is not a timestamp: {error}", row) from error

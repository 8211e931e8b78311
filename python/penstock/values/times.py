"""Converts points in time (timestamp), lengths of time (duration) and times of day (time). All of them count whole microseconds.

Nothing is rounded: a value with digits below a microsecond is refused. So is a duration without a unit, or one in months or years.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.errors import InvalidInputError
from penstock.values.checks import Array, fail, is_null, is_whole, shown, without_dimensions

# NumPy's dtypes for values that count microseconds: since 1970 UTC, in total, and since midnight.
TIMES = {"timestamp": "datetime64[us]", "duration": "timedelta64[us]", "time": "timedelta64[us]"}
DAY_US = 86_400_000_000
ISO_8601 = re.compile(r"(\d{4}|-\d{4,6})(-\d\d(-\d\d([T ]\d\d(:\d\d(:\d\d(\.\d{1,9})?)?)?)?)?)?")
TIME_OF_DAY = re.compile(r"([01]\d|2[0-3]):([0-5]\d)(?::([0-5]\d)(?:\.(\d{1,9}))?)?")

# Builds the error for the elements that a bool array marks, from the reason and a hint.
Refuse = Callable[[Array, str, str | None], InvalidInputError]

# How many of a finer unit make one microsecond.
_PER_MICROSECOND = {"ns": 10**3, "ps": 10**6, "fs": 10**9, "as": 10**12}
_FINE = "has digits below a microsecond"
_NO_UNIT = 'write numpy.timedelta64(90, "s") or datetime.timedelta(seconds=90)'


def _instead(dtype: str) -> str:
    """Return what to write for times with digits below a microsecond."""
    kind = "datetime64[us]" if dtype == "timestamp" else "timedelta64[us]"
    return f'cut them off first, as in values.astype("{kind}"), or store nanoseconds as int64'


def cast_times(array: Array, dtype: str, refuse: Refuse) -> Array | None:
    """Convert NumPy's times to microseconds. Returns None for arrays of other kinds. Whole numbers are timestamps in microseconds."""
    wanted = np.dtype(TIMES[dtype])
    if dtype == "timestamp" and array.dtype.kind in "iu":
        if array.dtype.kind == "u" and (bad := array > np.uint64(np.iinfo(np.int64).max)).any():
            raise refuse(bad, "does not fit 64 bits as microseconds since 1970", None)
        return array.astype(np.int64).view(wanted)
    if array.dtype.kind != wanted.kind:
        return None
    valid = ~np.isnat(array)
    unit, count = np.datetime_data(array.dtype)
    if not valid.any():
        return np.full(array.shape, "NaT", wanted)
    if unit == "generic":
        raise refuse(valid, "has no unit", _NO_UNIT)
    if wanted.kind == "m" and unit in ("Y", "M"):
        raise refuse(valid, "counts months or years, which differ in length", 'write days, as in numpy.timedelta64(30, "D")')
    parts = _PER_MICROSECOND.get(unit)
    if parts is None:
        out = array.astype(wanted)
        if (bad := (out.astype(array.dtype) != array) & valid).any():
            since = " since 1970" if dtype == "timestamp" else ""
            raise refuse(bad, f"is out of the range of 64-bit microseconds{since}", None)
    elif count == 1:  # NumPy's own conversion overflows at the ends of the range.
        whole, digits = np.divmod(array.view(np.int64), parts)
        if (bad := (digits != 0) & valid).any():
            raise refuse(bad, _FINE, _instead(dtype))
        out = np.where(valid, whole.view(wanted), np.array("NaT", wanted))
    else:
        return None  # The conversion would overflow silently.
    if dtype == "time" and (bad := ((out < np.timedelta64(0)) | (out >= np.timedelta64(DAY_US, "us"))) & valid).any():
        raise refuse(bad, "is not a time of day, from 00:00:00 to 23:59:59.999999", None)
    return out


def stack_times(items: list[Any], dtype: str) -> Array:
    """Convert a list of values, one per sample and none of them null, to an array."""
    return np.array([one_time(without_dimensions(item), dtype, row) for row, item in enumerate(items)], TIMES[dtype])


def times_within(objects: Array, dtype: str, row: int | None) -> Array:
    """Convert an array of objects, such as datetimes. `row`: the row of a single sample; None if the first axis counts samples."""
    made = np.empty(objects.shape, TIMES[dtype])
    for place, item in np.ndenumerate(objects):
        at = place[0] if row is None else row
        if is_null(item):
            raise fail(f"contains {item}, expected times", at, hint="make the whole sample null, or none of it")
        made[place] = one_time(item, dtype, at)
    return made


def one_time(item: Any, dtype: str, row: int) -> Any:
    """Convert one value: to datetime64[us] for a timestamp, and to timedelta64[us] for a duration or a time of day."""
    try:
        return _CONVERT[dtype](item, row)
    except (ValueError, TypeError, OverflowError) as error:
        if isinstance(error, InvalidInputError):
            raise
        raise fail(f"is {str(item)[:80]!r}, which is not a {dtype}: {error}", row) from error


def _timestamp(item: Any, row: int) -> Any:
    """Convert a datetime, date, string, datetime64, or whole number of microseconds since 1970."""
    if is_whole(item):
        return np.datetime64(int(item), "us")
    if isinstance(item, str):
        return _of_text(item, row)
    if hasattr(item, "to_datetime64"):  # The nanoseconds of a Timestamp of pandas are kept, in UTC.
        item = item.to_datetime64()
    elif isinstance(item, datetime.datetime) and item.tzinfo is not None:
        item = item.astimezone(datetime.UTC).replace(tzinfo=None)
    return _one(np.datetime64(item), "timestamp", item, row)


def _of_text(text: str, row: int) -> Any:
    """Convert text in the form of ISO 8601. Without an offset, it is in UTC."""
    item = text
    # Look for the minus sign of a UTC offset only after the date, which also contains dashes.
    offset = item[-1:] in ("Z", "z") or "+" in item or "-" in item[11:]
    if offset:
        parsed = datetime.datetime.fromisoformat(item)
        if parsed.tzinfo is not None:
            _check_digits(text, row)  # Python would drop them.
            return np.datetime64(parsed.astimezone(datetime.UTC).replace(tzinfo=None), "us")
    if not ISO_8601.fullmatch(item):  # NumPy would also accept "", "now" and "202001".
        raise ValueError("expected ISO 8601, such as 2026-01-31T12:00:00Z")
    _check_digits(text, row)
    whole, _, decimals = item.partition(".")
    # With nine decimals, years beyond 2262 would overflow in NumPy and wrap around.
    return _one(np.datetime64(whole), "timestamp", text, row) + np.timedelta64(int(decimals[:6].ljust(6, "0")), "us")


def is_fine(text: str) -> bool:
    """Return whether the text of a time has digits below a microsecond.

    >>> is_fine("12:34:56.1234567"), is_fine("12:34:56.123456000")
    (True, False)
    """
    decimals = re.search(r"[.,](\d+)", text)
    return bool(decimals and decimals[1][6:].strip("0"))


def _check_digits(text: str, row: int) -> None:
    if is_fine(text):
        raise fail(f"is {text[:80]!r}, which {_FINE}", row, hint="cut them off first, or store the text in a ps.Text() column")


def _duration(item: Any, row: int) -> Any:
    """Convert a timedelta. Numbers and text are refused, because they have no unit."""
    if hasattr(item, "to_timedelta64"):  # The nanoseconds of a Timedelta of pandas are kept.
        item = item.to_timedelta64()
    elif isinstance(item, datetime.timedelta):
        total = item // datetime.timedelta(microseconds=1)
        if not -(2**63) < total < 2**63:  # NumPy would wrap around.
            raise fail(f"is {shown(item)}, which is out of the range of 64-bit microseconds", row)
        item = np.timedelta64(total, "us")
    if not isinstance(item, np.timedelta64):
        raise fail(f"is {shown(item)}, expected duration", row, hint=_NO_UNIT)
    return _one(item, "duration", item, row)


def _time(item: Any, row: int) -> Any:
    """Convert a time of day: Python's, text such as 12:34:56.789, or a timedelta since midnight."""
    if isinstance(item, datetime.time):
        if item.tzinfo is not None:
            raise fail(f"is {item}, which has a time zone", row, hint="convert it to UTC and remove the zone: item.replace(tzinfo=None)")
        item = datetime.datetime.combine(datetime.date.min, item) - datetime.datetime.min
    elif isinstance(item, str) and (found := TIME_OF_DAY.fullmatch(item)):
        _check_digits(item, row)
        hours, minutes, seconds, decimals = found.groups(default="0")
        return np.timedelta64(((int(hours) * 60 + int(minutes)) * 60 + int(seconds)) * 10**6 + int(decimals[:6].ljust(6, "0")), "us")
    if not isinstance(item, datetime.timedelta | np.timedelta64):
        raise fail(f"is {shown(item)}, expected time", row, hint="write datetime.time(12, 30), or text such as 12:30:00")
    return _one(_duration(item, row), "time", item, row)


_CONVERT: dict[str, Callable[[Any, int], Any]] = {"timestamp": _timestamp, "duration": _duration, "time": _time}


def _one(time: Any, dtype: str, item: Any, row: int) -> Any:
    found = cast_times(np.array([time]), dtype, lambda _, why, hint: fail(f"is {shown(item)}, which {why}", row, hint))
    if found is None:
        raise fail(f"is {shown(item)}, which does not fit {dtype}", row, hint="cast it first")
    return found[0]

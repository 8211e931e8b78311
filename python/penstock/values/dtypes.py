"""Dtypes by their stored names, and casts that may round floats but never change values in any other way."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from penstock.errors import InvalidInputError
from penstock.values.checks import Array, fail, first_row, is_whole, without_dimensions
from penstock.values.times import TIMES, cast_times, stack_times, times_within

DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128", "timestamp", "duration", "time",
)  # fmt: skip


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype for a stored dtype. Timestamps are datetime64[us] in UTC; durations and times of day are timedelta64[us].

    >>> numpy_dtype("timestamp"), numpy_dtype("time")
    (dtype('<M8[us]'), dtype('<m8[us]'))
    """
    bfloat16: Any = ml_dtypes.bfloat16
    found: np.dtype[Any] = np.dtype(bfloat16 if name == "bfloat16" else TIMES.get(name, name))
    return found


def numpy_dtype_of(source: Any) -> np.dtype[Any]:
    """Return the NumPy dtype of an array-like object. TensorStore has its own dtype class."""
    dtype: np.dtype[Any] = np.dtype(getattr(source.dtype, "numpy_dtype", source.dtype))
    return dtype


def cast(array: Array, dtype: str, row: int | None = None) -> Array:
    """Cast values. Only floats are rounded: to fewer digits, as the column's dtype says. Refuses out-of-range values, floats for integer
    dtypes, and bools for numbers. Refuses whole numbers that a float dtype does not represent exactly, and times with digits below a
    microsecond. `row`: the row of a single sample.
    """
    wanted = numpy_dtype(dtype)
    array = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    if array.size == 0 or (array.dtype == wanted and dtype != "time"):
        return array.astype(wanted, copy=False)

    def refuse(bad: Array, why: str, hint: str | None = None) -> InvalidInputError:
        place = row if row is not None else first_row(bad)
        return fail(f"has {array[bad].flat[0]!s}, which {why}", place, hint)

    kind = array.dtype.kind
    if dtype in TIMES:
        if array.dtype.kind == "O":
            return times_within(array, dtype, row)
        if (times := cast_times(array, dtype, refuse)) is not None:
            return times
    elif wanted.kind in "iu" and kind in "iu":
        low, high = int(np.iinfo(wanted).min), int(np.iinfo(wanted).max)
        if int(array.min()) < low or int(array.max()) > high:
            bad = np.array([not low <= int(value) <= high for value in array.flat]).reshape(array.shape)
            raise refuse(bad, f"is out of the range of {dtype}, {low} to {high}")
        return array.astype(wanted)
    elif kind not in "bm" and (
        np.can_cast(array.dtype, wanted, "same_kind")
        or (dtype == "bfloat16" and kind in "fiu")
        or (wanted.kind == "f" and array.dtype == numpy_dtype("bfloat16"))
    ) and (kind != "c" or wanted.kind == "c"):  # fmt: skip
        with np.errstate(over="ignore"):
            out = array.astype(wanted)
        # Check only the range of floats. The column's dtype implies rounding to fewer digits.
        if wanted.kind in "fcV" and wanted != array.dtype and (bad := ~np.isfinite(out)).any():
            bad &= np.isfinite(array if kind in "fc" else array.astype(np.float64))
            if bad.any():
                raise refuse(bad, f"is out of the range of {dtype}")
        if kind in "iu" and (inexact := _inexact(array, dtype)) is not None:
            raise refuse(inexact, f"{dtype} does not represent exactly", hint_for_whole(dtype))
        return out
    raise fail(f"values are {array.dtype}, which does not fit {dtype}", row, hint=_hint(array.dtype, wanted))


def _hint(given: np.dtype[Any], wanted: np.dtype[Any]) -> str:
    """Return what to write for values whose dtype does not fit."""
    if given.kind == "m" and wanted.kind in "iuf":
        return "choose a unit, as in values // numpy.timedelta64(1, 'ms'), or make the column duration"
    if wanted.kind == "m" and given.kind in "iuf":
        return 'add the unit first, as in values.astype("timedelta64[ms]")'
    return f"cast them first, or make the column {given}" if given.name in DTYPES else "cast them first"


# How many bits a whole number may have and still be represented exactly, whatever its digits.
_WHOLE_BITS = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53, "complex64": 24, "complex128": 53}


def whole_bits(dtype: str) -> int:
    """Return how many bits a whole number of a dtype may have, or 64 if all its numbers are whole."""
    return _WHOLE_BITS.get(dtype, 64)


def is_exact(number: int, dtype: str) -> bool:
    """Return whether a dtype of floats represents a whole number exactly, apart from its range.

    >>> is_exact(2**24 + 1, "float32"), is_exact(2**24 + 2, "float32"), is_exact(-(2**70), "float32")
    (False, True, True)
    """
    size = abs(number)
    return (size // max(1, size & -size)).bit_length() <= whole_bits(dtype)


def hint_for_whole(dtype: str) -> str:
    """Return what to write for whole numbers that a dtype of floats does not represent exactly."""
    return f'make the column int64, or round the numbers first, as in values.astype("{"float32" if dtype == "bfloat16" else dtype}")'


def _inexact(array: Array, dtype: str) -> Array | None:
    """Return which whole numbers a dtype of floats does not represent exactly, or None if it represents all of them."""
    limit = 2 ** whole_bits(dtype)
    if -limit <= int(array.min()) and int(array.max()) <= limit:
        return None
    size = np.where(array < 0, (~array).astype(np.uint64) + np.uint64(1), array.astype(np.uint64))
    lowest = np.maximum(size & (~size + np.uint64(1)), np.uint64(1))
    bad: Array = size // lowest >= np.uint64(limit)
    return bad if bad.any() else None


def check_whole_numbers(given: Any, array: Array, dtype: str, row: int | None) -> None:
    """Refuse whole numbers in lists that NumPy rounded beside floats: `array` was made of the lists `given`."""
    limit = 2 ** whole_bits(dtype)
    if array.dtype.kind not in "fc" or not array.size or not (np.abs(array) >= limit).any():
        return
    for place, value in enumerate(given if row is None else [given]):
        if (number := _rounded(value, dtype)) is not None:
            raise fail(f"has {number}, which {dtype} does not represent exactly", place if row is None else row, hint_for_whole(dtype))


def _rounded(value: Any, dtype: str) -> Any:
    """Return a whole number within nested lists that a dtype of floats does not represent exactly, or None."""
    if isinstance(value, list | tuple):
        return next((number for part in value if (number := _rounded(part, dtype)) is not None), None)
    if isinstance(value, np.ndarray) and value.ndim:
        bad = _inexact(value, dtype) if value.dtype.kind in "iu" and value.size else None
        return None if bad is None else value[bad].flat[0]
    value = without_dimensions(value)
    return value if is_whole(value) and not is_exact(int(value), dtype) else None


def filler(value: Any, dtype: str, shape: tuple[int, ...] = ()) -> Array:
    """Convert one value to an array of a dtype, by the same rules as appended values. Whole floats also count as integers.

    >>> filler(255.0, "uint8"), filler(0.1, "float32", (2,)).tolist() == [np.float32(0.1)] * 2
    (array(255, dtype=uint8), True)
    """
    try:
        given = stack_times([value], dtype)[0] if dtype in TIMES and np.ndim(value) == 0 else value
        array = np.broadcast_to(np.asarray(given), shape)
    except ValueError as error:
        raise fail(str(error)) from error
    if array.dtype.kind == "f" and numpy_dtype(dtype).kind in "iu":
        with np.errstate(invalid="ignore"):
            whole = array.astype(np.int64)
        array = whole if bool((whole == array).all()) else array
    return cast(array, dtype, 0)


def dtype_name(dtype: Any) -> str:
    """Return the Penstock name of a dtype, which may be a name, a NumPy dtype or a type."""
    if isinstance(dtype, str) and dtype in DTYPES:
        return dtype
    if (name := str(dtype).removeprefix("torch.")) in DTYPES and type(dtype).__module__.partition(".")[0] in ("torch", "pyarrow"):
        return name
    try:
        found = None if dtype is None else np.dtype(dtype)
    except (TypeError, ValueError):  # NumPy reads "label:cat,dog" as a list of types.
        found = None
    if found is not None:
        if found.kind in "mM":
            return "timestamp" if found.kind == "M" else "duration"
        if found.name in DTYPES:
            return str(found.name)
    word = (dtype if isinstance(dtype, str) else getattr(dtype, "__name__", str(dtype))).lower()
    word = word.partition(":")[0]  # On the command line, parameters follow.
    instead = next((write for write, words in _INSTEAD.items() if word in words.split()), None)
    hint = f"valid dtypes: {', '.join(DTYPES)}" if instead is None else f"write {instead}"
    raise InvalidInputError(f"unknown dtype {dtype!r}", code="invalid-schema", hint=hint)


# What to write instead of names that other libraries use.
_INSTEAD = {
    "ps.Text()": "str string text varchar utf8 large_string unicode",
    "ps.Bytes()": "bytes binary blob bytearray large_binary",
    "ps.Json()": "json dict struct map object any",
    "ps.Image()": "image img picture jpeg jpg png pil",
    "ps.Category(), or ps.Label([names])": "category categorical enum factor dictionary",
    "ps.Label([names])": "label class classlabel classification",
    "ps.Labels([names])": "labels classes multilabel tags",
    'ps.Tensor((768,), "float32"), with your shape and dtype': "list array ndarray tensor vector embedding sequence tuple",
    'ps.Boxes(of="image")': "box boxes bbox bboxes",
    'ps.Mask(of="image")': "mask segmentation",
    '"timestamp"': "datetime date timestamptz datetime64[ns,utc] timestamp[us] timestamp[ns] timestamp[ms]",
    '"duration"': "timedelta interval duration[us] duration[ns] duration[ms] duration[s]",
    '"time"': "time64 time32 time64[us] time64[ns] time32[ms] time32[s]",
    '"int64"': "integer bigint number",
    '"float64"': "decimal real",
    '"bool"': "boolean",
}

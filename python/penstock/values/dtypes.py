"""Dtypes by their stored names, and casts that may round values but never change them in any other way."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from penstock.errors import InvalidInputError
from penstock.values.checks import Array, fail, first_row

DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128", "timestamp",
)  # fmt: skip


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype for a stored dtype. Timestamps are datetime64[us] in UTC.

    >>> numpy_dtype("timestamp")
    dtype('<M8[us]')
    """
    bfloat16: Any = ml_dtypes.bfloat16
    found: np.dtype[Any] = np.dtype(bfloat16 if name == "bfloat16" else "datetime64[us]" if name == "timestamp" else name)
    return found


def numpy_dtype_of(source: Any) -> np.dtype[Any]:
    """Return the NumPy dtype of an array-like object. TensorStore has its own dtype class."""
    dtype: np.dtype[Any] = np.dtype(getattr(source.dtype, "numpy_dtype", source.dtype))
    return dtype


def cast(array: Array, dtype: str, row: int | None = None) -> Array:
    """Cast values. Rounds only floats, and times (to microseconds). Refuses floats for integer dtypes, and out-of-range values. `row`: the
    row of a single sample.
    """
    wanted = numpy_dtype(dtype)
    array = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    if array.dtype == wanted or array.size == 0:
        return array.astype(wanted, copy=False)

    def refuse(bad: Array, why: str) -> InvalidInputError:
        place = row if row is not None else first_row(bad)
        return fail(f"has {array[bad].flat[0]!s}, which {why}", place)

    kind = array.dtype.kind
    if dtype == "timestamp":
        if kind == "u" and (bad := array > np.uint64(np.iinfo(np.int64).max)).any():
            raise refuse(bad, "does not fit 64 bits as microseconds since 1970")
        if kind in "iu":  # Whole numbers are microseconds since 1970.
            return array.astype(np.int64).view(wanted)
        unit, count = np.datetime_data(array.dtype) if kind == "M" else ("", 0)
        coarser = unit in ("Y", "M", "W", "D", "h", "m", "s", "ms", "us")
        if kind == "M" and (coarser or count == 1):  # With a unit of several nanoseconds, the cast would overflow silently.
            out = array.astype(wanted)
            bad = (out.astype(array.dtype) != array) & ~np.isnat(array) if coarser else np.zeros(array.shape, bool)
            if bad.any():
                raise refuse(bad, "is out of the range of microseconds since 1970 in 64 bits")
            return out
    elif wanted.kind in "iu" and kind in "iu":
        low, high = int(np.iinfo(wanted).min), int(np.iinfo(wanted).max)
        if int(array.min()) < low or int(array.max()) > high:
            bad = np.array([not low <= int(value) <= high for value in array.flat]).reshape(array.shape)
            raise refuse(bad, f"is out of the range of {dtype}, {low} to {high}")
        return array.astype(wanted)
    elif (
        np.can_cast(array.dtype, wanted, "same_kind")
        or (dtype == "bfloat16" and kind in "fiu")
        or (wanted.kind == "f" and array.dtype == numpy_dtype("bfloat16"))
    ) and (kind != "c" or wanted.kind == "c"):
        with np.errstate(over="ignore"):
            out = array.astype(wanted)
        # Check only the range of floats. The column's dtype implies rounding to fewer digits.
        if wanted.kind in "fcV" and wanted != array.dtype and (bad := ~np.isfinite(out)).any():
            bad &= np.isfinite(array if kind in "fc" else array.astype(np.float64))
            if bad.any():
                raise refuse(bad, f"is out of the range of {dtype}")
        return out
    or_else = f", or make the column {array.dtype}" if array.dtype.name in DTYPES else ""
    raise fail(f"values are {array.dtype}, which does not fit {dtype}", row, hint=f"cast them first{or_else}")


def filler(value: Any, dtype: str, shape: tuple[int, ...] = ()) -> Array:
    """Convert one value to an array of a dtype, by the same rules as appended values. Whole floats also count as integers.

    >>> filler(255.0, "uint8"), filler(0.1, "float32", (2,)).tolist() == [np.float32(0.1)] * 2
    (array(255, dtype=uint8), True)
    """
    try:
        array = np.broadcast_to(np.asarray(value), shape)
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
        if found.kind == "M":
            return "timestamp"
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
    '"timestamp"': "datetime date time timestamptz datetime64[ns,utc] timestamp[us] timestamp[ns] timestamp[ms]",
    '"int64"': "integer bigint number",
    '"float64"': "decimal real",
    '"bool"': "boolean",
}

"""Convert the user's input to forms for the core: containers, nulls, casts that change no value, ragged arrays.

The column types of `schema.py` call this module. Every refusal is an InvalidInputError, which names the bad row if there is one.
"""

from __future__ import annotations

import datetime
import math
import numbers
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np
import numpy.typing as npt

from penstock import _core
from penstock.errors import InvalidInputError

Prepared = tuple[Any, ...]
# Tensors of this size or more are tiled and never held in memory whole.
TILED_BYTES = 8 << 20
# From this many texts on, an Arrow array is faster than checking texts one by one, and worth the import of pyarrow.
MANY = 1000
# Lists with more bytes of text are converted in parts.
WHOLE_BYTES = 256 << 20
Array = npt.NDArray[Any]
ISO_8601 = re.compile(r"(\d{4}|-\d{4,6})(-\d\d(-\d\d([T ]\d\d(:\d\d(:\d\d(\.\d{1,9})?)?)?)?)?)?")

DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128", "timestamp",
)  # fmt: skip


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype of a stored dtype; timestamps are datetime64[us] in UTC.

    >>> numpy_dtype("timestamp")
    dtype('<M8[us]')
    """
    bfloat16: Any = ml_dtypes.bfloat16
    found: np.dtype[Any] = np.dtype(bfloat16 if name == "bfloat16" else "datetime64[us]" if name == "timestamp" else name)
    return found


def is_utf8(text: str) -> bool:
    """Return whether a text can be stored. A lone surrogate, as in some file names, cannot.

    >>> is_utf8("é"), is_utf8("\\udce9")
    (True, False)
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def fail(text: str, row: int | None = None, hint: str | None = None) -> InvalidInputError:
    """Build the error for a value that does not fit its column. If a row is given, `text` continues the words `row n`."""
    return InvalidInputError(text, code="invalid-value", hint=hint, row=row)


def shown(value: Any) -> str:
    """Return the beginning of a value for an error: text in quotes, other values as printed.

    >>> shown("2"), shown(2)
    ("'2'", '2')
    """
    return repr(value[:80]) if isinstance(value, str) else str(value)[:80]


def is_null(value: Any) -> bool:
    """Return whether a value is a null: None, pandas' NA, NaT, or a masked element."""
    if value is None or value is np.ma.masked or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, np.datetime64 | np.timedelta64) and bool(np.isnat(value))


def is_whole(value: Any) -> TypeGuard[int]:
    """Return whether a value is a whole number. Bools and durations are not, although NumPy treats a duration as an integer.

    >>> is_whole(np.int8(1)), is_whole(True), is_whole(np.timedelta64(1, "s"))
    (True, False, False)
    """
    return isinstance(value, int | np.integer) and not isinstance(value, bool | np.timedelta64)


def is_null_word(value: Any) -> bool:
    """Return whether a value among words is null. Among words, a float NaN is null too, as in pandas."""
    return is_null(value) or (isinstance(value, float) and value != value)


def is_arrow(values: Any) -> bool:
    """Return whether values are a pyarrow Array or ChunkedArray, without importing pyarrow."""
    return type(values).__module__.partition(".")[0] == "pyarrow" and hasattr(values, "null_count")


class Rows:
    """Samples in an array that reads parts on demand, such as an h5py or Zarr array. Slicing does not read."""

    def __init__(self, source: Any, start: int, end: int) -> None:
        self.source, self.start, self.end = source, start, end
        self.shape: tuple[int, ...] = (end - start, *map(int, source.shape[1:]))
        self.dtype = numpy_dtype_of(source)
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.end - self.start

    def __getitem__(self, key: slice) -> Rows:
        start, end, _ = key.indices(len(self))
        return Rows(self.source, self.start + start, self.start + max(start, end))

    def read(self) -> Array:
        found = self.source[self.start : self.end]
        return found if isinstance(found, np.ma.MaskedArray) else np.asarray(found)

    def part(self, row: int, window: tuple[slice, ...]) -> Any:
        return self.source[(self.start + row, *window)]


def numpy_dtype_of(source: Any) -> np.dtype[Any]:
    """Return the NumPy dtype of an array-like; TensorStore has its own dtype class."""
    dtype: np.dtype[Any] = np.dtype(getattr(source.dtype, "numpy_dtype", source.dtype))
    return dtype


def reads_its_parts(value: Any) -> bool:
    """Return whether a value is not a NumPy array but returns its parts as NumPy arrays."""
    if (
        isinstance(value, np.ndarray | np.generic)
        or is_arrow(value)
        or any(hasattr(value, name) for name in ("detach", "isna", "to_arrow"))
    ):
        return False
    return bool(hasattr(value, "__getitem__") and hasattr(value, "dtype") and getattr(value, "shape", ()) != ())


def container(values: Any) -> Any:
    """Convert any container of one value per sample to a NumPy array, a list or a pyarrow array, all of which can be sliced."""
    values = rows_of(values)
    return values.read() if isinstance(values, Rows) else values


def rows_of(values: Any) -> Any:
    """Convert values to a container that can be sliced, without reading an array that reads its own parts."""
    if isinstance(values, Rows):
        return values
    if reads_its_parts(values):
        return Rows(values, 0, int(values.shape[0]))
    if isinstance(values, list) or is_arrow(values):
        return values
    if isinstance(values, str | bytes | bytearray | memoryview | Mapping) or (hasattr(values, "iloc") and hasattr(values, "columns")):
        raise fail(
            f"a single {type(values).__name__}, expected one value per sample", hint="wrap it in a list, or pass its columns one by one"
        )
    if hasattr(values, "to_arrow") and not hasattr(values, "columns"):  # A Polars Series.
        return values.to_arrow()
    if hasattr(values, "detach"):
        values = from_torch(values)
    elif (
        hasattr(values, "isna")
        and hasattr(getattr(values, "dtype", None), "numpy_dtype")
        and hasattr(array := getattr(values, "array", values), "__arrow_array__")
    ):
        return array.__arrow_array__()  # In pandas: ArrowDtype, and numbers with NA, such as Int64.
    elif hasattr(values, "isna") and hasattr(values, "dtype"):
        values = from_pandas(values)
    if isinstance(values, np.ndarray):
        if values.ndim == 0:
            raise fail("a zero-dimensional array, expected one value per sample", hint="wrap it in a list")
        return list(values) if values.dtype.kind == "O" else values
    if not isinstance(values, Iterable):
        raise fail(f"a {type(values).__name__}, expected one value per sample")
    return list(values)


def from_torch(tensor: Any) -> Array:
    """Convert a torch tensor to an array; bfloat16 stays bfloat16."""
    try:
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
        if str(tensor.dtype) == "torch.bfloat16":
            import torch

            return np.asarray(tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16))
        return np.asarray(tensor.numpy())
    except (RuntimeError, TypeError) as error:  # The device "meta", sparse or quantised tensors.
        raise fail(f"a torch tensor that cannot become an array: {error}", hint="pass a dense tensor of a plain dtype") from error


def without_torch(values: Any) -> Any:
    """Convert the torch tensors in a list to arrays; other values stay unchanged."""
    if not isinstance(values, list) or not any(hasattr(kind, "detach") for kind in set(map(type, values))):
        return values
    made = list(values)
    for row, value in enumerate(values):
        try:
            made[row] = from_torch(value) if hasattr(value, "detach") else value
        except InvalidInputError as error:
            raise fail(f"is {error.message}", row, error.hint) from error
    return made


def from_pandas(values: Any) -> Any:
    """Convert a pandas Series, Index or array: plain dtypes to arrays, time zones to UTC, the rest to a list with None."""
    if getattr(values.dtype, "tz", None) is not None:
        return (values.dt if hasattr(values, "dt") else values).tz_convert(None).to_numpy()  # Keeps the unit, so years beyond 2262 fit.
    if isinstance(values.dtype, np.dtype) and values.dtype.kind != "O":
        return values.to_numpy()
    missing = np.asarray(values.isna())
    return [None if gone else value for value, gone in zip(values.astype(object), missing, strict=True)]


def text_from_pandas(values: Any) -> Any:
    """Return the Arrow array of a pandas Series or array with Arrow text; return other values unchanged."""
    if not hasattr(values, "isna") or getattr(values.dtype, "name", "") not in ("str", "string"):
        return values
    array = getattr(values, "array", values)
    return array.__arrow_array__() if hasattr(array, "__arrow_array__") else values


def fixed(array: Array, validity: npt.NDArray[np.bool_] | None) -> Prepared:
    """Prepare N samples of equal size."""
    contiguous = np.ascontiguousarray(array)
    flat = contiguous.reshape(-1).view(np.uint8) if contiguous.size else np.empty(0, np.uint8)
    return ("fixed", flat, validity, len(array))


def first_row(bad: Array) -> int:
    """Return the first row of a bool array (N, …) that contains True."""
    return int(np.argmax(bad.reshape(len(bad), -1).any(axis=1)))


def cast(array: Array, dtype: str, row: int | None = None) -> Array:
    """Cast without changing values: refuse floats for integers and values out of range. `row` is the row of a single sample."""
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
        if kind == "M" and (coarser or count == 1):  # A unit of several nanoseconds would overflow silently.
            out = array.astype(wanted)
            bad = (out.astype(array.dtype) != array) & ~np.isnat(array) if coarser else np.zeros(array.shape, bool)
            if bad.any():
                raise refuse(bad, "is out of the range of microseconds")
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
        # Check only the range of floats. Rounding to fewer digits is what the column's dtype asks for.
        if wanted.kind in "fcV" and wanted != array.dtype and (bad := ~np.isfinite(out)).any():
            bad &= np.isfinite(array if kind in "fc" else array.astype(np.float64))
            if bad.any():
                raise refuse(bad, f"is out of the range of {dtype}")
        return out
    or_else = f", or make the column {array.dtype}" if array.dtype.name in DTYPES else ""
    raise fail(f"values are {array.dtype}, which does not fit {dtype}", row, hint=f"cast them first{or_else}")


def filler(value: Any, dtype: str, shape: tuple[int, ...] = ()) -> Array:
    """Convert one value to an array of a dtype, by the rules for appended values; whole floats also count as integers.

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


def dense(values: Any, shape: tuple[int, ...], dtype: str) -> Prepared:
    """Prepare samples of one shape, given as an array or as a list with nulls."""
    validity: npt.NDArray[np.bool_] | None = None
    if is_arrow(values):
        values = from_arrow(values, shape)
    values = container(values)
    if isinstance(values, np.ma.MaskedArray):
        mask: Array = np.ma.getmaskarray(values).reshape(len(values), -1) if len(values) else np.zeros((0, 1), bool)
        partly = np.asarray(mask.any(axis=1) & ~mask.all(axis=1))
        if partly.any():
            raise fail("is masked in part", first_row(partly), hint="make the whole sample null, or none of it")
        validity = np.asarray(~mask.any(axis=1))
        values = np.asarray(values.data)
        if not validity.all():  # The data under a null is not a value.
            values = values.copy()
            values[~validity] = np.zeros((), values.dtype)
    if isinstance(values, list) and not shape:
        quick = plain_numbers(values, dtype)
        if quick is not None:
            return fixed(*quick)
    if isinstance(values, list):
        values = without_torch(values)
        nulls = [row for row, value in enumerate(values) if is_null(value)]
        if len(nulls) == len(values):
            array = np.zeros((len(values), *shape), numpy_dtype(dtype))
            return fixed(array, np.zeros(len(values), bool) if nulls else None)
        if nulls:
            validity = np.ones(len(values), bool)
            validity[nulls] = False
            first = int(np.argmax(validity))
            some = values[first]  # A placeholder of the right kind, which the core zeroes.
            if first:  # If the placeholder does not fit, the error must name its own row, not that of a null.
                try:
                    cast(stack([some], shape, dtype), dtype)
                except InvalidInputError as error:
                    error._row, error.rows = first, [first]
                    raise
            values = [some if is_null(value) else value for value in values]
        values = stack(values, shape, dtype)
    if values.shape[1:] != shape:
        wanted = f"(N, {', '.join(map(str, shape))})" if shape else "(N,)"
        raise fail(f"values have the shape {values.shape}, expected {wanted}")
    if values.dtype.kind == "M" and values.size and (missing := np.isnat(values).reshape(len(values), -1).any(axis=1)).any():
        if shape:
            raise fail("holds NaT, which only a scalar can be", first_row(missing))
        validity = ~missing if validity is None else validity & ~missing
    return fixed(cast(values, dtype), validity)


def pulled(values: Any, shape: tuple[int | None, ...], dtype: str, tile: tuple[int, ...] | None) -> Prepared | None:
    """Prepare samples too large for memory: the core pulls each window that it writes. Returns None for small samples."""
    values = from_torch(values) if hasattr(values, "detach") else values
    wanted = numpy_dtype(dtype)

    def large(sizes: tuple[int, ...]) -> bool:
        return tile is not None or math.prod(sizes) * wanted.itemsize >= TILED_BYTES

    def large_ones(items: list[Any]) -> bool:
        sizes = tuple(size for size in shape if size is not None)
        if len(sizes) == len(shape):
            return large(sizes)
        return any(large(item.shape) for item in items if hasattr(item, "dtype") and hasattr(item, "shape"))

    if isinstance(values, np.ndarray | Rows) and not isinstance(values, np.ma.MaskedArray) and values.dtype.kind != "O":
        if len(values.shape) < 2 or len(values) == 0 or not large(values.shape[1:]):
            return None
        items: list[Any] = [values] * len(values)
        shapes = [tuple(map(int, values.shape[1:]))] * len(values)
        validity = None
    elif isinstance(values, list) and large_ones(values):
        items = [None if is_null(value) else source_of(value, row, shape, dtype) for row, value in enumerate(values)]
        shapes = [() if item is None else tuple(map(int, item.shape)) for item in items]
        validity = np.array([item is not None for item in items], dtype=bool)
    else:
        return None
    for row, (item, sizes) in enumerate(zip(items, shapes, strict=True)):
        if item is not None:
            if len(sizes) != len(shape) or any(size is not None and size != found for size, found in zip(shape, sizes, strict=True)):
                raise fail(f"has the shape {sizes}, expected {shape}", row)
            cast(np.zeros(1, numpy_dtype_of(item)), dtype, row)  # Raises if the kind does not fit.

    def pull(row: int, window: list[tuple[int, int]]) -> Array:
        item, part = items[row], tuple(slice(low, high) for low, high in window)
        found = item.part(row, part) if isinstance(item, Rows) else item[(row, *part)] if item is values else item[part]
        if isinstance(found, np.ma.MaskedArray) and np.ma.is_masked(found):
            raise fail("is masked in part", row, hint="make the whole sample null, or none of it")
        array = cast(np.asarray(found), dtype, row)
        if array.shape != tuple(high - low for low, high in window):
            raise fail(f"returned an array of the shape {array.shape} for {window}", row)
        if array.dtype.kind == "M" and np.isnat(array).any():
            raise fail("holds NaT, which only a scalar can be", row)
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    return ("pulled", pull, [list(sizes) for sizes in shapes], validity)


def source_of(value: Any, row: int, shape: tuple[int | None, ...], dtype: str) -> Any:
    """Return one sample as an object that has a shape and a dtype and can be sliced."""
    if isinstance(value, np.ma.MaskedArray) or not (hasattr(value, "dtype") and hasattr(value, "shape")):
        return one_array(value, row, shape, dtype)
    return from_torch(value) if hasattr(value, "detach") else value


def from_arrow(values: Any, shape: tuple[int, ...]) -> Any:
    """Convert Arrow numbers or lists to an array, masked at nulls, or to a list if no array fits."""
    import pyarrow as pa

    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if isinstance(values, pa.FixedShapeTensorArray):
        return tensors_of(values)
    if isinstance(values, pa.ExtensionArray):
        values = values.storage
    if pa.types.is_nested(values.type):
        return tensors_of_lists(values, shape)
    if pa.types.is_dictionary(values.type):  # Its words may be null, which `null_count` ignores.
        values = values.dictionary_decode()
    if values.null_count == 0 or pa.types.is_timestamp(values.type) or pa.types.is_date(values.type):
        return values.to_numpy(zero_copy_only=False)  # Null times become NaT.
    boolean = pa.types.is_boolean(values.type)
    if not (boolean or pa.types.is_integer(values.type) or pa.types.is_floating(values.type)):
        return values.to_pylist()
    return np.ma.MaskedArray(np.asarray(values.fill_null(False if boolean else 0)), ~np.asarray(values.is_valid()))


def tensors_of_lists(values: Any, shape: tuple[int, ...]) -> Any:
    """Convert Arrow lists, nested or flat, to an array (N, *shape) with nulls masked, or to a list if that is impossible."""
    import pyarrow as pa

    flat = numbers_within(values.drop_null(), shape)
    if flat is None and pa.types.is_fixed_size_list(values.type):
        flat = numbers_within(values.drop_null(), (math.prod(shape),))
    if flat is None:
        return values.to_pylist()
    if values.null_count == 0:
        return flat.reshape(len(values), *shape)
    missing = ~np.asarray(values.is_valid())
    array: Array = np.zeros((len(values), *shape), flat.dtype)
    array[~missing] = flat.reshape(-1, *shape)
    return np.ma.MaskedArray(array, np.broadcast_to(missing.reshape(-1, *[1] * len(shape)), array.shape))


def numbers_within(lists: Any, shape: tuple[int, ...]) -> Array | None:
    """Return the numbers in nested Arrow lists of these lengths; None if other lengths or nulls occur."""
    import pyarrow as pa
    import pyarrow.compute as compute

    for size in shape:
        kind = lists.type
        if lists.null_count or not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
            return None
        if pa.types.is_fixed_size_list(kind):
            even = kind.list_size == size
        else:
            even = len(lists) == 0 or (np.asarray(compute.list_value_length(lists)) == size).all()
        if not even:
            return None
        lists = lists.flatten()
    kind = lists.type
    if lists.null_count or not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        return None
    return np.asarray(lists)


def tensors_of(values: Any) -> Array:
    """Convert Arrow tensors of one shape to an array (N, *shape), with axes in the order of their type and nulls masked."""
    kind, storage = values.type, values.storage
    size = math.prod(kind.shape)
    flat = storage.values.slice(storage.offset * size, len(values) * size)
    if flat.null_count and (storage.null_count == 0 or storage.flatten().null_count):
        bad = np.asarray(flat.is_null()).reshape(len(values), -1).any(axis=1) & np.asarray(values.is_valid())
        raise fail("holds a null, expected numbers", first_row(bad), hint="make the whole sample null, or none of it")
    array: Array = np.asarray(flat.fill_null(0) if flat.null_count else flat).reshape(len(values), *kind.shape)
    if kind.permutation is not None:
        array = array.transpose(0, *(axis + 1 for axis in kind.permutation))
    if values.null_count:
        return np.ma.MaskedArray(array, np.broadcast_to(~np.asarray(values.is_valid()).reshape(-1, *[1] * len(kind.shape)), array.shape))
    return array


def stack(items: list[Any], shape: tuple[int, ...], dtype: str) -> Array:
    """Stack Python values, none of them null, into one array."""
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
        raise fail(f"values do not make an array of {dtype}: {error}") from error
    if array.dtype.kind == "O" and shape:
        for row, item in enumerate(array):
            if any(part is None for part in item.flat):
                raise fail("holds None, expected numbers", row, hint="make the whole sample null, or none of it")
    return array


def plain_numbers(items: list[Any], dtype: str) -> tuple[Array, npt.NDArray[np.bool_] | None] | None:
    """Convert a list of plain Python numbers and None at once. Returns None if that fails, so that the caller finds the bad row."""
    wanted = numpy_dtype(dtype)
    kind = "u" if dtype == "uint64" else "i" if wanted.kind in "iu" else wanted.kind
    found = _core.numbers(items, kind) if items and kind in "iufb" else None
    if found is None:
        return None
    array, validity = found
    if kind == "f":
        array = cast(array, dtype)
    elif kind in "iu":
        if not np.iinfo(wanted).min <= int(array.min()) <= int(array.max()) <= np.iinfo(wanted).max:
            return None
        array = array.astype(wanted, copy=False)
    return array, validity


def without_dimensions(item: Any) -> Any:
    """Return the number in a zero-dimensional array; return other values unchanged."""
    return item[()] if isinstance(item, np.ndarray) and item.ndim == 0 else item


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
            # A UTC offset can begin with a minus only after the date, which has dashes too.
            offset = item[-1:] in ("Z", "z") or "+" in item or "-" in item[11:]
            parsed = datetime.datetime.fromisoformat(item) if offset else None
            item = parsed.astimezone(datetime.UTC).replace(tzinfo=None) if parsed is not None and parsed.tzinfo is not None else item
        if isinstance(item, str) and not ISO_8601.fullmatch(item):  # NumPy would also accept "", "now" and "202001".
            raise ValueError("expected ISO 8601, such as 2026-01-31T12:00:00Z")
        whole, _, decimals = item.partition(".") if isinstance(item, str) else (item, "", "")
        made = np.datetime64(cast(np.array([np.datetime64(whole)]), "timestamp", row)[0], "us")
        # With nine decimals, NumPy would overflow years beyond 2262 to other years.
        return made + np.timedelta64(int(decimals[:6].ljust(6, "0")), "us")
    except (ValueError, TypeError, OverflowError) as error:
        if isinstance(error, InvalidInputError):
            raise
        raise fail(f"is {str(item)[:80]!r}, which is not a timestamp: {error}", row) from error


def ragged(values: Any, shape: tuple[int | None, ...], dtype: str) -> Prepared:
    """Prepare arrays of different shapes."""
    whole = ragged_from_arrow(values, shape, dtype) if is_arrow(values) else None
    if whole is not None:
        return whole
    arrays: list[Array | None] = []
    free = [axis for axis, size in enumerate(shape) if size is None]
    values = arrays_of(values) if is_arrow(values) else container(values)
    for row, value in enumerate(values):
        arrays.append(None if is_null(value) else one_array(value, row, shape, dtype))
    data = [array.reshape(-1).view(np.uint8) for array in arrays if array is not None and array.size]
    sizes = np.array([0 if array is None else array.nbytes for array in arrays], dtype=np.int64)
    shapes = np.array([[0] * len(free) if array is None else [array.shape[axis] for axis in free] for array in arrays], dtype=np.int64)
    validity = np.array([array is not None for array in arrays], dtype=bool)
    flat = np.concatenate(data) if data else np.empty(0, np.uint8)
    return ("flat", flat, np.cumsum(sizes), shapes.reshape(len(arrays), len(free)), validity)


def ragged_from_arrow(values: Any, shape: tuple[int | None, ...], dtype: str) -> Prepared | None:
    """Convert Arrow lists whose only free dimension is the first, without making Python objects.

    Returns None if that fails, so that the caller finds the bad row.
    """
    import pyarrow as pa
    import pyarrow.compute as compute

    inner = tuple(size for size in shape[1:] if size is not None)
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if not isinstance(values, pa.Array) or not (pa.types.is_list(values.type) or pa.types.is_large_list(values.type)):
        return None
    if shape[0] is not None or len(inner) + 1 < len(shape):
        return None
    flat = numbers_within(values.flatten(), inner)  # Leaves out the data under nulls.
    if flat is None:
        return None
    try:
        numbers = np.ascontiguousarray(cast(flat, dtype))
    except InvalidInputError:
        return None
    counts = np.asarray(compute.list_value_length(values).fill_null(0)).astype(np.int64)
    ends = np.cumsum(counts * (math.prod(inner) * numbers.itemsize))
    return (
        "flat",
        numbers.view(np.uint8) if numbers.size else np.empty(0, np.uint8),
        ends,
        counts.reshape(-1, 1),
        np.asarray(values.is_valid()),
    )


def arrays_of(values: Any) -> Any:
    """Convert Arrow tensors of one shape, Penstock's `struct{data, shape}`, or lists, to one array or list per sample."""
    import pyarrow as pa

    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if isinstance(values, pa.FixedShapeTensorArray):
        return tensors_of(values)  # A null is masked whole, which `one_array` handles.
    if not pa.types.is_struct(values.type) or [field.name for field in values.type] != ["data", "shape"]:
        return values.to_pylist()
    made: list[Any] = []
    for row, value in enumerate(values):
        array = None
        if value.is_valid:
            data, shape = value["data"].values, value["shape"].as_py()
            if data is None or shape is None or data.null_count or None in shape or math.prod(shape) != len(data):
                raise fail(f"has data that does not make the shape {shape}", row)
            array = np.asarray(data).reshape(shape)
        made.append(array)
    return made


def one_array(value: Any, row: int, shape: tuple[int | None, ...], dtype: str) -> Array | None:
    """Return one sample of a ragged column; None if it is masked whole."""
    if isinstance(value, np.ma.MaskedArray):
        mask = np.ma.getmaskarray(value)
        if mask.any():
            if mask.all():
                return None
            raise fail("is masked in part", row, hint="make the whole sample null, or none of it")
        value = value.data
    try:
        array = from_torch(value) if hasattr(value, "detach") else np.asarray(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise fail(f"does not form an array: {error}", row) from error
    if array.size == 0 and array.ndim < len(shape):
        array = np.empty([size or 0 for size in shape], numpy_dtype(dtype))
    wrong = array.ndim != len(shape) or any(size is not None and size != array.shape[axis] for axis, size in enumerate(shape))
    if array.dtype.kind == "O" and not wrong:
        within = next((item for item in array.flat if not isinstance(item, numbers.Complex)), array.flat[0])
        raise fail(f"holds {str(within)[:80]!r}, expected {dtype}", row, hint="make the whole sample null, or none of it")
    if wrong:
        raise fail(f"has the shape {array.shape}, expected {shape}", row)
    return np.ascontiguousarray(cast(array, dtype, row))


def flat_from_arrow(values: Any) -> Prepared | None:
    """Prepare Arrow text or binary without making Python objects. Returns None for other types."""
    if not is_arrow(values):
        return None
    import pyarrow as pa

    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if pa.types.is_string(values.type) or pa.types.is_string_view(values.type):
        values = values.cast(pa.large_string())
    elif pa.types.is_binary(values.type) or pa.types.is_binary_view(values.type):
        values = values.cast(pa.large_binary())
    elif not (pa.types.is_large_string(values.type) or pa.types.is_large_binary(values.type)):
        return None
    validity = None if values.null_count == 0 else np.asarray(values.is_valid())
    _, offset_buffer, data_buffer = values.buffers()
    if offset_buffer is None or len(values) == 0:
        return ("flat", np.empty(0, np.uint8), np.zeros(len(values), np.int64), None, validity)
    offsets = np.frombuffer(offset_buffer, np.int64)[values.offset : values.offset + len(values) + 1]
    data = np.frombuffer(data_buffer, np.uint8) if data_buffer is not None else np.empty(0, np.uint8)
    return ("flat", data[offsets[0] : offsets[-1]], offsets[1:] - offsets[0], None, validity)


def row_bytes_of(values: Any) -> npt.NDArray[np.float64] | float:
    """Estimate the bytes of each value of an Arrow array, or one number if all are equal, without reading the values."""
    import pyarrow as pa

    types, kind, rows = pa.types, values.type, len(values)
    if not rows:
        return 0.0
    if isinstance(values, pa.ChunkedArray):
        parts = [(row_bytes_of(chunk), len(chunk)) for chunk in values.chunks if len(chunk)]
        first = parts[0][0]
        if isinstance(first, float) and all(isinstance(part, float) and part == first for part, _ in parts):
            return first
        return np.concatenate([np.broadcast_to(part, length) for part, length in parts])
    if isinstance(values, pa.ExtensionArray):
        return row_bytes_of(values.storage)
    wide = types.is_large_string(kind) or types.is_large_binary(kind)
    if wide or types.is_string(kind) or types.is_binary(kind):
        ends = np.frombuffer(values.buffers()[1], np.int64 if wide else np.int32)[values.offset : values.offset + rows + 1]
        return np.diff(ends).astype(np.float64) + 8.0
    if types.is_string_view(kind) or types.is_binary_view(kind):  # Each view is four numbers; the first is the length.
        lengths = np.frombuffer(values.buffers()[1], np.int32).reshape(-1, 4)[values.offset : values.offset + rows, 0]
        return lengths.astype(np.float64) + 8.0
    if types.is_dictionary(kind):  # Shared words are stored once but are expanded per value.
        return _picked(row_bytes_of(values.dictionary), np.asarray(values.indices.fill_null(0)).astype(np.int64)) + 8.0
    if types.is_run_end_encoded(kind):
        begin, count = values.find_physical_offset(), values.find_physical_length()
        ends = np.minimum(np.asarray(values.run_ends)[begin : begin + count].astype(np.int64) - values.offset, rows)
        return _picked(row_bytes_of(values.values), np.repeat(np.arange(begin, begin + count), np.diff(ends, prepend=0)))
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        first_of: Array = np.asarray(values.offsets)
        return _sums(row_bytes_of(values.values), len(values.values), first_of, first_of + np.asarray(values.sizes))
    if types.is_list(kind) or types.is_large_list(kind):
        offsets: Array = np.asarray(values.offsets)
        return _sums(row_bytes_of(values.values), len(values.values), offsets[:-1], offsets[1:])
    if types.is_fixed_size_list(kind):
        begins: Array = (values.offset + np.arange(rows)) * kind.list_size
        inner = row_bytes_of(values.values)
        return (
            inner * kind.list_size + 8.0 if isinstance(inner, float) else _sums(inner, len(values.values), begins, begins + kind.list_size)
        )
    if types.is_struct(kind):
        fields = [row_bytes_of(field) for field in values.flatten()]
        return np.sum(np.broadcast_arrays(*fields), axis=0, dtype=np.float64) if fields else 1.0
    return float(values.nbytes) / rows


def _picked(sizes: npt.NDArray[np.float64] | float, places: npt.NDArray[np.int64]) -> npt.NDArray[np.float64] | float:
    return sizes if isinstance(sizes, float) else sizes[places]


def _sums(sizes: npt.NDArray[np.float64] | float, count: int, begins: Array, ends: Array) -> npt.NDArray[np.float64]:
    """Return the size of each list: the sum of the sizes of its values, out of `count` values."""
    if isinstance(sizes, float):
        summed: npt.NDArray[np.float64] = np.multiply(ends - begins, sizes, dtype=np.float64)
        summed += 8.0
        return summed
    before = np.concatenate([[0.0], np.cumsum(np.broadcast_to(sizes, count))])
    return np.asarray(before[ends] - before[begins] + 8.0, np.float64)


def becomes_objects(values: Any) -> bool:
    """Return whether Arrow values must become Python objects: all nested values except lists of numbers."""
    if not is_arrow(values) or not values.type.num_fields:
        return False
    import pyarrow as pa

    kind = values.type
    while kind.num_fields == 1 and (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        kind = kind.field(0).type
    return not pa.types.is_primitive(kind)


class Coded:
    """Samples that are indices into one list of words. The core reads the list once for any number of slices."""

    def __init__(self, words: _core.Words, places: npt.NDArray[np.int64], validity: npt.NDArray[np.bool_] | None) -> None:
        self.words, self.places, self.validity = words, places, validity
        self.nbytes = places.nbytes

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, key: slice) -> Coded:
        return Coded(self.words, self.places[key], None if self.validity is None else self.validity[key])

    def prepared(self) -> Prepared:
        return ("coded", self.words, self.places.view(np.uint8), self.validity)


def coded_from_arrow(values: Any) -> Coded | None:
    """Keep dictionary-encoded Arrow words as a list of words and an index per sample. Returns None for other types."""
    if not is_arrow(values):
        return None
    import pyarrow as pa

    if not pa.types.is_dictionary(values.type):
        return None
    if isinstance(values, pa.ChunkedArray):
        if any(chunk.dictionary.null_count for chunk in values.chunks):
            return None
        values = values.unify_dictionaries().combine_chunks()
        values = values.chunk(0) if isinstance(values, pa.ChunkedArray) and values.num_chunks == 1 else values
    words = flat_from_arrow(values.dictionary) if isinstance(values, pa.DictionaryArray) else None
    if words is None or words[4] is not None:
        return None  # Words that are numbers or null are decoded and checked one by one.
    indices = values.indices
    validity = None if indices.null_count == 0 else np.asarray(indices.is_valid())
    filled = indices if validity is None else indices.fill_null(0)
    return Coded(_core.Words(words[1], words[2]), np.asarray(filled).astype(np.int64), validity)


def strings(values: Any) -> Any:
    """Convert a long list of texts and None to Arrow at once. Returns None if that fails."""
    found = _core.texts(values) if isinstance(values, list) and len(values) >= MANY else None
    if found is None:
        return None
    import pyarrow as pa

    data, offsets, validity = found
    bits = None if validity is None else pa.py_buffer(np.packbits(validity, bitorder="little"))
    return pa.LargeStringArray.from_buffers(len(values), pa.py_buffer(offsets), pa.py_buffer(data), bits)


def short_strings(values: Any) -> Any:
    """Convert texts like `strings` if they are small enough to be held twice. Cost: first measures about a thousand texts."""
    some = values[:: len(values) // 1000 + 1] if isinstance(values, list) else []
    lengths = [len(value) for value in some if isinstance(value, str)]
    most = min(WHOLE_BYTES, _core.configure()[0] // 4)
    return strings(values) if lengths and sum(lengths) / len(lengths) * len(values) <= most else None


def coded_from_strings(values: Any) -> Coded | None:
    """Convert a long list of words and None to indices into its distinct words. Returns None if that fails."""
    words = short_strings(values)
    return None if words is None else coded_from_arrow(words.dictionary_encode())


def items_of(values: Any) -> list[Any]:
    """Convert a container to a list."""
    return list(values.to_pylist()) if is_arrow(values) else list(container(values))


def codes_or_words(values: Any) -> Prepared:
    """Prepare the values of a label or category column: words, or whole numbers."""
    coded = values if isinstance(values, Coded) else coded_from_arrow(values)
    if coded is not None:
        return coded.prepared()
    if is_arrow(values) and hasattr(values.type, "value_type") and hasattr(values.type, "index_type"):
        values = values.cast(values.type.value_type)
    flat = flat_from_arrow(values)
    if flat is not None:
        return flat
    if isinstance(values, np.ndarray) and values.dtype.kind in "iu" and values.ndim == 1 and not isinstance(values, np.ma.MaskedArray):
        return fixed(cast(values, "int64"), None)
    items = items_of(values)
    texts = flat_from_arrow(strings(items))
    if texts is not None:
        return texts
    quick = plain_numbers(items, "int64")
    if quick is not None:
        return fixed(*quick)
    items = [None if is_null_word(value) else without_dimensions(value) for value in without_torch(items)]
    if any(isinstance(value, str) for value in items):
        for row, value in enumerate(items):
            if value is not None and not isinstance(value, str):
                raise fail(f"is a {type(value).__name__} among words", row)
        return ("items", items)
    for row, value in enumerate(items):
        if value is not None and not is_whole(value):
            raise fail(f"is {str(value)[:80]!r}, expected a word or a whole number", row)
    validity = np.array([value is not None for value in items], dtype=bool)
    codes = [0 if value is None else whole_number(value, row, "int64") for row, value in enumerate(items)]
    return fixed(np.array(codes, dtype=np.int64), validity)


def blob(value: Any, row: int) -> Any:
    """Return a value as bytes, a Path, or None."""
    if is_null_word(value):
        return None
    if isinstance(value, bytes | bytearray | os.PathLike):
        return value
    if isinstance(value, memoryview) or (isinstance(value, np.void) and value.dtype.names is None):
        return value.tobytes()
    raise fail(f"is a {type(value).__name__}, expected bytes, Path or None", row)


# Pillow modes that are stored unchanged, and modes that are converted without visible loss.
_AS_THEY_ARE = ("L", "RGB", "RGBA", "I;16")
_CONVERTED = {"1": "L", "LA": "RGBA", "La": "RGBA", "PA": "RGBA", "RGBa": "RGBA", "RGBX": "RGB", "CMYK": "RGB", "YCbCr": "RGB"}


def from_pillow(image: Any, row: int, mask: bool) -> Array:
    """Return the pixels of a Pillow image: colours for an image, class numbers for a mask."""
    mode = image.mode
    if not mask and (mode == "P" or (mode in ("1", "L", "RGB") and "transparency" in image.info)):
        image = image.convert("RGBA" if "transparency" in image.info else "RGB")  # A PNG may declare one colour transparent.
    elif mode == "1" and mask:
        return np.asarray(image).astype(np.uint8)
    elif mode in _CONVERTED and not mask:
        image = image.convert(_CONVERTED[mode])
    elif mode not in _AS_THEY_ARE and not (mask and mode == "P"):
        raise fail(f"is a Pillow image of mode {mode}", row, hint="convert it to L, RGB, RGBA or I;16 first")
    return np.asarray(image)


def picture(value: Any, row: int, mask: bool) -> Any:
    """Return encoded bytes, a Path, None, or (height, width, channels, bits, pixels), which the core stores as PNG."""
    if hasattr(value, "mode") and hasattr(value, "convert"):
        value = from_pillow(value, row, mask)
    elif hasattr(value, "detach"):
        value = from_torch(value)
    if not isinstance(value, np.ndarray):
        return blob(value, row)
    if isinstance(value, np.ma.MaskedArray):
        raise fail("is a masked array", row, hint="fill it first")
    if value.dtype == bool and mask:
        value = value.astype(np.uint8)
    value = value if value.dtype.isnative else value.astype(value.dtype.newbyteorder("="))
    good = value.dtype in (np.uint8, np.uint16) and value.ndim in ((2,) if mask else (2, 3)) and value.size
    if not good or (value.ndim == 3 and value.shape[2] not in (1, 3, 4)):
        wanted = "(H, W)" if mask else "(H, W) or (H, W, C) with C 1, 3 or 4"
        raise fail(f"is an array {value.shape} of {value.dtype}, expected {wanted} of uint8 or uint16", row)
    height, width, channels = value.shape if value.ndim == 3 else (*value.shape, 1)
    return (height, width, channels, value.dtype.itemsize * 8, np.ascontiguousarray(value).reshape(-1).view(np.uint8))


def refuse_one_image(values: Any) -> None:
    """Refuse an array that may be either one image or many grey images."""
    shape = tuple(getattr(values, "shape", ()))
    if len(shape) == 3 and shape[2] in (1, 3, 4):
        raise fail(
            f"an array of the shape {shape}, which is either one image or {shape[0]} grey images",
            hint="write [array] for one image; pass grey images as (N, H, W, 1), or as a list",
        )


def pictures(values: Any, mask: bool) -> Prepared:
    """Prepare the values of an image or mask column. An array of images has one image per row."""
    flat = flat_from_arrow(values)
    return flat or ("items", [picture(value, row, mask) for row, value in enumerate(items_of(values))])

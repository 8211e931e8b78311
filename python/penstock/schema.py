"""Column types, and what they make of the values that users append.

A type has `spec()` for the core and `prepare(values)` → one of the forms of `crates/python/src/input.rs`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import numpy.typing as npt

from penstock import _core
from penstock.errors import InvalidInputError

Prepared = tuple[Any, ...]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Give the NumPy dtype of a stored one; timestamps are datetime64[us], in UTC.

    >>> numpy_dtype("timestamp")
    dtype('<M8[us]')
    """
    if name == "bfloat16":
        name = ml_dtypes.bfloat16
    found: np.dtype[Any] = np.dtype("datetime64[us]" if name == "timestamp" else name)
    return found


DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128", "timestamp",
)  # fmt: skip


def dtype_name(dtype: Any) -> str:
    """Give our name of a dtype: a name, a NumPy dtype or type."""
    if isinstance(dtype, str) and dtype in DTYPES:
        return dtype
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = None
    if found is not None:
        if found.kind == "M":
            return "timestamp"
        if found.name in DTYPES:
            return str(found.name)
    raise InvalidInputError(f"unknown dtype {dtype!r}", code="invalid-schema", hint=f"one of {', '.join(DTYPES)}")


def fail(text: str, row: int | None = None, hint: str | None = None) -> InvalidInputError:
    """Build the error for a value that does not fit its column."""
    return InvalidInputError(text, code="invalid-value", hint=hint, rows=[] if row is None else [row])


def is_null(value: Any) -> bool:
    """Tell whether a value stands for a null: None, pandas' NA, NaT or a masked element."""
    return value is None or value is np.ma.masked or type(value).__name__ in ("NAType", "NaTType")


def as_list(values: Any) -> list[Any]:
    """Make a list of anything that holds one value a sample."""
    if isinstance(values, str | bytes | bytearray | Mapping):
        raise fail(f"a single {type(values).__name__}, expected one value a sample", hint="wrap it in a list")
    if hasattr(values, "to_pylist"):  # pyarrow
        return list(values.to_pylist())
    return list(values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ColumnType:
    """Base of the column types. `codec` ("none", "lz4", "zstd") compresses blocks; media are compressed already."""

    codec: str = "none"
    type: ClassVar[str]

    def spec(self) -> dict[str, Any]:
        """Give the column's entry in the schema, but for its name."""
        if self.codec not in ("none", "lz4", "zstd"):
            raise InvalidInputError(f"unknown codec {self.codec!r}", code="invalid-schema", hint="one of none, lz4, zstd")
        return {"type": self.type, "codec": self.codec}

    def prepare(self, values: Any) -> Prepared:
        """Turn one value a sample into a form for the core."""
        raise NotImplementedError


def flat_from_arrow(values: Any) -> Prepared | None:
    """Take text or binary from Arrow without making Python objects."""
    if not hasattr(values, "type") or not hasattr(values, "buffers"):
        return None
    import pyarrow as pa

    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if pa.types.is_string(values.type):
        values = values.cast(pa.large_string())
    elif pa.types.is_binary(values.type):
        values = values.cast(pa.large_binary())
    elif not (pa.types.is_large_string(values.type) or pa.types.is_large_binary(values.type)):
        return None
    validity = None if values.null_count == 0 else np.asarray(values.is_valid())
    _, offset_buffer, data_buffer = values.buffers()
    if offset_buffer is None:
        return ("flat", np.empty(0, np.uint8), np.empty(0, np.int64), None, None)
    offsets = np.frombuffer(offset_buffer, np.int64)[values.offset : values.offset + len(values) + 1]
    data = np.frombuffer(data_buffer, np.uint8) if data_buffer is not None else np.empty(0, np.uint8)
    return ("flat", data[offsets[0] : offsets[-1]], offsets[1:] - offsets[0], None, validity)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text(ColumnType):
    """Unicode text. Reads as str."""

    type = "text"

    def prepare(self, values: Any) -> Prepared:
        flat = flat_from_arrow(values)
        if flat is not None:
            return flat
        items = [None if is_null(value) else value for value in as_list(values)]
        for row, value in enumerate(items):
            if value is not None and not isinstance(value, str):
                raise fail(f"row {row} is a {type(value).__name__}, expected str", row)
        return ("items", items)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bytes(ColumnType):
    """Bytes of any length: bytes, bytearray, memoryview or a Path to be read. Reads as bytes."""

    type = "bytes"

    def prepare(self, values: Any) -> Prepared:
        return flat_from_arrow(values) or ("items", [blob(value, row) for row, value in enumerate(as_list(values))])


def blob(value: Any, row: int) -> Any:
    """Give bytes, a Path, or None."""
    if is_null(value) or isinstance(value, bytes | bytearray | os.PathLike):
        return None if is_null(value) else value
    if isinstance(value, memoryview | np.void):
        return value.tobytes()
    raise fail(f"row {row} is a {type(value).__name__}, expected bytes, Path or None", row)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Json(ColumnType):
    """Anything that JSON can hold, stored as compact text. Reads as Python objects."""

    type = "json"

    def prepare(self, values: Any) -> Prepared:
        items: list[str | None] = []
        for row, value in enumerate(as_list(values)):
            try:
                text = None if is_null(value) else json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
            except (TypeError, ValueError) as error:
                raise fail(f"row {row} is no JSON: {error}", row) from error
            items.append(text)
        return ("items", items)


def codes_or_words(values: Any) -> Prepared:
    """Prepare the values of a label or category: words, or whole numbers."""
    flat = flat_from_arrow(values)
    if flat is not None:
        return flat
    if hasattr(values, "dictionary_decode"):
        return codes_or_words(values.dictionary_decode())
    if isinstance(values, np.ndarray) and values.dtype.kind in "iu" and values.ndim == 1 and not isinstance(values, np.ma.MaskedArray):
        return fixed(values.astype(np.int64), None)
    items = [None if is_null(value) else value for value in as_list(values)]
    if any(isinstance(value, str) for value in items):
        for row, value in enumerate(items):
            if value is not None and not isinstance(value, str):
                raise fail(f"row {row} is a {type(value).__name__} among words", row)
        return ("items", items)
    for row, value in enumerate(items):
        if value is not None and (isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer)):
            raise fail(f"row {row} is {value!r}, expected a word or a whole number", row)
    validity = np.array([value is not None for value in items], dtype=bool)
    return fixed(np.array([value or 0 for value in items], dtype=np.int64), validity)


@dataclasses.dataclass(frozen=True)
class Label(ColumnType):
    """One of a closed list of names. Append names or codes; reads as int64 codes, as strings in scan.

    >>> Label(["cat", "dog"]).names
    ('cat', 'dog')
    """

    names: Sequence[str]
    type = "label"

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(self.names))

    def spec(self) -> dict[str, Any]:
        return {**super().spec(), "names": list(self.names)}

    def prepare(self, values: Any) -> Prepared:
        return codes_or_words(values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Category(ColumnType):
    """One of an open list of words, which grows as words are appended. Reads as int64 codes, as strings in scan."""

    type = "category"

    def prepare(self, values: Any) -> Prepared:
        return codes_or_words(values)


def fixed(array: npt.NDArray[Any], validity: npt.NDArray[np.bool_] | None) -> Prepared:
    """Prepare n equal samples."""
    contiguous = np.ascontiguousarray(array)
    flat = contiguous.reshape(-1).view(np.uint8) if contiguous.size else np.empty(0, np.uint8)
    return ("fixed", flat, validity, len(array))


def cast(array: npt.NDArray[Any], dtype: str, what: str) -> npt.NDArray[Any]:
    """Cast where no value changes its kind; refuse floats for integers, and numbers out of range."""
    wanted = numpy_dtype(dtype)
    if array.dtype == wanted:
        return array
    if array.size == 0:
        return array.astype(wanted)
    if dtype == "timestamp" and array.dtype.kind in "Miu":  # Whole numbers are microseconds since 1970.
        return array.astype(wanted)
    if wanted.kind in "iu" and array.dtype.kind in "iu":
        low, high = np.iinfo(wanted).min, np.iinfo(wanted).max
        if int(array.min()) < low or int(array.max()) > high:
            raise fail(f"{what} has values from {array.min()} to {array.max()}, {dtype} holds {low} to {high}")
        return array.astype(wanted)
    if np.can_cast(array.dtype, wanted, "same_kind") or (dtype in ("bfloat16", "float16", "float32") and array.dtype.kind in "fiu"):
        return array.astype(wanted)
    raise fail(f"{what} has the dtype {array.dtype}, which does not fit {dtype}", hint=f"cast it first, or make the column {array.dtype}")


def dense(values: Any, shape: tuple[int, ...], dtype: str) -> Prepared:
    """Prepare samples of one shape, given as an array or as a list with nulls."""
    validity: npt.NDArray[np.bool_] | None = None
    if hasattr(values, "to_numpy") and hasattr(values, "null_count"):  # pyarrow
        if hasattr(values, "combine_chunks"):
            values = values.combine_chunks()
        values = values.to_numpy(zero_copy_only=False) if values.null_count == 0 else values.to_pylist()
    elif hasattr(values, "isna") and hasattr(values, "to_numpy"):  # pandas
        missing = values.isna().to_numpy()
        values = (
            values.to_numpy()
            if values.dtype.kind == "f" or not missing.any()
            else [None if gone else value for value, gone in zip(values, missing, strict=True)]
        )
    elif hasattr(values, "detach") and hasattr(values, "numpy"):  # torch
        values = values.detach().cpu().numpy()
    if isinstance(values, np.ma.MaskedArray):
        mask = np.ma.getmaskarray(values)
        validity = np.asarray(~mask.reshape(len(values), -1).any(axis=1) if values.ndim > 1 else ~mask)
        zero: Any = np.zeros((), values.dtype)[()]
        values = values.filled(zero)
    if not isinstance(values, np.ndarray):
        items = as_list(values)
        nulls = [row for row, value in enumerate(items) if is_null(value)]
        if nulls:
            validity = np.ones(len(items), bool)
            validity[nulls] = False
            # NumPy does not mix bfloat16 with Python numbers.
            blank = np.zeros(shape, np.float32 if dtype == "bfloat16" else numpy_dtype(dtype))[()]
            items = [blank if is_null(value) else value for value in items]
        for row, item in enumerate(items if shape else ()):
            if np.shape(item) != shape:
                raise fail(f"row {row} has the shape {np.shape(item)}, expected {shape}", row)
        values = stack(items, dtype) if items else np.empty((0, *shape), numpy_dtype(dtype))
    if values.shape[1:] != shape:
        raise fail(
            f"values have the shape {values.shape}, expected (N, {', '.join(map(str, shape))})"
            if shape
            else f"values have the shape {values.shape}, expected (N,)"
        )
    return fixed(cast(values, dtype, "the array"), validity)


def stack(items: list[Any], dtype: str) -> npt.NDArray[Any]:
    """Make one array of Python values."""
    try:
        array = np.asarray(items)
    except (ValueError, TypeError, OverflowError) as error:
        raise fail(f"values do not make an array of {dtype}: {error}") from error
    if array.dtype.kind in "OUS":
        if dtype == "timestamp":
            try:
                return np.array([np.datetime64(naive_utc(item)) for item in items], dtype="datetime64[us]")
            except (ValueError, TypeError) as error:
                raise fail(f"values are no timestamps: {error}") from error
        bad = next(
            (row for row, item in enumerate(items) if not isinstance(item, int | float | complex | np.generic | np.ndarray | list | tuple)),
            None,
        )
        raise fail(f"row {bad} is {items[bad]!r}, expected {dtype}" if bad is not None else f"values do not make an array of {dtype}", bad)
    return array


def naive_utc(value: Any) -> Any:
    """Turn an aware datetime into UTC without zone, which is what NumPy takes."""
    import datetime

    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        return value.astimezone(datetime.UTC).replace(tzinfo=None)
    return value


def ragged(values: Any, shape: tuple[int | None, ...], dtype: str) -> Prepared:
    """Prepare arrays of different shapes."""
    arrays: list[npt.NDArray[Any] | None] = []
    wanted = numpy_dtype(dtype)
    free = [axis for axis, size in enumerate(shape) if size is None]
    for row, value in enumerate(values if isinstance(values, np.ndarray) else as_list(values)):
        if is_null(value):
            arrays.append(None)
            continue
        array = np.asarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)
        if array.size == 0 and array.ndim != len(shape):
            array = np.empty([size or 0 for size in shape], wanted)
        if (
            array.dtype.kind == "O"
            or array.ndim != len(shape)
            or any(size is not None and size != array.shape[axis] for axis, size in enumerate(shape))
        ):
            raise fail(f"row {row} has the shape {array.shape}, expected {shape}", row)
        arrays.append(np.ascontiguousarray(cast(array, dtype, f"row {row}")))
    data = [array.reshape(-1).view(np.uint8) for array in arrays if array is not None and array.size]
    sizes = np.array([0 if array is None else array.nbytes for array in arrays], dtype=np.int64)
    shapes = np.array([[0] * len(free) if array is None else [array.shape[axis] for axis in free] for array in arrays], dtype=np.int64)
    validity = np.array([array is not None for array in arrays], dtype=bool)
    flat = np.concatenate(data) if data else np.empty(0, np.uint8)
    return ("flat", flat, np.cumsum(sizes), shapes.reshape(len(arrays), len(free)), validity)


@dataclasses.dataclass(frozen=True)
class Scalar(ColumnType):
    """One number, bool or timestamp a sample; a plain dtype in a schema means this."""

    dtype: str
    type = "scalar"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_name(self.dtype))

    def spec(self) -> dict[str, Any]:
        return {**super().spec(), "dtype": self.dtype}

    def prepare(self, values: Any) -> Prepared:
        return dense(values, (), self.dtype)


@dataclasses.dataclass(frozen=True)
class Tensor(ColumnType):
    """An n-dimensional array a sample; None stands for a free dimension.

    Shapes: all fixed → batches are (N, *shape) arrays; some free → `Ragged`.

    >>> Tensor((None, 4), "float32").shape
    (None, 4)
    """

    shape: tuple[int | None, ...]
    dtype: str
    type = "tensor"

    def __post_init__(self) -> None:
        sizes = tuple(self.shape)
        for size in sizes:
            if size is not None and (isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 0):
                raise InvalidInputError(f"dimension {size!r}, expected a whole number or None", code="invalid-schema")
        object.__setattr__(self, "shape", tuple(None if size is None else int(size) for size in sizes))
        object.__setattr__(self, "dtype", dtype_name(self.dtype))

    def spec(self) -> dict[str, Any]:
        return {**super().spec(), "dtype": self.dtype, "shape": list(self.shape)}

    def prepare(self, values: Any) -> Prepared:
        if None in self.shape:
            return ragged(values, self.shape, self.dtype)
        return dense(values, tuple(size for size in self.shape if size is not None), self.dtype)


def picture(value: Any, row: int, mask: bool) -> Any:
    """Give encoded bytes, a Path, or None; arrays become PNG."""
    if not isinstance(value, np.ndarray):
        if hasattr(value, "__array_interface__") and not isinstance(value, bytes):  # PIL, and others that are arrays at heart
            value = np.asarray(value)
        else:
            return blob(value, row)
    if value.dtype == bool and mask:
        value = value.astype(np.uint8)
    if value.dtype not in (np.uint8, np.uint16) or value.ndim not in ((2,) if mask else (2, 3)):
        wanted = "(H, W)" if mask else "(H, W) or (H, W, C)"
        raise fail(f"row {row} is an array {value.shape} of {value.dtype}, expected {wanted} of uint8 or uint16", row)
    shape = value.shape if value.ndim == 3 else (*value.shape, 1)
    flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    height, width, channels = shape
    return _core.encode_png(height, width, channels, value.dtype.itemsize * 8, flat)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Image(ColumnType):
    """A JPEG or PNG, kept bit for bit; arrays are stored as PNG.

    Shapes: reads as (H, W, C) uint8 or uint16, C 1, 3 or 4. `exif_orientation=False` leaves pixels as they lie in the file.
    """

    exif_orientation: bool = True
    type = "image"

    def spec(self) -> dict[str, Any]:
        return {**super().spec(), "exif_orientation": self.exif_orientation}

    def prepare(self, values: Any) -> Prepared:
        return flat_from_arrow(values) or ("items", [picture(value, row, False) for row, value in enumerate(as_list_of_arrays(values))])


def as_list_of_arrays(values: Any) -> Iterable[Any]:
    """Iterate one value a sample; an array of images is one image a row."""
    return values if isinstance(values, np.ndarray) else as_list(values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mask(ColumnType):
    """A class number a pixel, stored as PNG. Shapes: reads as (H, W) uint8 or uint16; palettes are not applied."""

    of: str | None = None
    type = "mask"

    def spec(self) -> dict[str, Any]:
        return {**super().spec(), "of": self.of}

    def prepare(self, values: Any) -> Prepared:
        return flat_from_arrow(values) or ("items", [picture(value, row, True) for row, value in enumerate(as_list_of_arrays(values))])


@dataclasses.dataclass(frozen=True)
class Boxes(ColumnType):
    """Boxes of an image. Shapes: (N, 4) float32, N free; reads as `Ragged`. `format`: xyxy, xywh or cxcywh, in pixels."""

    format: str = "xyxy"
    of: str | None = None
    type = "boxes"

    def spec(self) -> dict[str, Any]:
        return {**super().spec(), "format": self.format, "of": self.of}

    def prepare(self, values: Any) -> Prepared:
        return ragged(values, (None, 4), "float32")


@dataclasses.dataclass(frozen=True)
class Keypoints(ColumnType):
    """Points of the objects in an image. Shapes: (N, points, dimensions) float32, N free, points free if None."""

    points: int | None = None
    dimensions: int = 2
    of: str | None = None
    type = "keypoints"

    def spec(self) -> dict[str, Any]:
        return {**super().spec(), "points": self.points, "dimensions": self.dimensions, "of": self.of}

    def prepare(self, values: Any) -> Prepared:
        return ragged(values, (None, self.points, self.dimensions), "float32")


TYPES: dict[str, type[ColumnType]] = {
    kind.type: kind for kind in (Text, Bytes, Json, Label, Category, Scalar, Tensor, Image, Mask, Boxes, Keypoints)
}


class Schema(dict[str, ColumnType]):
    """Column name → type, in order."""

    def __repr__(self) -> str:
        return "Schema({\n" + "".join(f"    {name!r}: {kind},\n" for name, kind in self.items()) + "})"


def to_json(schema: Mapping[str, Any]) -> str:
    """Write a schema for the core; a plain dtype is a scalar."""
    if not isinstance(schema, Mapping):
        raise InvalidInputError(f"a schema is a {type(schema).__name__}, expected a dict of column name to type", code="invalid-schema")
    columns = []
    for name, kind in schema.items():
        if not isinstance(name, str):
            raise InvalidInputError(f"cannot create column {name!r}: a name is a str", code="invalid-schema")
        if not isinstance(kind, ColumnType):
            if isinstance(kind, type) and issubclass(kind, ColumnType):
                raise InvalidInputError(
                    f"cannot create column `{name}`: {kind.__name__} is a class", code="invalid-schema", hint=f"write ps.{kind.__name__}()"
                )
            kind = Scalar(kind)
        columns.append({"name": name, **kind.spec()})
    return json.dumps(columns)


def from_json(text: str) -> Schema:
    """Read a schema of the core."""
    schema = Schema()
    for column in json.loads(text):
        kind = TYPES[column["type"]]
        fields = {field.name for field in dataclasses.fields(kind)}
        values = {key: value for key, value in column.items() if key in fields}
        schema[column["name"]] = kind(**values)
    return schema

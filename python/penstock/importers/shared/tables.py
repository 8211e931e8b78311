"""Converts Arrow tables to columns. Infers column types from Arrow types, and avoids creating Python objects for values where possible."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute

from penstock.columns.blob import Bytes
from penstock.columns.boxes import Boxes
from penstock.columns.category import Category
from penstock.columns.column_type import ColumnType
from penstock.columns.image import Image
from penstock.columns.json_text import Json, parsed
from penstock.columns.keypoints import Keypoints
from penstock.columns.label import Label, Labels
from penstock.columns.scalar import Scalar
from penstock.columns.tensor import Tensor
from penstock.columns.text import Text
from penstock.errors import Error, UnsupportedError
from penstock.frameworks.parquet import listed
from penstock.importers.shared.source import Refusal
from penstock.schema import noted as noted_type
from penstock.values.checks import fail
from penstock.values.dtypes import is_exact, whole_bits
from penstock.values.media import begins_as_image
from penstock.values.times import TIMES, is_fine

# Text of a whole number.
WHOLE = "^[+-]?[0-9]+$"

_PLAIN = {pa.bool_(): "bool", pa.float16(): "float16", pa.float32(): "float32", pa.float64(): "float64"} | {
    getattr(pa, name)(): name for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
}


def infer(kind: pa.DataType, name: str) -> ColumnType:
    """Choose a column type for an Arrow type."""
    if (dtype := plain_dtype(kind)) is not None:
        return Scalar(dtype)
    if is_text(kind) or pa.types.is_null(kind):
        return Text()
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind) or pa.types.is_binary_view(kind):
        return Bytes()
    if pa.types.is_dictionary(kind):
        return Category() if is_text(kind.value_type) else infer(kind.value_type, name)
    if pa.types.is_decimal(kind):
        return Text()
    if isinstance(kind, pa.FixedShapeTensorType) and (dtype := plain_dtype(kind.value_type)) is not None:
        shape = tuple(kind.shape) if kind.permutation is None else tuple(kind.shape[axis] for axis in kind.permutation)
        return Tensor(shape, dtype)
    if is_array_of_hugging_face(kind):
        return Tensor(tuple(kind.shape), kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        return infer(kind.storage_type, name)
    if pa.types.is_run_end_encoded(kind):
        return infer(kind.value_type, name)
    if pa.types.is_fixed_size_list(kind) and (dtype := plain_dtype(kind.value_type)) is not None:
        return Tensor((kind.list_size,), dtype)
    if _is_list(kind) and (dtype := plain_dtype(kind.value_type)) is not None:
        return Tensor((None,), dtype)
    if is_media(kind):
        return Bytes()  # `media_type` later chooses the type from the first bytes.
    if (what := _no_json(kind)) is not None:
        raise UnsupportedError(
            f"cannot import column `{name}`: it contains {what} inside {kind}, which JSON cannot represent",
            code="unsupported-format",
            hint="move it to a separate column first, or leave it out"
            + (f'; or import it as text: --type "{name}=text"' if _no_text(kind) is None else ""),
        )
    if pa.types.is_nested(kind):
        return Json()
    raise UnsupportedError(
        f"cannot import column `{name}`: there is no column type for Arrow's {kind}",
        code="unsupported-format",
        hint="cast it first, or leave it out",
    )


def plain_dtype(kind: pa.DataType) -> str | None:
    """Return the dtype of a scalar column for an Arrow type, or None if there is none."""
    return _PLAIN.get(kind) or time_dtype(kind)


def time_dtype(kind: pa.DataType) -> str | None:
    """Return the dtype for a type of times, whatever its unit: timestamp, duration or time. Returns None for other types."""
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return "timestamp"
    return "duration" if pa.types.is_duration(kind) else "time" if pa.types.is_time(kind) else None


def noted(schemas: list[pa.Schema]) -> dict[str, ColumnType]:
    """Return the column types that the metadata of Arrow schemas state: Penstock's own, and the class names of Hugging Face."""
    found: dict[str, ColumnType] = {}
    names = dict.fromkeys(name for schema in schemas for name in schema.names)
    features = [_hugging_face(schema) for schema in schemas]
    for name in names:
        kind = restored([schema.field(name) for schema in schemas if name in schema.names])
        if kind is None and all(other.get(name) == features[0].get(name) for other in features):
            kind = features[0].get(name)
        if kind is not None:
            found[name] = kind
    return found


def _hugging_face(schema: pa.Schema) -> dict[str, ColumnType]:
    """Return the types of labels and images, as Hugging Face datasets note them in Arrow and Parquet metadata."""
    found: dict[str, ColumnType] = {}
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        for field in schema:
            feature = features.get(field.name) or {}
            inner = feature[0] if isinstance(feature, list) else feature.get("feature") or {}
            if isinstance(inner, dict) and inner.get("_type") == "ClassLabel" and _is_list(field.type):
                found[field.name] = Labels(inner["names"])
                continue
            if feature.get("_type") == "ClassLabel" and pa.types.is_integer(field.type):
                found[field.name] = Label(feature["names"])
            if feature.get("_type") == "Image" and is_media(field.type):
                found[field.name] = Image()
    except (Error, KeyError, ValueError, TypeError, AttributeError):
        return {}  # Other programs may write any text there.
    return found


def as_noted(array: pa.Array, kind: ColumnType, noted: ColumnType | None) -> Any:
    """Convert values whose metadata give them a meaning that their Arrow type lacks. Returns None for other values."""
    if isinstance(kind, Boxes) and isinstance(noted, Boxes) and noted.format != kind.format:
        return kind.of_arrow(array, noted.format)
    if isinstance(kind, Json) and isinstance(noted, Json):
        return parsed(array.to_pylist())
    if isinstance(kind, Label | Category) and isinstance(noted, Label) and pa.types.is_integer(array.type):
        # In Hugging Face datasets, -1 means no label. The names may have other codes in the destination.
        names = noted.names
        return [None if code in (None, -1) else names[code] if 0 <= code < len(names) else code for code in array.to_pylist()]
    if isinstance(kind, Labels) and isinstance(noted, Labels) and _is_list(array.type) and pa.types.is_integer(array.type.value_type):
        names = noted.names
        return [None if row is None else [names[code] if 0 <= code < len(names) else code for code in row] for row in array.to_pylist()]
    return None


def restored(fields: list[pa.Field]) -> ColumnType | None:
    """Return the column type that Penstock noted in the metadata of a field when it wrote the values. Returns None if there is none, if it
    does not fit the values, or if several files disagree.
    """
    kind, *others = map(noted_type, fields)
    if kind is None or any(other != kind for other in others):
        return None
    return kind if all(field.type in (kind.arrow_type(), listed(kind.arrow_type(), kind)) for field in fields) else None


def is_binary(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is a type of bytes."""
    return any(
        test(kind) for test in (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view)
    )


def is_text(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is a text type."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _no_json(kind: pa.DataType) -> str | None:
    """Name the values within an Arrow type that JSON cannot represent. Returns None if JSON can represent all values."""
    if pa.types.is_decimal(kind):
        return "decimal numbers"
    if (dtype := time_dtype(kind)) is not None:
        return {"timestamp": "points in time", "duration": "durations", "time": "times of day"}[dtype]
    return _no_text(kind) or next((what for part in _parts(kind) if (what := _no_json(part)) is not None), None)


def _no_text(kind: pa.DataType) -> str | None:
    """Name the values within an Arrow type that have no text. Returns None if all values have one."""
    if is_binary(kind):
        return "binary values"
    if (pa.types.is_time64(kind) or pa.types.is_duration(kind)) and kind.unit == "ns":  # Python's times have microseconds.
        return "times in nanoseconds"
    if pa.types.is_interval(kind):
        return "intervals of months, days and nanoseconds"
    return next((what for part in _parts(kind) if (what := _no_text(part)) is not None), None)


def _parts(kind: pa.DataType) -> list[pa.DataType]:
    """Return the types within a nested, dictionary, run-end or extension type."""
    inner = storage(kind)
    return [inner] if inner != kind else [kind.field(index).type for index in range(kind.num_fields)]


def is_array_of_hugging_face(kind: pa.DataType) -> bool:
    """Return whether values are an `Array2D` to `Array5D` of the `datasets` library: nested lists whose shape the type states."""
    return (
        isinstance(kind, pa.ExtensionType)
        and isinstance(getattr(kind, "value_type", None), str)
        and isinstance(getattr(kind, "shape", None), tuple)
    )


def is_media(kind: pa.DataType) -> bool:
    """Return whether this is the type in which Hugging Face stores media: struct<bytes: binary, path: string>."""
    if not pa.types.is_struct(kind) or {field.name for field in kind} != {"bytes", "path"}:
        return False
    return is_binary(kind.field("bytes").type)


def media_type(first: bytes | None) -> ColumnType:
    """Choose the type of a media column from its first value."""
    return Image() if first is not None and begins_as_image(first[:16]) else Bytes()


def values(array: pa.Array | pa.ChunkedArray, kind: ColumnType) -> Any:
    """Convert an Arrow column to a form that `kind.prepare` accepts."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks() if array.num_chunks != 1 else array.chunk(0)
    if isinstance(array, pa.ChunkedArray):  # combine_chunks returns a ChunkedArray if offsets would overflow.
        return array.to_pylist()
    if is_array_of_hugging_face(array.type):
        dtype = array.type.value_type
        return [None if row is None else np.array(row, dtype) for row in array.storage.to_pylist()]
    if isinstance(kind, Tensor | Boxes | Keypoints | Labels):
        return array  # `prepare` accepts tensors and lists of numbers unchanged.
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if not (isinstance(kind, Category) and pa.types.is_dictionary(array.type)):
        array = decoded(array)
    if is_media(array.type):
        array, only_paths = media(array)
        if only_paths:
            raise fail(only_paths[0][1], only_paths[0][0], hint="embed the files first (in Hugging Face datasets: `embed_external_files`)")
    if isinstance(kind, Text) and pa.types.is_time64(array.type) and array.type.unit == "ns":
        return array.cast(pa.string())
    as_text = isinstance(kind, Text) and is_binary(array.type)  # Binary values are accepted as text if they are UTF-8.
    unfit = _no_json if isinstance(kind, Json) else _no_text
    if isinstance(kind, Text | Json) and not as_text and (what := unfit(array.type)) is not None:
        raise UnsupportedError(f"{array.type} contains {what}, which are not text", code="unsupported-format", hint="flatten it first")
    if as_text:
        return array.cast(pa.large_binary())
    if isinstance(kind, Text) and not (pa.types.is_string(array.type) or pa.types.is_large_string(array.type)):
        text = (lambda value: json.dumps(_plain(value), ensure_ascii=False)) if pa.types.is_nested(array.type) else str
        return [None if value is None else text(value) for value in array.to_pylist()]
    return array if isinstance(kind, Text | Bytes | Category | Label | Scalar | Image) else array.to_pylist()


def timestamps(texts: pa.Array) -> tuple[pa.Array, list[int]]:
    """Convert time strings to microseconds in UTC. Also returns the rows that are not times, or have digits below a microsecond."""
    times = _times(texts)
    if times is None:
        times = _times(compute.replace_substring_regex(texts, ZEROS, r"\1\2"))
    if times is not None:
        return times, []
    if len(texts) == 1:
        return pa.nulls(1, pa.timestamp("us")), [0]
    each = [timestamps(texts[row : row + 1]) for row in range(len(texts))]
    return pa.concat_arrays([value for value, _ in each]), [row for row, (_, bad) in enumerate(each) if bad]


# Zeros below a microsecond, after the digits that count.
ZEROS = r"(\.\d{6})0{1,3}(\D|$)"


def _times(texts: pa.Array) -> pa.Array | None:
    """Cast time strings to microseconds in UTC. Returns None if Arrow refuses any of them."""
    for zone in (None, "UTC"):
        with contextlib.suppress(pa.ArrowInvalid):
            return texts.cast(pa.timestamp("us", tz=zone)).cast(pa.timestamp("us"))
    return None


def unlike(path: str, column: str, text: pa.StringScalar, kind: Scalar) -> Refusal:
    """Build the refusal for text that does not match the column's type."""
    value = text.as_py()
    why = f"expected {kind.dtype}"
    if kind.dtype in TIMES and is_fine(value):
        why = "which has digits below a microsecond: cut them off first, or import the column as text"
    elif whole_bits(kind.dtype) < 64 and re.fullmatch(WHOLE, value.strip()) and not is_exact_text(value.strip(), kind.dtype):
        why = f"which {kind.dtype} does not represent exactly: import the column as text"
    return Refusal.of_value(path, column, f"{value[:80]!r}, {why}")


def is_exact_text(text: str, dtype: str) -> bool:
    """Return whether a dtype of floats represents the whole number in a text exactly. float64 has at most a sign and 309 digits."""
    return len(text) <= 310 and is_exact(int(text), dtype)


def storage(kind: pa.DataType) -> pa.DataType:
    """Return the type of the values in a dictionary, run-end or extension type."""
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return storage(kind.value_type)
    return storage(kind.storage_type) if isinstance(kind, pa.BaseExtensionType) else kind


def decoded(array: pa.Array) -> pa.Array:
    """Return the plain values of a dictionary, run-end, extension or view array."""
    if isinstance(array, pa.ExtensionArray):
        return decoded(array.storage)
    if pa.types.is_run_end_encoded(array.type):
        return decoded(compute.run_end_decode(array))
    if pa.types.is_dictionary(array.type):
        return pa.DictionaryArray.from_arrays(array.indices, decoded(array.dictionary)).dictionary_decode()
    wanted = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}  # Arrow cannot `take` from views.
    return array.cast(wanted[array.type]) if array.type in wanted else array


def wider(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Choose a number type, or a type for lists of numbers, that can represent the values of both types. Returns None if none exists.

    >>> wider(pa.float32(), pa.float64()), wider(pa.int32(), pa.uint16()), wider(pa.int64(), pa.float64())
    (DataType(double), DataType(int32), None)
    """
    if one == other:
        return one
    if _is_list(one) and _is_list(other):
        inner = wider(one.value_type, other.value_type)
        return None if inner is None else pa.list_(inner)
    if not is_number(one) or not is_number(other):
        return None
    small, large = sorted((one, other), key=lambda kind: (pa.types.is_floating(kind), kind.bit_width))
    if pa.types.is_floating(small) or (not pa.types.is_floating(large) and _is_signed(small) == _is_signed(large)):
        return large
    if pa.types.is_floating(large):
        bits = small.bit_width - _is_signed(small)
        return large if bits <= whole_bits(f"float{large.bit_width}") else pa.float64() if bits <= whole_bits("float64") else None
    bits = max(kind.bit_width * (1 if _is_signed(kind) else 2) for kind in (one, other))
    return getattr(pa, f"int{bits}")() if bits <= 64 else None


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def has_nulls_within(values: pa.Array) -> bool:
    """Return whether lists contain a null, which a tensor cannot. As in JSON lines, such lists become JSON."""
    lists = storage(values.type)
    plain = not isinstance(values, pa.ExtensionArray) and (_is_list(lists) or pa.types.is_fixed_size_list(lists))
    return plain and bool(values.drop_null().flatten().null_count)


def is_number(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is an integer or float type."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _is_signed(kind: pa.DataType) -> bool:
    return bool(pa.types.is_signed_integer(kind))


def media(array: pa.StructArray) -> tuple[pa.Array, list[tuple[int, str]]]:
    """Return the media bytes, and the rows that contain only a path, each with the reason. The path may refer to a file on another
    machine.
    """
    bodies, paths = decoded(compute.struct_field(array, "bytes")), compute.struct_field(array, "path")
    only_path = np.flatnonzero(compute.and_(compute.is_null(bodies), compute.is_valid(paths)))
    return bodies, [(int(row), f"it contains only the path {str(paths[row])[:80]!r}, without bytes") for row in only_path]


def with_paths(array: pa.StructArray, bodies: pa.Array, rows: Iterable[int]) -> list[bytes | str | None]:
    """Return media bytes, and instead of them the path in the rows that contain only that."""
    values: list[bytes | str | None] = bodies.to_pylist()
    paths = compute.struct_field(array, "path")
    for row in rows:
        values[row] = paths[row].as_py()
    return values


def _plain(value: Any) -> Any:
    """Convert nested Arrow values to values that JSON can represent."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return str(value)

"""What Arrow's types mean, and plain values of Arrow arrays. Imports pyarrow, so column types import this module only when needed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute

from penstock.errors import UnsupportedError
from penstock.values.checks import fail

_PLAIN = {pa.bool_(): "bool", pa.float16(): "float16", pa.float32(): "float32", pa.float64(): "float64"} | {
    getattr(pa, name)(): name for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
}


def plain_dtype(kind: pa.DataType) -> str | None:
    """Return the dtype of a scalar column for an Arrow type, or None if there is none."""
    return _PLAIN.get(kind) or time_dtype(kind)


def time_dtype(kind: pa.DataType) -> str | None:
    """Return the dtype for a type of times, whatever its unit: timestamp, duration or time. Returns None for other types."""
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return "timestamp"
    return "duration" if pa.types.is_duration(kind) else "time" if pa.types.is_time(kind) else None


def is_binary(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is a type of bytes."""
    return any(
        test(kind) for test in (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view)
    )


def is_text(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is a text type."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def no_json(kind: pa.DataType) -> str | None:
    """Name the values within an Arrow type that JSON cannot represent. Returns None if JSON can represent all values."""
    if pa.types.is_decimal(kind):
        return "decimal numbers"
    if (dtype := time_dtype(kind)) is not None:
        return {"timestamp": "points in time", "duration": "durations", "time": "times of day"}[dtype]
    return no_text(kind) or next((what for part in _parts(kind) if (what := no_json(part)) is not None), None)


def no_text(kind: pa.DataType) -> str | None:
    """Name the values within an Arrow type that have no text. Returns None if all values have one."""
    if is_binary(kind):
        return "binary values"
    if (pa.types.is_time64(kind) or pa.types.is_duration(kind)) and kind.unit == "ns":  # Python's times have microseconds.
        return "times in nanoseconds"
    if pa.types.is_interval(kind):
        return "intervals of months, days and nanoseconds"
    return next((what for part in _parts(kind) if (what := no_text(part)) is not None), None)


def _parts(kind: pa.DataType) -> list[pa.DataType]:
    """Return the types within a nested, dictionary, run-end or extension type."""
    inner = storage(kind)
    return [inner] if inner != kind else [kind.field(index).type for index in range(kind.num_fields)]


def is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def is_any_list(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is one of lists, also of lists of one size."""
    return is_list(kind) or bool(pa.types.is_fixed_size_list(kind))


def is_number(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is an integer or float type."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


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


def media(array: pa.StructArray) -> tuple[pa.Array, list[tuple[int, str]]]:
    """Return the media bytes, and the rows that contain only a path, each with the reason. The path may refer to a file on another
    machine.
    """
    bodies, paths = decoded(compute.struct_field(array, "bytes")), compute.struct_field(array, "path")
    only_path = np.flatnonzero(compute.and_(compute.is_null(bodies), compute.is_valid(paths)))
    return bodies, [(int(row), f"it contains only the path {str(paths[row])[:80]!r}, without bytes") for row in only_path]


def plain(array: pa.Array) -> pa.Array:
    """Return plain values: media as bytes, and no dictionaries and extension types. Raises: InvalidInputError for media of which there is only a path."""
    array = decoded(array)
    if not is_media(array.type):
        return array
    bodies, only_paths = media(array)
    if only_paths:
        raise fail(only_paths[0][1], only_paths[0][0], hint="embed the files first (in Hugging Face datasets: `embed_external_files`)")
    return bodies


def text(array: pa.Array) -> Any:
    """Return the texts of plain values. Binary ones are accepted if they are UTF-8, and nested ones become JSON.

    Raises: UnsupportedError for values that have no text.
    """
    kind = array.type
    if pa.types.is_time64(kind) and kind.unit == "ns":
        return array.cast(pa.string())
    if is_binary(kind):
        return array.cast(pa.large_binary())
    refuse(kind, no_text(kind))
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return array
    text = (lambda value: json.dumps(_plain(value), ensure_ascii=False)) if pa.types.is_nested(kind) else str
    return [None if value is None else text(value) for value in array.to_pylist()]


def refuse(kind: pa.DataType, what: str | None) -> None:
    """Refuse a type that contains what cannot be represented, if there is something.

    Raises: UnsupportedError.
    """
    if what is not None:
        raise UnsupportedError(f"{kind} contains {what}, which are not text", hint="flatten it first")


def _plain(value: Any) -> Any:
    """Convert nested Arrow values to values that JSON can represent."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return str(value)

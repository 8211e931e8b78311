"""Converts Arrow tables to columns. Infers column types from Arrow types, and avoids creating Python objects for values where possible."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute

from penstock.columns.blob import Bytes
from penstock.columns.category import Category
from penstock.columns.column_type import ColumnType
from penstock.columns.image import Image
from penstock.columns.json_text import Json
from penstock.columns.label import Label, Labels
from penstock.columns.scalar import Scalar
from penstock.columns.tensor import Tensor
from penstock.columns.text import Text
from penstock.errors import Error, UnsupportedError
from penstock.frameworks.parquet import listed
from penstock.schema import noted as noted_type
from penstock.values.arrow.types import (
    is_any_list,
    is_array_of_hugging_face,
    is_binary,
    is_list,
    is_media,
    is_number,
    is_text,
    no_json,
    no_text,
    plain_dtype,
    storage,
)
from penstock.values.dtypes import whole_bits
from penstock.values.media import begins_as_image


def infer(kind: pa.DataType, name: str) -> ColumnType:
    """Choose a column type for an Arrow type."""
    if (dtype := plain_dtype(kind)) is not None:
        return Scalar(dtype)
    if is_text(kind) or pa.types.is_null(kind):
        return Text()
    if is_binary(kind):
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
    if is_list(kind) and (dtype := plain_dtype(kind.value_type)) is not None:
        return Tensor((None,), dtype)
    if is_media(kind):
        return Bytes()  # `media_type` later chooses the type from the first bytes.
    if (what := no_json(kind)) is not None:
        raise UnsupportedError(
            f"cannot import column `{name}`: it contains {what} inside {kind}, which JSON cannot represent",
            hint="move it to a separate column first, or leave it out"
            + (f'; or import it as text: --type "{name}=text"' if no_text(kind) is None else ""),
        )
    if pa.types.is_nested(kind):
        return Json()
    raise UnsupportedError(
        f"cannot import column `{name}`: there is no column type for Arrow's {kind}", hint="cast it first, or leave it out"
    )


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
            if isinstance(inner, dict) and inner.get("_type") == "ClassLabel" and is_list(field.type):
                found[field.name] = Labels(inner["names"])
                continue
            if feature.get("_type") == "ClassLabel" and pa.types.is_integer(field.type):
                found[field.name] = Label(feature["names"])
            if feature.get("_type") == "Image" and is_media(field.type):
                found[field.name] = Image()
    except (Error, KeyError, ValueError, TypeError, AttributeError):
        return {}  # Other programs may write any text there.
    return found


def restored(fields: list[pa.Field]) -> ColumnType | None:
    """Return the column type that Penstock noted in the metadata of a field when it wrote the values. Returns None if there is none, if it
    does not fit the values, or if several files disagree.
    """
    kind, *others = map(noted_type, fields)
    if kind is None or any(other != kind for other in others):
        return None
    return kind if all(field.type in (kind.arrow_type(), listed(kind.arrow_type(), kind)) for field in fields) else None


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
    return kind.from_arrow(array)


def wider(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Choose a number type, or a type for lists of numbers, that can represent the values of both types. Returns None if none exists.

    >>> wider(pa.float32(), pa.float64()), wider(pa.int32(), pa.uint16()), wider(pa.int64(), pa.float64())
    (DataType(double), DataType(int32), None)
    """
    if one == other:
        return one
    if is_list(one) and is_list(other):
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


def without_nulls_within(found: ColumnType, arrays: Iterable[pa.Array]) -> ColumnType:
    """Return the type that was inferred for lists, or JSON, as in JSON lines, if they contain a null, which a tensor cannot."""
    return Json() if found.is_array and any(map(_has_nulls_within, arrays)) else found


def _has_nulls_within(values: pa.Array) -> bool:
    plain = not isinstance(values, pa.ExtensionArray) and is_any_list(storage(values.type))
    return plain and bool(values.drop_null().flatten().null_count)


def _is_signed(kind: pa.DataType) -> bool:
    return bool(pa.types.is_signed_integer(kind))


def with_paths(array: pa.StructArray, bodies: pa.Array, rows: Iterable[int]) -> list[bytes | str | None]:
    """Return media bytes, and instead of them the path in the rows that contain only that."""
    values: list[bytes | str | None] = bodies.to_pylist()
    paths = compute.struct_field(array, "path")
    for row in rows:
        values[row] = paths[row].as_py()
    return values

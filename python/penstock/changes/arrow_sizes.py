"""Estimates the size of Arrow values after conversion, without reading them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.values.checks import Array, is_arrow


def row_bytes_of(values: Any) -> npt.NDArray[np.float64] | float:
    """Estimate the bytes per value of an Arrow array without reading the values. Returns one number if all sizes are equal."""
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
    if types.is_string_view(kind) or types.is_binary_view(kind):  # Each view consists of four numbers, the first of which is the length.
        lengths = np.frombuffer(values.buffers()[1], np.int32).reshape(-1, 4)[values.offset : values.offset + rows, 0]
        return lengths.astype(np.float64) + 8.0
    if types.is_dictionary(kind):  # Shared words are stored once but expanded for every value.
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
    """Return the size of each list: 8 bytes plus the sizes of its values. `count`: the total number of values."""
    if isinstance(sizes, float):
        summed: npt.NDArray[np.float64] = np.multiply(ends - begins, sizes, dtype=np.float64)
        summed += 8.0
        return summed
    before = np.concatenate([[0.0], np.cumsum(np.broadcast_to(sizes, count))])
    return np.asarray(before[ends] - before[begins] + 8.0, np.float64)


def becomes_objects(values: Any) -> bool:
    """Return whether Arrow values must become Python objects. This is true for nested values other than lists of numbers."""
    if not is_arrow(values) or not values.type.num_fields:
        return False
    import pyarrow as pa

    kind = values.type
    while kind.num_fields == 1 and (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        kind = kind.field(0).type
    return not pa.types.is_primitive(kind)

"""Converts Arrow numbers, times, lists and text to arrays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from penstock.values.checks import Array, Prepared, fail, first_row, is_arrow
from penstock.values.dtypes import cast


def from_arrow(values: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """Convert Arrow numbers, times or lists to an array with nulls masked, or to a list if an array is not possible."""
    import pyarrow as pa
    import pyarrow.compute as compute

    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if isinstance(values, pa.FixedShapeTensorArray):
        return tensors_of(values, dtype)
    if isinstance(values, pa.ExtensionArray):
        values = values.storage
    if pa.types.is_nested(values.type):
        return tensors_of_lists(values, shape, dtype)
    if pa.types.is_run_end_encoded(values.type):
        values = compute.run_end_decode(values)
    if pa.types.is_dictionary(values.type):  # Dictionary values may themselves be null, and `null_count` does not count those.
        values = values.dictionary_decode()
    if (array := elements_of(values)) is None:
        return values.to_pylist()
    return array if values.null_count == 0 else np.ma.MaskedArray(array, ~np.asarray(values.is_valid()))


def elements_of(values: Any) -> Array | None:
    """Convert Arrow numbers, bools and times to an array, with any value for nulls. Returns None for other types."""
    import pyarrow as pa

    types, kind = pa.types, values.type
    if types.is_timestamp(kind) or types.is_date(kind) or types.is_duration(kind):
        return np.asarray(values.to_numpy(zero_copy_only=False))  # Null times become NaT.
    if types.is_time(kind):
        counts = values.cast(pa.int32() if types.is_time32(kind) else pa.int64()).fill_null(0)
        return np.asarray(counts).astype(np.int64).view(f"timedelta64[{kind.unit}]")
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
        return np.asarray(values if values.null_count == 0 else values.fill_null(False if types.is_boolean(kind) else 0))
    return None


def tensors_of_lists(values: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """Convert nested or flat Arrow lists to an array (N, *shape) with nulls masked, or to a list if that is impossible."""
    import pyarrow as pa

    flat = numbers_within(values.drop_null(), shape, dtype)
    if flat is None and pa.types.is_fixed_size_list(values.type):
        flat = numbers_within(values.drop_null(), (math.prod(shape),), dtype)
    if flat is None:
        return objects_of(values, dtype)
    return with_nulls(flat.reshape(-1, *shape), values)


def objects_of(values: Any, dtype: str) -> list[Any]:
    """Convert Arrow lists to Python's. Times of day with digits below a microsecond, which Python would cut off, are refused by their row."""
    import pyarrow as pa

    def leaves(lists: Any) -> Any:
        while pa.types.is_list(lists.type) or pa.types.is_large_list(lists.type) or pa.types.is_fixed_size_list(lists.type):
            lists = lists.flatten()
        return lists

    kind = leaves(values[:0]).type
    for row in range(len(values)) if pa.types.is_time64(kind) and kind.unit == "ns" else ():
        if (times := elements_of(leaves(values.slice(row, 1)).drop_null())) is not None:
            cast(times, dtype, row)
    return list(values.to_pylist())


def with_nulls(array: Array, values: Any) -> Array:
    """Return the samples of an array, which has no nulls, among the nulls of Arrow values, masked."""
    if values.null_count == 0:
        return array
    missing = ~np.asarray(values.is_valid())
    every: Array = np.zeros((len(values), *array.shape[1:]), array.dtype)
    every[~missing] = array
    return np.ma.MaskedArray(every, np.broadcast_to(missing.reshape(-1, *[1] * (array.ndim - 1)), every.shape))


def numbers_within(lists: Any, shape: tuple[int, ...], dtype: str) -> Array | None:
    """Return the elements in nested Arrow lists of these lengths, or None if any length differs or any value is null."""
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
    return plain_elements(lists, dtype)


def plain_elements(values: Any, dtype: str) -> Array | None:
    """Return Arrow elements without nulls as an array, or None for nulls and for other values. Complex numbers are pairs of floats."""
    import pyarrow as pa

    kind = values.type
    if values.null_count:
        return None
    if dtype.startswith("complex") and pa.types.is_fixed_size_list(kind) and kind.list_size == 2 and pa.types.is_floating(kind.value_type):
        halves = plain_elements(values.flatten(), "float64")
        if halves is None:
            return None
        wide = halves.dtype == np.float64
        return halves.astype(np.float64 if wide else np.float32, copy=False).view(np.complex128 if wide else np.complex64)
    return elements_of(values)


def tensors_of(values: Any, dtype: str) -> Array:
    """Convert Arrow tensors of the same shape to an array (N, *shape), with the axes in the type's order and nulls masked."""
    kind = values.type
    lists = values.storage.drop_null()
    flat = lists.flatten()
    array = plain_elements(flat, dtype)
    if array is None and flat.null_count:
        bad = np.asarray(np.asarray(flat.is_null()).reshape(len(lists), -1).any(axis=1))
        row = np.flatnonzero(np.asarray(values.is_valid()))[first_row(bad)]
        raise fail("contains a null, expected numbers", int(row), hint="make the whole sample null, or none of it")
    if array is None:
        raise fail(f"values are {kind}, expected {dtype}", hint="cast them first")
    array = array.reshape(len(lists), *kind.shape)
    if kind.permutation is not None:
        array = array.transpose(0, *(axis + 1 for axis in kind.permutation))
    return with_nulls(array, values)


def flat_from_arrow(values: Any) -> Prepared | None:
    """Prepare Arrow text or binary data without creating Python objects. Returns None for other types."""
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

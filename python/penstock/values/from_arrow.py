"""Converts Arrow numbers, lists and text to arrays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from penstock.values.checks import Array, Prepared, fail, first_row, is_arrow


def from_arrow(values: Any, shape: tuple[int, ...]) -> Any:
    """Convert Arrow numbers or lists to an array with nulls masked, or to a list if an array is not possible."""
    import pyarrow as pa

    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if isinstance(values, pa.FixedShapeTensorArray):
        return tensors_of(values)
    if isinstance(values, pa.ExtensionArray):
        values = values.storage
    if pa.types.is_nested(values.type):
        return tensors_of_lists(values, shape)
    if pa.types.is_dictionary(values.type):  # Dictionary values may themselves be null, and `null_count` does not count those.
        values = values.dictionary_decode()
    if values.null_count == 0 or pa.types.is_timestamp(values.type) or pa.types.is_date(values.type):
        return values.to_numpy(zero_copy_only=False)  # Null times become NaT.
    boolean = pa.types.is_boolean(values.type)
    if not (boolean or pa.types.is_integer(values.type) or pa.types.is_floating(values.type)):
        return values.to_pylist()
    return np.ma.MaskedArray(np.asarray(values.fill_null(False if boolean else 0)), ~np.asarray(values.is_valid()))


def tensors_of_lists(values: Any, shape: tuple[int, ...]) -> Any:
    """Convert nested or flat Arrow lists to an array (N, *shape) with nulls masked, or to a list if that is impossible."""
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
    """Return the numbers in nested Arrow lists of these lengths, or None if any length differs or any value is null."""
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
    """Convert Arrow tensors of the same shape to an array (N, *shape), with the axes in the type's order and nulls masked."""
    kind, storage = values.type, values.storage
    size = math.prod(kind.shape)
    flat = storage.values.slice(storage.offset * size, len(values) * size)
    if flat.null_count and (storage.null_count == 0 or storage.flatten().null_count):
        bad = np.asarray(flat.is_null()).reshape(len(values), -1).any(axis=1) & np.asarray(values.is_valid())
        raise fail("contains a null, expected numbers", first_row(bad), hint="make the whole sample null, or none of it")
    array: Array = np.asarray(flat.fill_null(0) if flat.null_count else flat).reshape(len(values), *kind.shape)
    if kind.permutation is not None:
        array = array.transpose(0, *(axis + 1 for axis in kind.permutation))
    if values.null_count:
        return np.ma.MaskedArray(array, np.broadcast_to(~np.asarray(values.is_valid()).reshape(-1, *[1] * len(kind.shape)), array.shape))
    return array


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

"""Prepares samples of different shapes."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np

from penstock.errors import InvalidInputError
from penstock.values.checks import Array, Prepared, fail, holds_bool, is_arrow, is_null
from penstock.values.containers import container, from_torch
from penstock.values.dtypes import cast, check_whole_numbers, numpy_dtype
from penstock.values.from_arrow import numbers_within, objects_of, plain_elements, tensors_of
from penstock.values.times import TIMES


def ragged(values: Any, shape: tuple[int | None, ...], dtype: str) -> Prepared:
    """Prepare arrays of different shapes."""
    whole = ragged_from_arrow(values, shape, dtype) if is_arrow(values) else None
    if whole is not None:
        return whole
    arrays: list[Array | None] = []
    free = [axis for axis, size in enumerate(shape) if size is None]
    values = arrays_of(values, dtype) if is_arrow(values) else container(values)
    for row, value in enumerate(values):
        arrays.append(None if is_null(value) else one_array(value, row, shape, dtype))
    data = [array.reshape(-1).view(np.uint8) for array in arrays if array is not None and array.size]
    sizes = np.array([0 if array is None else array.nbytes for array in arrays], dtype=np.int64)
    shapes = np.array([[0] * len(free) if array is None else [array.shape[axis] for axis in free] for array in arrays], dtype=np.int64)
    validity = np.array([array is not None for array in arrays], dtype=bool)
    flat = np.concatenate(data) if data else np.empty(0, np.uint8)
    return ("flat", flat, np.cumsum(sizes), shapes.reshape(len(arrays), len(free)), validity)


def ragged_from_arrow(values: Any, shape: tuple[int | None, ...], dtype: str) -> Prepared | None:
    """Convert Arrow lists whose only free dimension is the first, without creating Python objects.

    Returns None if the conversion fails, so that the caller can find the bad row.
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
    flat = numbers_within(values.flatten(), inner, dtype)  # Omits the data under nulls.
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


def arrays_of(values: Any, dtype: str) -> Any:
    """Convert Arrow tensors of the same shape, Penstock's `struct{data, shape}`, or lists to one array or list per sample."""
    import pyarrow as pa

    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if isinstance(values, pa.FixedShapeTensorArray):
        return tensors_of(values, dtype)  # A null is an entirely masked array, which `one_array` handles.
    if not pa.types.is_struct(values.type) or [field.name for field in values.type] != ["data", "shape"]:
        return objects_of(values, dtype)
    made: list[Any] = []
    for row, value in enumerate(values):
        array = None
        if value.is_valid:
            data, shape = value["data"].values, value["shape"].as_py()
            elements = None if data is None else plain_elements(data, dtype)
            if elements is None or shape is None or None in shape or math.prod(shape) != len(elements):
                raise fail(f"has data that does not fit the shape {shape}", row)
            array = elements.reshape(shape)
        made.append(array)
    return made


def one_array(value: Any, row: int, shape: tuple[int | None, ...], dtype: str) -> Array | None:
    """Return one sample of a ragged column, or None if it is entirely masked."""
    if isinstance(value, np.ma.MaskedArray):
        mask = np.ma.getmaskarray(value)
        if mask.any():
            if mask.all():
                return None
            raise fail("is partly masked", row, hint="make the whole sample null, or none of it")
        value = value.data
    try:
        array = from_torch(value) if hasattr(value, "detach") else np.asarray(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise fail(f"does not form an array: {error}", row) from error
    if array.size == 0 and array.ndim < len(shape):
        # Lists show the sizes before the first empty one.
        sizes = [(array.shape[axis] if axis < array.ndim else 0) if size is None else size for axis, size in enumerate(shape)]
        array = np.empty(sizes, numpy_dtype(dtype)) if 0 in sizes else array
    wrong = array.ndim != len(shape) or any(size is not None and size != array.shape[axis] for axis, size in enumerate(shape))
    if array.dtype.kind == "O" and not wrong:
        if not array.size:
            return np.empty([size or 0 for size in array.shape], numpy_dtype(dtype))
        if dtype in TIMES:
            return np.ascontiguousarray(cast(array, dtype, row))
        within = next((item for item in array.flat if not isinstance(item, numbers.Complex)), array.flat[0])
        raise fail(f"contains {str(within)[:80]!r}, expected {dtype}", row, hint="make the whole sample null, or none of it")
    if wrong:
        raise fail(f"has the shape {array.shape}, expected {shape}", row)
    if isinstance(value, list | tuple):
        if dtype != "bool" and holds_bool(value):
            raise fail(f"contains a bool, expected {dtype}", row)
        check_whole_numbers(value, array, dtype, row)
    return np.ascontiguousarray(cast(array, dtype, row))

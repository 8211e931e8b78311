"""Builds Arrow arrays from the flat values that the core returns. Imports pyarrow, so column types import this module only when needed.

Source: Arrow columnar format 1.5.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from penstock.values.times import TIMES

_FIXED: dict[str, Any] = {
    "bool": pa.bool_(), "float16": pa.float16(), "bfloat16": pa.float32(), "float32": pa.float32(), "float64": pa.float64(),
    "timestamp": pa.timestamp("us", tz="UTC"), "duration": pa.duration("us"), "time": pa.time64("us"), "complex64": pa.list_(pa.float32(), 2), "complex128": pa.list_(pa.float64(), 2),
}  # fmt: skip


def element_type(dtype: str) -> pa.DataType:
    """Return the Arrow type for an element. Arrow lacks bfloat16 and complex, which become float32 and a list of two floats."""
    return _FIXED.get(dtype) or getattr(pa, dtype)()


def elements(values: Any, dtype: str, nulls: Any) -> pa.Array:
    """Convert a NumPy array of elements."""
    if element_type(dtype) == pa.float32():  # bfloat16 has no Arrow type. A reader may also ask for float16 as float32.
        values = values.astype(np.float32, copy=False)
    if dtype in ("complex64", "complex128"):
        half = values.view(np.float32 if dtype == "complex64" else np.float64)
        return pa.FixedSizeListArray.from_arrays(pa.array(half.reshape(-1)), 2, mask=None if nulls is None else pa.array(nulls))
    if dtype in TIMES:
        return pa.array(values.view(np.int64), mask=nulls).cast(element_type(dtype))
    return pa.array(values, element_type(dtype), mask=nulls)


def flat(values: tuple[Any, ...], kind: pa.DataType) -> pa.Array:
    """Convert values of any length, given as bytes and offsets, to large binary or large string, without a copy."""
    data, offsets, _, nulls = values
    bitmap = None if nulls is None else pa.py_buffer(np.packbits(~nulls, bitorder="little"))
    return pa.Array.from_buffers(
        kind, len(offsets) - 1, [bitmap, pa.py_buffer(offsets), pa.py_buffer(data)], null_count=0 if nulls is None else -1
    )


def words_type() -> pa.DataType:
    """Return the Arrow type for labels and categories."""
    return pa.dictionary(pa.int32(), pa.string())


def words(values: tuple[Any, ...], names: pa.Array) -> pa.Array:
    """Convert codes to a dictionary array."""
    codes, nulls = values
    return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32), mask=nulls), names)


# The sizes of the dimensions of arrays, with None for free ones; or None for numbers.
Shape = tuple[int | None, ...] | None


def array_type(dtype: str | None, shape: Shape) -> pa.DataType:
    """Return the Arrow type for numbers, tensors of the same shape, or ragged tensors; for other values, binary."""
    if dtype is None:
        return pa.large_binary()
    if shape is None:
        return element_type(dtype)
    if None in shape:
        return pa.struct([("data", pa.large_list(element_type(dtype))), ("shape", pa.list_(pa.int64(), len(shape)))])
    return pa.fixed_shape_tensor(element_type(dtype), list(shape))


def array(values: tuple[Any, ...], dtype: str, shape: Shape) -> pa.Array:
    """Convert numbers, tensors or ragged tensors."""
    if shape is None:
        return elements(values[0], dtype, values[1])
    return ragged(values, dtype) if None in shape else fixed(values, dtype, array_type(dtype, shape))


def fixed(values: tuple[Any, ...], dtype: str, kind: pa.DataType) -> pa.Array:
    """Convert an (N, *shape) array to a tensor extension array."""
    array, nulls = values
    mask = None if nulls is None else pa.array(nulls)
    storage = pa.FixedSizeListArray.from_arrays(elements(array.reshape(-1), dtype, None), kind.storage_type.list_size, mask=mask)
    return pa.ExtensionArray.from_storage(kind, storage)


def ragged(values: tuple[Any, ...], dtype: str) -> pa.Array:
    """Convert concatenated values, offsets and shapes to structs of data and shape."""
    data, offsets, shapes, nulls = values
    rank = shapes.shape[1]
    lists = pa.LargeListArray.from_arrays(pa.array(offsets), elements(data, dtype, None))
    sizes = pa.FixedSizeListArray.from_arrays(pa.array(shapes.reshape(-1)), rank)
    return pa.StructArray.from_arrays(
        [lists, sizes], fields=list(array_type(dtype, (None,) * rank)), mask=None if nulls is None else pa.array(nulls)
    )

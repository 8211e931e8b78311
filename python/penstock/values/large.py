"""Prepares samples that are too large for memory. The core pulls one slice at a time while writing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from penstock.values.checks import Array, Prepared, fail, is_null
from penstock.values.containers import Rows, from_torch
from penstock.values.dtypes import cast, numpy_dtype, numpy_dtype_of
from penstock.values.ragged import one_array

# Tensors of this size or larger are tiled and never fully loaded into memory.
TILED_BYTES = 8 << 20


def pulled(values: Any, shape: tuple[int | None, ...], dtype: str, tile: tuple[int, ...] | None) -> Prepared | None:
    """Prepare samples that are too large for memory. The core pulls one slice at a time while writing. Returns None for small samples."""
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
            cast(np.zeros(1, numpy_dtype_of(item)), dtype, row)  # Raises an error if the dtype does not fit.

    def pull(row: int, box: list[tuple[int, int]]) -> Array:
        item, part = items[row], tuple(slice(low, high) for low, high in box)
        found = item.part(row, part) if isinstance(item, Rows) else item[(row, *part)] if item is values else item[part]
        if isinstance(found, np.ma.MaskedArray) and np.ma.is_masked(found):
            raise fail("is partly masked", row, hint="make the whole sample null, or none of it")
        array = cast(np.asarray(found), dtype, row)
        if array.shape != tuple(high - low for low, high in box):
            raise fail(f"returned an array of shape {array.shape} for {box}", row)
        if array.dtype.kind in "mM" and np.isnat(array).any():
            raise fail("contains NaT, which is allowed only in scalar columns", row)
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    return ("pulled", pull, [list(sizes) for sizes in shapes], validity)


def source_of(value: Any, row: int, shape: tuple[int | None, ...], dtype: str) -> Any:
    """Return one sample as an object that has a shape and a dtype and can be sliced."""
    if isinstance(value, np.ma.MaskedArray) or not (hasattr(value, "dtype") and hasattr(value, "shape")):
        return one_array(value, row, shape, dtype)
    return from_torch(value) if hasattr(value, "detach") else value

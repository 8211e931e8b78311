"""Prepares samples that all have the same shape."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import InvalidInputError
from penstock.values.checks import Array, Prepared, fail, first_row, is_arrow, is_null
from penstock.values.containers import container, without_torch
from penstock.values.dtypes import cast, numpy_dtype
from penstock.values.from_arrow import from_arrow
from penstock.values.scalars import plain_numbers, stack


def is_plain(values: Any, shape: tuple[int | None, ...], dtype: str) -> bool:
    """Return whether values are an array of this dtype and of samples of this shape, and none of them can be refused."""
    return type(values) is np.ndarray and values.shape[1:] == shape and values.dtype == numpy_dtype(dtype) and values.dtype.kind not in "mM"


def fixed(array: Array, validity: npt.NDArray[np.bool_] | None) -> Prepared:
    """Prepare N samples of equal size."""
    contiguous = np.ascontiguousarray(array)
    flat = contiguous.reshape(-1).view(np.uint8) if contiguous.size else np.empty(0, np.uint8)
    return ("fixed", flat, validity, len(array))


def dense(values: Any, shape: tuple[int, ...], dtype: str) -> Prepared:
    """Prepare samples of the same shape, given as an array or as a list with nulls."""
    validity: npt.NDArray[np.bool_] | None = None
    if is_arrow(values):
        values = from_arrow(values, shape, dtype)
    values = container(values)
    if isinstance(values, np.ma.MaskedArray):
        mask: Array = np.ma.getmaskarray(values).reshape(len(values), -1) if len(values) else np.zeros((0, 1), bool)
        partly = np.asarray(mask.any(axis=1) & ~mask.all(axis=1))
        if partly.any():
            raise fail("is partly masked", first_row(partly), hint="make the whole sample null, or none of it")
        validity = np.asarray(~mask.any(axis=1))
        values = np.asarray(values.data)
        if not validity.all():  # The data under a null is meaningless.
            values = values.copy()
            values[~validity] = np.zeros((), values.dtype)
    if isinstance(values, list) and not shape:
        quick = plain_numbers(values, dtype)
        if quick is not None:
            return fixed(*quick)
    if isinstance(values, list):
        values = without_torch(values)
        nulls = [row for row, value in enumerate(values) if is_null(value)]
        if len(nulls) == len(values):
            array = np.zeros((len(values), *shape), numpy_dtype(dtype))
            return fixed(array, np.zeros(len(values), bool) if nulls else None)
        if nulls:
            validity = np.ones(len(values), bool)
            validity[nulls] = False
            first = int(np.argmax(validity))
            some = values[first]  # A placeholder of the right kind, which the core zeroes.
            if first:  # If the placeholder does not fit, the error must name the placeholder's own row, not the row of a null.
                try:
                    cast(stack([some], shape, dtype), dtype)
                except InvalidInputError as error:
                    error._row, error.rows = first, [first]
                    raise
            values = [some if is_null(value) else value for value in values]
        values = stack(values, shape, dtype)
    if values.shape[1:] != shape:
        wanted = f"(N, {', '.join(map(str, shape))})" if shape else "(N,)"
        raise fail(f"values have the shape {values.shape}, expected {wanted}")
    if values.dtype.kind in "mM" and values.size and (missing := np.isnat(values).reshape(len(values), -1).any(axis=1)).any():
        if shape:
            raise fail("contains NaT, which is allowed only in scalar columns", first_row(missing))
        validity = ~missing if validity is None else validity & ~missing
    return fixed(cast(values, dtype), validity)

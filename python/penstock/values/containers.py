"""Containers with one value per sample: lists, arrays, and objects from torch, pandas, Polars and libraries with lazy arrays."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from penstock.errors import InvalidInputError
from penstock.values.checks import Array, fail, is_arrow
from penstock.values.dtypes import numpy_dtype_of


class Rows:
    """Samples in an array that reads parts on demand, such as an h5py or Zarr array. Slicing reads nothing."""

    def __init__(self, source: Any, start: int, end: int) -> None:
        self.source, self.start, self.end = source, start, end
        self.shape: tuple[int, ...] = (end - start, *map(int, source.shape[1:]))
        self.dtype = numpy_dtype_of(source)
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.end - self.start

    def __getitem__(self, key: slice) -> Rows:
        start, end, _ = key.indices(len(self))
        return Rows(self.source, self.start + start, self.start + max(start, end))

    def read(self) -> Array:
        found = self.source[self.start : self.end]
        return found if isinstance(found, np.ma.MaskedArray) else np.asarray(found)

    def part(self, row: int, key: tuple[slice, ...]) -> Any:
        return self.source[(self.start + row, *key)]


def reads_its_parts(value: Any) -> bool:
    """Return whether a value is a lazy array, that is, not a NumPy array, but readable in parts as NumPy arrays."""
    if (
        isinstance(value, np.ndarray | np.generic)
        or is_arrow(value)
        or any(hasattr(value, name) for name in ("detach", "isna", "to_arrow"))
    ):
        return False
    return bool(hasattr(value, "__getitem__") and hasattr(value, "dtype") and getattr(value, "shape", ()) != ())


def container(values: Any) -> Any:
    """Convert any container with one value per sample to a NumPy array, list or pyarrow array, all of which can be sliced."""
    values = rows_of(values)
    return values.read() if isinstance(values, Rows) else values


def rows_of(values: Any, keep_nan: bool = False) -> Any:
    """Convert values to a container that can be sliced. Arrays that read parts on demand are not read yet. `keep_nan` says that a NaN among
    pandas' objects is a number. In other columns, it is a null.
    """
    plain = type(values) is np.ndarray and values.ndim > 0 and values.dtype.kind != "O"
    if plain or isinstance(values, Rows):
        return values
    if reads_its_parts(values):
        return Rows(values, 0, int(values.shape[0]))
    if isinstance(values, list) or is_arrow(values):
        return values
    if isinstance(values, str | bytes | bytearray | memoryview | Mapping) or (hasattr(values, "iloc") and hasattr(values, "columns")):
        raise fail(
            f"a single {type(values).__name__}, expected one value per sample",
            hint="pass its columns one by one" if hasattr(values, "columns") else f"write [{values!r:.60}]",
        )
    if hasattr(values, "to_arrow") and not hasattr(values, "columns"):  # A Polars Series.
        return values.to_arrow()
    if hasattr(values, "detach"):
        values = from_torch(values)
    elif (
        hasattr(values, "isna")
        and hasattr(getattr(values, "dtype", None), "numpy_dtype")
        and hasattr(array := getattr(values, "array", values), "__arrow_array__")
    ):
        return array.__arrow_array__()  # For pandas' ArrowDtype and its numeric types with NA, such as Int64.
    elif hasattr(values, "isna") and hasattr(values, "dtype"):
        values = from_pandas(values, keep_nan)
    if isinstance(values, np.ndarray):
        if values.ndim == 0:
            raise fail("a zero-dimensional array, expected one value per sample", hint="wrap it in a list")
        return list(values) if values.dtype.kind == "O" else values
    if not isinstance(values, Iterable):
        raise fail(f"a single {type(values).__name__}, expected one value per sample", hint=f"write [{values!r:.60}]")
    return list(values)


def from_torch(tensor: Any) -> Array:
    """Convert a torch tensor to an array. bfloat16 stays bfloat16."""
    try:
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
        if str(tensor.dtype) == "torch.bfloat16":
            import torch

            return np.asarray(tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16))
        return np.asarray(tensor.numpy())
    except (RuntimeError, TypeError) as error:  # Tensors on the "meta" device, and sparse or quantised tensors.
        raise fail(f"a torch tensor that cannot become an array: {error}", hint="pass a dense tensor of a plain dtype") from error


def without_torch(values: Any) -> Any:
    """Convert the torch tensors in a list to arrays. Other values are left unchanged."""
    if not isinstance(values, list) or not any(hasattr(kind, "detach") for kind in set(map(type, values))):
        return values
    made = list(values)
    for row, value in enumerate(values):
        try:
            made[row] = from_torch(value) if hasattr(value, "detach") else value
        except InvalidInputError as error:
            raise fail(f"is {error.message}", row, error.hint) from error
    return made


def from_pandas(values: Any, keep_nan: bool) -> Any:
    """Convert a pandas Series, Index or array: plain dtypes to an array, zoned times to UTC, and the rest to a list with None for nulls."""
    if getattr(values.dtype, "tz", None) is not None:
        return (values.dt if hasattr(values, "dt") else values).tz_convert(None).to_numpy()  # Keeps the unit, so years beyond 2262 fit.
    if isinstance(values.dtype, np.dtype) and values.dtype.kind != "O":
        return values.to_numpy()
    missing = np.asarray(values.isna())
    kept = (float, complex, np.inexact) if keep_nan else ()
    return [None if gone and not isinstance(value, kept) else value for value, gone in zip(values.astype(object), missing, strict=True)]


def text_from_pandas(values: Any) -> Any:
    """Return the Arrow array behind a pandas Series or array of Arrow text. Other values are returned unchanged."""
    if not hasattr(values, "isna") or getattr(values.dtype, "name", "") not in ("str", "string"):
        return values
    array = getattr(values, "array", values)
    return array.__arrow_array__() if hasattr(array, "__arrow_array__") else values


def rank_of(value: Any) -> int | None:
    """Return the number of dimensions of an array or nested list, 0 for a single value, or None if it is not known.

    >>> rank_of(np.zeros((2, 3))), rank_of([[1, 2], [3]]), rank_of(7), rank_of([]), rank_of(None)
    (2, 2, 0, None, None)
    """
    if value is None:
        return None
    if is_arrow(value):
        return 1
    shape = getattr(value, "shape", None)
    if shape is not None and not isinstance(value, str):
        return len(shape)
    if isinstance(value, list | tuple):
        inner = next((rank for rank in map(rank_of, value[:8]) if rank is not None), None)
        return None if inner is None else inner + 1
    return 0


def items_of(values: Any) -> list[Any]:
    """Convert a container to a list."""
    return list(values.to_pylist()) if is_arrow(values) else list(container(values))

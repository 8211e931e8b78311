"""Tensor columns."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Self

from penstock.columns.column_type import ColumnType
from penstock.errors import InvalidInputError
from penstock.values.checks import Prepared, is_whole
from penstock.values.containers import rows_of, without_torch
from penstock.values.dense import dense, is_plain
from penstock.values.dtypes import dtype_name, numpy_dtype
from penstock.values.large import pulled
from penstock.values.ragged import ragged


@dataclasses.dataclass(frozen=True)
class Tensor(ColumnType):
    """An n-dimensional array per sample. None in the shape marks a free dimension.

    Shapes: if all dimensions are fixed, batches are (N, *shape) arrays; otherwise they are `Ragged`. No fixed dimension may be 0.
    Samples of 8 MiB or more are stored as tiles of about 64 KiB, so `ds["volume"][7, 0:64, 10:20]` reads little more than it
    returns. `tile`, with one length per dimension, sets the tile shape for samples of any size. A large sample may be any object that has
    a shape and a dtype and can be read in parts (np.memmap, h5py, Zarr, TensorStore). Such a sample is never fully loaded into memory.

    >>> Tensor((None, 4), "float32").shape
    (None, 4)
    >>> Tensor((300, 1080, 1920, 3), "uint8", tile=(1, 270, 480, 3)).tile
    (1, 270, 480, 3)
    """

    shape: tuple[int | None, ...]
    dtype: str
    tile: tuple[int, ...] | None = None
    type = "tensor"
    takes_arrow = "any"
    is_array = True
    has_parts = True

    def __post_init__(self) -> None:
        if not isinstance(self.shape, tuple | list):
            hint = f"write ps.Tensor(({self.shape},), …)" if is_whole(self.shape) else 'write ps.Tensor((768,), "float32")'
            raise InvalidInputError(f"shape is {self.shape!r}, expected a tuple", code="invalid-schema", hint=hint)
        sizes = tuple(self.shape)
        for size in sizes:
            if size is not None and (not is_whole(size) or size < 0):
                raise InvalidInputError(f"a dimension is {size!r}, expected a whole number or None", code="invalid-schema")
        object.__setattr__(self, "shape", tuple(None if size is None else int(size) for size in sizes))
        if self.tile is not None:
            sides = tuple(self.tile) if isinstance(self.tile, tuple | list) else (None,)
            if len(sides) != len(sizes) or any(not is_whole(side) or side < 1 for side in sides):
                raise InvalidInputError(
                    f"tile={self.tile!r}, expected a whole number above 0 for each of {len(sizes)} dimensions", code="invalid-schema"
                )
            object.__setattr__(self, "tile", tuple(int(side) for side in sides))
        object.__setattr__(self, "dtype", dtype_name(self.dtype))

    def rows(self, values: Any) -> Any:
        return rows_of(without_torch(values))

    def row_bytes(self) -> int:
        return math.prod(size or 0 for size in self.shape) * numpy_dtype(self.dtype).itemsize

    def fits(self, values: Any) -> bool:
        return is_plain(values, self.shape, self.dtype)

    def prepare(self, values: Any) -> Prepared:
        large = pulled(values, self.shape, self.dtype, self.tile)
        if large is not None:
            return large
        if None in self.shape:
            return ragged(values, self.shape, self.dtype)
        return dense(values, tuple(size for size in self.shape if size is not None), self.dtype)

    def read_dtype(self) -> str | None:
        return self.dtype

    def sample_shape(self) -> tuple[int | None, ...]:
        return self.shape

    def without_halves(self) -> Self:
        return dataclasses.replace(self, dtype="float32") if self.dtype == "float16" else self

    @classmethod
    def from_text(cls, text: str) -> Self:
        dtype, _, shape = text.partition(":")
        if not dtype:
            raise ValueError("a tensor needs a dtype and a shape, as in tensor:float32:3x?")
        sizes = shape.split("x") if shape else []
        if not all(size == "?" or (size.isascii() and size.isdecimal()) for size in sizes):
            raise ValueError(f"the shape is `{shape}`, expected sizes or ?, separated by x")
        return cls(tuple(None if size == "?" else int(size) for size in sizes), dtype)

    def describe(self) -> str:
        return f"tensor {self.dtype} ({', '.join('?' if size is None else str(size) for size in self.shape)})"

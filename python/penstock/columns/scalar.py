"""Scalar columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from penstock.columns.column_type import ColumnType
from penstock.values.checks import Prepared
from penstock.values.containers import rows_of
from penstock.values.dense import dense, is_plain
from penstock.values.dtypes import dtype_name, numpy_dtype
from penstock.values.scalars import plain_numbers

if TYPE_CHECKING:
    import pyarrow as pa


@dataclasses.dataclass(frozen=True)
class Scalar(ColumnType):
    """One number, bool or timestamp per sample. In a schema, a plain dtype is shorthand for this type."""

    dtype: str
    type = "scalar"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_name(self.dtype))

    def spec(self) -> dict[str, Any]:
        return {**super().spec(), "dtype": self.dtype}

    def rows(self, values: Any) -> Any:
        quick = plain_numbers(values, self.dtype) if isinstance(values, list) else None
        if quick is None:
            return rows_of(values)
        array, validity = quick
        return array if validity is None else np.ma.MaskedArray(array, ~validity)

    def row_bytes(self) -> int:
        return numpy_dtype(self.dtype).itemsize

    def fits(self, values: Any) -> bool:
        return is_plain(values, (), self.dtype)

    def prepare(self, values: Any) -> Prepared:
        return dense(values, (), self.dtype)

    @classmethod
    def form_of(cls, spec: Mapping[str, Any]) -> str:
        return "fixed"

    def read_dtype(self) -> str | None:
        return self.dtype

    def arrow_type(self) -> pa.DataType:
        from penstock.values import to_arrow

        return to_arrow.element_type(self.dtype)

    def to_arrow(self, values: tuple[Any, ...], words: pa.Array | None) -> pa.Array:
        from penstock.values import to_arrow

        return to_arrow.elements(values[0], self.dtype, values[1])

    @classmethod
    def from_text(cls, text: str) -> Self:
        return cls(text)

    def describe(self) -> str:
        return self.dtype

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
    """One number, bool or time per sample. In a schema, a plain dtype is shorthand for this type.

    A "timestamp" is a point in time, in UTC; a "duration" is a length of time, and a "time" is a time of day. They count whole microseconds:
    a value with digits below that is refused, as is a duration without a unit, such as 90. Appending takes what Python, NumPy, pandas, Polars
    and Arrow use for them, and text in the form of ISO 8601 for the others. They read as datetime64[us], and as timedelta64[us].

    Only floats are rounded, as their dtype says: a whole number that it does not represent exactly is refused. NaN is a value of floats, and
    no null.

    >>> import datetime, numpy as np, penstock as ps
    >>> ds = ps.create("memory://times", {"at": "timestamp", "took": "duration", "opens": "time"})
    >>> receipt = ds.append({"at": ["2026-01-31T12:00:00Z"], "took": [np.timedelta64(90, "s")], "opens": [datetime.time(9, 30)]})
    >>> ds["took"][0], ds.to_arrow(["opens"])["opens"].to_pylist()
    (np.timedelta64(90000000,'us'), [datetime.time(9, 30)])
    """

    dtype: str
    type = "scalar"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_name(self.dtype))

    def spec(self) -> dict[str, Any]:
        return {**super().spec(), "dtype": self.dtype}

    def rows(self, values: Any) -> Any:
        quick = plain_numbers(values, self.dtype) if isinstance(values, list) else None
        if quick is None:
            return rows_of(values, keep_nan="float" in self.dtype or "complex" in self.dtype)
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

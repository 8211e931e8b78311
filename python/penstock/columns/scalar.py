"""Scalar columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from penstock.columns.column_type import ColumnType
from penstock.values.checks import Prepared
from penstock.values.containers import rows_of
from penstock.values.dense import dense, is_plain
from penstock.values.dtypes import dtype_name, is_exact, numpy_dtype
from penstock.values.scalars import plain_numbers

if TYPE_CHECKING:
    import numpy.typing as npt
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
    takes_arrow = "plain"
    has_codes = True
    has_number = True
    is_comparable = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_name(self.dtype))

    def rows(self, values: Any) -> Any:
        quick = plain_numbers(values, self.dtype) if isinstance(values, list) else None
        if quick is None:
            return rows_of(values, keep_nan="float" in self.dtype or "complex" in self.dtype)
        array, validity = quick
        return array if validity is None else np.ma.MaskedArray(array, ~validity)

    def row_bytes(self) -> int:
        return numpy_dtype(self.dtype).itemsize

    @property
    def has_groups(self) -> bool:
        return not self.dtype.startswith("complex")

    @property
    def is_key(self) -> bool:
        return "int" in self.dtype

    @property
    def has_text(self) -> bool:
        return not self.dtype.startswith("complex") and self.dtype != "duration"

    def fits(self, values: Any) -> bool:
        return is_plain(values, (), self.dtype)

    def prepare(self, values: Any) -> Prepared:
        return dense(values, (), self.dtype)

    def read_dtype(self) -> str | None:
        return self.dtype

    def of_codes(self, values: npt.NDArray[Any], words: Sequence[str]) -> pa.Array:
        dtype = numpy_dtype(self.dtype)
        return self.to_arrow((values.astype(f"u{dtype.itemsize}").view(dtype), None), None)

    def without_halves(self) -> Self:
        return dataclasses.replace(self, dtype="float32") if self.dtype == "float16" else self

    def from_texts(self, texts: pa.Array, is_given: bool) -> tuple[Any, list[tuple[int, str]]]:
        from penstock.values.text import from_text

        values, bad = from_text.converted(texts, self.dtype, is_given)
        return values, [(row, from_text.unlike(texts[row].as_py(), self.dtype)) for row in bad]

    def json_type(self) -> pa.DataType | None:
        import pyarrow as pa

        # float32 is read as float64. Later, appending refuses values that float32 cannot represent.
        if self.dtype in ("float32", "float64"):
            return pa.float64()
        return self.arrow_type() if self.dtype in ("bool", "int8", "int16", "int32", "int64") else None

    def from_json(self, value: Any) -> Any:
        """Convert a whole number in a column of floats if it stays the same, because JSON writers write whole floats so."""
        if self.dtype != "float64" or isinstance(value, bool) or not isinstance(value, int):
            return value
        return float(value) if abs(value) < 2**1023 and is_exact(value, "float64") else value

    def from_pandas(self, values: Any) -> Any:
        return self.rows(values)

    @classmethod
    def from_text(cls, text: str) -> Self:
        return cls(text)

    def describe(self) -> str:
        return self.dtype

"""The base class for columns whose values are codes for words."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.columns.column_type import ColumnType
from penstock.values.checks import Prepared
from penstock.values.containers import rows_of, text_from_pandas
from penstock.values.words import coded_from_arrow, coded_from_strings, codes_or_words

if TYPE_CHECKING:
    import pyarrow as pa


@dataclasses.dataclass(frozen=True, kw_only=True)
class Coded(ColumnType):
    """Base class for label and category columns. Subclasses define `words`."""

    def rows(self, values: Any) -> Any:
        values = rows_of(text_from_pandas(values))
        return coded_from_arrow(values) or coded_from_strings(values) or values

    def prepare(self, values: Any) -> Prepared:
        return codes_or_words(values)

    @classmethod
    def form_of(cls, spec: Mapping[str, Any]) -> str:
        return "fixed"

    def read_dtype(self) -> str | None:
        return "int64"

    def arrow_type(self) -> pa.DataType:
        from penstock.values import to_arrow

        return to_arrow.words_type()

    def to_arrow(self, values: tuple[Any, ...], words: pa.Array | None) -> pa.Array:
        from penstock.values import to_arrow

        return to_arrow.words(values, words)

"""Category columns: an open list of words."""

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

    from penstock.view import View


@dataclasses.dataclass(frozen=True, kw_only=True)
class Category(ColumnType):
    """A word from an open list, which grows as words are appended. Reads as int64 codes, or as strings in `scan`.

    Append words, or codes of this dataset's own `vocabulary`. The same code can mean a different word in another dataset.
    """

    type = "category"

    def rows(self, values: Any) -> Any:
        values = rows_of(text_from_pandas(values))
        return coded_from_arrow(values) or coded_from_strings(values) or values

    def prepare(self, values: Any) -> Prepared:
        return codes_or_words(values)

    @classmethod
    def form_of(cls, spec: Mapping[str, Any]) -> str:
        return "fixed"

    def arrow_type(self) -> pa.DataType:
        from penstock.values import to_arrow

        return to_arrow.words_type()

    def to_arrow(self, values: tuple[Any, ...], words: pa.Array | None) -> pa.Array:
        from penstock.values import to_arrow

        return to_arrow.words(values, words)

    def words(self, view: View, column: str) -> list[str] | None:
        return view._snapshot.vocabulary(column)

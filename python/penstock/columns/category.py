"""Category columns: an open list of words."""

from __future__ import annotations

import dataclasses
from typing import Any

from penstock.columns.column_type import ColumnType
from penstock.values.checks import Prepared
from penstock.values.containers import rows_of, text_from_pandas
from penstock.values.words import coded_from_arrow, coded_from_strings, codes_or_words


@dataclasses.dataclass(frozen=True, kw_only=True)
class Category(ColumnType):
    """One of an open list of words, which grows as words are appended. Reads as int64 codes, or as strings in `scan`.

    Append words, or codes of this dataset's own `vocabulary`. The same codes mean different words in other datasets.
    """

    type = "category"

    def rows(self, values: Any) -> Any:
        values = rows_of(text_from_pandas(values))
        return coded_from_arrow(values) or coded_from_strings(values) or values

    def prepare(self, values: Any) -> Prepared:
        return codes_or_words(values)

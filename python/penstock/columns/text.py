"""Text columns."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from penstock.columns.column_type import ColumnType
from penstock.values.checks import Prepared, fail, is_null_word
from penstock.values.containers import items_of, rows_of, text_from_pandas
from penstock.values.from_arrow import flat_from_arrow
from penstock.values.words import short_strings, strings

if TYPE_CHECKING:
    import pyarrow as pa


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text(ColumnType):
    """Unicode text. Reads as str."""

    type = "text"
    has_words = True
    is_key = True

    def rows(self, values: Any) -> Any:
        values = text_from_pandas(values)
        whole = short_strings(values)
        return rows_of(values) if whole is None else whole

    def prepare(self, values: Any) -> Prepared:
        flat = flat_from_arrow(strings(values) if isinstance(values, list) else values)
        if flat is not None:
            return flat
        items = items_of(values)
        if not set(map(type, items)) <= {str, type(None)}:
            items = [None if is_null_word(value) else value for value in items]
            for row, value in enumerate(items):
                if value is not None and not isinstance(value, str):
                    raise fail(f"is a {type(value).__name__}, expected str", row)
        return ("items", items)

    def from_arrow(self, array: pa.Array) -> Any:
        from penstock.values.arrow import types as arrow_types

        return arrow_types.text(arrow_types.plain(array))

    def from_texts(self, texts: pa.Array, is_given: bool) -> tuple[Any, list[tuple[int, str]]]:
        return texts, []

    def arrow_type(self) -> pa.DataType:
        import pyarrow as pa

        return pa.large_string()

"""Category columns, which store words from an open list."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from penstock.columns.coded import Coded
from penstock.values.checks import is_arrow, is_whole

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.views.view import View


@dataclasses.dataclass(frozen=True, kw_only=True)
class Category(Coded):
    """A word from an open list, which grows as words are appended. Reads as int64 codes, or as strings in `scan`.

    Append words, or codes from this dataset's own `vocabulary`. The same code can mean a different word in another dataset.
    """

    type = "category"

    def from_arrow(self, array: pa.Array) -> Any:
        import pyarrow as pa

        array = array.storage if isinstance(array, pa.ExtensionArray) else array
        return array if pa.types.is_dictionary(array.type) else super().from_arrow(array)

    def codes_in(self, values: Any) -> Iterator[tuple[int, Any]]:
        if is_arrow(values):
            import pyarrow as pa

            from penstock.values.arrow import types as arrow_types

            if not pa.types.is_integer(arrow_types.storage(values.type)):
                return
            values = values.to_pylist()
        for row, value in enumerate(values):
            if is_whole(value):
                yield row, value

    def words(self, view: View, column: str) -> list[str] | None:
        return view._snapshot.vocabulary(column)

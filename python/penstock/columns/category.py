"""Category columns, which store words from an open list."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from penstock.columns.coded import Coded

if TYPE_CHECKING:
    from penstock.views.view import View


@dataclasses.dataclass(frozen=True, kw_only=True)
class Category(Coded):
    """A word from an open list, which grows as words are appended. Reads as int64 codes, or as strings in `scan`.

    Append words, or codes from this dataset's own `vocabulary`. The same code can mean a different word in another dataset.
    """

    type = "category"

    def words(self, view: View, column: str) -> list[str] | None:
        return view._snapshot.vocabulary(column)

"""Label columns: a closed list of names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from penstock.columns.column_type import ColumnType
from penstock.errors import InvalidInputError
from penstock.values.checks import Prepared
from penstock.values.containers import rows_of, text_from_pandas
from penstock.values.words import coded_from_arrow, coded_from_strings, codes_or_words

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.view import View


@dataclasses.dataclass(frozen=True)
class Label(ColumnType):
    """A name from a closed list. Append names or codes. Reads as int64 codes, or as strings in `scan`.

    >>> Label(["cat", "dog"]).names
    ('cat', 'dog')
    """

    names: Sequence[str]
    type = "label"

    def __post_init__(self) -> None:
        if isinstance(self.names, str) or not all(isinstance(name, str) for name in self.names):
            raise InvalidInputError(f"labels are {self.names!r}, expected a list of str", code="invalid-schema")
        object.__setattr__(self, "names", tuple(self.names))

    def spec(self) -> dict[str, Any]:
        return {**super().spec(), "names": list(self.names)}

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
        return list(self.names)

    @classmethod
    def from_text(cls, text: str) -> Self:
        if not text:
            raise ValueError("a label needs names, as in label:cat,dog")
        return cls(text.split(","))

    def describe(self) -> str:
        shown = ", ".join(self.names[:4])
        return f"label of {len(self.names)} ({shown}{', …' if len(self.names) > 4 else ''})"

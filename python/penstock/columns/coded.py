"""The base class for columns whose values are codes for words."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from penstock.columns.column_type import ColumnType
from penstock.values.checks import Prepared
from penstock.values.containers import rows_of, text_from_pandas
from penstock.values.words import coded_from_arrow, coded_from_strings, codes_or_words

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow as pa


@dataclasses.dataclass(frozen=True, kw_only=True)
class Coded(ColumnType):
    """Base class for label and category columns. Subclasses define `words`."""

    takes_arrow: ClassVar[Literal["objects", "plain", "any"]] = "plain"
    is_coded = True
    has_words = True
    has_codes = True

    def rows(self, values: Any) -> Any:
        values = rows_of(text_from_pandas(values))
        return coded_from_arrow(values) or coded_from_strings(values) or values

    def from_noted(self, array: pa.Array, noted: ColumnType | None) -> Any:
        import pyarrow as pa

        if noted is None or noted.classes is None or noted.rank or not pa.types.is_integer(array.type):
            return None
        # In Hugging Face datasets, -1 means no label. The names may have other codes in the destination.
        names = noted.classes
        return [None if code in (None, -1) else names[code] if 0 <= code < len(names) else code for code in array.to_pylist()]

    def of_codes(self, values: npt.NDArray[Any], words: Sequence[str]) -> pa.Array:
        import pyarrow as pa

        return pa.array([words[value] for value in values.tolist()], pa.string())

    def prepare(self, values: Any) -> Prepared:
        return codes_or_words(values)

    def read_dtype(self) -> str | None:
        return "int64"

    def arrow_type(self) -> pa.DataType:
        from penstock.values.arrow import to_arrow

        return to_arrow.words_type()

    def to_arrow(self, values: tuple[Any, ...], words: pa.Array | None) -> pa.Array:
        from penstock.values.arrow import to_arrow

        return to_arrow.words(values, words)

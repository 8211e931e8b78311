"""Columns whose values are names from a closed list: one name per sample (`Label`), or a list of names (`Labels`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from penstock.columns.coded import Coded
from penstock.columns.column_type import ColumnType
from penstock.errors import InvalidInputError
from penstock.values.checks import Prepared, fail, is_arrow, is_null
from penstock.values.containers import container, rows_of
from penstock.values.ragged import arrays_of, ragged

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.views.view import View


@dataclasses.dataclass(frozen=True)
class Named(Coded):
    """Base class for columns whose codes refer to a closed list of names."""

    names: Sequence[str]

    def __post_init__(self) -> None:
        if isinstance(self.names, str) or not isinstance(self.names, Iterable) or not all(isinstance(name, str) for name in self.names):
            raise InvalidInputError(
                f"labels are {self.names!r}, expected a list of str",
                code="invalid-schema",
                hint=f'write ps.{type(self).__name__}(["cat", "dog"])',
            )
        object.__setattr__(self, "names", tuple(self.names))

    @property
    def classes(self) -> Sequence[str] | None:
        return self.names

    def with_classes(self, names: Sequence[str]) -> Self:
        return dataclasses.replace(self, names=names)

    def words(self, view: View, column: str) -> list[str] | None:
        return list(self.names)

    @classmethod
    def from_text(cls, text: str) -> Self:
        return cls(text.split(",") if text else ())  # Without names, an import takes them from the data.

    def describe(self) -> str:
        shown = ", ".join(self.names[:4])
        return f"{self.type} of {len(self.names)} ({shown}{', …' if len(self.names) > 4 else ''})"


@dataclasses.dataclass(frozen=True)
class Label(Named):
    """A name from a closed list. Append names or codes. Reads as int64 codes, or as strings in `scan`.

    >>> Label(["cat", "dog"]).names
    ('cat', 'dog')
    """

    type = "label"


@dataclasses.dataclass(frozen=True)
class Labels(Named):
    """A list of names from a closed list, such as the class of each box. Append lists of names or codes. Shapes: (N,) int64 codes for any
    N; reads as `Ragged`, or as lists of strings in `scan`.

    >>> import penstock as ps
    >>> ds = ps.create("memory://labels", {"classes": ps.Labels(["cat", "dog"])})
    >>> receipt = ds.append({"classes": [["dog", "cat", "dog"], [], [0]]})
    >>> [codes.tolist() for codes in ds["classes"][:]], ds.to_arrow()["classes"][0].as_py()
    ([[1, 0, 1], [], [0]], ['dog', 'cat', 'dog'])

    `of` names a column of boxes or keypoints, each of which has one label. Other counts are refused, unless `boxes="keep"`.
    """

    of: str | None = None
    type = "labels"
    takes_arrow = "any"
    has_words = False
    has_codes = False

    def rows(self, values: Any) -> Any:
        return rows_of(values)

    @property
    def one_for_each(self) -> str | None:
        return self.of

    def from_noted(self, array: pa.Array, noted: ColumnType | None) -> Any:
        import pyarrow as pa

        from penstock.values.arrow import types as arrow_types

        if noted is None or noted.classes is None or noted.rank != 1:
            return None
        if not (arrow_types.is_list(array.type) and pa.types.is_integer(array.type.value_type)):
            return None
        names = noted.classes
        return [None if row is None else [names[code] if 0 <= code < len(names) else code for code in row] for row in array.to_pylist()]

    def prepare(self, values: Any) -> Prepared:
        found = codes_from_arrow(values, self.names) if is_arrow(values) else None
        return ragged(_codes(values, self.names) if found is None else found, (None,), "int64")

    def sample_shape(self) -> tuple[int | None, ...]:
        return (None,)

    def arrow_type(self) -> pa.DataType:
        import pyarrow as pa

        from penstock.values.arrow import to_arrow

        return pa.large_list(to_arrow.words_type())

    def to_arrow(self, values: tuple[Any, ...], words: pa.Array | None) -> pa.Array:
        import pyarrow as pa

        from penstock.values.arrow import to_arrow

        codes, offsets, _, nulls = values
        mask = None if nulls is None else pa.array(nulls)
        return pa.LargeListArray.from_arrays(pa.array(offsets), to_arrow.words((codes, None), words), mask=mask)


def codes_from_arrow(values: Any, names: Sequence[str]) -> Any:
    """Convert Arrow lists of words to lists of codes. Returns None for other types, and if a word is null or not among the names."""
    import pyarrow as pa
    import pyarrow.compute as compute

    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if not (pa.types.is_list(values.type) or pa.types.is_large_list(values.type)):
        return None
    words = values.flatten()  # Omits the words under nulls.
    if pa.types.is_dictionary(words.type):
        if pa.types.is_string_view(words.type.value_type):  # Arrow cannot `take` from views.
            words = pa.DictionaryArray.from_arrays(words.indices, words.dictionary.cast(pa.large_string()))
        words = words.dictionary_decode()
    if pa.types.is_string_view(words.type):
        words = words.cast(pa.large_string())
    if not (pa.types.is_string(words.type) or pa.types.is_large_string(words.type)):
        return None
    codes = compute.index_in(words, value_set=pa.array(names, words.type))
    if codes.null_count:
        return None
    ends = compute.cumulative_sum(compute.list_value_length(values).fill_null(0).cast(pa.int64()))
    offsets = pa.concat_arrays([pa.array([0], pa.int64()), ends])
    return pa.LargeListArray.from_arrays(offsets, codes.cast(pa.int64()), mask=values.is_null() if values.null_count else None)


def _codes(values: Any, names: Sequence[str]) -> list[Any]:
    """Convert lists of names to lists of codes. Lists of numbers are returned as they are."""
    place = {name: code for code, name in enumerate(names)}
    found: list[Any] = []
    for row, value in enumerate(arrays_of(values, "int64") if is_arrow(values) else container(values)):
        if is_null(value):
            found.append(None)
            continue
        if not isinstance(value, list | tuple | np.ndarray) and not hasattr(value, "detach"):
            raise fail(f"is {value!r:.80}, expected a list of labels", row, hint=f"write [{value!r:.80}], or use ps.Label(names)")
        if not any(isinstance(label, str) for label in value):
            found.append(value)
            continue
        unknown = next((label for label in value if label not in place), None) if all(isinstance(label, str) for label in value) else 0
        if unknown is not None:
            other = next((label for label in value if not isinstance(label, str)), unknown)
            raise fail(f"contains {str(other)[:80]!r}, which is not a label", row, hint=f"labels: {', '.join(names[:20])}")
        found.append([place[label] for label in value])
    return found

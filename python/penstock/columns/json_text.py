"""JSON columns."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.columns.column_type import ColumnType
from penstock.values.checks import Prepared, fail, is_null
from penstock.values.containers import items_of

if TYPE_CHECKING:
    import pyarrow as pa


def _has_keys_of_one_name(value: Any) -> bool:
    """Return whether any dict has keys such as 1 and "1", which JSON would merge into one.

    >>> _has_keys_of_one_name([{1: "a", "1": "b"}]), _has_keys_of_one_name({1: "a", "2": {}})
    (True, False)
    """
    within = [value]
    while within:
        value = within.pop()
        if isinstance(value, dict):
            if any(type(key) is not str for key in value) and len(json.loads(json.dumps(dict.fromkeys(value)))) < len(value):
                return True
            value = value.values()
        elif not isinstance(value, list | tuple):
            continue
        within += [one for one in value if isinstance(one, dict | list | tuple)]
    return False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Json(ColumnType):
    """Any value that JSON can represent, stored as compact text. Reads as Python objects.

    Text is stored as a JSON string, even if it comes from Arrow. `scan` returns JSON as text, so parse it before you append it again.
    """

    type = "json"
    rank = None
    has_groups = True
    has_text = True

    def prepare(self, values: Any) -> Prepared:
        items: list[str | None] = []
        for row, value in enumerate(items_of(values)):
            try:
                text = None if is_null(value) else json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
                if text and _has_keys_of_one_name(value):
                    raise ValueError("two of its keys convert to the same string")
            except (TypeError, ValueError, RecursionError) as error:
                raise fail(f"is not JSON: {error}", row) from error
            items.append(text)
        return ("items", items)

    def from_arrow(self, array: pa.Array) -> Any:
        from penstock.values.arrow import types as arrow_types

        array = arrow_types.plain(array)
        arrow_types.refuse(array.type, arrow_types.no_json(array.type))
        return array.to_pylist()

    def from_noted(self, array: pa.Array, noted: ColumnType | None) -> Any:
        return None if noted is None or noted.type != self.type else self.from_scan(array)

    def from_scan(self, values: pa.Array | pa.ChunkedArray) -> Any:
        return parsed(values.to_pylist())

    def from_texts(self, texts: pa.Array, is_given: bool) -> tuple[Any, list[tuple[int, str]]]:
        from penstock.values.text import from_text

        return from_text.parsed(from_text.nulled(texts))

    def from_pandas(self, values: Any) -> Any:
        # Lists of text are arrays there.
        return [value.tolist() if isinstance(value, np.ndarray) else value for value in super().from_pandas(values)]

    def arrow_type(self) -> pa.DataType:
        import pyarrow as pa

        return pa.large_string()


def parsed(texts: Iterable[str | None]) -> list[Any]:
    """Parse texts that are JSON. A null remains one. Raises: InvalidInputError with the row of a text that is not JSON."""
    made = []
    for row, text in enumerate(texts):
        try:
            made.append(None if text is None else json.loads(text))
        except (ValueError, RecursionError) as error:
            raise fail(f"is not JSON: {error}", row) from error
    return made

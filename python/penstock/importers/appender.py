"""Appends the rows of chunks, and finds the bad ones among them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.columns.column_type import ColumnType
from penstock.errors import Error, InvalidInputError
from penstock.importers.shared.chunks import contents_of, picked
from penstock.importers.shared.source import Chunk, Refusal
from penstock.transaction import Transaction
from penstock.values.arrow import types as arrow_types
from penstock.values.checks import is_arrow
from penstock.values.containers import container, items_of

_SKIP = "pass --on-error skip to leave out such items"


def as_error(refusal: Refusal, column: str | None = None) -> Error:
    hint = f"{refusal.hint}; or {_SKIP}" if refusal.hint else _SKIP
    error = InvalidInputError(f"cannot import `{refusal.path}`: {refusal.message}", code=refusal.code, hint=hint)
    error.column = column
    return error


class Appender:
    """Appends the good rows of chunks. Finds the bad rows by appending smaller and smaller parts.

    `opened` are the label columns that take their names from the data: those that are new are added.
    """

    def __init__(
        self,
        transaction: Transaction,
        kinds: Mapping[str, ColumnType],
        validate: str,
        on_error: str,
        refused: list[Refusal],
        opened: Collection[str] = (),
    ) -> None:
        self.transaction, self.kinds, self.validate, self.on_error, self.refused = transaction, kinds, validate, on_error, refused
        # The known classes of label columns whose names come from the data.
        self.open: dict[str, set[str]] = {
            name: set(kind.classes) for name, kind in kinds.items() if name in opened and kind.classes is not None
        }

    def append(self, chunk: Chunk) -> int:
        """Append a chunk and return the number of samples appended."""
        columns = {name: container(values) for name, values in chunk.columns.items()}
        bad: dict[str, set[int]] = {}
        for row, column, refusal in self._problems(columns, chunk):
            if self.on_error == "raise":
                raise as_error(refusal, column)
            self.refused.append(refusal)
            bad.setdefault(column, set()).add(row)
        if self.on_error == "null":
            for column, nulls in bad.items():
                columns[column] = [None if row in nulls else value for row, value in enumerate(items_of(columns[column]))]
            return self._part(columns, range(chunk.rows), chunk)
        left_out = set().union(*bad.values())
        return self._part(columns, [row for row in range(chunk.rows) if row not in left_out] if left_out else range(chunk.rows), chunk)

    def _problems(self, columns: dict[str, Any], chunk: Chunk) -> list[tuple[int, str, Refusal]]:
        """Collect the values that the source refused, numbers in category columns, and media that cannot be decoded.

        Returns one reason per row, or one per value with `on_error="null"`. Reads each media file once and stores
        its bytes in `columns`.
        """
        each = self.on_error == "null"  # If true, every bad value is reported; otherwise, one reason per row is enough.
        found = {(row, column if each else ""): (row, column, refusal) for row, column, refusal in reversed(chunk.problems)}
        for name, values in list(columns.items()):
            kind = self.kinds[name]
            for row, number in kind.codes_in(values):
                refusal = Refusal.of_value(chunk.name(row), name, f"the value is {number}, expected a word: codes differ between datasets")
                found.setdefault((row, name if each else ""), (row, name, refusal))
            if not kind.is_picture or is_arrow(values):
                continue
            bodies = [_body(value) for value in values]
            if any(body is not None for body in bodies):
                columns[name] = [value if body is None else body for value, body in zip(values, bodies, strict=True)]
                errors = kind.check_media(bodies, self.validate)
                for row, error in enumerate(errors):
                    if error is not None:
                        refusal = Refusal(chunk.name(row), error.code, error.message, error.hint)
                        found.setdefault((row, name if each else ""), (row, name, refusal))
        if each:
            known = {(row, column) for row, column, _ in chunk.problems}
            return [*chunk.problems, *(entry for entry in found.values() if entry[:2] not in known)]
        return sorted(found.values(), key=lambda entry: entry[0])

    def _part(self, columns: Mapping[str, Any], rows: Sequence[int], chunk: Chunk) -> int:
        if not rows:
            return 0
        part = columns if len(rows) == chunk.rows else {name: picked(values, rows) for name, values in columns.items()}
        try:
            self._append(part, len(rows))
            return len(rows)
        except Error as error:
            if error.code in _NO_FAULT_OF_A_ROW:
                raise
            if self.on_error == "raise":
                _name(error, chunk, rows)
                raise
            if len(rows) > 1:
                middle = len(rows) // 2
                return self._part(columns, rows[:middle], chunk) + self._part(columns, rows[middle:], chunk)
            return self._row(part, chunk.name(rows[0]), error)

    def _append(self, columns: Mapping[str, Any], rows: int) -> None:
        for name, known in self.open.items():
            new = sorted(words_of(columns.get(name, ())) - known)
            if new:
                self.transaction.add_classes(name, new)
                known.update(new)
        # `_problems` has checked all media except Arrow arrays, which the transaction checks.
        left = any(is_arrow(values) and self.kinds[name].is_picture for name, values in columns.items())
        before = self.transaction._boxes.changed
        try:
            self.transaction.append_slice(columns, 0, rows, self.validate if left else "header")
        except Error:
            self.transaction._boxes.changed = before  # Parts of these rows are tried again.
            raise

    def _row(self, values: Mapping[str, Any], name: str, error: Error) -> int:
        """Refuse a row, or replace its bad values with nulls. Returns the number of samples appended."""
        while True:
            self.refused.append(Refusal(name, error.code, error.reason))
            column = error.column
            # Replacing a refused null with a null would loop forever.
            if (
                self.on_error != "null"
                or column is None
                or column not in values
                or (isinstance(values[column], list) and values[column][0] is None)
            ):
                return 0
            values = {**values, column: [None]}
            try:
                self._append(values, 1)
                return 1
            except Error as again:
                if again.code in _NO_FAULT_OF_A_ROW:
                    raise
                error = again


def words_of(values: Any) -> set[str]:
    """Return the words among values, or in lists of them."""
    if is_arrow(values):
        values = arrow_types.decoded(values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values)
        while arrow_types.is_any_list(values.type):
            values = arrow_types.decoded(values.flatten())
        values = values.unique().to_pylist()
    found: set[str] = set()
    for value in values:
        words = [value] if isinstance(value, str) else value if isinstance(value, list | tuple | np.ndarray) else ()
        found.update(word for word in words if isinstance(word, str))
    return found


# Errors that every row would raise, such as failing storage or a closed transaction.
_NO_FAULT_OF_A_ROW = ("no-space", "storage-failed", "read-only", "permission-denied", "transaction-closed", "internal", "column-not-found")


def _body(value: Any) -> bytes | None:
    """Return encoded media to check before appending, or None. Also returns None for an unreadable file, which is refused later."""
    found = contents_of(value)
    return bytes(found) if isinstance(found, bytes | bytearray) else None


def _name(error: Error, chunk: Chunk, rows: Sequence[int]) -> None:
    """Name the refused item in the error."""
    if error.rows and error.rows[0] < len(rows):
        error._within(f"cannot import `{chunk.name(rows[error.rows[0]])}`")
        error._row, error.rows = None, []  # These were row numbers within a part, which mean nothing to the caller.
        error.hint = error.hint or _SKIP

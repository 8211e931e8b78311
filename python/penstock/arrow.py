"""Converts views to Arrow: record batches for `scan`, and the C stream that DuckDB, Polars and pandas read.

A leaf module: only `View.scan` and `View.__arrow_c_stream__` import it. The core cuts a scan into groups (`Scan` in
crates/dataset/src/read/scan.rs), and each column type builds its arrays. Source: Arrow columnar format 1.5, C stream interface.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from penstock.ahead import Ahead
from penstock.errors import InvalidInputError
from penstock.values.checks import is_whole
from penstock.view import _names

if TYPE_CHECKING:
    from penstock.view import View


def arrow_schema(view: View, names: Sequence[str]) -> pa.Schema:
    """Return the Arrow schema of the named columns. Field metadata records each column's Penstock type."""
    schema = view.schema
    fields = []
    for name in names:
        if name in ("_row_id", "_position"):
            fields.append(pa.field(name, pa.int64(), nullable=False))
        else:
            fields.append(pa.field(name, schema[name].arrow_type(), metadata={"penstock.type": schema[name].type}))
    return pa.schema(fields)


def reader(view: View, columns: Sequence[str] | None, batch_size: int) -> pa.RecordBatchReader:
    """Return a reader over the whole view."""
    view = view._as_it_is()
    names = list(view.schema) if columns is None else _names(columns) or []
    batches = scan(view, names, batch_size)
    return pa.RecordBatchReader.from_batches(arrow_schema(view, names), batches)


def scan(view: View, columns: Sequence[str] | None, batch_size: int) -> Iterator[pa.RecordBatch]:
    """Read a view as record batches of at most `batch_size` rows."""
    if not is_whole(batch_size) or batch_size <= 0:
        raise InvalidInputError(f"cannot scan with batch_size={batch_size!r}: expected a whole number above 0")
    view = view._as_it_is()
    batch_size = min(int(batch_size), max(1, len(view)))
    names = list(view.schema) if columns is None else _names(columns) or []
    view._view.take((0, 0), names, "flat")  # A missing column raises an error here, not mid-stream.
    if not names or not len(view):
        return _without_columns(len(view), batch_size)
    return _batches(view, names, batch_size) if view._snapshot.mapped else _batches_ahead(view, names, batch_size)


class _Rows:
    """Reads rows of the named columns as record batches."""

    def __init__(self, view: View, names: list[str]) -> None:
        self._view, self._names, self._schema = view, names, arrow_schema(view, names)
        kinds = view.schema
        self._kinds = {name: kinds[name] for name in names if name in kinds}
        self._words = {
            name: pa.array(words, pa.string()) for name, kind in self._kinds.items() if (words := kind.words(view, name)) is not None
        }

    def read(self, start: int, end: int, keep: bool) -> pa.RecordBatch:
        """Read a range of rows. If `keep` is true, the block cache keeps the blocks that were read."""
        batch = self._view._view.take((start, end), self._names, "flat", scan=keep)
        arrays = [
            kind.to_arrow(batch[name], self._words.get(name)) if (kind := self._kinds.get(name)) else pa.array(batch[name])
            for name in self._names
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def _batches(view: View, names: list[str], batch_size: int) -> Iterator[pa.RecordBatch]:
    """Yield batches from a view whose files are mapped."""
    rows, cuts = _Rows(view, names), view._view.scan(names, batch_size)
    while (group := cuts.next(0)) is not None:
        batch = rows.read(*group)
        cuts.took(len(batch), _own_bytes(batch))
        yield batch
        del batch  # Release this batch before the next one is read.


def _batches_ahead(view: View, names: list[str], batch_size: int) -> Iterator[pa.RecordBatch]:
    """Yield batches cut from groups that other threads read ahead."""
    rows, cuts = _Rows(view, names), view._view.scan(names, batch_size)
    groups: collections.deque[Ahead[pa.RecordBatch]] = collections.deque()

    def read_ahead() -> None:
        while (group := cuts.next(len(groups))) is not None:
            groups.append(Ahead(partial(rows.read, *group)))

    try:
        read_ahead()
        while groups:
            group = groups.popleft().result()
            most_rows, most_bytes = cuts.took(len(group), _own_bytes(group))
            read_ahead()
            yield from _cut(group, most_rows, most_bytes)
            del group
    finally:
        for ahead in groups:
            ahead.stop()


def _own_bytes(batch: pa.RecordBatch) -> int:
    """Return the size of a batch in bytes, not counting the dictionaries that all batches share."""
    return sum(column.indices.nbytes if isinstance(column, pa.DictionaryArray) else column.nbytes for column in batch.columns)


def _cut(group: pa.RecordBatch, most_rows: int, most_bytes: int) -> Iterator[pa.RecordBatch]:
    """Cut a group into batches of at most `most_rows` rows and `most_bytes` bytes. A single row may exceed `most_bytes`."""
    row = 0
    while row < len(group):
        rows = most_rows
        while rows > 1 and _own_bytes(group.slice(row, rows)) > most_bytes:
            rows //= 2
        yield group.slice(row, rows)
        row += rows


def _without_columns(rows: int, batch_size: int) -> Iterator[pa.RecordBatch]:
    """Yield batches that have rows but no columns."""
    for start in range(0, rows, batch_size):
        yield pa.RecordBatch.from_struct_array(pa.array([{}] * min(batch_size, rows - start), pa.struct([])))


__all__ = ["arrow_schema", "reader", "scan"]

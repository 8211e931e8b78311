"""Converts views to Arrow: the record batches of `scan`, of the C stream that DuckDB, Polars and pandas read, and of exports.

A leaf module, imported when it is needed. The core cuts a scan into groups (`Scan` in
crates/dataset/src/read/scan.rs), and each column type builds its arrays. Source: Arrow columnar format 1.5, C stream interface.
"""

from __future__ import annotations

import atexit
import collections
import itertools
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import InvalidInputError
from penstock.frameworks.ahead import Ahead
from penstock.schema import COLUMN
from penstock.values.checks import is_whole

if TYPE_CHECKING:
    from penstock.columns.column_type import ColumnType
    from penstock.views.concat import Concat
    from penstock.views.view import View


# The columns of a scan, with their types. Row ids and positions have none.
Kinds = list[tuple[str, "ColumnType | None"]]


def kinds_of(view: View | Concat, names: Sequence[str], halves: bool = True) -> Kinds:
    """Return the types of the named columns. Without `halves`, float16 becomes float32."""
    schema = view.schema
    each = [(name, schema.get(name)) for name in names]
    return each if halves else [(name, kind and kind.without_halves()) for name, kind in each]


def arrow_schema(kinds: Kinds) -> pa.Schema:
    """Return the Arrow schema of columns. Field metadata has each column's entry in the Penstock schema, as JSON."""
    return pa.schema(
        pa.field(name, pa.int64(), nullable=False)
        if kind is None
        else pa.field(name, kind.arrow_type(), metadata={COLUMN: json.dumps(kind.spec())})
        for name, kind in kinds
    )


def reader(
    view: View | Concat,
    columns: Sequence[str] | None,
    batch_size: int,
    halves: bool = True,
    places: npt.NDArray[np.int64] | None = None,
) -> pa.RecordBatchReader:
    """Return a reader over the whole view, or joined views, in record batches of at most `batch_size` rows.

    The `_position` of a sample of joined views is its place among all of them, or what `places` says, if these were selected from others.
    """
    view = view._as_it_is()
    kinds = kinds_of(view, list(view.schema) if columns is None else view._named(columns) or [], halves)
    schema, parts = arrow_schema(kinds), view._parts()
    # Codes of labels have the meaning that each view gives them.
    scans = [_scan(part, kinds_of(part, [name for name, _ in kinds], halves), batch_size) for part in parts]
    batches: Iterator[pa.RecordBatch] = itertools.chain.from_iterable(scans)
    if parts[0] is not view and kinds:
        alike = [_alike(scan, kinds, [part.schema.get(name) for name, _ in kinds], schema) for part, scan in zip(parts, scans, strict=True)]
        batches = itertools.chain.from_iterable(alike)
        if "_position" in schema.names:
            batches = _placed(batches, schema.names.index("_position"), np.arange(len(view)) if places is None else places)
    return pa.RecordBatchReader.from_batches(schema, _heeding_exit(batches))


def _alike(batches: Iterator[pa.RecordBatch], kinds: Kinds, own: list[ColumnType | None], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the batches of one of several joined views with the schema of all, and its boxes in their format."""
    for batch in batches:
        each = zip(batch.columns, kinds, own, strict=True)
        columns = [values if kind is None else kind.of_arrow(values, stored) for values, (_, kind), stored in each]
        yield pa.RecordBatch.from_arrays(columns, schema=schema)


def _placed(batches: Iterator[pa.RecordBatch], column: int, places: npt.NDArray[np.int64]) -> Iterator[pa.RecordBatch]:
    """Put the places of all samples into a column, which has their positions in datasets of their own."""
    first = 0
    for batch in batches:
        yield batch.set_column(column, batch.schema.field(column), pa.array(places[first : first + batch.num_rows], pa.int64()))
        first += batch.num_rows


# Calls of `_heeding_exit` that are running Python code below a frame of Arrow.
_inside: set[object] = set()
_ending = False
os.register_at_fork(after_in_child=_inside.clear)  # A forked child does not have these threads.


def _heeding_exit(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield batches until Python exits. Then, end other threads here: Python would end them where they are, and Arrow aborts when it meets that."""
    while True:
        if _ending and threading.current_thread() is not threading.main_thread():
            raise SystemExit  # Unlike other exceptions, this one ends a thread without a word.
        call = object()
        _inside.add(call)
        try:
            batch = next(batches, None)
        finally:
            _inside.discard(call)
        if batch is None:
            return
        yield batch
        del batch  # Release this batch before the next one is read.


@atexit.register
def _await_calls() -> None:
    """Wait up to 10 s until no thread is reading batches, and give the last one time to leave Python code."""
    global _ending
    _ending = True
    end = time.monotonic() + 10
    while _inside and time.monotonic() < end:
        time.sleep(0.001)  # Arrow does not signal when its threads are done.
    time.sleep(0.02)


def _scan(view: View, kinds: Kinds, batch_size: int) -> Iterator[pa.RecordBatch]:
    if not is_whole(batch_size) or batch_size <= 0:
        raise InvalidInputError(f"cannot scan with batch_size={batch_size!r}: expected a whole number above 0")
    batch_size = min(int(batch_size), max(1, len(view)))
    view._view.take((0, 0), [name for name, _ in kinds], "flat")  # A missing column raises an error here, not mid-stream.
    if not kinds or not len(view):
        return _without_columns(len(view), batch_size)
    return _batches(view, kinds, batch_size) if view._snapshot.mapped else _batches_ahead(view, kinds, batch_size)


class _Rows:
    """Reads rows of some columns as record batches."""

    def __init__(self, view: View, kinds: Kinds) -> None:
        self._view, self._names, self._kinds, self._schema = view, [name for name, _ in kinds], kinds, arrow_schema(kinds)
        self._words = {name: pa.array(words, pa.string()) for name, kind in kinds if kind and (words := kind.words(view, name)) is not None}

    def read(self, start: int, end: int, keep: bool) -> pa.RecordBatch:
        """Read a range of rows. If `keep` is true, the block cache keeps the blocks that were read."""
        batch = self._view._view.take((start, end), self._names, "flat", scan=keep)
        arrays = [kind.to_arrow(batch[name], self._words.get(name)) if kind else pa.array(batch[name]) for name, kind in self._kinds]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def _batches(view: View, kinds: Kinds, batch_size: int) -> Iterator[pa.RecordBatch]:
    """Yield batches from a view whose files are mapped."""
    rows, cuts = _Rows(view, kinds), view._view.scan([name for name, _ in kinds], batch_size)
    while (group := cuts.next(0)) is not None:
        batch = rows.read(*group)
        cuts.took(len(batch), _own_bytes(batch))
        yield batch
        del batch  # Release this batch before the next one is read.


def _batches_ahead(view: View, kinds: Kinds, batch_size: int) -> Iterator[pa.RecordBatch]:
    """Yield batches cut from groups that other threads read ahead."""
    rows, cuts = _Rows(view, kinds), view._view.scan([name for name, _ in kinds], batch_size)
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

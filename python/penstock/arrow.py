"""Views as Arrow: record batches for scan, and the C stream that DuckDB, Polars and pandas read.

A leaf module: only `View.scan` and `View.__arrow_c_stream__` import it. Source: Arrow columnar format 1.5, C stream interface.
"""

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from penstock import _core
from penstock.columns.boxes import Boxes
from penstock.columns.category import Category
from penstock.columns.column_type import ColumnType
from penstock.columns.json_text import Json
from penstock.columns.keypoints import Keypoints
from penstock.columns.label import Label
from penstock.columns.scalar import Scalar
from penstock.columns.tensor import Tensor
from penstock.columns.text import Text
from penstock.errors import InvalidInputError
from penstock.values.checks import is_whole
from penstock.view import _names

if TYPE_CHECKING:
    from penstock.view import View

_FIXED: dict[str, Any] = {
    "bool": pa.bool_(), "float16": pa.float16(), "bfloat16": pa.float32(), "float32": pa.float32(), "float64": pa.float64(),
    "timestamp": pa.timestamp("us", tz="UTC"), "complex64": pa.list_(pa.float32(), 2), "complex128": pa.list_(pa.float64(), 2),
}  # fmt: skip


def element_type(dtype: str) -> pa.DataType:
    """Return the Arrow type of an element. Arrow lacks bfloat16 and complex: they become float32 and a list of two floats."""
    return _FIXED.get(dtype) or getattr(pa, dtype)()


def element(kind: ColumnType) -> str:
    """Return the element dtype of a tensor-like column."""
    return kind.dtype if isinstance(kind, Scalar | Tensor) else "float32"


def column_type(kind: ColumnType) -> pa.DataType:
    """Return the Arrow type of a column."""
    if isinstance(kind, Scalar):
        return element_type(kind.dtype)
    if isinstance(kind, Label | Category):
        return pa.dictionary(pa.int32(), pa.string())
    if isinstance(kind, Text | Json):
        return pa.large_string()
    if isinstance(kind, Tensor) and None not in kind.shape:
        return pa.fixed_shape_tensor(element_type(kind.dtype), [int(size or 0) for size in kind.shape])
    if isinstance(kind, Tensor | Boxes | Keypoints):
        rank = len(kind.shape) if isinstance(kind, Tensor) else 2 if isinstance(kind, Boxes) else 3
        return pa.struct([("data", pa.large_list(element_type(element(kind)))), ("shape", pa.list_(pa.int64(), rank))])
    return pa.large_binary()


def arrow_schema(view: View, names: Sequence[str]) -> pa.Schema:
    """Return the Arrow schema of the named columns. Field metadata records each column's Penstock type."""
    schema = view.schema
    fields = []
    for name in names:
        if name in ("_row_id", "_position"):
            fields.append(pa.field(name, pa.int64(), nullable=False))
        else:
            fields.append(pa.field(name, column_type(schema[name]), metadata={"penstock.type": schema[name].type}))
    return pa.schema(fields)


def reader(view: View, columns: Sequence[str] | None, batch_size: int) -> pa.RecordBatchReader:
    """Return a reader over the whole view."""
    view = view._as_it_is()
    names = list(view.schema) if columns is None else _names(columns) or []
    view._view.take((0, 0), names, "flat")  # A missing column raises here, not in mid-stream.
    return pa.RecordBatchReader.from_batches(arrow_schema(view, names), scan(view, names, batch_size))


def scan(view: View, columns: Sequence[str] | None, batch_size: int) -> Iterator[pa.RecordBatch]:
    """Read a view as record batches of at most `batch_size` rows."""
    if not is_whole(batch_size) or batch_size <= 0:
        raise InvalidInputError(f"cannot scan with batch_size={batch_size!r}: expected a whole number above 0")
    view = view._as_it_is()
    batch_size = min(int(batch_size), max(1, len(view)))
    names = list(view.schema) if columns is None else _names(columns) or []
    view._view.take((0, 0), names, "flat")
    return _batches(view, names, batch_size)


# Unmapped files are read in groups. The first group has GROUP_BYTES and each later one up to twice the last, at most
# 1/32 of the memory budget. At most GROUPS are read ahead.
GROUP_BYTES = 8 << 20
GROUP_ROWS = 1 << 17
GROUPS = 2
# A batch uses at most 1/BATCHES of the budget: the consumer holds one batch, one is being built, and more are being read.
BATCHES = 8


def _batches(view: View, names: list[str], batch_size: int) -> Iterator[pa.RecordBatch]:
    schema, kinds = arrow_schema(view, names), view.schema
    words = {name: pa.array(_words(view, name), pa.string()) for name in names if isinstance(kinds.get(name), Label | Category)}

    def read(start: int, end: int, keep: bool) -> pa.RecordBatch:
        batch = view._view.take((start, end), names, "flat", scan=keep)
        arrays = [pa.array(batch[name]) if name.startswith("_") else _array(kinds[name], batch[name], words.get(name)) for name in names]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    if not names or not len(view):
        yield from _without_columns(len(view), batch_size)
        return
    memory_bytes, _, _ = _core.configure()
    uneven = [name for name in names if name in kinds and not _is_even(kinds[name])]
    decoded = view._snapshot.column_bytes(uneven)[1]
    # In a fixed shape, a null takes as much memory as a value.
    mean_bytes = decoded / len(view._snapshot) + sum(kinds[name].row_bytes() or 8 for name in names if name in kinds and name not in uneven)

    def rows_that_fit(row_bytes: float) -> int:
        """Return how many rows of this size fit a batch's part of the budget, at most `batch_size`."""
        return max(1, min(batch_size, int(memory_bytes / BATCHES / max(1.0, row_bytes))))

    def rows_of_batch(row_bytes: float) -> int:
        """Return how many unread rows fit, judged by the size of earlier rows, the column means and the rows to come."""
        rows = rows_that_fit(max(row_bytes, mean_bytes))
        while rows > 1 and decoded_bytes(start, rows) > memory_bytes / BATCHES:
            rows //= 2
        return rows

    def decoded_bytes(start: int, rows: int) -> int:
        """Return the decoded bytes of upcoming rows in uneven columns; 0, without a look-up, if those columns fit a batch in full."""
        if decoded <= memory_bytes / BATCHES:
            return 0
        return view._view.decoded_bytes((start, min(start + rows, len(view))), uneven)

    def fits(rows: int) -> bool:
        """Return whether the next rows fit the group, by the bytes that they request and decode to."""
        return max(_asked(view, names, start, rows) * rows, decoded_bytes(start, rows)) <= 1.25 * group_bytes

    start = 0
    if view._snapshot.mapped:
        row_bytes = 0.0
        while start < len(view):
            end = min(start + rows_of_batch(row_bytes), len(view))
            batch = read(start, end, True)
            start, row_bytes = end, batch.nbytes / len(batch)
            yield batch
            del batch  # Release this batch before the next one is read.
        return
    most = max(GROUP_BYTES, memory_bytes // 32)
    group_bytes, row_bytes = GROUP_BYTES, _asked(view, names, 0, rows_of_batch(0.0))
    groups: collections.deque[_Ahead] = collections.deque()

    def read_ahead() -> None:
        nonlocal start, group_bytes
        rows = rows_of_batch(row_bytes)
        # If batches are larger than a group, read only one ahead.
        while start < len(view) and len(groups) < (GROUPS if row_bytes * rows <= group_bytes else 1):
            end = min(start + _whole_batches(group_bytes / row_bytes if row_bytes else 0, rows, fits), len(view))
            # Do not cache the blocks of a scan that would fill half of the block cache.
            groups.append(_Ahead(read, start, end, row_bytes * len(view) <= memory_bytes // 4))
            start, group_bytes = end, min(2 * group_bytes, most)

    try:
        read_ahead()
        while groups:
            group = groups.popleft().result()
            row_bytes = group.nbytes / len(group)
            read_ahead()
            row, most_rows = 0, rows_that_fit(row_bytes)
            while row < len(group):
                rows = most_rows
                while rows > 1 and group.slice(row, rows).nbytes > memory_bytes / BATCHES:
                    rows //= 2
                yield group.slice(row, rows)
                row += rows
            del group
    finally:
        for ahead in groups:
            ahead.stop()


def _is_even(kind: ColumnType) -> bool:
    """Return whether all values of a column take the same number of bytes."""
    return isinstance(kind, Label | Category) or kind.row_bytes() > 0


def _asked(view: View, names: list[str], start: int, rows: int) -> float:
    """Return the bytes per row that will be requested from storage. Cost: reads the tails of data files."""
    end = min(start + rows, len(view))
    return sum(high - low for _, low, high in view._view.ranges((start, end), names)) / (end - start)


def _without_columns(rows: int, batch_size: int) -> Iterator[pa.RecordBatch]:
    """Yield batches without columns, which still have rows."""
    for start in range(0, rows, batch_size):
        yield pa.RecordBatch.from_struct_array(pa.array([{}] * min(batch_size, rows - start), pa.struct([])))


def _whole_batches(most_rows: float, batch_size: int, fits: Callable[[int], bool]) -> int:
    """Return the rows of a group: whole batches that fit, at most `most_rows`, and at least one batch."""
    rows = min(int(most_rows), GROUP_ROWS) // batch_size * batch_size
    while rows > batch_size and not fits(rows):
        rows = rows // 2 // batch_size * batch_size
    return max(rows, batch_size)


class _Ahead:
    """Rows that a separate thread reads ahead. Without that thread, as in a forked child, `result` reads them."""

    def __init__(self, read: Callable[[int, int, bool], pa.RecordBatch], start: int, end: int, keep: bool) -> None:
        self._read, self._rows, self._process = read, (start, end, keep), os.getpid()
        self._batch: pa.RecordBatch | None = None
        self._error: BaseException | None = None
        self._stop = _core.Stop()
        self._worker: int | None = None
        self._at_work = threading.Lock()
        self._at_work.acquire()
        try:
            threading.Thread(target=self._run, name="penstock-scan", daemon=True).start()
        except RuntimeError:  # No thread could be started: `result` reads the rows.
            self._at_work.release()

    def _run(self) -> None:
        self._worker = threading.get_ident()
        try:
            self._stop.heed()
            self._batch = self._read(*self._rows)
        except BaseException as error:
            self._error = error
        finally:
            self._at_work.release()

    def stop(self) -> None:
        """Cancel the read and wait for its thread to stop."""
        self._stop.set()
        self._wait()

    def _wait(self) -> None:
        """Wait for a lock instead of `join`: garbage collection may call this while Python starts a thread and holds a lock of `join`."""
        if os.getpid() == self._process and threading.get_ident() != self._worker:
            with self._at_work:
                pass

    def result(self) -> pa.RecordBatch:
        self._wait()
        if self._error is not None:
            raise self._error
        return self._read(*self._rows) if self._batch is None else self._batch


def _words(view: View, name: str) -> list[str]:
    kind = view.schema[name]
    return list(kind.names) if isinstance(kind, Label) else view._snapshot.vocabulary(name)


def _array(kind: ColumnType, flat: tuple[Any, ...], words: pa.Array | None) -> pa.Array:
    if words is not None:
        codes, nulls = flat
        return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32), mask=nulls), words)
    if isinstance(kind, Scalar):
        return _elements(flat[0], kind.dtype, flat[1])
    if isinstance(kind, Tensor) and None not in kind.shape:
        values, nulls = flat
        size = int(np.prod([int(n or 0) for n in kind.shape]))
        storage = pa.FixedSizeListArray.from_arrays(
            _elements(values.reshape(-1), kind.dtype, None), size, mask=None if nulls is None else pa.array(nulls)
        )
        return pa.ExtensionArray.from_storage(column_type(kind), storage)
    data, offsets, shapes, nulls = flat
    if shapes is None:
        buffers = [_bitmap(nulls), pa.py_buffer(offsets), pa.py_buffer(data)]
        return pa.Array.from_buffers(column_type(kind), len(offsets) - 1, buffers, null_count=-1 if nulls is not None else 0)
    rank = shapes.shape[1]
    lists = pa.LargeListArray.from_arrays(pa.array(offsets), _elements(data, element(kind), None))
    sizes = pa.FixedSizeListArray.from_arrays(pa.array(shapes.reshape(-1)), rank)
    return pa.StructArray.from_arrays([lists, sizes], fields=list(column_type(kind)), mask=None if nulls is None else pa.array(nulls))


def _elements(values: Any, dtype: str, nulls: Any) -> pa.Array:
    if dtype == "bfloat16":
        values = values.astype(np.float32)
    if dtype in ("complex64", "complex128"):
        half = values.view(np.float32 if dtype == "complex64" else np.float64)
        return pa.FixedSizeListArray.from_arrays(pa.array(half.reshape(-1)), 2, mask=None if nulls is None else pa.array(nulls))
    if dtype == "timestamp":
        return pa.array(values.view(np.int64), mask=nulls).cast(element_type(dtype))
    return pa.array(values, element_type(dtype), mask=nulls)


def _bitmap(nulls: Any) -> pa.Buffer | None:
    return None if nulls is None else pa.py_buffer(np.packbits(~nulls, bitorder="little"))


__all__ = ["arrow_schema", "column_type", "reader", "scan"]

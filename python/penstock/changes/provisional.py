"""Provisional row ids: those of samples that a transaction appended. Each transaction marks its own, so that others refuse them.

A provisional row id consists of the sign bit, 0, 22 bits that mark the transaction, and the number of the sample. The core knows them without
the mark.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from penstock.changes.inputs import Ids
from penstock.errors import Error, NotFoundError
from penstock.view import row_ids_of

_EXISTING = -(1 << 62)
_INDEX_BITS, _MARKS = 40, 1 << 22
_MARK_BITS = (_MARKS - 1) << _INDEX_BITS
_counts: itertools.count[int]


def _restart() -> None:
    """Begin at another mark than other processes, also after a fork."""
    global _counts
    _counts = itertools.count(int.from_bytes(os.urandom(4)))


_restart()
os.register_at_fork(after_in_child=_restart)


class Mark:
    """The mark of one transaction. With a journal, it follows from the path, because the transaction may continue in another process."""

    def __init__(self, journal: str | None) -> None:
        number = next(_counts) if journal is None else zlib.crc32(os.path.abspath(journal).encode(errors="surrogateescape"))
        self._bits = number % _MARKS << _INDEX_BITS

    def outward(self, ids: Ids) -> Ids:
        """Mark provisional row ids of the core."""
        return np.where(ids < _EXISTING, ids | self._bits, ids)

    def inward(self, row_ids: Any) -> Ids:
        """Return row ids as the core knows them. Raises: NotFoundError for a provisional row id of another transaction."""
        ids = row_ids_of(row_ids)
        provisional = ids < _EXISTING
        if not provisional.any():
            return ids
        other = provisional & (ids & _MARK_BITS != self._bits)
        if other.any():
            row = int(np.argmax(other))
            error = NotFoundError(
                f"cannot find row id {ids[row]}: it is a provisional row id of another transaction",
                code="row-id-not-found",
                hint="after a commit, its receipt has the final row ids",
                rows=[row],
            )
            error.row_ids = [int(ids[row])]
            raise error
        return np.where(provisional, ids & ~np.int64(_MARK_BITS), ids)

    def batch(self, batch: Any) -> Any:
        """Mark the row ids of a record batch."""
        import pyarrow as pa

        for at, field in enumerate(batch.schema):
            if field.name == "_row_id":
                batch = batch.set_column(at, field, pa.array(self.outward(batch.column(at).to_numpy())))
        return batch

    def sql(self) -> str:
        """Return an SQL expression for the marked form of `_row_id`."""
        return f"CASE WHEN _row_id < {_EXISTING} THEN _row_id | {self._bits} ELSE _row_id END"

    @contextlib.contextmanager
    def in_errors(self) -> Iterator[None]:
        """Mark the row ids that errors of the core name."""
        try:
            yield
        except Error as error:
            for row_id in error.row_ids:
                error._reason = error._reason.replace(str(row_id), str(self._of(row_id)))
                error._prefix = error._prefix.replace(str(row_id), str(self._of(row_id)))
            error.row_ids = [self._of(row_id) for row_id in error.row_ids]
            error.args = (error.message,)
            raise

    def _of(self, row_id: int) -> int:
        return row_id | self._bits if row_id < _EXISTING else row_id

"""Provisional row ids: those of samples that a transaction appended. Each transaction marks its own, so that others refuse them.

A provisional row id consists of the sign bit, 0, 22 bits that mark the transaction, and the number of the sample. The core knows them without
the mark.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from penstock.changes.inputs import Ids
from penstock.errors import Error, NotFoundError
from penstock.views.keys import row_ids_of

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
    """The mark of one transaction. With a journal, the journal determines it, because the transaction may continue in another process."""

    def __init__(self, journal: int | None) -> None:
        self._bits = (next(_counts) if journal is None else journal) % _MARKS << _INDEX_BITS

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

    def batches(self, batches: Any) -> Iterator[Any]:
        """Mark the row ids of record batches, and those in errors while they are read."""
        import pyarrow as pa

        with self.in_errors():
            for batch in batches:
                for at, field in enumerate(batch.schema):
                    if field.name == "_row_id":
                        batch = batch.set_column(at, field, pa.array(self.outward(batch.column(at).to_numpy())))
                yield batch

    def sql(self) -> str:
        """Return an SQL expression for the marked form of `_row_id`."""
        return f"CASE WHEN _row_id < {_EXISTING} THEN _row_id | {self._bits} ELSE _row_id END"

    @contextlib.contextmanager
    def in_errors(self) -> Iterator[None]:
        """Mark the row ids that errors of the core name. Other numbers in their texts, such as keys, are the user's."""

        def marked(found: re.Match[str]) -> str:
            return found[1] + str(self._of(int(found[2])))

        try:
            yield
        except Error as error:
            own = [row_id for row_id in error.row_ids if self._of(row_id) != row_id]
            named = re.compile(rf"(row id )({'|'.join(map(str, own))})\b")
            if own:
                error._reason, error._prefix = named.sub(marked, error._reason), named.sub(marked, error._prefix)
            error.row_ids = [self._of(row_id) for row_id in error.row_ids]
            error.args = (error.message,)
            raise

    def _of(self, row_id: int) -> int:
        """Mark a row id of the core. One that has a mark already, of another transaction whose error passes through, is unchanged."""
        return row_id | self._bits if row_id < _EXISTING and not row_id & _MARK_BITS else row_id

"""The entries of a log and of a comparison, and the log itself."""

from __future__ import annotations

import dataclasses
import datetime
import json
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, overload

import numpy as np
import numpy.typing as npt

from penstock import _core
from penstock.errors import unpicklable


@dataclasses.dataclass(frozen=True)
class TransactionNote:
    """What one transaction says about itself in `Commit.transactions`."""

    message: str
    author: str
    samples_added: int
    samples_deleted: int
    properties: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Compaction:
    """What `Dataset.compact` did: how many fragments and overlays it replaced, and what it wrote instead. `dropped_samples` are deleted ones that left the
    files. Damaged fragments remained as they were (`Dataset.verify` names their files).
    """

    snapshot: str
    fragments: int
    overlays: int
    new_fragments: int
    written_bytes: int
    dropped_samples: int
    damaged_fragments: int


@dataclasses.dataclass(frozen=True)
class Commit:
    """An entry in `ds.log()`. `time` is in UTC; `samples` is the number of samples in the snapshot. A merge has two parents.

    Transactions that threads of one process commit at the same time may share a commit. `transactions` then has several entries, `message`
    and `author` list those that differ, and the numbers are sums. `properties` are those of the first transaction that has any.
    """

    snapshot: str
    message: str
    author: str
    time: datetime.datetime
    parents: tuple[str, ...]
    kind: str
    samples: int
    samples_added: int
    samples_deleted: int
    properties: dict[str, Any]
    transactions: tuple[TransactionNote, ...]


@dataclasses.dataclass(frozen=True)
class Difference:
    """An entry in `ds.diff()`: samples that were "added", "deleted" or "changed", by row id. `column` is the column that changed.

    Other kinds are "column added", "column dropped", "column renamed" and "column widened". These have a column, and no row ids.
    """

    kind: str
    column: str | None
    row_ids: npt.NDArray[np.int64]


class Log(Sequence[Commit]):
    """Commits, newest first. They are read when they are needed: iteration streams, and `len` reads all of them.

    No commit comes before one of its descendants.
    """

    def __init__(self, core: _core.Log, limit: int | None) -> None:
        self._core, self._limit = core, limit
        self._known: list[Commit] = []
        self._lock = threading.Lock()

    def _read(self, count: int | None) -> bool:
        """Read commits until `count` are known, or all. Returns whether there are that many."""
        count = count if self._limit is None else min(self._limit, self._limit if count is None else count)
        with self._lock:
            while count is None or len(self._known) < count:
                entry = self._core.next()
                if entry is None:
                    self._limit = len(self._known)
                    break
                self._known.append(_commit(entry))
        return count is None or len(self._known) >= count

    def __iter__(self) -> Iterator[Commit]:
        at = 0
        while (self._limit is None or at < self._limit) and self._read(at + 1):
            yield self._known[at]
            at += 1

    def __len__(self) -> int:
        self._read(None)
        return len(self._known)

    @overload
    def __getitem__(self, index: int) -> Commit: ...
    @overload
    def __getitem__(self, index: slice) -> list[Commit]: ...
    def __getitem__(self, index: int | slice) -> Commit | list[Commit]:
        if isinstance(index, slice):
            forwards = index.stop is not None and index.stop >= 0 and (index.start or 0) >= 0 and (index.step or 1) > 0
            self._read(index.stop if forwards else None)
            return self._known[index]
        self._read(None if index < 0 else index + 1)
        return self._known[index]

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Log | list) else NotImplemented

    # Logs are compared by their commits, so they have no hash. Type checkers know only classes that inherit one.
    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> NoReturn:
        raise unpicklable("a Log", "a log reads commits on demand: pass list(log) or the dataset instead")

    def __repr__(self) -> str:
        shown = [f"{commit.snapshot}  {commit.message}" for commit in self[:10]]
        return "\n".join([*shown, *(["…"] if len(self[:11]) > 10 else [])]) or "no commits"


def _commit(entry: dict[str, Any]) -> Commit:
    time = datetime.datetime.fromtimestamp(0, datetime.UTC) + datetime.timedelta(microseconds=entry["time_us"])
    parts = tuple(TransactionNote(**{**part, "properties": json.loads(part["properties"])}) for part in entry["transactions"])
    return Commit(
        snapshot=entry["snapshot"], message="; ".join(dict.fromkeys(part.message for part in parts)),
        author=", ".join(dict.fromkeys(part.author for part in parts)), time=time, parents=tuple(entry["parents"]), kind=entry["kind"],
        samples=entry["samples"], samples_added=sum(part.samples_added for part in parts), samples_deleted=sum(part.samples_deleted for part in parts),
        properties=next((part.properties for part in parts if part.properties), {}), transactions=parts,
    )  # fmt: skip

"""Compute the missing values of a column, in steps that can be resumed (docs/design/0013-staged-samples.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.changes.boxes import rule_of
from penstock.changes.checks import text_of
from penstock.errors import ConflictError, InvalidInputError
from penstock.values.checks import is_whole

if TYPE_CHECKING:
    from penstock.dataset import Dataset
    from penstock.transaction import Transaction

Compute = Callable[[dict[str, Any]], Any]
Runs = npt.NDArray[np.int64]

# After this many conflicts in a row, one more is an error.
CLASHES = 50


def sizes(batch_size: int, commit_samples: int) -> tuple[int, int]:
    """Check the sizes of batches and steps. A step has at least one batch."""
    for name, value in (("batch_size", batch_size), ("commit_samples", commit_samples)):
        if not is_whole(value) or value < 1:
            raise InvalidInputError(f"cannot backfill: {name}={value!r}, expected a whole number above 0")
    return batch_size, max(batch_size, commit_samples)


class Backfill:
    """One run of a backfill: the column, the function that computes its values, and the columns from which it does."""

    def __init__(
        self, dataset: Dataset, column: str, compute: Compute, columns: Sequence[str], message: str | None, boxes: str = "refuse"
    ) -> None:
        if isinstance(columns, str) or not isinstance(columns, Sequence) or not columns:
            raise InvalidInputError(f"cannot backfill from columns={columns!r}: expected a list of column names")
        if text_of(column, "column", "backfill") in columns:
            raise InvalidInputError(
                f"cannot backfill column `{column}` from itself", hint="give the columns that its values are computed from"
            )
        self._dataset, self._column, self._compute, self._columns = dataset, column, compute, list(columns)
        self._boxes = rule_of(boxes).action
        self._message = f"backfill {column}" if message is None else message

    def run(self, batch_size: int, commit_samples: int, progress: Callable[[int, int], None] | None) -> int:
        """Compute missing values until there are none. Returns how many were committed."""
        done, step, clashes = 0, commit_samples, 0
        while True:
            self._dataset.refresh()
            missing, maybe = self._dataset._snapshot.without_value(self._column)
            total = done + int(missing[:, 1].sum())
            before, clash, expected = done, False, self._dataset._snapshot.number
            known = missing, maybe
            for ids in self._steps(missing, maybe, step):
                if self._dataset._snapshot.number != expected:
                    # Another process made a commit before the last step, and may have computed the next ones.
                    known, expected = self._dataset._snapshot.without_value(self._column), self._dataset._snapshot.number
                ids = ids[_inside(ids, *known)]
                if not len(ids):
                    continue
                transaction = self._changed(ids, batch_size)
                try:
                    transaction.commit()
                except ConflictError as error:
                    clashes += 1
                    if error.code != "conflict" or clashes > CLASHES:
                        raise
                    # Another process changed or computed some of these samples. Smaller steps meet fewer of its changes.
                    step, clash = max(batch_size, step // 2), True
                    break
                done, expected, clashes = done + len(ids), expected + 1, 0
                if progress is not None:
                    progress(done, max(done, total))
            if not clash:
                if done == before:
                    return done
                step = commit_samples

    def _steps(self, missing: Runs, maybe: Runs, samples: int) -> Iterator[npt.NDArray[np.int64]]:
        """Yield row ids of samples without a value. Processes begin at different places, so that they seldom compute the same ones."""
        dataset = self._dataset._as_it_is()  # Each commit moves the handle.
        for which in (0, 1):
            for ids in _chunks(_rotated((missing, maybe)[which], samples), samples):
                if which == 1:
                    values = dataset.take(row_ids=ids, columns=[self._column], decode=False)[self._column]
                    ids = ids[_nulls(values)]
                if len(ids):
                    yield ids

    def _changed(self, ids: npt.NDArray[np.int64], batch_size: int) -> Transaction:
        """Compute values in a transaction."""
        transaction = self._dataset.transaction(self._message, boxes=self._boxes)
        try:
            for start in range(0, len(ids), batch_size):
                batch = ids[start : start + batch_size]
                given = transaction.take(batch, columns=self._columns)
                try:
                    values = self._compute(given)
                except Exception as error:
                    error.add_note(f"in {self._compute!r}, for {len(batch)} samples with row ids {batch[:3].tolist()}, …")
                    raise
                if not hasattr(values, "__len__") or len(values) != len(batch):
                    found = f"{len(values)} values" if hasattr(values, "__len__") else f"a {type(values).__name__}"
                    raise InvalidInputError(
                        f"cannot backfill column `{self._column}`: the function returned {found} for {len(batch)} samples",
                        code="column-lengths-differ",
                        hint="return one value for each sample; use None for a null",
                    )
                transaction.update({self._column: values}, row_ids=batch)
        except BaseException:
            transaction.abort()
            raise
        return transaction


def _rotated(runs: Runs, samples: int) -> Runs:
    """Return the runs from a random place on, then those before it. Few samples are not divided."""
    total = int(runs[:, 1].sum())
    if total <= samples:
        return runs
    skip = int(np.random.default_rng().integers(total // samples)) * samples
    ends = np.cumsum(runs[:, 1])
    at = int(np.searchsorted(ends, skip, side="right"))
    inside = skip - int(ends[at] - runs[at, 1])
    first, count = runs[at]
    parts = [[[first + inside, count - inside]], runs[at + 1 :], runs[:at], [[first, inside]]]
    turned = np.concatenate([np.asarray(part, np.int64).reshape(-1, 2) for part in parts])
    return turned[turned[:, 1] > 0]


def _chunks(runs: Runs, samples: int) -> Iterator[npt.NDArray[np.int64]]:
    """Yield row ids of runs, `samples` at a time."""
    parts: list[npt.NDArray[np.int64]] = []
    room = samples
    for first, count in runs.tolist():
        while count:
            now = min(count, room)
            parts.append(np.arange(first, first + now, dtype=np.int64))
            first, count, room = first + now, count - now, room - now
            if not room:
                yield np.concatenate(parts)
                parts, room = [], samples
    if parts:
        yield np.concatenate(parts)


def _inside(ids: npt.NDArray[np.int64], *sets: Runs) -> npt.NDArray[np.bool_]:
    """Return which row ids are in any of these sets."""
    found = np.zeros(len(ids), np.bool_)
    for runs in sets:
        at = np.searchsorted(runs[:, 0], ids, side="right") - 1
        found |= (at >= 0) & (ids < (runs[:, 0] + runs[:, 1])[at]) if len(runs) else False
    return found


def _nulls(values: Any) -> npt.NDArray[np.bool_]:
    """Return which values of a batch are null."""
    if isinstance(values, np.ma.MaskedArray):
        mask = np.ma.getmaskarray(values)
        return np.asarray(mask.reshape(len(mask), -1).all(axis=1), np.bool_)
    if isinstance(values, np.ndarray):
        return np.zeros(len(values), np.bool_)
    return np.fromiter((value is None for value in values), np.bool_, len(values))

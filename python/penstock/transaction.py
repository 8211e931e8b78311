"""Transactions, whose changes become one commit or are discarded."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, overload

import numpy as np
import numpy.typing as npt

from penstock import _core
from penstock.changes import boxes as box_checks
from penstock.changes import inputs, tables
from penstock.changes.call import Calls
from penstock.changes.checks import json_of, text_of
from penstock.changes.provisional import Mark
from penstock.changes.receipt import Receipt, receipt_of
from penstock.changes.schema_changes import SchemaChanges
from penstock.changes.stage import Stage
from penstock.changes.tables import Table
from penstock.errors import ClosedError, Error, InvalidInputError, NotFoundError
from penstock.schema import Schema
from penstock.views.keys import names_of
from penstock.views.view import View

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.dataset import Dataset


class Transaction(SchemaChanges):
    """Appends, updates and deletions that become one commit or are discarded.

    Other commits may be made in the meantime. The transaction is then committed after them. It is a ConflictError if one of them changed
    a value that this transaction read or changed, or deleted one of its samples; nothing is committed. With `isolation="snapshot"`,
    values that were only read do not count. After a ConflictError, refresh the handle and run the transaction again. After any other error
    of a call, the transaction is unchanged and continues, unless parts of a large input had been written: then `commit` refuses. It also
    refuses after Ctrl-C in a call, and while another thread is in one. After Ctrl-C in `commit`, look for the commit in the dataset's log.

    >>> import penstock as ps
    >>> ds = ps.create("memory://transaction", {"text": ps.Text()})
    >>> old = ds.append({"text": ["a", "b", "c"]}).row_ids
    >>> with ds.transaction("several changes") as tx:
    ...     new = tx.append({"text": ["d", "e"]})
    ...     tx.update({"text": ["A", "D"]}, row_ids=[old[0], new[0]])
    ...     count = tx.delete(row_ids=old[1:2])
    >>> ds["text"][:], ds.log()[0].message
    (['A', 'c', 'D', 'e'], 'several changes')
    """

    # Over 6 parameters: each is an argument of `Dataset.transaction`.
    def __init__(
        self,
        dataset: Dataset,
        message: str,
        author: str,
        properties: Mapping[str, Any] | None,
        isolation: str,
        journal: str | os.PathLike[str] | None = None,
        boxes: str = "refuse",
    ) -> None:
        self._dataset, self._boxes = dataset, box_checks.rule_of(boxes)
        self._message, self._author = text_of(message, "message"), text_of(author, "author")
        self._note(properties)
        if isolation not in ("serializable", "snapshot"):
            raise InvalidInputError(f"cannot begin a transaction: isolation={isolation!r}, expected 'serializable' or 'snapshot'")
        if journal is not None and not isinstance(journal, str | os.PathLike):
            raise InvalidInputError(f"cannot begin a transaction: journal={journal!r}, expected a path")
        self._journal = None if journal is None else text_of(os.fspath(journal), "journal")
        mode = isolation == "serializable", self._journal
        self._core = _core.begin(dataset._snapshot, self._message, self._author, self._properties, mode)
        self._mark = Mark(self._core.journal_mark())
        self._known: Schema | None = None
        self._receipt: Receipt | None = None
        self._calls = Calls(self._core)
        self._aborted = False

    @property
    def restored(self) -> int:
        """How many calls of an earlier process, whose journal this transaction continues, have been repeated."""
        return self._core.restored()

    @property
    def receipt(self) -> Receipt:
        """The receipt for the commit. Raises: ClosedError before the commit."""
        if self._receipt is None:
            raise ClosedError("cannot return a receipt: the transaction has not been committed")
        return self._receipt

    def append(self, columns: Table, *, validate: str = "header") -> npt.NDArray[np.int64]:
        """Add samples to the transaction. `columns` maps column names to one value per sample, or is another table; see `Dataset.append`.

        Returns provisional row ids, one per sample, which are negative. `update` and `delete` of this transaction accept them. The
        final row ids are in `receipt`.
        """
        # Another thread may append between two slices.
        return self._mark.outward(_ids_of(self.append_runs(columns, validate)))

    def append_runs(self, columns: Table, validate: str, first_row: int = 0) -> list[tuple[int, int]]:
        """Add samples like `append`. Returns runs of provisional row ids, each as its first id and its length. `first_row` is the number of the
        first sample in the user's input, for errors.
        """
        if (found := tables.columns_of(columns, "append", self._schema)) is None:
            return self._append_stream(columns, validate)
        ready, samples = inputs.ready_columns(self._schema, found, "append to", first_row)
        return self.append_parts(ready, self._parts(ready, samples), validate, first_row)

    def _append_stream(self, stream: Any, validate: str) -> list[tuple[int, int]]:
        if self._journal is not None:
            raise InvalidInputError("cannot append a stream: this transaction has a journal", hint="append its parts in separate calls")
        runs: list[tuple[int, int]] = []
        with self._calls.begin():
            for columns in tables.pieces(stream, self._schema, "append"):
                runs += self.append_runs(columns, validate, sum(count for _, count in runs))
        return runs

    def append_parts(
        self, ready: Mapping[str, Any], parts: Iterable[tuple[int, int]], validate: str, first_row: int = 0
    ) -> list[tuple[int, int]]:
        """Add these parts of columns that can be sliced. Returns runs of provisional row ids, as `append_runs` does."""
        runs = []
        with self._calls.begin():
            for start, end in parts:
                runs.append((self.append_slice(ready, start, end, validate, first_row), end - start))
        return runs

    @overload
    def update(self, columns: Mapping[str, Any], *, row_ids: npt.ArrayLike, validate: str = "header") -> None: ...

    @overload
    def update(self, columns: Mapping[str, Any], *, on: str, validate: str = "header") -> list[Any]: ...

    def update(
        self, columns: Mapping[str, Any], *, row_ids: npt.ArrayLike | None = None, on: str | None = None, validate: str = "header"
    ) -> list[Any] | None:
        """Give samples new values in some columns. `columns` maps column names to one value per row id; None is a null.

        If a row id is repeated, its last value counts. Columns that are left out keep their values. `row_ids` come from `_row_id`,
        a receipt, or `append` of this transaction. Other columns and samples are not rewritten: the new values are written to files
        of their own, together with the row ids (about 2 bytes each, or less). Boxes whose labels are not given must be as many as those that
        are stored, and labels as the boxes; these are read.

        With `on`, samples are found by their values in that column, as in `upsert`, and none are appended. Returns the keys that no sample
        has, as they were given; other values in their rows are not looked at. If another commit adds or changes one of the keys in the
        meantime, the commit is a ConflictError.

        Cost: finds the samples (a binary search each, or a scan of the key column), then as for `append`. Raises: NotFoundError
        (row-id-not-found, column-not-found), InvalidInputError (invalid-value, column-lengths-differ, key-not-unique), CorruptError
        (media-undecodable).

        >>> import penstock as ps
        >>> ds = ps.create("memory://update", {"label": ps.Label(["cat", "dog"]), "year": "int32"})
        >>> ids = ds.append({"label": ["cat", "cat", "dog"], "year": [2001, 2002, 2003]}).row_ids
        >>> with ds.transaction("fix labels") as tx:
        ...     tx.update({"label": ["dog", None]}, row_ids=ids[1:])
        >>> ds["label"][:2].tolist(), ds[2]["label"], ds["year"][:].tolist()
        ([0, 1], None, [2001, 2002, 2003])
        >>> with ds.transaction("by year") as tx:
        ...     missing = tx.update({"year": [2003, 1999], "label": ["cat", "cat"]}, on="year")
        >>> missing, ds["label"][:].tolist()
        ([1999], [0, 1, 0])
        """
        if (row_ids is None) == (on is None):
            raise InvalidInputError("cannot update: expected either row_ids or on")
        if on is not None:
            return self._update_on(columns, on, validate)
        ids = self._mark.inward(row_ids)
        ready, samples = inputs.ready(self._schema, columns, "update")
        if not ready or samples != len(ids):
            raise InvalidInputError(
                f"cannot update: {len(ids)} row ids for {samples} values in {len(ready)} columns",
                code="column-lengths-differ",
                hint="give at least one column, and one value for each row id",
            )
        parts = self._parts(ready, samples)
        with self._calls.begin(), self._mark.in_errors():
            for start, end in parts:
                self._update_part(ids, ready, (start, end), validate)
        return None

    def _update_on(self, columns: Mapping[str, Any], key: str, validate: str) -> list[Any]:
        ready, samples = inputs.ready(self._schema, columns, "update")
        if text_of(key, "on", "update") not in ready or len(ready) == 1:
            what = f"the key column `{key}` is not given" if key not in ready else "no column besides the key is given"
            raise InvalidInputError(f"cannot update: {what}", hint="give the keys, and the new values of at least one column")
        box_checks.check_given_together(self._schema, ready, "update")
        missing, parts = [], self._parts(ready, samples)
        with self._calls.begin(), self._mark.in_errors():
            for start, end in parts:
                rows = self._core.update_on(key, inputs.prepared(self._schema, ready, start, end, "update"), validate, start)
                missing += [start + row for row in rows.tolist()]
        return inputs.chosen(ready[key], missing)

    def _update_part(self, ids: npt.NDArray[np.int64], ready: Mapping[str, Any], part: tuple[int, int], validate: str) -> None:
        start, end = part
        rows = inputs.last(self._schema, ready, ids[start:end])
        if rows is None:
            self._update(ids[start:end], inputs.prepared(self._schema, ready, start, end, "update"), validate, start)
            return
        columns = {name: values[start:end][rows] for name, values in ready.items()}
        try:
            self._update(ids[start:end][rows], inputs.prepared(self._schema, columns, 0, len(rows), "update"), validate, 0)
        except Error as error:
            error.rows = [start + int(rows[row]) for row in error.rows]
            raise

    def _update(self, ids: npt.NDArray[np.int64], made: dict[str, Any], validate: str, first_row: int) -> None:
        def other_of(column: str) -> Any:
            self._core.note_read([column], ids)
            return self._view().take(row_ids=ids, columns=[column])[column]

        with contextlib.suppress(NotFoundError):  # The core names the row id that is missing.
            box_checks.check_stored(self._schema, made, other_of, first_row)
        self._core.update(ids, made, validate, first_row)

    def upsert(self, columns: Mapping[str, Any], *, key: str, validate: str = "header") -> npt.NDArray[np.int64]:
        """Update the samples whose value in column `key` is given in `columns`, and append the others. The given keys stay unique, unless a
        commit that began before this one appends them later.

        Returns one row id per key; those of new samples are provisional. If a key is repeated, its last sample counts. Columns that are
        left out keep their values. New samples get the fill value of such a column (see `add_column`), or null; an explicit None is a null.
        If another commit adds one of the keys in the meantime, the commit is a ConflictError. To change existing samples only, see `update`.
        A key is a whole number, bool, timestamp, text, bytes, label or category.

        Cost: reads the whole key column, and closes the data file of the last append. Give many keys in one call.
        Raises: InvalidInputError (key-not-unique if two samples have a key, invalid-value for a null).

        >>> import penstock as ps
        >>> ds = ps.create("memory://upsert", {"source": ps.Text(), "year": "int32"})
        >>> receipt = ds.append({"source": ["a.png", "b.png"], "year": [2001, 2002]})
        >>> with ds.transaction("two sources") as tx:
        ...     ids = tx.upsert({"source": ["b.png", "c.png"], "year": [2012, 2013]}, key="source")
        >>> ds["source"][:], ds["year"][:].tolist()
        (['a.png', 'b.png', 'c.png'], [2001, 2012, 2013])
        """
        ready, samples = inputs.ready(self._schema, columns, "upsert")
        if text_of(key, "key", "upsert") not in ready:
            raise InvalidInputError(f"cannot upsert: the key column `{key}` is not given", hint="give one key for each sample")
        box_checks.check_given_together(self._schema, ready, "upsert")
        ids, parts = [], self._parts(ready, samples)
        with self._calls.begin(), self._mark.in_errors():
            for start, end in parts:
                ids.append(self._core.upsert(key, inputs.prepared(self._schema, ready, start, end, "upsert"), validate, start))
        return self._mark.outward(np.concatenate(ids)) if ids else np.empty(0, np.int64)

    def delete(self, *, row_ids: npt.ArrayLike | None = None, where: str | None = None) -> int:
        """Delete samples by row id, or those for which an SQL condition is true. Returns how many. Later snapshots do not have them;
        earlier snapshots and loaders opened on those are not affected.

        `where` is a condition that DuckDB evaluates, such as `"year < 2000 AND label = 'cat'"`. It sees the changes of this transaction. It is
        true or false for a single sample: subqueries, aggregates, windows and parameters are refused, and so are numbers and texts. NaN is larger than all numbers.
        Dates and times are in UTC, whatever time zone the machine has, unless the condition names another one.
        If another commit appends or deletes samples, or changes the condition's columns, in the meantime, the commit is a ConflictError.
        Cost: finds the samples (a binary search each), or scans the condition's columns. The commit writes the row ids (about 2 bytes
        each, or less), and no data. Raises: NotFoundError (row-id-not-found, also for a sample that is already deleted;
        column-not-found), InvalidInputError for a condition that is not SQL.

        >>> import penstock as ps
        >>> ds = ps.create("memory://delete", {"year": "int32"})
        >>> ids = ds.append({"year": [2001, 2002, 2003]}).row_ids
        >>> with ds.transaction("delete one") as tx:
        ...     count = tx.delete(row_ids=[ids[1]])
        >>> ds["year"][:].tolist(), ds.take([0, 1], columns=["_row_id"])["_row_id"].tolist()
        ([2001, 2003], [0, 2])
        >>> with ds.transaction("delete others") as tx:
        ...     count = tx.delete(where="year < 2003")
        >>> count, ds["year"][:].tolist()
        (1, [2003])
        """
        if (row_ids is None) == (where is None):
            raise InvalidInputError("cannot delete: expected either row_ids or where")
        if where is None:
            ids = self._mark.inward(row_ids)
        else:
            from penstock.query import predicate

            read = lambda columns: self._core.note_read(columns, None)  # noqa: E731
            ids = self._mark.inward(predicate.matching(self._view(), where, read, self._mark.sql()))
        with self._calls.begin(), self._mark.in_errors():
            self._core.delete(ids)
        return len(np.unique(ids))

    def add(self, stages: Stage | Iterable[Stage]) -> npt.NDArray[np.int64]:
        """Add the samples of stages, which `Dataset.stage` made in any process. Returns one row id per sample, in the order of the stages.

        A stage is added once: for a stage that a commit of this branch already added, `add` adds nothing and returns the row ids that
        its samples have there. Other row ids are provisional. If another commit adds the same stage in the meantime, the commit is a
        ConflictError. Samples of a stage that were deleted remain deleted. Cost: reads the manifest, and the metadata of each file; no values.
        Raises: InvalidInputError (invalid-argument for a stage of another dataset, or with a column that was dropped), NotFoundError
        (object-not-found if its files are gone).

        >>> import penstock as ps
        >>> ds = ps.create("memory://add", {"n": "int64"})
        >>> stages = [ds.stage({"n": [1, 2]}), ds.stage({"n": [3]})]
        >>> with ds.transaction("two stages") as tx:
        ...     ids = tx.add(stages)
        >>> ds["n"][:].tolist(), tx.receipt.row_ids.tolist()
        ([1, 2, 3], [0, 1, 2])
        >>> with ds.transaction("again") as tx:
        ...     print(tx.add(stages), len(tx))
        [0 1 2] 3
        """
        listed = [stages] if isinstance(stages, Stage) or not isinstance(stages, Iterable) else list(stages)
        for stage in listed:
            if not isinstance(stage, Stage) or not isinstance(stage._data, bytes):
                raise InvalidInputError(f"cannot add a {type(stage).__name__}: expected what ds.stage returns")
        with self._calls.begin():
            added = self._core.add([stage._data for stage in listed])
        return self._mark.outward(_ids_of(run for runs in added for run in runs))

    def overwrite(self, columns: Mapping[str, Any], *, validate: str = "header") -> npt.NDArray[np.int64]:
        """Delete all samples that this transaction sees, and append these ones. Returns provisional row ids, as `append` does.

        If another commit changes or deletes any of these samples in the meantime, or appends any, the commit is a ConflictError. (With
        `isolation="snapshot"`, samples that it appends remain.) Earlier snapshots keep the samples. Memory: 8 bytes per deleted sample.

        >>> import penstock as ps
        >>> ds = ps.create("memory://overwrite", {"n": "int32"})
        >>> receipt = ds.append({"n": [1, 2, 3]})
        >>> with ds.transaction("another version") as tx:
        ...     ids = tx.overwrite({"n": [7]})
        >>> ds["n"][:].tolist(), len(ps.open("memory://overwrite", snapshot=receipt.snapshot))
        ([7], 3)
        """
        if self._journal is not None:
            raise InvalidInputError("cannot overwrite: this transaction has a journal", hint="use a transaction without `journal=`")
        self._core.note_read(list(self._schema), None)
        scanned = self._view().scan(["_row_id"], batch_size=1 << 16)
        before = np.concatenate([np.empty(0, np.int64), *(batch.column("_row_id").to_numpy() for batch in scanned)])
        with self._calls.begin():
            new = self.append(columns, validate=validate)  # If a value is refused, nothing has been deleted.
            self._core.delete(before)
        return new

    def take(
        self, row_ids: npt.ArrayLike, *, columns: Sequence[str] | None = None, decode: bool = True, on_corrupt: str = "raise"
    ) -> dict[str, Any]:
        """Read samples as this transaction sees them: with its own updates, appended samples and deletions. See `Dataset.take`.

        Cost: one copy. New values are read from memory until they exceed an eighth of the memory budget. If another commit changes
        these values in the meantime, the commit is a ConflictError.

        >>> import penstock as ps
        >>> ds = ps.create("memory://tx-take", {"n": "int64"})
        >>> ids = ds.append({"n": [1, 2, 3]}).row_ids
        >>> with ds.transaction("add 10") as tx:
        ...     tx.update({"n": tx.take(ids[1:])["n"] + 10}, row_ids=ids[1:])
        ...     print(tx.take(ids)["n"])
        [ 1 12 13]
        """
        ids = self._mark.inward(row_ids)
        # A missing sample is also something that was read.
        self._core.note_read(self._stored(columns), ids)
        with self._mark.in_errors():
            batch = self._view().take(row_ids=ids, columns=columns, decode=decode, on_corrupt=on_corrupt)
        if "_row_id" in batch:
            batch["_row_id"] = self._mark.outward(batch["_row_id"])
        return batch

    def scan(self, columns: Sequence[str] | None = None, *, batch_size: int = 1024) -> pa.RecordBatchReader:
        """Read all samples as this transaction sees them, as record batches. See `Dataset.scan`.

        If another commit appends or deletes samples, or changes these columns, in the meantime, the commit is a ConflictError.
        """
        self._core.note_read(self._stored(columns), None)
        scanned = self._view().scan(columns, batch_size=batch_size)
        return type(scanned).from_batches(scanned.schema, self._mark.batches(scanned))

    def _stored(self, columns: Sequence[str] | None) -> list[str]:
        """Return the columns that a read needs."""
        return list(self._schema) if columns is None else [name for name in names_of(columns) or [] if name in self._schema]

    def vocabulary(self, column: str) -> list[str]:
        """List the words of a label or category column in code order, with those that this transaction added."""
        if text_of(column, "column", "list words") in self._schema:
            self._core.note_read([column], None)
        return self._view().vocabulary(column)

    def __len__(self) -> int:
        """The number of samples that this transaction sees. This counts as a read of all samples: a concurrent append is a conflict."""
        self._core.note_read([], None)
        return len(self._core.view()[1])

    def __reduce__(self) -> NoReturn:
        raise InvalidInputError("cannot pickle a transaction", hint="pickle the dataset, and begin a transaction in the other process")

    def __bool__(self) -> bool:
        return True

    def _view(self) -> View:
        return View(*self._core.view())

    def _parts(self, ready: Mapping[str, Any], samples: int) -> list[tuple[int, int]]:
        """Cut large inputs into parts. With a journal, a call is one part, so that it is repeated as a whole or not at all."""
        parts = inputs.parts(self._schema, ready, samples)
        if self._journal is not None and len(parts) > 1:
            raise InvalidInputError(
                f"cannot change {samples} samples in one call: this transaction has a journal", hint=f"give at most {parts[0][1]} at a time"
            )
        return parts

    def append_slice(self, ready: Mapping[str, Any], start: int, end: int, validate: str, first_row: int = 0) -> int:
        """Append rows start…end of columns that can be sliced. One call to the core appends either all of these rows or none.

        Returns the provisional row id of the first of them.
        """
        prepared = inputs.prepared(self._schema, ready, start, end, "append to", first_row)
        return self._core.append(prepared, validate, first_row + start)

    def commit(self) -> Receipt:
        """Commit now and move the dataset handle to the new snapshot. Cost on a local disk: two syncs for up to 2 KiB, else four."""
        try:
            self._calls.close()
        except ClosedError:
            if self._calls.failed is not None:
                self._core.abort(True)
            raise
        self._receipt, snapshot = receipt_of(self._core.commit(self._message, self._author, self._properties))
        self._dataset._move(snapshot)
        return self._receipt

    def abort(self) -> None:
        """Abort the transaction and delete the data that it wrote, and its journal."""
        self._core.abort(False)
        self._aborted = True

    def _note(self, properties: Mapping[str, Any] | None) -> None:
        """Set the properties of the commit."""
        self._properties = json_of(properties, "begin a transaction")

    def __enter__(self) -> Transaction:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self._aborted = True
            self._core.abort(True)  # A journal remains, because the next process may continue it.
        elif self._receipt is None and not self._aborted:
            self.commit()


def _ids_of(runs: Iterable[tuple[int, int]]) -> npt.NDArray[np.int64]:
    """Return the row ids of runs, each given as its first id and its length."""
    parts = [np.arange(first, first + count, dtype=np.int64) for first, count in runs]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)

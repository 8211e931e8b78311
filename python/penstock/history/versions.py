"""The versions of a dataset: its log, the differences between snapshots, tags, pins, and branches."""

from __future__ import annotations

import functools
import getpass
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from penstock import _core
from penstock.changes.checks import json_of, text_of
from penstock.changes.receipt import Receipt
from penstock.errors import InvalidInputError, NotFoundError
from penstock.history.log import Commit, Compaction, Difference, Log
from penstock.views.view import View

# What names a snapshot: an id or the beginning of one, a branch, a tag, a receipt, a commit, or a view.
Which = str | View | Receipt | Commit


def author_of() -> str:
    """Return the author of commits: PENSTOCK_AUTHOR, or the name of the user."""
    try:
        return os.environ.get("PENSTOCK_AUTHOR") or _user(os.getuid())
    except (KeyError, OSError):
        return ""


@functools.cache
def _user(_uid: int) -> str:
    return getpass.getuser()


def snapshot_id_of(which: Any, doing: str) -> str:
    """Return the snapshot id of a receipt, a commit or a view. Text is returned unchanged."""
    found = getattr(which, "snapshot", which)
    if not isinstance(found, str):
        raise InvalidInputError(
            f"cannot {doing} snapshot {which!r}: expected an id, a receipt or a commit", hint="use an id from ds.snapshot or ds.log()"
        )
    return text_of(found, "snapshot", f"{doing} a snapshot")


class Versions(View):
    """A view of one snapshot that can move to other snapshots of its branch."""

    # Whether this handle was opened at a snapshot, tag or time, and has not moved since.
    _fixed = False

    def __init__(self, snapshot: _core.Snapshot) -> None:
        super().__init__(snapshot, snapshot.view())

    def _move(self, snapshot: _core.Snapshot) -> None:
        """Move to a later snapshot. If two threads commit through the same handle, it ends up at the later snapshot."""
        view = snapshot.view()
        if snapshot.number >= self._snapshot.number:
            self._snapshot, self._view, self._fixed = snapshot, view, False

    def _as_it_is(self) -> View:
        return View(self._snapshot, self._view)

    def log(self, limit: int | None = None) -> Log:
        """Return the commits of which this snapshot consists, newest first, as a sequence that reads them when they are needed.

        After a merge, these are the commits of both branches, in the order of their times. Cost: one read per commit.

        >>> import penstock as ps
        >>> ds = ps.create("memory://log", {"n": "int32"})
        >>> receipt = ds.append({"n": [1]}, message="first numbers")
        >>> [commit.message for commit in ds.log()]
        ['first numbers', 'create']
        """
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
            raise InvalidInputError(f"cannot list {limit!r} commits: expected a whole number")
        return Log(self._snapshot.log(), limit)

    def diff(self, since: Which, until: Which | None = None) -> Iterator[Difference]:
        """Compare two snapshots of this dataset: which samples were added or deleted, and which have other values, and in which columns.

        Each snapshot is an id, a branch, a tag, or a handle; `until` is this handle's snapshot by default. Yields groups of at most 65,536 samples.
        A sample may be in several groups, one for each column that changed.
        Cost: reads the manifest pages and row ids that only one of the snapshots has, and the values that may have changed, in both.
        Raises: NotFoundError (snapshot-not-found, name-not-found).

        >>> import penstock as ps
        >>> ds = ps.create("memory://diff", {"n": "int32", "t": ps.Text()})
        >>> before = ds.append({"n": [1, 2, 3], "t": ["a", "b", "c"]})
        >>> with ds.transaction() as tx:
        ...     ids = tx.append({"n": [4]})
        ...     tx.update({"n": [1, 20]}, row_ids=before.row_ids[:2])
        ...     count = tx.delete(row_ids=[2])
        >>> for found in ds.diff(before.snapshot):
        ...     print(found.kind, found.column, found.row_ids)
        added None [3]
        deleted None [2]
        changed n [1]
        """
        diff = self._at(since).diff(self._snapshot if until is None else self._at(until))
        while (found := diff.next()) is not None:
            yield Difference(*found)

    def _at(self, which: Which) -> _core.Snapshot:
        """Return the snapshot with this id, or the newest one of this branch, or the one of this tag."""
        if isinstance(which, View):
            if which._snapshot.dataset_id != self._snapshot.dataset_id:
                raise InvalidInputError(f"`{which.uri}` is another dataset than `{self.uri}`", hint="open snapshots of the same dataset")
            if not which._view.is_all():
                raise InvalidInputError(
                    "cannot use a selection of samples as a snapshot", hint="give the dataset that the samples were selected from"
                )
            return which._snapshot
        text = snapshot_id_of(which, "find")
        digits = re.fullmatch(r"[0-9a-f]+-\d+(?:-([0-9a-f]{0,32}))?", text)
        if digits is not None and len(digits[1] or "") == 32:
            return self._snapshot.at(text, None)
        try:
            return self._snapshot.at(None, text)
        except NotFoundError as error:
            if digits is None or error.code != "name-not-found":
                raise
            return self._snapshot.at(text, None)  # No branch and no tag has this name, so it is the beginning of an id.

    def resolve(self, snapshot: str) -> bool:
        """Return whether a commit succeeded that raised `commit-state-unknown`, given the snapshot that its message names.

        Cost: one read. Raises: UnavailableError (commit-state-unknown) if the answer may still change; the next commit decides it.

        >>> import penstock as ps
        >>> ds = ps.create("memory://resolve", {"n": "int32"})
        >>> receipt = ds.append({"n": [1]})
        >>> ds.resolve(receipt.snapshot), ds.resolve("0-1-" + "0" * 32)
        (True, False)
        """
        return self._snapshot.resolve(text_of(snapshot, "snapshot", "resolve a commit"))

    def create_tag(self, name: str, snapshot: Which | None = None) -> None:
        """Name this handle's snapshot, or another one, until the tag is deleted. `ps.open(tag=)` opens it.

        `snapshot` is an id, a branch, a tag or a handle. A name has 1 to 255 bytes, and is not the beginning of a snapshot id, such as `0-1`. If several processes create one tag, one of them succeeds. Cost: a few requests and one put, however many tags there are.
        Raises: AlreadyExistsError (name-exists), NotFoundError (snapshot-not-found), InvalidInputError (invalid-argument).

        >>> import penstock as ps
        >>> ds = ps.create("memory://tags", {"number": "int32"})
        >>> ds.create_tag("empty")
        >>> receipt = ds.append({"number": [1, 2]})
        >>> len(ps.open("memory://tags", tag="empty")), list(ds.tags())
        (0, ['empty'])
        """
        target = None if snapshot is None else self._at(snapshot).id
        self._snapshot.create_tag(text_of(name, "tag", "create a tag"), target)

    def delete_tag(self, name: str) -> None:
        """Delete a tag. Its snapshot remains. Raises: NotFoundError (name-not-found)."""
        self._snapshot.delete_tag(text_of(name, "tag", "delete a tag"))

    def tags(self) -> dict[str, str]:
        """Return a dict of tags to snapshot ids. Cost: a search for the newest names record, and two requests if it has changed."""
        return self._snapshot.tags()

    def pins(self) -> dict[str, str]:
        """Return a dict of pin names to snapshot ids. A pinned snapshot is never garbage-collected. `loader(pin=True)` creates pins.

        Cost: as for `tags`.

        >>> import penstock as ps
        >>> ds = ps.create("memory://pins", {"number": "int32"})
        >>> receipt = ds.append({"number": [1, 2]})
        >>> loader = ds.loader(batch_size=2, pin=True)
        >>> [name] = ds.pins()
        >>> ds.pins()[name] == ds.snapshot, ds.unpin(name), ds.pins()
        (True, None, {})
        """
        return self._snapshot.pins()

    def unpin(self, name: str) -> None:
        """Remove a pin. Raises: NotFoundError if no pin has that name. Costs one more put than `pins`."""
        if not isinstance(name, str) or not self._snapshot.unpin(name):
            raise NotFoundError(f"`{self.uri}` has no pin {name!r}", hint="see ds.pins()")

    @property
    def branch(self) -> str | None:
        """The name of the branch to which this handle commits, or None if the branch was deleted. Cost: as for `tags`, except for "main".

        >>> import penstock as ps
        >>> ps.create("memory://branch", {"n": "int32"}).branch
        'main'
        """
        return _core.branch_name(self._snapshot)

    def branches(self) -> dict[str, str]:
        """Return a dict of branches to the ids of their newest snapshots. Cost: as for `tags`, and two reads per branch."""
        return _core.branches(self._snapshot)

    def create_branch(self, name: str, snapshot: Which | None = None) -> Self:
        """Create a branch that begins at this handle's snapshot, or at another one, and return a handle for it.

        Commits to the handle go to the branch; `merge` brings them back. `snapshot` is an id, a branch, a tag or a handle. Branches and
        tags share one set of names. Cost: two small objects, however large the dataset is.
        Raises: AlreadyExistsError (name-exists), NotFoundError (snapshot-not-found), InvalidInputError (invalid-argument).

        >>> import penstock as ps
        >>> ds = ps.create("memory://create-branch", {"n": "int32"})
        >>> receipt = ds.append({"n": [1, 2]})
        >>> exp = ds.create_branch("exp")
        >>> receipt = exp.append({"n": [3]})
        >>> len(exp), len(ds), len(ps.open("memory://create-branch", branch="exp"))
        (3, 2, 3)
        """
        at = self._snapshot if snapshot is None else self._at(snapshot)
        return type(self)(_core.create_branch(at, text_of(name, "branch", "create a branch"), author_of()))

    def delete_branch(self, name: str) -> None:
        """Delete a branch. Its snapshots remain, and a merge of them is not affected. Later commits to the branch are refused. If several processes
        delete it at once, all of them succeed. If a fault interrupts it, the branch has ended, and its name is free for another branch or tag.

        Raises: NotFoundError (branch-not-found), InvalidInputError (invalid-argument) for "main".
        """
        _core.delete_branch(self._snapshot, text_of(name, "branch", "delete a branch"), author_of())

    # Over 6 parameters: callers pass them by name, except the first.
    def merge(
        self,
        other: Which,
        *,
        on_conflict: str | Mapping[str, str] = "fail",
        message: str | None = None,
        author: str | None = None,
        properties: Mapping[str, Any] | None = None,
    ) -> Receipt:
        """Merge a branch, or another snapshot, into this handle's branch as one commit with two parents, and move the handle there.

        The branch gets the samples that the other side added since both were one, without those that it deleted, and its new values. Row
        ids remain the same. A value that both sides changed differently is a conflict. So is a sample that one side changed and the other
        one deleted. A sample that never lived on this branch was not deleted here, so a merge brings it. One that either side had and deleted is deleted,
        unless the other side has other values of it: then it is a conflict. `on_conflict` is "fail", "ours" (this branch) or "theirs", or a dict of column names to these; "*" means all other columns.
        Returns the new snapshot and the row ids of the samples that the branch got. If the branch has all commits of the other side already,
        no commit is made. Unique keys of `upsert` are not checked: if both sides added one key, both samples remain. If both
        sides added one stage, one of them must delete its samples first.
        If each side merged an older commit of the other one, there are several common ancestors.
        A value is also a conflict if they disagree.

        Cost: reads the manifest pages and row ids in which both sides and their common ancestor differ. Reads the values that both sides
        may have changed. Data files are shared, not copied. If this branch has no commits of its own, nothing else is read.
        Raises: ConflictError (conflict) with the columns and the first row ids, NotFoundError (branch-not-found, name-not-found,
        snapshot-not-found, column-not-found), InvalidInputError (invalid-argument).

        >>> import penstock as ps
        >>> ds = ps.create("memory://merge", {"label": ps.Label(["cat", "dog"]), "year": "int32"})
        >>> ids = ds.append({"label": ["cat", "cat"], "year": [2001, 2002]}).row_ids
        >>> exp = ds.create_branch("exp")
        >>> with exp.transaction("fix a label") as tx:
        ...     tx.update({"label": ["dog"]}, row_ids=ids[:1])
        ...     new = tx.append({"label": ["dog"], "year": [2003]})
        >>> with ds.transaction("fix a year") as tx:
        ...     tx.update({"year": [2012]}, row_ids=ids[1:])
        >>> receipt = ds.merge("exp")
        >>> ds["label"][:].tolist(), ds["year"][:].tolist(), len(ds.log()[0].parents)
        ([1, 0, 1], [2001, 2012, 2003], 2)
        """
        theirs = self._at(other)
        name = other if isinstance(other, str) else theirs.id
        texts = self._texts(f"merge {name}" if message is None else message, author, properties, "merge")
        return self._moved(*_core.merge(self._snapshot, theirs.id, _policies(on_conflict), texts))

    # Over 6 parameters: callers pass them by name, except the first.
    def cherry_pick(
        self,
        commit: Which,
        *,
        on_conflict: str | Mapping[str, str] = "fail",
        message: str | None = None,
        author: str | None = None,
        properties: Mapping[str, Any] | None = None,
    ) -> Receipt:
        """Copy the changes of one commit to this handle's branch: what differs between it and its first parent.

        The samples that the commit added keep their row ids, so that a later merge does not add them again. Nothing else comes with them: samples
        beside them that never lived on this branch come with a later merge or copy. A sample that the commit changed and this branch
        lacks is a conflict. `on_conflict="theirs"` brings it, and "ours" leaves it out. A sample that this branch deleted remains deleted.
        See `merge` for `on_conflict`, errors and costs. If the branch has all of the changes already, no commit is made.

        >>> import penstock as ps
        >>> ds = ps.create("memory://cherry-pick", {"n": "int32"})
        >>> exp = ds.create_branch("exp")
        >>> first, second = exp.append({"n": [1]}), exp.append({"n": [2]})
        >>> receipt = ds.cherry_pick(second.snapshot)
        >>> ds["n"][:].tolist()
        [2]
        """
        theirs = self._at(commit)
        texts = self._texts(f"copy of {theirs.id}" if message is None else message, author, properties, "copy a commit")
        return self._moved(*_core.cherry_pick(self._snapshot, theirs.id, _policies(on_conflict), texts))

    def reset(self, snapshot: Which, *, message: str | None = None, author: str | None = None) -> Receipt:
        """Give this handle's branch the state of another snapshot, as a new commit, and move the handle there.

        `snapshot` is an id, a branch, a tag or a handle. The commits in between remain in the log. Any transaction that began before is a
        conflict. Row ids are never used twice. Cost: reads the manifest pages in which the snapshots differ, and writes one small object or two.
        Raises: ConflictError (conflict) if the branch has commits that this handle has not seen; refresh it first.

        >>> import penstock as ps
        >>> ds = ps.create("memory://reset", {"n": "int32"})
        >>> good = ds.append({"n": [1, 2]})
        >>> bad = ds.append({"n": [-1]})
        >>> receipt = ds.reset(good.snapshot)
        >>> ds["n"][:].tolist(), [commit.kind for commit in ds.log()]
        ([1, 2], ['reset', 'data', 'data', 'create'])
        """
        target = self._at(snapshot)
        texts = self._texts(f"reset to {target.id}" if message is None else message, author, None, "reset a branch")
        return self._moved(_core.reset(self._snapshot, target.id, texts), np.empty(0, np.int64))

    def compact(self, *, message: str = "compact", author: str | None = None) -> Compaction:
        """Write small and worn fragments of the newest snapshot again as a few large ones, as one commit, and move the handle there.

        Many small commits leave many small files, new values beside the old ones, and deleted samples in the files. A read then needs many requests. All
        values, row ids and positions stay the same. Fragments below 32 MiB are joined with their neighbours. Larger ones are written again if they have
        new values, but not the files of other columns. They are also written again if more than a tenth of their samples is deleted. Other writers may
        commit in the meantime. Old snapshots keep their files. If there is nothing to do, no commit is made.

        Cost: reads and writes the values of these fragments once, in an eighth of the memory budget.
        Raises: ConflictError (conflict) if others compact, reset or merge the branch all the time, UnavailableError (storage-failed).

        >>> import penstock as ps
        >>> ds = ps.create("memory://compact", {"n": "int32"})
        >>> ids = [ds.append({"n": [number]}).row_ids[0] for number in range(10)]
        >>> with ds.transaction() as tx:
        ...     deleted = tx.delete(row_ids=ids[:2])
        ...     tx.update({"n": [50]}, row_ids=ids[5:6])
        >>> done = ds.compact()
        >>> done.fragments, done.new_fragments, done.dropped_samples, ds["n"][:].tolist()
        (10, 1, 2, [2, 3, 4, 50, 6, 7, 8, 9])
        """
        snapshot, counts = _core.compact(self._snapshot, self._texts(message, author, None, "compact"))
        self._move(snapshot)
        return Compaction(snapshot.id, **counts)

    def _texts(self, message: str, author: str | None, properties: Mapping[str, Any] | None, doing: str) -> tuple[str, str, str]:
        author = author_of() if author is None else text_of(author, "author", doing)
        return text_of(message, "message", doing), author, json_of(properties, doing)

    def _moved(self, snapshot: _core.Snapshot, row_ids: npt.NDArray[np.int64]) -> Receipt:
        self._move(snapshot)
        return Receipt(snapshot.id, row_ids)


def _policies(on_conflict: str | Mapping[str, str]) -> tuple[str, list[tuple[str, str]]]:
    """Return the policy of most columns, and those of the columns that are named."""
    if isinstance(on_conflict, str):
        return on_conflict, []
    if not isinstance(on_conflict, Mapping) or not all(isinstance(text, str) for pair in on_conflict.items() for text in pair):
        raise InvalidInputError(
            f"cannot merge: on_conflict is {on_conflict!r}, expected fail, ours, theirs, or a dict of column names to these"
        )
    columns = [(name, policy) for name, policy in on_conflict.items() if name != "*"]
    return on_conflict.get("*", "fail"), columns

"""`create`, `open` and `Dataset`: everything that creates a dataset or moves a handle to another snapshot."""

from __future__ import annotations

import dataclasses
import datetime
import getpass
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock import _core
from penstock.errors import InvalidInputError, NotFoundError
from penstock.schema import to_json
from penstock.transaction import Receipt, Transaction, _text
from penstock.values.checks import is_utf8
from penstock.view import View


def configure(*, memory_bytes: int | None = None, threads: int | None = None, image_pixels: int | None = None) -> dict[str, int]:
    """Set this process's budgets and return all current budgets.

    `memory_bytes`: memory shared by caches and writers (default 512 MiB, or an eighth of the cgroup limit if lower; at least 16 MiB).
    A dataset opened afterwards may use up to a quarter of this budget for data-file metadata. `threads`: the maximum number of threads
    per call (default: the number of available CPUs divided by LOCAL_WORLD_SIZE). `image_pixels`: the maximum number of pixels per image
    (default 2^28).

    >>> configure(threads=2)["threads"]
    2
    """
    for name, value in (("memory_bytes", memory_bytes), ("threads", threads), ("image_pixels", image_pixels)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**63):
            raise InvalidInputError(f"cannot configure {name}={value!r}: expected a whole number above 0")
    names = ("memory_bytes", "threads", "image_pixels")
    return dict(zip(names, _core.configure(memory_bytes, threads, image_pixels), strict=True))


def _author() -> str:
    try:
        return os.environ.get("PENSTOCK_AUTHOR") or getpass.getuser()
    except (KeyError, OSError):
        return ""


def _uri(uri: str | os.PathLike[str]) -> str:
    text = os.fspath(uri)
    if not isinstance(text, str):
        raise InvalidInputError(f"cannot open {uri!r}: expected a str or a Path", code="invalid-uri")
    if not is_utf8(text):
        raise InvalidInputError(f"cannot open {text!r}: the path is not UTF-8", code="invalid-uri")
    return text


def create(
    uri: str | os.PathLike[str],
    schema: Mapping[str, Any],
    *,
    message: str = "create",
    storage_options: Mapping[str, Any] | None = None,
) -> Dataset:
    """Create a dataset with commit 0, and create any missing parent folders of a local path. See `open` for `storage_options`.

    Raises: AlreadyExistsError (dataset-exists), InvalidInputError (invalid-schema, folder-not-empty), UnsupportedError
    (unsupported-storage, if storage cannot create an object without overwriting), PermissionDeniedError (credentials-missing,
    credentials-refused, permission-denied), NotFoundError (bucket-not-found), UnavailableError (storage-unreachable).

    >>> import penstock as ps
    >>> ds = ps.create("memory://create", {"image": ps.Image(), "year": "int32", "vector": ps.Tensor((768,), "float32")})
    >>> len(ds), list(ds.schema)
    (0, ['image', 'year', 'vector'])
    """
    return Dataset(
        _core.create(_uri(uri), to_json(schema), _text(message, "message", "create a dataset"), _author(), _options(storage_options))
    )


# Over 6 parameters: callers pass them by name, except the first.
def open(
    uri: str | os.PathLike[str],
    *,
    branch: str = "main",
    snapshot: str | None = None,
    tag: str | None = None,
    as_of: datetime.datetime | str | None = None,
    io: str = "auto",
    storage_options: Mapping[str, Any] | None = None,
) -> Dataset:
    """Open a dataset at its newest snapshot, or at a snapshot given by its id, by a tag, or by a time.

    `as_of` opens the newest snapshot that was committed at or before a time. It is a datetime with a time zone, or text such as
    "2026-11-20T12:00:00Z" or "2026-11-20", which is midnight in UTC.

    `uri` is a path, file://, memory://, s3://, gs://, az://, or http(s):// for reading. `io` selects how local files are read:
    "auto" and "mapped" map them, "buffered" reads only the ranges that a call to `take` needs, and "direct" does the same without
    the page cache.

    `storage_options` for S3: endpoint_url, region, profile, access_key_id, secret_access_key, session_token, anonymous (bool),
    virtual_hosted (bool), ca_bundle (path to a PEM file). An omitted option is taken from its AWS_… variable or the profile.
    For every object store: timeout_seconds (deadline for one operation, default 60), hedge (bool: send a second request for a
    range that takes unusually long). A pickled handle contains all of these options except access_key_id,
    secret_access_key and session_token.

    Cost: on local disk, three reads (of the hint, the record and the root) and three look-ups. On object storage, three requests: one
    lists a single name, and two read the record and the root. The cost does not grow with the number of samples. Opening a local copy also
    lists its data files, until the first commit to that copy. A tag costs two requests more, `as_of` one for each doubling of the number
    of commits. Raises: NotFoundError (dataset-not-found, snapshot-not-found, name-not-found, branch-not-found), CorruptError (log-incomplete,
    copy-incomplete), UnsupportedError (unknown-feature).
    """
    if branch != "main":
        raise NotFoundError(
            f"cannot open branch `{branch}` of `{uri}`: there is no such branch",
            code="branch-not-found",
            hint="this release supports only `main`",
        )
    if snapshot is not None and not isinstance(snapshot, str):
        raise InvalidInputError(f"cannot open snapshot {snapshot!r}: expected a str", hint="use an id from ds.snapshot or ds.log()")
    if sum(given is not None for given in (snapshot, tag, as_of)) > 1:
        raise InvalidInputError(f"cannot open `{uri}`: expected only one of snapshot, tag and as_of")
    if tag is not None:
        _text(tag, "tag", "open a dataset")
    opened = _core.open(
        _uri(uri), snapshot, _options(storage_options), _text(io, "io", "open a dataset"), tag=tag, as_of_us=_microseconds(as_of)
    )
    return Dataset(opened)


def _microseconds(time: datetime.datetime | str | None) -> int | None:
    """Convert a time to microseconds since 1970 UTC."""
    if time is None:
        return None
    if isinstance(time, str):
        try:
            given = datetime.datetime.fromisoformat(time)
        except ValueError as error:
            raise InvalidInputError(f"cannot open a dataset as of {time!r}: {error}", hint="write 2026-11-20T12:00:00Z") from error
        time = given if given.tzinfo else given.replace(tzinfo=datetime.UTC)
    if not isinstance(time, datetime.datetime) or time.tzinfo is None:
        raise InvalidInputError(
            f"cannot open a dataset as of {time!r}: expected text or a datetime with a time zone",
            hint="use datetime.datetime.now(datetime.UTC), or text in UTC",
        )
    return (time - datetime.datetime.fromtimestamp(0, datetime.UTC)) // datetime.timedelta(microseconds=1)


def open_incomplete(
    uri: str | os.PathLike[str], snapshot: str | None = None, tag: str | None = None, as_of: datetime.datetime | str | None = None
) -> Dataset:
    """Open a dataset like `open`, but accept an incomplete copy, so that `verify` can name the missing objects."""
    return Dataset(_core.open(_uri(uri), snapshot, incomplete=True, tag=tag, as_of_us=_microseconds(as_of)))


def _options(given: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if given is None:
        return []
    if not isinstance(given, Mapping):
        raise InvalidInputError(f"storage_options is a {type(given).__name__}, expected a dict of option names to values")
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, str | bool | int | float | os.PathLike):
            raise InvalidInputError(f"storage_options[{name!r}] is a {type(value).__name__}, expected str, number, bool or Path")
    return [(name, os.fspath(value) if isinstance(value, os.PathLike) else str(value)) for name, value in given.items()]


@dataclasses.dataclass(frozen=True)
class Commit:
    """An entry in `ds.log()`. `time` is in UTC; `samples` is the number of samples in the snapshot."""

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


@dataclasses.dataclass(frozen=True)
class Difference:
    """An entry in `ds.diff()`: samples that were "added", "deleted" or "changed", by row id. `column` is the column that changed."""

    kind: str
    column: str | None
    row_ids: npt.NDArray[np.int64]


class Dataset(View):
    """A dataset at one snapshot: a `View` that can also write.

    A handle sees its own commits immediately, and other writers' commits after `refresh()` is called.
    """

    def __init__(self, snapshot: _core.Snapshot) -> None:
        super().__init__(snapshot, snapshot.view())

    def _move(self, snapshot: _core.Snapshot) -> None:
        """Move to a later snapshot. If two threads commit through the same handle, it ends up at the later snapshot."""
        view = snapshot.view()
        if snapshot.number >= self._snapshot.number:
            self._snapshot, self._view = snapshot, view

    def _as_it_is(self) -> View:
        return View(self._snapshot, self._view)

    def refresh(self) -> Dataset:
        """Move to the newest snapshot and return self. Costs at most as much as `open`."""
        self._move(self._snapshot.refresh())
        return self

    def append(self, columns: Mapping[str, Any], *, message: str = "append", validate: str = "header") -> Receipt:
        """Append samples as one commit. `columns` maps column names to one value per sample. None is a null; omitted columns are all null.

        Cost: encodes on all threads, writes the bytes to data files once, then syncs four times. `validate="decode"` checks every pixel
        of media; `"header"` checks only their headers. Memory: up to `ps.configure(memory_bytes=…)`, in addition to the caller's data.
        Raises: InvalidInputError (invalid-value, column-lengths-differ), CorruptError (media-undecodable, with `.rows`),
        NotFoundError (column-not-found), UnavailableError (commit-state-unknown). On any other error, nothing is committed.
        After a KeyboardInterrupt, check `log()`: Ctrl-C may arrive just after the commit.

        >>> import penstock as ps
        >>> ds = ps.create("memory://append", {"year": "int32"})
        >>> ds.append({"year": [1999, None]}).row_ids.tolist()
        [0, 1]
        """
        with self.transaction(message) as transaction:
            transaction.append_runs(columns, validate)
        return transaction.receipt

    def transaction(
        self,
        message: str = "",
        *,
        author: str | None = None,
        properties: Mapping[str, Any] | None = None,
        isolation: str = "serializable",
    ) -> Transaction:
        """Begin a transaction. In a `with` block, it commits at the end or, on an exception, aborts and deletes its data.

        With `isolation="snapshot"`, other commits may change values that this transaction only read.
        """
        if not isinstance(properties, Mapping | None):
            raise InvalidInputError(f"cannot begin a transaction: its properties are a {type(properties).__name__}, expected a dict")
        return Transaction(self, message, author if author is not None else _author(), dict(properties or {}), isolation)

    def log(self, limit: int | None = None) -> list[Commit]:
        """List commits, newest first. Cost: one read per commit."""
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
            raise InvalidInputError(f"cannot list {limit!r} commits: expected a whole number")
        return [_commit(entry) for entry in self._snapshot.log(limit)]

    def diff(self, since: str | View, until: str | View | None = None) -> Iterator[Difference]:
        """Compare two snapshots of this dataset: which samples were added or deleted, and which have other values, and in which columns.

        Each snapshot is an id, a tag, or a handle; `until` is this handle's snapshot by default. Yields groups of at most 65,536 samples.
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

    def _at(self, which: str | View) -> _core.Snapshot:
        """Return the snapshot with this id or tag."""
        if isinstance(which, View):
            return which._snapshot
        text = _text(which, "snapshot", "compare snapshots")
        is_id = re.fullmatch(r"[0-9a-f]+-\d+-[0-9a-f]{32}", text) is not None
        return self._snapshot.at(text if is_id else None, None if is_id else text)

    def resolve(self, snapshot: str) -> bool:
        """Return whether a commit succeeded that raised `commit-state-unknown`, given the snapshot that its message names.

        Cost: one read. Raises: UnavailableError (commit-state-unknown) if the answer may still change; the next commit decides it.

        >>> import penstock as ps
        >>> ds = ps.create("memory://resolve", {"n": "int32"})
        >>> receipt = ds.append({"n": [1]})
        >>> ds.resolve(receipt.snapshot), ds.resolve("0-1-" + "0" * 32)
        (True, False)
        """
        return self._snapshot.resolve(_text(snapshot, "snapshot", "resolve a commit"))

    def verify(self, progress: Callable[[int, int], None] | None = None) -> dict[str, Any]:
        """Read and check every byte that this snapshot depends on.

        Returns counts and `problems`, a list of (object, error) pairs that is empty for an intact dataset. Calls
        `progress(data_files, data_bytes)` as it proceeds. Does not decode media, unlike `append(validate="decode")` and reads.
        Cost: reads every data file once.
        """
        return self._snapshot.verify(progress)

    def create_tag(self, name: str, snapshot: str | None = None) -> None:
        """Name this handle's snapshot, or the one with the id `snapshot`, until the tag is deleted. `ps.open(tag=)` opens it.

        A name has 1 to 255 bytes. Cost: a few requests and one put, however many tags there are.
        Raises: AlreadyExistsError (name-exists), NotFoundError (snapshot-not-found), InvalidInputError (invalid-argument).

        >>> import penstock as ps
        >>> ds = ps.create("memory://tags", {"number": "int32"})
        >>> ds.create_tag("empty")
        >>> receipt = ds.append({"number": [1, 2]})
        >>> len(ps.open("memory://tags", tag="empty")), list(ds.tags())
        (0, ['empty'])
        """
        self._snapshot.create_tag(_text(name, "tag", "create a tag"), snapshot)

    def delete_tag(self, name: str) -> None:
        """Delete a tag. Its snapshot remains. Raises: NotFoundError (name-not-found)."""
        self._snapshot.delete_tag(_text(name, "tag", "delete a tag"))

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
            raise NotFoundError(f"`{self.uri}` has no pin {name!r}", code="object-not-found", hint="see ds.pins()")

    def layout(self) -> dict[str, dict[str, int]]:
        """Return each column's storage use as stored_bytes, blocks and data_files. Cost: reads the tail of every data file."""
        return {
            name: {"stored_bytes": stored, "blocks": blocks, "data_files": files} for name, stored, blocks, files in self._snapshot.layout()
        }

    def __reduce__(self) -> tuple[Any, ...]:
        _, arguments = super().__reduce__()
        return (_reopen_dataset, arguments[:3])


def _reopen_dataset(uri: str, snapshot: str, options: tuple[list[tuple[str, str]], str]) -> Dataset:
    return Dataset(_core.open(uri, snapshot, *options))


def _commit(entry: dict[str, Any]) -> Commit:
    time = datetime.datetime.fromtimestamp(0, datetime.UTC) + datetime.timedelta(microseconds=entry["time_us"])
    return Commit(
        snapshot=entry["snapshot"], message=entry["message"], author=entry["author"], time=time, parents=tuple(entry["parents"]), kind=entry["kind"],
        samples=entry["samples"], samples_added=entry["samples_added"], samples_deleted=entry["samples_deleted"],
        properties=json.loads(entry.get("properties") or "{}"),
    )  # fmt: skip

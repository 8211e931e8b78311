"""`create`, `open` and `Dataset`: everything that creates a dataset or moves a handle to another snapshot."""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from penstock import _core
from penstock.changes import backfill, inputs
from penstock.changes.boxes import rule_of, with_rule
from penstock.changes.checks import text_of
from penstock.changes.receipt import Receipt, receipt_of
from penstock.changes.stage import Stage
from penstock.changes.tables import Table, columns_of
from penstock.errors import InvalidInputError
from penstock.history.versions import Versions, Which, author_of, snapshot_id_of
from penstock.schema import from_json, to_json
from penstock.transaction import Transaction
from penstock.values.checks import is_utf8, storage_pairs


def configure(
    *, memory_bytes: int | None = None, threads: int | None = None, image_pixels: int | None = None, inline_bytes: int | None = None
) -> dict[str, int]:
    """Set this process's budgets and return all current budgets.

    `memory_bytes`: memory shared by caches and writers (default 512 MiB, or an eighth of the cgroup limit if lower; at least 16 MiB).
    A dataset opened afterwards may use up to a quarter of this budget for data-file metadata. `threads`: the maximum number of threads
    per call (default: the number of available CPUs divided by LOCAL_WORLD_SIZE). `image_pixels`: the maximum number of pixels per image
    (default 2^28). `inline_bytes`: a commit with at most so many bytes of data stores them in its record and writes no other object
    (0 to 2,048; default 2,048).

    >>> configure(threads=2)["threads"]
    2
    """
    if inline_bytes is not None and (isinstance(inline_bytes, bool) or not isinstance(inline_bytes, int) or not 0 <= inline_bytes <= 2048):
        raise InvalidInputError(f"cannot configure inline_bytes={inline_bytes!r}: expected a whole number from 0 to 2048")
    for name, value in (("memory_bytes", memory_bytes), ("threads", threads), ("image_pixels", image_pixels)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**63):
            raise InvalidInputError(f"cannot configure {name}={value!r}: expected a whole number above 0")
    names = ("memory_bytes", "threads", "image_pixels", "inline_bytes")
    return dict(zip(names, _core.configure(memory_bytes, threads, image_pixels, inline_bytes), strict=True))


def _uri(uri: str | os.PathLike[str]) -> str:
    text = os.fspath(uri) if isinstance(uri, os.PathLike) else uri
    if not isinstance(text, str):
        hint = 'write a path, such as "data/photos", or a URI, such as "s3://bucket/photos"'
        raise InvalidInputError(f"cannot open {uri!r}: expected a str or a Path", code="invalid-uri", hint=hint)
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
        _core.create(
            _uri(uri), to_json(schema), text_of(message, "message", "create a dataset"), author_of(), storage_pairs(storage_options)
        )
    )


# Over 6 parameters: callers pass them by name, except the first.
def open(
    uri: str | os.PathLike[str],
    *,
    branch: str = "main",
    snapshot: Which | None = None,
    tag: str | None = None,
    as_of: datetime.datetime | str | None = None,
    io: str = "auto",
    cache: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Dataset:
    """Open a dataset at the newest snapshot of a branch, or at a given snapshot, tag or time.

    A commit of a handle whose branch has newer commits follows these, and moves the handle there. If the branch was reset in
    the meantime, refresh the handle first. A loader, a view and other handles stay where they are. A handle that was opened at a snapshot, tag or
    time refuses to append until `refresh()` has moved it to the newest snapshot. A transaction may begin at any snapshot.

    `snapshot` is an id, or a beginning of it with the number (`0-12` or `0-12-9f3a`), or what has one: a receipt, a commit of `log()`, or a view.

    `as_of` opens the newest snapshot that was committed at or before a time. It is a datetime with a time zone, or text such as
    "2026-11-20T12:00:00Z" or "2026-11-20", which is midnight in UTC. Times are those of the clocks of the writers. If later commits have times in the
    future, a RuntimeWarning says so: they may be older than they claim.

    `uri` is a path, file:// (with `%20` for a space), memory://, s3://, gs://, az://, or http(s):// for reading. `io` selects how local files are read:
    "auto" and "mapped" map them, "buffered" reads only the ranges that a call to `take` needs, and "direct" does the same without
    the page cache.

    `cache` keeps what is read on local drives: a folder and its size, such as "/nvme/penstock:200GB", several of them with commas
    between, or "memory:8GB". All processes of this machine share it. Its default for object stores is the variable PENSTOCK_CACHE.
    `cache=""` uses none. A full or failing drive never fails a read.

    `storage_options` for S3: endpoint_url, region, profile, access_key_id, secret_access_key, session_token, anonymous (bool),
    virtual_hosted (bool), ca_bundle (path to a PEM file). An omitted option is taken from its AWS_… variable or the profile.
    For Azure, `connection_string`, and the names of object_store: account_name, account_key, sas_token, endpoint, … They are taken from
    AZURE_STORAGE_CONNECTION_STRING, AZURE_STORAGE_ACCOUNT, AZURE_STORAGE_KEY and its other AZURE_… variables. For Google, its names:
    service_account_path, service_account_key, bearer_token, …, or GOOGLE_APPLICATION_CREDENTIALS and STORAGE_EMULATOR_HOST. `anonymous` and
    endpoint_url work for all three.
    For every object store: timeout_seconds (deadline for one operation, default 60), hedge (bool: send a second request for a
    range that takes unusually long). A pickled handle contains all of these options except secrets: keys, tokens and connection strings.
    The first request fails after 2.5 seconds if the address is wrong: no such host, no server, or a server of another kind.

    Cost: on local disk, three reads (of the hint, the record and the root) and three look-ups. On object storage, three requests: one
    lists a single name, and two read the record and the root. The cost does not grow with the number of samples. Opening a local copy also
    lists its data files, until the first commit to that copy. A tag or a branch costs two or three requests more, `as_of` one for each
    doubling of the number of commits. Raises: NotFoundError (dataset-not-found, snapshot-not-found, name-not-found, branch-not-found), CorruptError (log-incomplete,
    copy-incomplete), UnsupportedError (unknown-feature).
    """
    snapshot = None if snapshot is None else snapshot_id_of(snapshot, "open")
    if sum(given is not None for given in (snapshot, tag, as_of)) > 1:
        raise InvalidInputError(f"cannot open `{uri}`: expected only one of snapshot, tag and as_of")
    if text_of(branch, "branch", "open a dataset") != "main" and (snapshot is not None or tag is not None):
        raise InvalidInputError(
            f"cannot open `{uri}`: expected a branch or one of snapshot and tag", hint="a snapshot or tag already belongs to a branch"
        )
    if tag is not None:
        text_of(tag, "tag", "open a dataset")
    options, access = storage_pairs(storage_options), text_of(io, "io", "open a dataset")
    if cache is not None:
        options.append(("cache", text_of(os.fspath(cache), "cache", "open a dataset")))
    opened = Dataset(_core.open(_uri(uri), snapshot, options, access, tag=tag, branch=(branch, _microseconds(as_of))))
    opened._fixed = any(given is not None for given in (snapshot, tag, as_of))
    return opened


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
    uri: str | os.PathLike[str],
    *,
    branch: str = "main",
    snapshot: str | None = None,
    tag: str | None = None,
    as_of: datetime.datetime | str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Dataset:
    """Open a dataset like `open`, but accept an incomplete copy, so that `verify` can name the missing objects."""
    options = storage_pairs(storage_options)
    return Dataset(_core.open(_uri(uri), snapshot, options, incomplete=True, tag=tag, branch=(branch, _microseconds(as_of))))


class Dataset(Versions):
    """A dataset at one snapshot: a `View` that can also write.

    A handle sees its own commits immediately, and other writers' commits after `refresh()` is called.
    """

    def refresh(self) -> Dataset:
        """Move to the newest snapshot and return self. Costs at most as much as `open`."""
        self._move(self._snapshot.refresh())
        return self

    def append(self, columns: Table, *, message: str = "append", validate: str = "header", boxes: str = "refuse") -> Receipt:
        """Append samples as one commit. `columns` maps column names to one value per sample. None is a null. A column that is left out gets
        its fill value (see `Transaction.add_column`), or is null.

        `columns` may also be a pandas or Polars frame, a pyarrow table, a Hugging Face dataset, or a list of dicts. It may be a stream: an
        Arrow reader, or a generator that yields rows or tables. The index of a frame is not stored. A key that only some of the dicts lack is
        a null in these.

        `boxes` says what happens to boxes that are not finite or have a negative size: "refuse"; "keep"; "clip" cuts boxes at the borders of
        the image that they are `of`, and makes negative sizes 0; "drop" leaves out the box, and its label in columns of labels that are `of`
        the boxes. Each box must have one such label, except with "keep".

        Cost: encodes on all threads, writes the bytes to data files once, then syncs four times (twice for up to 2 KiB). `validate="decode"` checks every pixel
        of media; `"header"` checks only their headers. Memory: up to `ps.configure(memory_bytes=…)`, in addition to the caller's data.
        Raises: InvalidInputError (invalid-value, column-lengths-differ), CorruptError (media-undecodable, with `.rows`),
        NotFoundError (column-not-found), UnavailableError (commit-state-unknown). On any other error, nothing is committed.
        After a KeyboardInterrupt, check `log()`: Ctrl-C ends a long append before its commit, but may also arrive just after it.

        >>> import penstock as ps
        >>> ds = ps.create("memory://append", {"year": "int32"})
        >>> ds.append({"year": [1999, None]}).row_ids.tolist()
        [0, 1]
        >>> ds.append({"year": year} for year in (2000, 2001)).row_ids.tolist()
        [2, 3]
        """
        if self._fixed:  # The user may expect that the samples follow those of this snapshot.
            raise InvalidInputError(
                f"cannot append: this handle was opened at snapshot {self.snapshot}",
                hint='call ds.refresh() to move to the newest snapshot, or ds.create_branch("name") to append to this one',
            )
        snapshot = self._snapshot
        schema = from_json(snapshot.columns)
        if (found := columns_of(columns, "append", schema)) is None:
            with self.transaction(message, boxes=boxes) as transaction:
                transaction.append(columns, validate=validate)
            return transaction.receipt
        schema = with_rule(schema, rule_of(boxes)) if boxes != "refuse" else schema
        ready, samples = inputs.ready_columns(schema, found, "append to")
        parts = inputs.parts(schema, ready, samples)
        if len(parts) == 1:
            prepared = inputs.prepared(schema, ready, 0, samples, "append to")
            receipt, snapshot = receipt_of(_core.append(snapshot, text_of(message, "message", "append"), author_of(), prepared, validate))
            self._move(snapshot)
            return receipt
        with self.transaction(message, boxes=boxes) as transaction:
            transaction.append_parts(ready, parts, validate)
        return transaction.receipt

    def update(
        self,
        columns: Mapping[str, Any],
        *,
        row_ids: npt.ArrayLike | None = None,
        on: str | None = None,
        message: str = "update",
        validate: str = "header",
        boxes: str = "refuse",
    ) -> Receipt:
        """Give existing samples new values in some columns, as one commit. See `Transaction.update`, which takes the same arguments.

        `boxes` says what happens to wrong boxes, as in `append`. With `on`, the receipt's `not_found` lists the keys that no sample has, as they were given.

        >>> import penstock as ps
        >>> ds = ps.create("memory://ds-update", {"source": ps.Text(), "year": "int32"})
        >>> receipt = ds.append({"source": ["a.png", "b.png"], "year": [2001, 2002]})
        >>> ds.update({"source": ["b.png", "c.png"], "year": [2012, 2013]}, on="source").not_found
        ['c.png']
        >>> ds["year"][:].tolist()
        [2001, 2012]
        """
        with self.transaction(message, boxes=boxes) as transaction:
            # The overloads have either row_ids or on. The call itself refuses both, and neither.
            missing = transaction.update(columns, row_ids=row_ids, on=on, validate=validate)  # type: ignore[call-overload]
        return dataclasses.replace(transaction.receipt, not_found=missing or [])

    def transaction(
        self,
        message: str = "",
        *,
        author: str | None = None,
        properties: Mapping[str, Any] | None = None,
        isolation: str = "serializable",
        journal: str | os.PathLike[str] | None = None,
        boxes: str = "refuse",
    ) -> Transaction:
        """Begin a transaction. In a `with` block, it commits at the end or, on an exception, aborts and deletes its data.

        With `isolation="snapshot"`, other commits may change values that this transaction only read. A message has at most 1,024 bytes, an
        author 256, and properties 1,024 as JSON; this is checked now.

        `boxes` says what its calls do with wrong boxes, as in `append`.

        `journal` is the path of a local file that makes uncommitted changes survive a crash: each `append`, `update`, `upsert` and `delete` is
        durable there before it returns (one sync each). Schema changes, stages, `overwrite` and values of tiled columns are refused. If the file exists, the transaction continues: it begins at the same
        snapshot and repeats the changes, whose number is `tx.restored`. The file is deleted by the commit and by `tx.abort()`. It remains after
        an exception. Raises: UnavailableError (journal-in-use), InvalidInputError for a journal of another dataset or branch.

        >>> import penstock as ps, pathlib, tempfile
        >>> ds = ps.create("memory://journal", {"n": "int64"})
        >>> receipt = ds.append({"n": range(5)})
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "training.journal"
        >>> tx = ds.transaction("train", journal=path)
        >>> tx.update({"n": [10, 11]}, row_ids=[0, 1])
        >>> del tx  # As a crash would.
        >>> with ds.transaction("train", journal=path) as tx:
        ...     print(tx.restored, tx.take([0, 2])["n"])
        1 [10  2]
        >>> ds["n"][:].tolist(), path.exists()
        ([10, 11, 2, 3, 4], False)
        """
        return Transaction(self, message, author if author is not None else author_of(), properties, isolation, journal, boxes)

    def stage(self, columns: Table, *, validate: str = "header", boxes: str = "refuse") -> Stage:
        """Write samples without committing them. Any process may do so; `Transaction.add` commits any number of stages at once.

        `columns`, `boxes` and errors are as for `append`. Samples that only have nulls in tiled columns of fixed shape without a fill value are refused. When this returns, the files are durable. They are not part of any snapshot.
        Cost: as for `append`, without the commit. The stage is picklable, and has a few hundred bytes.

        >>> import penstock as ps
        >>> ds = ps.create("memory://stage", {"n": "int64"})
        >>> stage = ds.stage({"n": [1, 2]})
        >>> len(stage), len(ds)
        (2, 0)
        """
        transaction = self.transaction("stage", boxes=boxes)
        try:
            transaction.append_runs(columns, validate)
            samples = transaction._core.samples()
            return Stage(samples, transaction._core.stage())
        except BaseException:
            transaction.abort()
            raise

    # Over 6 parameters: callers pass them by name, except the first two.
    def backfill(
        self,
        column: str,
        compute: Callable[[dict[str, Any]], Any],
        *,
        columns: Sequence[str],
        batch_size: int = 256,
        commit_samples: int = 8192,
        message: str | None = None,
        progress: Callable[[int, int], None] | None = None,
        boxes: str = "refuse",
    ) -> int:
        """Compute the missing values of a column, and commit them in steps. Returns how many samples got a value.

        `compute` gets a batch of `columns`, as `take` returns it, and returns one value per sample. A sample's value is missing if the
        sample was appended without it, or with None, and no update has given it one; a fill value counts as missing. A None that
        `compute` returns is a null, and is not computed again.

        Every `commit_samples` samples are a commit. After a crash, call it again: it continues with the values that are still missing.
        Other writers may append in the meantime, and their samples get values as well. If one of them changes the inputs of a step, this
        step is repeated. Several processes may run the same backfill. Calls `progress(done, total)` after each commit. `boxes` says what
        happens to wrong boxes, as in `append`.

        >>> import penstock as ps
        >>> ds = ps.create("memory://backfill", {"n": "int64"})
        >>> receipt = ds.append({"n": [1, 2, 3]})
        >>> with ds.transaction("a column for squares") as tx:
        ...     tx.add_column("square", "int64")
        >>> ds.backfill("square", lambda batch: batch["n"] ** 2, columns=["n"])
        3
        >>> ds["square"][:].tolist(), ds.backfill("square", lambda batch: batch["n"], columns=["n"])
        ([1, 4, 9], 0)
        """
        sizes = backfill.sizes(batch_size, commit_samples)
        return backfill.Backfill(self, column, compute, columns, message, boxes).run(*sizes, progress)

    def verify(self, progress: Callable[[int, int], None] | None = None) -> dict[str, Any]:
        """Read and check every byte that this snapshot depends on.

        Returns counts and `problems`, a list of (object, error) pairs that is empty for an intact dataset. Calls
        `progress(data_files, data_bytes)` as it proceeds. Does not decode media, unlike `append(validate="decode")` and reads.
        `unreferenced_objects` and `unreferenced_bytes` are as in `unreferenced`, or None.
        Cost: reads every data file once, and what `unreferenced` reads.
        """
        return self._snapshot.verify(progress)

    def structure(self) -> dict[str, int]:
        """Return what this snapshot consists of: numbers of samples, fragments, data files and overlays, and their bytes.

        `absent_samples` are those that a copied commit brought in its files, although they never lived on this branch.
        Cost: reads the manifest pages. No data file is read.

        >>> import penstock as ps
        >>> ds = ps.create("memory://structure", {"n": "int32"})
        >>> receipt = ds.append({"n": [1, 2, 3]})
        >>> ds.structure()["samples"], ds.structure()["fragments"], ds.structure()["overlays"]
        (3, 1, 0)
        """
        return dict(self._snapshot.structure())

    def unreferenced(self) -> dict[str, int] | None:
        """Count the objects that no snapshot of any branch refers to, and their bytes.

        A writer that was killed leaves such objects. A running one has them too until it commits, and so have stages that were not added, so they
        are not necessarily garbage. Returns None if they cannot be counted, because the store cannot list, or a record or page is damaged.
        Cost: lists the dataset, and reads all records, roots and pages of all branches, concurrently.

        >>> import penstock as ps
        >>> ds = ps.create("memory://unreferenced", {"n": "int32"})
        >>> receipt = ds.append({"n": [1, 2, 3]})
        >>> ds.unreferenced()
        {'objects': 0, 'bytes': 0}
        """
        found = self._snapshot.unreferenced()
        return None if found is None else {"objects": found[0], "bytes": found[1]}

    def layout(self) -> dict[str, dict[str, int]]:
        """Return each column's storage use as stored_bytes, blocks and data_files. Cost: reads the tail of every data file."""
        return {
            name: {"stored_bytes": stored, "blocks": blocks, "data_files": files} for name, stored, blocks, files in self._snapshot.layout()
        }

    def __reduce__(self) -> tuple[Any, ...]:
        _, arguments = super().__reduce__()
        return (_reopen_dataset, (*arguments[:3], self._fixed))


def _reopen_dataset(uri: str, snapshot: str, options: tuple[list[tuple[str, str]], str], fixed: bool) -> Dataset:
    opened = Dataset(_core.open(uri, snapshot, *options))
    opened._fixed = fixed
    return opened

"""`import_data`: imports a source as one commit and reports every refused item."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
import shutil
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

from penstock import _core
from penstock.changes.boxes import rule_of, without_images
from penstock.changes.tables import is_table
from penstock.columns.column_type import ColumnType
from penstock.dataset import Dataset, create, open
from penstock.errors import AlreadyExistsError, ConflictError, Error, InvalidInputError, NotFoundError
from penstock.importers import earlier
from penstock.importers.appender import Appender, as_error
from penstock.importers.opening import all_options, open_source
from penstock.importers.shared.chunks import limited, with_files, with_names
from penstock.importers.shared.naming import Naming
from penstock.importers.shared.source import Chunk, OpenedSource, Options, Report, checked_patterns
from penstock.importers.shared.unread import checked_kinds, counted, refuse
from penstock.schema import from_json, to_json
from penstock.values.checks import whole


# Over 6 parameters: each is a user option, passed by keyword.
def import_data(
    source: Any,
    destination: str | os.PathLike[str],
    *,
    format: str = "auto",
    types: Mapping[str, Any] | None = None,
    validate: str = "header",
    on_error: str = "raise",
    message: str | None = None,
    branch: str = "main",
    progress: Callable[[int, int | None, str], None] | None = None,
    mode: str | None = None,
    key: str | None = None,
    limit: int | None = None,
    shuffle_seed: int | None = None,
    files: Sequence[str] = (),
    root: str | os.PathLike[str] | None = None,
    columns: Sequence[str] = (),
    drop: Sequence[str] = (),
    rename: Mapping[str, str] | None = None,
    ignore: Sequence[str] = (),
    boxes: str = "refuse",
    name: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Report:
    """Import images, annotations of COCO or YOLO, files of CSV, JSON, Parquet or Arrow, tables, or any iterable of dicts.

    The import is one commit.

    A table is a pandas or Polars frame, an Arrow table or reader, a dict of columns, or a Hugging Face dataset. Text in a column of type
    image or mask, or in one of the columns `files`, names files: in the folder `root`, or in that of the table.

    Appends to the branch if the destination is a dataset with these columns, and otherwise creates it. If the same files were imported
    already, `mode` decides: None raises AlreadyExistsError (already-imported), "append" imports them again, "skip-existing" does not.
    `key` names a column of texts or whole numbers that identifies samples. In this mode, samples whose key the dataset has are left out,
    so a table that has grown is completed. Images are known by their `path` without it. "create" refuses an existing dataset. All this
    also holds for commits that are made during the import. `types` maps column names to types;
    missing types are inferred. `ps.Label([])` and `ps.Labels([])` take their names from the data. `on_error`: "raise" commits nothing, "skip" leaves out the item, "null" stores a null for the value.
    `columns` are the only ones to import, `drop` those to leave out, and `rename` maps names of the source to those in the dataset. Other options
    go by the names in the dataset. A name that a dataset cannot have, such as an empty one, is changed; see `Report.renamed`.
    Annotations that this release does not store are refused by kind, with their number: `ignore` lists the kinds to leave out, such as
    "polygons" or "voc". `boxes` says what happens to boxes that are not finite or have a negative size, as in `Dataset.append`:
    "refuse", "keep", "clip" or "drop".
    Rows in memory that were imported already are recognised by the first of them. `name` distinguishes one such source from another.
    Values are stored as they are or refused, by the same rules as in `append`.
    `limit` offers only so many samples. `shuffle_seed` shuffles the images of a folder first.
    `storage_options` are those of `ps.open`, for the destination.
    `progress(done, total, unit)` is called after each chunk. `options`: encoding (CSV and JSON); delimiter, quote and header (CSV);
    include and exclude, lists of patterns such as "*.jpg" or "train/*" that select files in a folder; split=False keeps folders such as
    `train` in the label; masks="class" or "instance" (COCO).

    Memory: the budget, plus data parsed ahead (up to 250 MiB, or a few times the largest line or Arrow record batch); with keys,
    about 120 bytes per sample. Raises: InvalidInputError (also media-undecodable, for a damaged image; key-not-unique), NotFoundError
    (source-not-found), UnsupportedError (unsupported-format), CorruptError (object-malformed, for a damaged file).
    """
    names = all_options()
    if unknown := sorted(set(options) - names):
        raise InvalidInputError(f"cannot import: unknown option `{unknown[0]}`", hint=f"options: {', '.join(sorted(names))}")
    options |= {name: checked_patterns(name, options[name]) for name in ("include", "exclude") if name in options}
    if not isinstance(rename, Mapping | None) or not all(isinstance(text, str) for text in itertools.chain(*(rename or {}).items())):
        raise InvalidInputError(f"rename={rename!r}, expected a dict of names in the source to names in the dataset")
    if not isinstance(types, Mapping | None):
        raise InvalidInputError(f"types={types!r}, expected a dict of column names to types", hint='write types={"image": ps.Image()}')
    if not isinstance(root, str | os.PathLike | None):
        raise InvalidInputError(f"root={root!r}, expected a folder")
    common = Options(
        types=from_json(to_json(types or {})),
        on_error=on_error,
        root=None if root is None else pathlib.Path(root),
        shuffle_seed=None if shuffle_seed is None else whole(shuffle_seed, "shuffle_seed", 0),
        naming=Naming(checked_patterns("columns", columns), checked_patterns("drop", drop), rename or {}),
        ignore=checked_kinds(checked_patterns("ignore", ignore)),
        boxes=rule_of(boxes).action,
        validate=validate,
        mode=mode,
        key=key,
        limit=None if limit is None else whole(limit, "limit", 1),
        files=checked_patterns("files", files),
        name=name,
    )
    wanted = _Import(source, destination, format, common, options, message, branch, progress, storage_options)
    again, lost = isinstance(source, str | os.PathLike | list | tuple | Mapping) or is_table(source), 0
    for _ in range(TRIES - 1):
        try:
            return wanted.imported()
        except (ConflictError, AlreadyExistsError) as error:
            # In the meantime, somebody created the destination, imported some of this, or changed the schema.
            created = error.code == "dataset-exists" and mode != "create"
            if not created and (isinstance(error, AlreadyExistsError) or mode == "append"):
                raise
            if not again:
                error.hint = "import it again: rows from an iterator cannot be read twice"
                raise
        except NotFoundError as error:
            # Perhaps somebody else created the destination, failed, and removed it.
            lost += 1
            if not again or mode == "append" or lost > 2 or error.code not in ("object-not-found", "dataset-not-found"):
                raise
    return wanted.imported()


# How often an import runs, if others import the same at the same time.
TRIES = 10


@dataclasses.dataclass(frozen=True)
class _Import:
    """A call of `import_data`, with checked options. `own` are those of the format."""

    source: Any
    destination: str | os.PathLike[str]
    format: str
    options: Options
    own: Mapping[str, Any]
    message: str | None
    branch: str
    progress: Callable[[int, int | None, str], None] | None
    storage_options: Mapping[str, Any] | None

    def imported(self) -> Report:
        """Import the source, unless it was imported already."""
        there = _existing(self.destination, self.branch, self.storage_options)
        if there is not None and self.options.mode == "create":
            raise AlreadyExistsError(
                f"cannot create `{self.destination}`: it is already a dataset", hint="choose another destination, or another mode"
            )
        options = dataclasses.replace(self.options, defaults={} if there is None else there.schema)
        # With keys, a limit does not count what is left out.
        opened, name = open_source(self.source, self.format, options, self.own, options.limit if self.options.key is None else None)
        refuse(name, opened.unread, options.ignore)
        names = opened.names or options.naming.names_of(list(opened.schema), name)
        changed = {old: new for old, new in names.items() if old != new and old not in options.naming.rename}
        opened = with_names(opened, names)
        opened.root = opened.root or options.root or _beside(self.source)
        kinds = {**opened.schema, **options.defaults}
        if options.boxes == "clip":
            for column in opened.schema:
                if (kind := kinds[column]).box_format and kind.belongs_to not in opened.schema:
                    raise without_images(column, kind)
        always = _columns_in(self.options.files, kinds)
        key = _key_in(self.options.key, opened, kinds)
        note = self._note(opened, name, opened.root if any(kind.is_picture for kind in kinds.values()) or self.options.files else None)
        if note and there is not None and self.options.mode != "append":
            before = earlier.find(there, note, self.options.limit, opened.content)
            if before is not None and (skipped := self._skipped(name, before, key, opened)) is not None:
                return skipped
        missing = _missing(self.destination)
        dataset, created = _destination(there, self.destination, opened.schema, f"create for {name}", self.storage_options)
        with _undo(dataset, created, missing), contextlib.closing(opened.chunks):
            report = self._append(dataset, opened, name, always, None if self.options.mode == "append" else key, note)
        report.left_out_kinds, report.renamed = counted(len(opened.left_out), opened.unread), changed
        return report

    def _note(self, opened: OpenedSource, name: str, root: pathlib.Path | None) -> dict[str, Any]:
        """Return what a commit says about its source: nothing for tables in memory. `root` is the folder of files that it names."""
        if not opened.files and self.options.mode == "skip-existing" and self.options.key is None and self.options.name is None:
            raise InvalidInputError(
                f"cannot import {name} with mode={self.options.mode!r}: it is unknown whether it was already imported",
                hint='name a column whose values identify rows: key="id" (--key id); or name the rows: name="part 1"; or import a file',
            )
        if not opened.files:
            # A name or the first rows identify all of them. With a key, rows are found one by one.
            content = opened.content if self.options.name is None and self.options.key is None else None
            known = self.options.name if content is None else content.digest(content.rows)
            if known is None:
                return {}
            made = {"source": name[:200], "place": "", "digest": earlier.digest_of_text(repr(self.options.name), known)}
            return made if content is None else {**made, "rows": content.rows}
        digest = earlier.digest_of(_beside(self.source), opened.files, root)
        return {"source": name[:200], "place": earlier.place_of(pathlib.Path(self.source)), "digest": digest}

    def _skipped(self, name: str, before: earlier.Earlier, key: str | None, opened: OpenedSource) -> Report | None:
        """Return the report if everything was imported already, or None if the rest is found by keys."""
        commit = before.commit
        if not opened.files and before.same and self.options.mode is None:
            rows = "rows that begin with the same ones" if self.options.name is None else f"rows named {self.options.name!r}"
            raise AlreadyExistsError(
                f"cannot import the {name}: commit {commit.snapshot} ({commit.time:%Y-%m-%d %H:%M} UTC) imported {rows}",
                code="already-imported",
                hint='name a column whose values identify rows: key="id"; or name these rows, if they are different ones: name="part 2"; '
                'or mode="append" imports all of them again',
            )
        if not before.same:
            if key is not None:
                return None
            text = f"commit {commit.snapshot} ({commit.time:%Y-%m-%d %H:%M} UTC) imported it with different contents"
            raise AlreadyExistsError(
                f"cannot import `{name}`: {text}, and it is unknown which rows are new",
                code="already-imported",
                hint='name a column whose values identify rows: key="id", mode="skip-existing" (--key id --mode skip-existing); '
                'or mode="append" (--mode append) imports all of them',
            )
        if key is None and before.whole and self.options.mode == "skip-existing":
            return Report(0, [], commit.snapshot, opened.left_out, skipped=commit.samples_added)
        if key is None or (before.whole and self.options.mode is None):
            raise _imported(name, before)
        return None

    def _append(
        self, dataset: Dataset, opened: OpenedSource, name: str, always: Sequence[str], key: str | None, note: dict[str, Any]
    ) -> Report:
        """Append the samples of an opened source, and commit. `key` is the column that identifies them."""
        report = Report(0, [], None, opened.left_out)
        kinds, on_error = dataset.schema, self.options.on_error
        image = "image" if "image" in kinds and kinds["image"].may_be_file else None
        known = earlier.Known(dataset, key, image, self.options.key is not None) if key is not None else None
        named = [column for column, kind in kinds.items() if kind.is_picture]
        read = functools.partial(with_files, kinds=named, always=always, folder=opened.root or pathlib.Path())
        with (
            contextlib.closing(
                _offered(opened.chunks, read, known, self.options.mode == "skip-existing", self.options.limit, report)
            ) as chunks,
            dataset.transaction(self.message or f"import {name}", boxes=self.options.boxes) as transaction,
        ):
            if self.options.mode != "append":
                transaction._core.begin_import(key, note.get("digest"))
            # A label type without names takes them from the data.
            opened_labels = [column for column, kind in self.options.types.items() if kind.classes is not None and not kind.classes]
            appender = Appender(transaction, kinds, self.options.validate, on_error, report.refused, opened_labels)
            for chunk in chunks:
                report.refused.extend(chunk.refused)
                if chunk.refused and on_error == "raise":
                    raise as_error(chunk.refused[0])
                report.samples += appender.append(chunk)
                transaction._boxes.changed += chunk.dropped_boxes
                if self.progress:
                    limit = self.options.limit if opened.unit != "bytes" else None
                    total = opened.total if limit is None or opened.total is None else min(limit, opened.total)
                    self.progress(chunk.done if total is None else min(chunk.done, total), total, opened.unit)
            if known is not None and not report.samples:
                transaction.abort()  # There is nothing to commit.
                report.snapshot = dataset.snapshot
                return report
            if note:
                transaction._note({earlier.PROPERTY: {**note, "limit": self.options.limit, "left_out": len(report.refused)}})
        report.snapshot, report.corrected_boxes = transaction.receipt.snapshot, transaction._boxes.changed
        return report


def _offered(
    given: Iterable[Chunk],
    read: Callable[[Iterable[Chunk]], Iterable[Chunk]],
    known: earlier.Known | None,
    skip: bool,
    limit: int | None,
    report: Report,
) -> Generator[Chunk, None, None]:
    """Yield the rows to append: with the contents of the files that they name, without those that are known, and up to `limit`."""
    if known is not None:
        given = earlier.without(read(given), known, skip, report)
        yield from given if limit is None else limited(given, limit)
    else:
        yield from read(given if limit is None else limited(given, limit))


def _imported(name: str, before: earlier.Earlier) -> AlreadyExistsError:
    """Make the error for a source that was imported already."""
    part = "" if before.whole else ", or part of them"
    text = f"commit {before.commit.snapshot} ({before.commit.time:%Y-%m-%d %H:%M} UTC) already imported the same files{part}"
    hint = earlier.HINT if before.whole else 'mode="append" (--mode append) imports all of them again'
    return AlreadyExistsError(f"cannot import `{name}`: {text}", code="already-imported", hint=hint)


def _beside(source: Any) -> pathlib.Path:
    """Return the folder of a source; for tables in memory, the current folder."""
    if not isinstance(source, str | os.PathLike):
        return pathlib.Path()
    path = pathlib.Path(source)
    return path if path.is_dir() else path.parent


def _key_in(given: str | None, opened: OpenedSource, kinds: Mapping[str, ColumnType]) -> str | None:
    """Return the column that identifies samples: the one that was given, or the paths of images."""
    if given is None:
        return earlier.PATH if opened.by_path and earlier.PATH in kinds and kinds[earlier.PATH].has_words else None
    if given not in opened.schema:
        raise InvalidInputError(f"key={given!r}: the source has no such column", hint=f"columns: {', '.join(opened.schema)}")
    kind = kinds[given]
    if not kind.is_key:
        raise InvalidInputError(f"key={given!r}: this column is {kind.describe()}, expected text or whole numbers")
    return given


def _columns_in(files: Sequence[str], kinds: Mapping[str, ColumnType]) -> Sequence[str]:
    """Check the columns that name files."""
    for name in files:
        if name not in kinds or not kinds[name].may_be_file:
            found = f"is {kinds[name].describe()}" if name in kinds else "does not exist"
            raise InvalidInputError(
                f"files={name!r}: this column {found}, expected bytes, an image or a mask", hint=f'pass its type: --type "{name}=bytes"'
            )
    return files


def _existing(uri: str | os.PathLike[str], branch: str, storage_options: Mapping[str, Any] | None) -> Dataset | None:
    if str(uri).lower().startswith(("http://", "https://")):
        return None  # `create` reports that HTTP is read-only.
    try:
        return open(uri, branch=branch, storage_options=storage_options)
    except NotFoundError as error:
        if error.code != "dataset-not-found":
            raise
        if branch != "main":
            hint = "import into main first, or create the dataset and the branch"
            raise NotFoundError(
                f"cannot import into branch `{branch}` of `{uri}`: it is not a dataset", code="branch-not-found", hint=hint
            ) from None
        return None


def _destination(
    dataset: Dataset | None,
    uri: str | os.PathLike[str],
    schema: dict[str, ColumnType],
    message: str,
    storage_options: Mapping[str, Any] | None,
) -> tuple[Dataset, bool]:
    if dataset is None:
        return create(uri, schema, message=message, storage_options=storage_options), True
    missing = [name for name in schema if name not in dataset.schema]
    if missing:
        raise InvalidInputError(
            f"cannot import into `{uri}`: it has no column `{missing[0]}`",
            code="invalid-schema",
            hint=f"columns: {', '.join(dataset.schema)}; import into a new dataset",
        )
    return dataset, False


def _missing(destination: str | os.PathLike[str]) -> list[pathlib.Path]:
    """List the folders that must be created for a dataset, innermost first."""
    local = _core.local_path(destination) if isinstance(destination, str) else destination
    path = pathlib.Path(local or ".").absolute()
    return list(itertools.takewhile(lambda folder: not folder.exists(), (path, *path.parents)))


class _undo:
    """Removes the dataset that a failed import created, unless another writer committed to it. A folder that already existed is kept."""

    def __init__(self, dataset: Dataset, created: bool, missing: list[pathlib.Path]) -> None:
        # For a link, this is its target: the link itself belongs to the user.
        self.root = pathlib.Path(dataset.uri).resolve() if created and "://" not in dataset.uri else None
        self.missing = missing
        self.left = dataset.uri if created and self.root is None else None
        self.first = dataset.snapshot

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None or isinstance(error, ConflictError):  # After a conflict, the dataset has another writer's commit.
            return
        if self.root is None:
            if self.left is not None and isinstance(error, Error):
                what = f"the empty dataset `{self.left}` remains: import the same columns again, or choose another destination"
                error.hint = f"{error.hint}; {what}" if error.hint else what
            return
        # Rename the folder first, so that a concurrent commit fails instead of being acknowledged and then lost.
        aside = self.root.with_name(f".{self.root.name}.failed-import-{os.getpid()}")
        with contextlib.suppress(OSError):
            self.root.rename(aside)
            if open(aside).snapshot == self.first:
                shutil.rmtree(aside, ignore_errors=True)
                if not self.missing:
                    self.root.mkdir(exist_ok=True)
                for folder in self.missing[1:]:
                    folder.rmdir()  # Fails at the first folder that is not empty, which ends the loop.
            else:
                aside.rename(self.root)

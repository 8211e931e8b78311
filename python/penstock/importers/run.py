"""`import_data`: imports a source as one commit and reports every refused item."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from penstock.columns.blob import Bytes
from penstock.columns.column_type import ColumnType
from penstock.columns.image import Image
from penstock.columns.mask import Mask
from penstock.columns.text import Text
from penstock.dataset import Dataset, create, open
from penstock.errors import AlreadyExistsError, Error, InvalidInputError, NotFoundError
from penstock.importers import csv, earlier, frames, jsonl, parquet, rows
from penstock.importers.appender import Appender, as_error
from penstock.importers.pictures import coco, images, yolo
from penstock.importers.shared.chunks import limited, with_files
from penstock.importers.shared.source import Chunk, FolderOptions, OpenedSource, Options, Report, TextOptions, checked_patterns
from penstock.schema import from_json, to_json
from penstock.values.checks import whole


@dataclasses.dataclass(frozen=True)
class Format:
    """An importer: the function that opens a path, the class of its options, and the option values that differ from the defaults of
    that class.
    """

    open_source: Callable[[pathlib.Path, Any], OpenedSource]
    options: type[Options]
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)


FORMATS = {
    "images": Format(images.open_source, images.ImageOptions),
    "coco": Format(coco.open_source, coco.CocoOptions),
    "yolo": Format(yolo.open_source, images.ImageOptions),
    "csv": Format(csv.open_source, csv.CsvOptions),
    "tsv": Format(csv.open_source, csv.CsvOptions, {"delimiter": "\t"}),
    "jsonl": Format(jsonl.open_source, TextOptions),
    "parquet": Format(parquet.open_source, FolderOptions),
    "arrow": Format(parquet.open_source, FolderOptions),
}

# The formats whose samples are known before they are read.
SHUFFLED = ("images", "coco", "yolo")
SUFFIXES = {
    ".json": "coco", ".yaml": "yolo", ".yml": "yolo", ".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow", ".feather": "arrow", ".ipc": "arrow",
}  # fmt: skip


FILES_TO_DETECT = 1000


def detect(source: pathlib.Path) -> str:
    """Choose the format. For a file, the suffix decides. For a folder, its structure decides ("yolo"), or a file of annotations in it
    ("coco"). Otherwise the format is "parquet" if the first files include tables but no images, and "images" if not.
    """
    if source.is_dir():
        if yolo.is_yolo(source):
            return "yolo"
        if coco.within(source):
            return "coco"
        first = {file.suffix.lower() for file in itertools.islice(source.rglob("*"), FILES_TO_DETECT)}
        return "parquet" if first & set(parquet.SUFFIXES) and not first & set(images.SUFFIXES) else "images"
    suffixes = [suffix.lower() for suffix in source.suffixes if suffix.lower() not in (".gz", ".bz2", ".zst", ".xz")]
    found = SUFFIXES.get(suffixes[-1] if suffixes else "")
    if found is None:
        raise InvalidInputError(f"cannot import `{source}`: unknown file extension", hint=f"pass --format, one of {', '.join(FORMATS)}")
    return found


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
    limit: int | None = None,
    shuffle_seed: int | None = None,
    files: Sequence[str] = (),
    root: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Report:
    """Import a folder of images, COCO or YOLO annotations, CSV/TSV, JSON lines, Parquet/Arrow, a table in memory, or any iterable of
    dicts, as one commit.

    A table is a pandas or Polars frame, an Arrow table or reader, a dict of columns, or a Hugging Face dataset. Text in a column of type
    image or mask, or in one of the columns `files`, names files: in the folder `root`, or in that of the table.

    Appends to the branch if the destination is a dataset with these columns, and otherwise creates it. If the same files were imported
    already, `mode` decides: None raises AlreadyExistsError (already-imported), "append" imports them again, "skip-existing" does not. In
    this mode, images whose `path` the dataset has are left out. "create" refuses an existing dataset. `types` maps column names to types;
    missing types are inferred. `on_error`: "raise" commits nothing, "skip" leaves out the item, "null" stores a null for the value.
    `limit` offers only so many samples. `shuffle_seed` shuffles the images of a folder first.
    `storage_options` are those of `ps.open`, for the destination.
    `progress(done, total, unit)` is called after each chunk. `options`: encoding (CSV and JSON lines); delimiter, quote and header (CSV);
    include and exclude, lists of patterns such as "*.jpg" or "train/*" that select files in a folder; split=False keeps folders such as
    `train` in the label; masks="class" or "instance" (COCO).

    Memory: the budget, plus data parsed ahead (up to 250 MiB, or a few times the largest line or Arrow record batch).
    Raises: InvalidInputError (also media-undecodable, for a damaged image), NotFoundError (source-not-found), UnsupportedError
    (unsupported-format), CorruptError (object-malformed, for a damaged file).
    """
    limit, shuffle_seed = _checked(on_error, validate, mode, limit, shuffle_seed)
    names = set().union(*(_own_options(format.options) for format in FORMATS.values()))
    if unknown := sorted(set(options) - names):
        raise InvalidInputError(f"cannot import: unknown option `{unknown[0]}`", hint=f"options: {', '.join(sorted(names))}")
    options |= {name: checked_patterns(name, options[name]) for name in ("include", "exclude") if name in options}
    files = checked_patterns("files", files)
    there = _existing(destination, branch, storage_options)
    if there is not None and mode == "create":
        raise AlreadyExistsError(
            f"cannot create `{destination}`: it is a dataset already", hint="choose another destination, or another mode"
        )
    if not isinstance(types, Mapping | None):
        raise InvalidInputError(f"types={types!r}, expected a dict of column names to types", hint='write types={"image": ps.Image()}')
    if not isinstance(root, str | os.PathLike | None):
        raise InvalidInputError(f"root={root!r}, expected a folder")
    given = {name: _type(name, kind) for name, kind in (types or {}).items()}
    defaults = {} if there is None else there.schema
    common = Options(given, on_error, defaults, None if root is None else pathlib.Path(root), shuffle_seed)
    opened, name = _open_source(source, format, common, options, limit)
    opened.root = opened.root or common.root or _beside(source)
    kinds = {**opened.schema, **defaults}
    always = _columns_in(files, kinds)
    by_path = opened.by_path and there is not None and isinstance(defaults.get(earlier.PATH), Text)
    note = _note(source, opened, name, any(isinstance(kind, Image | Mask) for kind in kinds.values()) or bool(files), mode)
    before = earlier.find(there, note["digest"], limit) if note and there is not None and mode != "append" else None
    if before is not None and not by_path and before.whole and mode == "skip-existing":
        return Report(0, [], before.commit.snapshot, opened.left_out, skipped=before.commit.samples_added)
    # Of images, those that are there are found by their paths.
    if before is not None and (not by_path or (before.whole and mode is None)):
        raise _imported(name, before)
    missing = _missing(destination)
    dataset, created = _destination(there, destination, opened.schema, f"create for {name}", storage_options)
    report = Report(0, [], None, opened.left_out)
    kinds = dataset.schema
    image = "image" if isinstance(kinds.get("image"), Image | Mask | Bytes) else None
    known = earlier.Known(dataset, image) if by_path and mode != "append" else None
    named = [name for name, kind in kinds.items() if isinstance(kind, Image | Mask)]
    read = functools.partial(with_files, kinds=named, always=always, folder=opened.root)
    with (
        _undo(dataset, created, missing),
        contextlib.closing(opened.chunks),
        contextlib.closing(_offered(opened.chunks, read, known, mode == "skip-existing", limit, report)) as chunks,
        dataset.transaction(message or f"import {name}") as transaction,
    ):
        appender = Appender(transaction, kinds, validate, on_error, report.refused)
        for chunk in chunks:
            report.refused.extend(chunk.refused)
            if chunk.refused and on_error == "raise":
                raise as_error(chunk.refused[0])
            report.samples += appender.append(chunk)
            if progress:
                total = opened.total if limit is None or opened.total is None or opened.unit == "bytes" else min(limit, opened.total)
                progress(opened.done() if total is None else min(opened.done(), total), total, opened.unit)
        if known is not None and not report.samples:
            transaction.abort()  # There is nothing to commit.
            report.snapshot = dataset.snapshot
            return report
        if note:
            transaction._note({earlier.PROPERTY: {**note, "limit": limit, "left_out": len(report.refused)}})
    report.snapshot = transaction.receipt.snapshot
    return report


MODES = ("append", "skip-existing", "create")


def _checked(on_error: str, validate: str, mode: str | None, limit: int | None, seed: int | None) -> tuple[int | None, int | None]:
    """Check options, and return the limit and the seed."""
    if on_error not in ("raise", "skip", "null"):
        raise InvalidInputError(f"on_error={on_error!r}, expected raise, skip or null")
    if validate not in ("header", "decode"):
        raise InvalidInputError(f"validate={validate!r}, expected header or decode")
    if mode not in (None, *MODES):
        raise InvalidInputError(f"mode={mode!r}, expected {', '.join(MODES)} or None")
    if limit is not None:
        limit = whole(limit, "limit", 1)
    return limit, None if seed is None else whole(seed, "shuffle_seed", 0)


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


def _note(source: Any, opened: OpenedSource, name: str, names_files: bool, mode: str | None) -> dict[str, Any]:
    """Return what a commit says about its source: nothing for tables in memory."""
    if not opened.files and mode == "skip-existing":
        raise InvalidInputError(
            f"cannot import {name} with mode={mode!r}: nothing tells whether it was imported already",
            hint='upsert its columns by a unique key, in a transaction: tx.upsert(columns, key="id"); or import a file',
        )
    if not opened.files:
        return {}
    path = pathlib.Path(source)
    folder = path if path.is_dir() else path.parent
    return {"source": name[:200], "digest": earlier.digest_of(folder, opened.files, opened.root if names_files else None)}


def _imported(name: str, before: earlier.Earlier) -> AlreadyExistsError:
    """Make the error for a source that was imported already."""
    part = "" if before.whole else ", or a part of them,"
    text = f"commit {before.commit.snapshot} ({before.commit.time:%Y-%m-%d %H:%M} UTC) imported the same files{part} already"
    hint = earlier.HINT if before.whole else 'mode="append" (--mode append) imports all of them again'
    return AlreadyExistsError(f"cannot import `{name}`: {text}", code="already-imported", hint=hint)


def _beside(source: Any) -> pathlib.Path:
    """Return the folder of a source; for tables in memory, the current folder."""
    if not isinstance(source, str | os.PathLike):
        return pathlib.Path()
    path = pathlib.Path(source)
    return path if path.is_dir() else path.parent


def _columns_in(files: Sequence[str], kinds: Mapping[str, ColumnType]) -> Sequence[str]:
    """Check the columns that name files."""
    for name in files:
        if not isinstance(kinds.get(name), Image | Mask | Bytes):
            found = f"is {kinds[name].describe()}" if name in kinds else "does not exist"
            raise InvalidInputError(
                f"files={name!r}: this column {found}, expected bytes, an image or a mask", hint=f'pass its type: --type "{name}=bytes"'
            )
    return files


def _type(name: str, kind: Any) -> ColumnType:
    return from_json(to_json({name: kind}))[name]


def _own_options(options: type[Options]) -> set[str]:
    """Return the names of the options that a class adds to the common options."""
    return {field.name for field in dataclasses.fields(options)} - {field.name for field in dataclasses.fields(Options)}


def _open_source(source: Any, format: str, common: Options, options: Mapping[str, Any], limit: int | None) -> tuple[OpenedSource, str]:
    if not isinstance(source, str | os.PathLike):
        if isinstance(source, Mapping) and source and all(frames.is_table(table) for table in source.values()):
            raise InvalidInputError(
                f"cannot import a dict of tables: {', '.join(map(str, source))}",
                hint=f"import one of them: source[{next(iter(source))!r}]; or add a column that names the part, and append one after the other",
            )
        _check_shuffled("table", common)
        table = frames.open_source(source, common)
        if table is not None:
            return table, "table"
        if not isinstance(source, Iterable):
            raise InvalidInputError(f"cannot import a {type(source).__name__}: expected a path, a table, or an iterable of dicts")
        if isinstance(source, Iterator):
            first = list(itertools.islice(source, 1))
            source = itertools.chain(first, source)
            if first and frames.is_table(first[0]):
                return frames.open_tables(source, common), "tables"
            source = source if limit is None else itertools.islice(source, limit)  # Takes no more rows than wanted.
        return rows.open_source(source, common), "iterable"
    if "://" in str(source):
        raise InvalidInputError(f"cannot import `{source}`: sources are local files and folders, or iterables", hint="download it first")
    path = pathlib.Path(source)
    if not path.exists():
        raise NotFoundError(f"cannot import `{path}`: there is no such file or folder", code="source-not-found")
    if path.suffix.lower() == ".xz":
        raise InvalidInputError(f"cannot import `{path}`: xz is not supported", hint="decompress it, or compress it as .gz, .bz2 or .zst")
    chosen = detect(path) if format == "auto" else format
    if chosen not in FORMATS:
        raise InvalidInputError(f"cannot import `{path}`: unknown format {chosen!r}", hint=f"use one of auto, {', '.join(FORMATS)}")
    if chosen not in SHUFFLED:
        _check_shuffled(f"file of format {chosen}", common)
    importer = FORMATS[chosen]
    own = _own_options(importer.options)
    # Options for other formats have no effect. None selects the format's own default, if it has one.
    given = {name: value for name, value in options.items() if name in own and not (value is None and name in importer.values)}
    settings = importer.options(**vars(common), **{**importer.values, **given})
    try:
        return importer.open_source(path, settings), path.name
    except OSError as error:
        if isinstance(error, Error):
            raise
        raise NotFoundError(f"cannot import `{path}`: {error}", code="source-not-found") from error


def _check_shuffled(what: str, options: Options) -> None:
    if options.shuffle_seed is not None:
        raise InvalidInputError(
            f"shuffle_seed={options.shuffle_seed!r}: a {what} is read in order", hint="shuffle when you load: ds.loader(shuffle=True)"
        )


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
    path = pathlib.Path(destination).absolute()
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
        if kind is None:
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

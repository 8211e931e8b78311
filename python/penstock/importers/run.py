"""`import_data`: imports a source as one commit and reports every refused item."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from penstock import _core
from penstock.columns.category import Category
from penstock.columns.column_type import ColumnType
from penstock.columns.image import Image
from penstock.columns.mask import Mask
from penstock.dataset import Dataset, create, open
from penstock.errors import Error, InvalidInputError, NotFoundError
from penstock.importers import csv, frames, images, jsonl, parquet, rows, tables
from penstock.importers.source import Chunk, FolderOptions, OpenedSource, Options, Refusal, TextOptions, checked_patterns
from penstock.schema import from_json, to_json
from penstock.transaction import Transaction
from penstock.values.checks import is_arrow, is_whole
from penstock.values.containers import container, items_of


@dataclasses.dataclass(frozen=True)
class Format:
    """An importer: the function that opens a path, the class of its options, and the option values that differ from the defaults of
    that class.
    """

    open_source: Callable[[pathlib.Path, Any], OpenedSource]
    options: type[Options]
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)


FORMATS = {
    "images": Format(images.open_source, FolderOptions),
    "csv": Format(csv.open_source, csv.CsvOptions),
    "tsv": Format(csv.open_source, csv.CsvOptions, {"delimiter": "\t"}),
    "jsonl": Format(jsonl.open_source, TextOptions),
    "parquet": Format(parquet.open_source, FolderOptions),
    "arrow": Format(parquet.open_source, FolderOptions),
}

SUFFIXES = {
    ".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow", ".feather": "arrow", ".ipc": "arrow",
}  # fmt: skip


FILES_TO_DETECT = 1000


@dataclasses.dataclass
class Report:
    """The result of an import: the number of samples in the commit, and every refused item. Together they account for every item offered.

    With `on_error="null"`, an item with a refused value still becomes a sample, with a null in that column. `left_out` lists the files in a
    folder that were not offered: files of other kinds, such as README.md, and files not selected by include and exclude.
    """

    samples: int
    refused: list[Refusal]
    snapshot: str | None
    left_out: list[str] = dataclasses.field(default_factory=list)


def detect(source: pathlib.Path) -> str:
    """Choose the format. For a file, the suffix decides. For a folder, the format is "parquet" if the first files include tables but no
    images, and "images" otherwise.
    """
    if source.is_dir():
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
    **options: Any,
) -> Report:
    """Import a folder of images, CSV/TSV, JSON lines, Parquet/Arrow, a table in memory, or any iterable of dicts, as one commit.

    A table is a pandas or Polars frame, an Arrow table or reader, a dict of columns, or a Hugging Face dataset.

    Appends to the branch if the destination is a dataset with these columns, and otherwise creates it. `types` maps column names to types; missing types
    are inferred. `on_error`: "raise" commits nothing, "skip" leaves out the item, "null" stores a null for the value.
    `progress(done, total, unit)` is called after each chunk. `options`: encoding (CSV and JSON lines); delimiter, quote and header (CSV);
    include and exclude, lists of patterns such as "*.jpg" or "train/*" that select files in a folder.

    Memory: the budget, plus data parsed ahead (up to 250 MiB, or a few times the largest line or Arrow record batch).
    Raises: InvalidInputError (also media-undecodable, for a damaged image), NotFoundError (source-not-found), UnsupportedError
    (unsupported-format), CorruptError (object-malformed, for a damaged file).
    """
    if on_error not in ("raise", "skip", "null"):
        raise InvalidInputError(f"on_error={on_error!r}, expected raise, skip or null")
    if validate not in ("header", "decode"):
        raise InvalidInputError(f"validate={validate!r}, expected header or decode")
    known = set().union(*(_own_options(format.options) for format in FORMATS.values()))
    if unknown := sorted(set(options) - known):
        raise InvalidInputError(f"cannot import: unknown option `{unknown[0]}`", hint=f"options: {', '.join(sorted(known))}")
    options |= {name: checked_patterns(name, options[name]) for name in ("include", "exclude") if name in options}
    there = _existing(destination, branch)
    given = {name: _type(name, kind) for name, kind in (types or {}).items()}
    opened, name = _open_source(source, format, Options(given, on_error, {} if there is None else there.schema), options)
    missing = _missing(destination)
    dataset, created = _destination(there, destination, opened.schema, f"create dataset to import {name}")
    report = Report(0, [], None, opened.left_out)
    with (
        _undo(dataset, created, missing),
        contextlib.closing(opened.chunks) as chunks,
        dataset.transaction(message or f"import {name}") as transaction,
    ):
        kinds = dataset.schema
        appender = _Appender(transaction, kinds, validate, on_error, report.refused)
        for chunk in chunks:
            report.refused.extend(chunk.refused)
            if chunk.refused and on_error == "raise":
                raise _as_error(chunk.refused[0])
            report.samples += appender.append(chunk)
            if progress:
                progress(opened.done(), opened.total, opened.unit)
    report.snapshot = transaction.receipt.snapshot
    return report


def _type(name: str, kind: Any) -> ColumnType:
    return from_json(to_json({name: kind}))[name]


def _own_options(options: type[Options]) -> set[str]:
    """Return the names of the options that a class adds to the common options."""
    return {field.name for field in dataclasses.fields(options)} - {field.name for field in dataclasses.fields(Options)}


def _open_source(source: Any, format: str, common: Options, options: Mapping[str, Any]) -> tuple[OpenedSource, str]:
    if not isinstance(source, str | os.PathLike):
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
    importer = FORMATS[chosen]
    own = _own_options(importer.options)
    # Options for other formats have no effect. None selects the format's own default, if it has one.
    given = {name: value for name, value in options.items() if name in own and not (value is None and name in importer.values)}
    settings = importer.options(common.types, common.on_error, common.defaults, **{**importer.values, **given})
    try:
        return importer.open_source(path, settings), path.name
    except OSError as error:
        if isinstance(error, Error):
            raise
        raise NotFoundError(f"cannot import `{path}`: {error}", code="source-not-found") from error


def _existing(uri: str | os.PathLike[str], branch: str) -> Dataset | None:
    if str(uri).lower().startswith(("http://", "https://")):
        return None  # `create` reports that HTTP is read-only.
    try:
        return open(uri, branch=branch)
    except NotFoundError as error:
        if error.code != "dataset-not-found":
            raise
        if branch != "main":
            hint = "import into main first, or create the dataset and the branch"
            raise NotFoundError(
                f"cannot import into branch `{branch}` of `{uri}`: it is not a dataset", code="branch-not-found", hint=hint
            ) from None
        return None


def _destination(dataset: Dataset | None, uri: str | os.PathLike[str], schema: dict[str, ColumnType], message: str) -> tuple[Dataset, bool]:
    if dataset is None:
        return create(uri, schema, message=message), True
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


def _as_error(refusal: Refusal, column: str | None = None) -> Error:
    error = InvalidInputError(
        f"cannot import `{refusal.path}`: {refusal.message}", code=refusal.code, hint="pass --on-error skip to leave out such items"
    )
    error.column = column
    return error


class _Appender:
    """Appends the good rows of chunks. Finds the bad rows by appending smaller and smaller parts."""

    def __init__(
        self, transaction: Transaction, kinds: Mapping[str, ColumnType], validate: str, on_error: str, refused: list[Refusal]
    ) -> None:
        self.transaction, self.kinds, self.validate, self.on_error, self.refused = transaction, kinds, validate, on_error, refused

    def append(self, chunk: Chunk) -> int:
        """Append a chunk and return the number of samples appended."""
        columns = {name: container(values) for name, values in chunk.columns.items()}
        bad: dict[str, set[int]] = {}
        for row, column, refusal in self._problems(columns, chunk):
            if self.on_error == "raise":
                raise _as_error(refusal, column)
            self.refused.append(refusal)
            bad.setdefault(column, set()).add(row)
        if self.on_error == "null":
            for column, nulls in bad.items():
                columns[column] = [None if row in nulls else value for row, value in enumerate(items_of(columns[column]))]
            return self._part(columns, range(chunk.rows), chunk)
        left_out = set().union(*bad.values())
        return self._part(columns, [row for row in range(chunk.rows) if row not in left_out] if left_out else range(chunk.rows), chunk)

    def _problems(self, columns: dict[str, Any], chunk: Chunk) -> list[tuple[int, str, Refusal]]:
        """Collect the values that the source refused, numbers in category columns, and media that cannot be decoded.

        Returns one reason per row, or one per value with `on_error="null"`. Reads each media file once and stores
        its bytes in `columns`.
        """
        each = self.on_error == "null"  # If true, every bad value is reported; otherwise, one reason per row is enough.
        found = {(row, column if each else ""): (row, column, refusal) for row, column, refusal in reversed(chunk.problems)}
        for name, values in list(columns.items()):
            kind = self.kinds[name]
            for row, number in _numbers(values) if isinstance(kind, Category) else ():
                refusal = Refusal.of_value(chunk.name(row), name, f"the value is {number}, expected a word: codes differ between datasets")
                found.setdefault((row, name if each else ""), (row, name, refusal))
            if not isinstance(kind, Image | Mask) or is_arrow(values):
                continue
            bodies = [_body(value) for value in values]
            if any(body is not None for body in bodies):
                columns[name] = [value if body is None else body for value, body in zip(values, bodies, strict=True)]
                errors = _core.check_media(bodies, isinstance(kind, Mask), self.validate)
                for row, error in enumerate(errors):
                    if error is not None:
                        found.setdefault((row, name if each else ""), (row, name, Refusal(chunk.name(row), error.code, error.message)))
        if each:
            known = {(row, column) for row, column, _ in chunk.problems}
            return [*chunk.problems, *(entry for entry in found.values() if entry[:2] not in known)]
        return sorted(found.values(), key=lambda entry: entry[0])

    def _part(self, columns: Mapping[str, Any], rows: Sequence[int], chunk: Chunk) -> int:
        if not rows:
            return 0
        part = columns if len(rows) == chunk.rows else {name: _picked(values, rows) for name, values in columns.items()}
        try:
            self._append(part, len(rows))
            return len(rows)
        except Error as error:
            if error.code in _NO_FAULT_OF_A_ROW:
                raise
            if self.on_error == "raise":
                _name(error, chunk, rows)
                raise
            if len(rows) > 1:
                middle = len(rows) // 2
                return self._part(columns, rows[:middle], chunk) + self._part(columns, rows[middle:], chunk)
            return self._row(part, chunk.name(rows[0]), error)

    def _append(self, columns: Mapping[str, Any], rows: int) -> None:
        # `_problems` has checked all media except Arrow arrays, which the transaction checks.
        left = any(is_arrow(values) and isinstance(self.kinds[name], Image | Mask) for name, values in columns.items())
        self.transaction.append_slice(columns, 0, rows, self.validate if left else "header")

    def _row(self, values: Mapping[str, Any], name: str, error: Error) -> int:
        """Refuse a row, or replace its bad values with nulls. Returns the number of samples appended."""
        while True:
            self.refused.append(Refusal(name, error.code, error.reason))
            column = error.column
            # Replacing a refused null with a null would loop forever.
            if self.on_error != "null" or column is None or column not in values or _is_null(values[column], 0):
                return 0
            values = {**values, column: [None]}
            try:
                self._append(values, 1)
                return 1
            except Error as again:
                if again.code in _NO_FAULT_OF_A_ROW:
                    raise
                error = again


# Errors that every row would raise, such as failing storage or a closed transaction.
_NO_FAULT_OF_A_ROW = ("no-space", "storage-failed", "read-only", "permission-denied", "transaction-closed", "internal", "column-not-found")


def _body(value: Any) -> bytes | None:
    """Return encoded media to check before appending, or None. Also returns None for an unreadable file, which is refused later."""
    if isinstance(value, os.PathLike):
        with contextlib.suppress(OSError):
            return pathlib.Path(value).read_bytes()
        return None
    return bytes(value) if isinstance(value, bytes | bytearray) else None


def _numbers(values: Any) -> Iterator[tuple[int, Any]]:
    """Yield each whole number among the values, with its row."""
    if is_arrow(values) and not pa.types.is_integer(tables.storage(values.type)):
        return
    for row, value in enumerate(values.to_pylist() if is_arrow(values) else values):
        if is_whole(value):
            yield row, value


def _picked(values: Any, rows: Sequence[int]) -> Any:
    return (
        values.take(list(rows)) if is_arrow(values) else values[rows] if isinstance(values, np.ndarray) else [values[row] for row in rows]
    )


def _is_null(values: Any, row: int) -> bool:
    return isinstance(values, list) and values[row] is None


def _name(error: Error, chunk: Chunk, rows: Sequence[int]) -> None:
    """Name the refused item in the error."""
    if error.rows and error.rows[0] < len(rows):
        error._within(f"cannot import `{chunk.name(rows[error.rows[0]])}`")
        error._row, error.rows = None, []  # These were row numbers within a part, which mean nothing to the caller.
        error.hint = error.hint or "pass --on-error skip to leave out such items"

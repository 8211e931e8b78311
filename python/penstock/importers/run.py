"""`import_data`: source → one commit, with a report of every item that was refused."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from penstock import _core
from penstock.dataset import Dataset, Transaction, create, open
from penstock.errors import Error, InvalidInputError, NotFoundError
from penstock.importers import csv, images, jsonl, parquet, rows
from penstock.importers.source import Chunk, Options, Refusal, Source
from penstock.schema import ColumnType, Image, Mask, from_json, to_json

FORMATS: dict[str, Callable[[pathlib.Path, Options], Source]] = {
    "images": images.open_source,
    "csv": csv.open_source,
    "tsv": csv.open_source,
    "jsonl": jsonl.open_source,
    "parquet": parquet.open_source,
    "arrow": parquet.open_source,
}

SUFFIXES = {
    ".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow", ".feather": "arrow", ".ipc": "arrow",
}  # fmt: skip


@dataclasses.dataclass
class Report:
    """What an import did: samples in the commit, and every item refused. samples + refused = items offered."""

    samples: int
    refused: list[Refusal]
    snapshot: str | None


def detect(source: pathlib.Path) -> str:
    """Tell the format of a source: a folder is images, a file goes by its ending."""
    if source.is_dir():
        return "images"
    suffixes = [suffix.lower() for suffix in source.suffixes if suffix.lower() not in (".gz", ".bz2", ".zst", ".xz")]
    found = SUFFIXES.get(suffixes[-1] if suffixes else "")
    if found is None:
        raise InvalidInputError(f"cannot import `{source}`: its ending tells no format", hint=f"give --format, one of {', '.join(FORMATS)}")
    return found


def import_data(
    source: str | os.PathLike[str] | Iterable[Mapping[str, Any]],
    destination: str | os.PathLike[str],
    *,
    format: str = "auto",
    types: Mapping[str, Any] | None = None,
    validate: str = "header",
    on_error: str = "raise",
    message: str | None = None,
    progress: Callable[[int, int | None, str], None] | None = None,
    **options: Any,
) -> Report:
    """Import a folder of images, CSV/TSV, JSON lines, Parquet/Arrow, or any iterable of dicts, as one commit.

    The destination is created, or appended to if it is a dataset with these columns. `types` gives column types by name; the
    rest are inferred. `on_error`: "raise" (nothing is committed), "skip" the item, or "null" the value. Memory is bounded by
    the budget. `progress(done, total, unit)` is called as it goes.
    Raises: InvalidInputError, NotFoundError (source-not-found), CorruptError (media-undecodable).
    """
    if on_error not in ("raise", "skip", "null"):
        raise InvalidInputError(f"on_error={on_error!r}, expected raise, skip or null")
    if validate not in ("header", "decode"):
        raise InvalidInputError(f"validate={validate!r}, expected header or decode")
    settings = Options(types={name: _type(name, kind) for name, kind in (types or {}).items()}, **options)
    opened, name = _open_source(source, format, settings)
    dataset, created = _destination(destination, opened.schema, f"create for import of {name}")
    report = Report(0, [], None)
    with _undo(dataset, created), dataset.transaction(message or f"import {name}") as transaction:
        kinds = dataset.schema
        for chunk in opened.chunks:
            report.refused.extend(chunk.refused)
            if chunk.refused and on_error == "raise":
                raise _as_error(chunk.refused[0])
            report.samples += _append(transaction, chunk, kinds, validate, on_error, report.refused)
            if progress:
                progress(opened.done(), opened.total, opened.unit)
    report.snapshot = transaction.receipt.snapshot
    return report


def _type(name: str, kind: Any) -> ColumnType:
    return from_json(to_json({name: kind}))[name]


def _open_source(source: Any, format: str, settings: Options) -> tuple[Source, str]:
    if not isinstance(source, str | os.PathLike):
        if not isinstance(source, Iterable):
            raise InvalidInputError(f"cannot import a {type(source).__name__}: expected a path or an iterable of dicts")
        return rows.open_source(source, settings), "iterable"
    path = pathlib.Path(source)
    if not path.exists():
        raise NotFoundError(f"cannot import `{path}`: there is no such file or folder", code="source-not-found")
    chosen = detect(path) if format == "auto" else format
    if chosen not in FORMATS:
        raise InvalidInputError(f"cannot import `{path}`: unknown format {chosen!r}", hint=f"one of auto, {', '.join(FORMATS)}")
    if chosen == "tsv" and settings.delimiter is None:
        settings = dataclasses.replace(settings, delimiter="\t")
    try:
        return FORMATS[chosen](path, settings), path.name
    except OSError as error:
        if isinstance(error, Error):
            raise
        raise NotFoundError(f"cannot import `{path}`: {error}", code="source-not-found") from error


def _destination(uri: str | os.PathLike[str], schema: dict[str, ColumnType], message: str) -> tuple[Dataset, bool]:
    try:
        dataset = open(uri)
    except NotFoundError as error:
        if error.code != "dataset-not-found":
            raise
        return create(uri, schema, message=message), True
    missing = [name for name in schema if name not in dataset.schema]
    if missing:
        raise InvalidInputError(
            f"cannot import into `{uri}`: it has no column `{missing[0]}`",
            code="invalid-schema",
            hint=f"columns: {', '.join(dataset.schema)}; import into a new dataset",
        )
    return dataset, False


class _undo:
    """Remove a dataset that this import has just made, if the import fails: nothing half-written stays."""

    def __init__(self, dataset: Dataset, created: bool) -> None:
        self.root = pathlib.Path(dataset.uri) if created and "://" not in dataset.uri else None

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None and self.root is not None:
            import shutil

            for name in ("log", "r", "d", "p", "w"):
                shutil.rmtree(self.root / name, ignore_errors=True)
            with contextlib.suppress(OSError):  # Something else lies there: it is not ours to remove.
                self.root.rmdir()


def _as_error(refusal: Refusal) -> Error:
    return InvalidInputError(
        f"cannot import `{refusal.path}`: {refusal.message}", code=refusal.code, hint="pass --on-error skip to leave such items out"
    )


def _append(
    transaction: Transaction, chunk: Chunk, kinds: Mapping[str, ColumnType], validate: str, on_error: str, refused: list[Refusal]
) -> int:
    """Append what of a chunk is good; gives the number of samples."""
    columns, keep = chunk.columns, list(range(chunk.rows))
    for _ in range(1 + len(columns) + chunk.rows):
        if chunk.rows == 0 or not keep:
            return 0
        try:
            transaction.append(_media_checked(columns, kinds, validate, on_error, chunk, keep, refused), validate="header")
            return len(keep)
        except Error as error:
            if on_error == "raise" or not error.rows or transaction._failed is not None:
                _name(error, chunk, keep)
                raise
            bad = sorted({row for row in error.rows if 0 <= row < len(keep)})
            if not bad:
                raise
            name = _column_of(error, columns)
            refused.extend(Refusal(chunk.name(keep[row]), error.code, error.message) for row in bad)
            if on_error == "null" and name is not None:
                columns = {**columns, name: [None if row in bad else value for row, value in enumerate(_listed(columns[name]))]}
                continue
            gone = set(bad)
            columns = {other: [value for row, value in enumerate(_listed(values)) if row not in gone] for other, values in columns.items()}
            keep = [row for index, row in enumerate(keep) if index not in gone]
    raise InvalidInputError("cannot import: every attempt found another bad row")


def _listed(values: Any) -> list[Any]:
    return list(values.to_pylist()) if hasattr(values, "to_pylist") else list(values)


def _column_of(error: Error, columns: Mapping[str, Any]) -> str | None:
    return next((name for name in columns if f"column `{name}`" in error.message), None)


def _name(error: Error, chunk: Chunk, keep: list[int]) -> None:
    """Put the item's own name into the error."""
    if error.rows and 0 <= error.rows[0] < len(keep):
        error.message = f"cannot import `{chunk.name(keep[error.rows[0]])}`: {error.message}"
        error.hint = error.hint or "pass --on-error skip to leave such items out"


def _media_checked(
    columns: dict[str, Any],
    kinds: Mapping[str, ColumnType],
    validate: str,
    on_error: str,
    chunk: Chunk,
    keep: list[int],
    refused: list[Refusal],
) -> dict[str, Any]:
    """Decode media on all threads where the user wants that; refused ones raise with all their rows."""
    if validate == "header":
        return columns
    for name, values in columns.items():
        kind = kinds[name]
        if not isinstance(kind, Image | Mask):
            continue
        form, *parts = kind.prepare(values)
        if form != "items":
            continue
        bodies = [value.read_bytes() if isinstance(value, pathlib.Path) else value for value in parts[0]]
        errors = _core.check_media([None if body is None else bytes(body) for body in bodies], isinstance(kind, Mask), "decode")
        bad = [row for row, error in enumerate(errors) if error is not None]
        if bad:
            first = errors[bad[0]]
            raise type(first)(f"cannot append to column `{name}`: {first.message}", code=first.code, hint=first.hint, rows=bad)
        columns = {**columns, name: bodies}
    return columns

"""Opens the source of an import: chooses the format of files and folders, or takes tables and rows in memory."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from penstock import _core
from penstock.changes.tables import is_table
from penstock.dataset import open
from penstock.errors import Error, InvalidInputError, NotFoundError
from penstock.importers import csv, frames, json, jsonl, parquet, rows
from penstock.importers.pictures import coco, images, yolo
from penstock.importers.shared.source import OpenedSource, Options, TextOptions


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
    "json": Format(json.open_source, TextOptions),
    "jsonl": Format(jsonl.open_source, TextOptions),
    "parquet": Format(parquet.open_source, parquet.ParquetOptions),
    "arrow": Format(parquet.open_source, parquet.ParquetOptions),
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
    if found in ("coco", "jsonl") and json.is_array(source):
        return "json"
    if found is None:
        raise InvalidInputError(f"cannot import `{source}`: unknown file extension", hint=f"pass --format, one of {', '.join(FORMATS)}")
    return found


def own_options(options: type[Options]) -> set[str]:
    """Return the names of the options that a class adds to the common options."""
    return {field.name for field in dataclasses.fields(options)} - {field.name for field in dataclasses.fields(Options)}


def all_options() -> set[str]:
    """Return the names of the options of all formats."""
    return set().union(*(own_options(format.options) for format in FORMATS.values()))


def open_source(source: Any, format: str, common: Options, options: Mapping[str, Any], limit: int | None) -> tuple[OpenedSource, str]:
    """Open a source by its type, or by the format of its files. Returns it with its name."""
    if not isinstance(source, str | os.PathLike):
        if isinstance(source, Mapping) and source and all(is_table(table) for table in source.values()):
            raise InvalidInputError(
                f"cannot import a dict of tables: {', '.join(map(str, source))}",
                hint=f"import one of them: source[{next(iter(source))!r}]; or add a column that names the table, and append one after another",
            )
        _check_shuffled("table", common)
        if isinstance(source, list | tuple) and source and is_table(source[0]):
            return frames.open_tables(source, common), "tables"
        table = frames.open_source(source, common)
        if table is not None:
            return table, "table"
        if not isinstance(source, Iterable):
            raise InvalidInputError(f"cannot import a {type(source).__name__}: expected a path, a table, or an iterable of dicts")
        if isinstance(source, Iterator):
            first = list(itertools.islice(source, 1))
            source = itertools.chain(first, source)
            if first and is_table(first[0]):
                return frames.open_tables(source, common), "tables"
            source = source if limit is None else itertools.islice(source, limit)  # Takes no more rows than wanted.
        return rows.open_source(source, common), "iterable"
    local = _core.local_path(source) if isinstance(source, str) else source
    if local is None:
        raise InvalidInputError(
            f"cannot import `{source}`: sources are local files and folders, or iterables",
            hint=f"download it first; if it is a dataset, {_COPY}",
        )
    path = pathlib.Path(local)
    if (path / "log").is_dir() and _is_dataset(path):
        raise InvalidInputError(f"cannot import `{path}`: it is already a dataset", hint=_COPY)
    if not path.exists():
        raise NotFoundError(f"cannot import `{path}`: there is no such file or folder", code="source-not-found")
    if path.suffix.lower() == ".xz":
        raise InvalidInputError(f"cannot import `{path}`: xz is not supported", hint="decompress it, or compress it as .gz, .bz2 or .zst")
    chosen = detect(path) if format == "auto" else format
    if chosen not in FORMATS:
        raise InvalidInputError(f"cannot import `{path}`: unknown format {chosen!r}", hint=f"use one of auto, {', '.join(FORMATS)}")
    if chosen == "jsonl" and path.is_file() and json.is_array(path, str(options.get("encoding") or "utf-8")):
        chosen = "json"
    if chosen not in SHUFFLED:
        _check_shuffled(f"{chosen} file", common)
    importer = FORMATS[chosen]
    own = own_options(importer.options)
    # Options for other formats have no effect. None selects the format's own default, if it has one.
    given = {name: value for name, value in options.items() if name in own and not (value is None and name in importer.values)}
    settings = importer.options(**vars(common), **{**importer.values, **given})
    if chosen in SHUFFLED:  # These columns have fixed names.
        settings = settings.renamed()
    try:
        return importer.open_source(path, settings), path.name
    except OSError as error:
        if isinstance(error, Error):
            raise
        raise NotFoundError(f"cannot import `{path}`: {error}", code="source-not-found") from error


_COPY = "copy its folder or bucket with any tool, or append its samples: ps.open(destination).append(ps.open(source))"


def _is_dataset(folder: pathlib.Path) -> bool:
    try:
        open(folder)
    except Error as error:
        return error.code != "dataset-not-found"  # A damaged dataset is one as well.
    return True


def _check_shuffled(what: str, options: Options) -> None:
    if options.shuffle_seed is not None:
        raise InvalidInputError(
            f"shuffle_seed={options.shuffle_seed!r}: a {what} is read in order", hint="shuffle when you load: ds.loader(shuffle=True)"
        )

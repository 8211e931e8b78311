"""Changes what a source yields: reads the files that columns name, leaves out samples, or stops early."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from penstock import _core
from penstock.errors import InvalidInputError
from penstock.importers.shared.source import Chunk, OpenedSource, Refusal
from penstock.values.arrow import types as arrow_types
from penstock.values.checks import is_arrow, is_utf8

Item = TypeVar("Item")
# Limits for a chunk of files, which is held in memory. The last file in a chunk may push the chunk over the byte limit.
FILES_AT_ONCE = 256
CHUNK_BYTES = 16 << 20
# Photographs are smaller than this, and each file must fit in memory.
LARGEST_FILE_BYTES = 1 << 30


def picked(values: Any, rows: Sequence[int]) -> Any:
    """Return the values of some rows."""
    return (
        values.take(pa.array(rows, pa.int64()))
        if is_arrow(values)
        else values[rows]
        if isinstance(values, np.ndarray)
        else [values[row] for row in rows]
    )


def part_of(chunk: Chunk, rows: Sequence[int]) -> Chunk:
    """Return some rows of a chunk. What the source refused goes with the first row, or with none."""
    place = {row: at for at, row in enumerate(rows)}
    return Chunk(
        {name: picked(values, rows) for name, values in chunk.columns.items()},
        len(rows),
        lambda row: chunk.name(rows[row]),
        chunk.refused if 0 in place or not chunk.rows else (),
        [(place[row], column, refusal) for row, column, refusal in chunk.problems if row in place],
        chunk.dropped_boxes if 0 in place else 0,
        chunk.done,
    )


def limited(chunks: Iterable[Chunk], limit: int) -> Generator[Chunk, None, None]:
    """Yield chunks until `limit` rows have been offered."""
    left = limit
    for chunk in chunks:
        if left <= 0:
            return
        yield chunk if chunk.rows <= left else part_of(chunk, range(left))
        left -= chunk.rows


def with_names(opened: OpenedSource, names: Mapping[str, str]) -> OpenedSource:
    """Return a source with only these columns, under their names in the dataset."""
    if all(old == new for old, new in names.items()) and list(names) == list(opened.schema):
        return opened
    opened.schema = {new: with_target(opened.schema[old], names) for old, new in names.items()}
    opened.chunks = _named(opened.chunks, names)
    opened.by_path = opened.by_path and names.get("path") == "path"
    return opened


def with_target(kind: Any, names: Mapping[str, str]) -> Any:
    """Return a column type that belongs to a column by its new name, or to none if that is left out."""
    target = getattr(kind, "of", None)
    if target is None:
        return kind
    own = target if target in names.values() else None  # A type that the user gave has the new name.
    return dataclasses.replace(kind, of=names.get(target, own))


def _named(chunks: Generator[Chunk, None, None], names: Mapping[str, str]) -> Generator[Chunk, None, None]:
    with contextlib.closing(chunks):
        for chunk in chunks:
            chunk.columns = {new: chunk.columns[old] for old, new in names.items() if old in chunk.columns}
            chunk.problems = [(row, names[column], refusal) for row, column, refusal in chunk.problems if column in names]
            yield chunk


def with_files(
    chunks: Iterable[Chunk], kinds: Collection[str], always: Collection[str], folder: pathlib.Path
) -> Generator[Chunk, None, None]:
    """Read the files that text in the columns `kinds` and `always` names. Chunks are divided by the sizes of the files.

    In the columns `always`, bytes are names as well. A file that cannot be read is a problem of its row.
    """
    for chunk in chunks:
        named = {name: _names(chunk.columns[name], name in always) for name in (*kinds, *always) if name in chunk.columns}
        named = {name: values for name, values in named.items() if any(isinstance(value, str | os.PathLike) for value in values)}
        if not named:
            yield chunk
            continue
        files = {name: [_file(folder, value) for value in values] for name, values in named.items()}
        held = partial(_bytes_of, files)
        for rows in grouped(range(chunk.rows), held, FILES_AT_ONCE, CHUNK_BYTES):
            part = part_of(chunk, rows)
            problems = list(part.problems)
            for name, values in named.items():
                read = partial(_read, part.name, name, problems)
                part.columns[name] = [read(at, values[row], files[name][row]) for at, row in enumerate(rows)]
            part.problems = sorted(problems, key=lambda problem: problem[0])
            yield part


def _names(values: Any, always: bool) -> list[Any]:
    """Return the values as a list in which names of files are text. Returns an empty list if there are none."""
    if is_arrow(values):
        kind = arrow_types.storage(values.type)
        if always and arrow_types.is_binary(kind):
            return [None if value is None else os.fsdecode(value) for value in values.to_pylist()]
        elif not arrow_types.is_text(kind) and not pa.types.is_dictionary(kind):
            return []
        return list(values.to_pylist())
    return [os.fsdecode(value) if always and isinstance(value, bytes) else value for value in values]


def _bytes_of(files: Mapping[str, list[pathlib.Path | None]], row: int) -> int:
    return sum(size_of(file) for each in files.values() if (file := each[row]) is not None)


def _file(folder: pathlib.Path, value: Any) -> pathlib.Path | None:
    if isinstance(value, os.PathLike):
        return folder / value
    if not isinstance(value, str) or not value or "\0" in value:
        return None
    try:
        local = _core.local_path(value) if ":" in value else value
    except InvalidInputError:
        return None
    return None if local is None else folder / local


def grouped(items: Iterable[Item], size: Callable[[Item], int], most: int, largest: int) -> Iterator[list[Item]]:
    """Divide items into groups of at most `most`. A group ends with the item that brings its size to `largest`.

    >>> list(grouped([3, 4, 5, 6], lambda item: item, 3, 7))
    [[3, 4], [5, 6]]
    """
    group: list[Item] = []
    held = 0
    for item in items:
        group.append(item)
        held += size(item)
        if len(group) >= most or held >= largest:
            yield group
            group, held = [], 0
    if group:
        yield group


def contents_of(value: Any) -> Any:
    """Return the contents of a file, or None if it cannot be read. Other values are returned unchanged."""
    try:
        return pathlib.Path(value).read_bytes() if isinstance(value, os.PathLike) else value
    except OSError:
        return None


def size_of(file: pathlib.Path) -> int:
    """Return the size of a file in bytes, or 0 if it cannot be read."""
    try:
        return file.stat().st_size
    except (OSError, ValueError):  # A name with a lone surrogate raises ValueError.
        return 0


def _read(
    name_of: Callable[[int], str], column: str, problems: list[tuple[int, str, Refusal]], row: int, value: Any, file: pathlib.Path | None
) -> Any:
    """Return the contents of a file, or None with a problem. Values that are not names are returned unchanged."""
    if not isinstance(value, str | os.PathLike):
        return value
    text = os.fspath(value)
    if not text:
        return None
    problem = Refusal("", "invalid-value", f"`{text[:200]}` is not the path of a local file") if file is None else problem_of(text, file)
    if problem is None and file is not None:
        try:
            return file.read_bytes()
        except OSError as error:
            problem = Refusal("", "source-not-found", str(error))
    if problem is not None:
        problems.append((row, column, Refusal(name_of(row), problem.code, f"cannot read column `{column}`: {problem.message}")))
    return None


def problem_of(name: str, file: pathlib.Path) -> Refusal | None:
    """Return why a file cannot be a sample, or None."""
    if not is_utf8(name):
        return Refusal(name.encode("utf-8", "backslashreplace").decode(), "invalid-value", "the file name is not UTF-8")
    try:
        status = file.stat()
        if not os.access(file, os.R_OK):
            return Refusal(name, "permission-denied", "the file cannot be read")
    except OSError as error:
        return Refusal(name, "source-not-found", str(error))
    if not file.is_file():
        return Refusal(name, "invalid-value", "it is not a regular file")
    if status.st_size > LARGEST_FILE_BYTES:
        return Refusal(name, "media-too-large", f"the file has {status.st_size} bytes, expected at most {LARGEST_FILE_BYTES}")
    return None

"""A folder of images: every file is a sample, its parent folder its class.

Whether a file is an image is told by its content, never by its name: what can't be read is refused and reported.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from penstock.errors import InvalidInputError
from penstock.importers.source import Chunk, Options, Refusal, Source
from penstock.schema import ColumnType, Image, Label, Text
from penstock.values import is_utf8

# A chunk of files is held whole: at most so many, and no more bytes than this unless one file has more.
FILES_AT_ONCE = 256
CHUNK_BYTES = 16 << 20
# No photograph is larger; a file that is would have to be held whole.
LARGEST_FILE_BYTES = 1 << 30


def open_source(folder: pathlib.Path, options: Options) -> Source:
    """List the folder. Columns: image, path (relative), and label where there are sub-folders."""
    if not folder.is_dir():
        raise InvalidInputError(f"cannot import `{folder}` as images: it is no folder")
    files = sorted(_walk(folder))
    if not files:
        raise InvalidInputError(f"cannot import `{folder}`: it holds no files")
    classes = sorted({name for file in files if (name := _class_of(folder, file)) is not None})
    schema: dict[str, ColumnType] = {"image": options.types.get("image", Image()), "path": Text()}
    if classes:
        schema["label"] = options.types.get("label", Label(classes))
    progress = {"done": 0}

    def chunks() -> Iterator[Chunk]:
        for group in _groups(files):
            good, names, refused = [], [], []
            for file in group:
                problem = _problem(folder, file)
                if problem is None:
                    good.append(file)
                    names.append(str(file.relative_to(folder)))
                else:
                    refused.append(problem)
            columns: dict[str, Any] = {"image": good, "path": names}
            if classes:
                columns["label"] = [_class_of(folder, file) for file in good]
            progress["done"] += len(group)
            yield Chunk(columns, len(good), names.__getitem__, refused)

    return Source(schema, chunks(), len(files), "files", lambda: progress["done"])


def _groups(files: list[pathlib.Path]) -> Iterator[list[pathlib.Path]]:
    """Cut the list where a chunk would hold too much."""
    group: list[pathlib.Path] = []
    size = 0
    for file in files:
        with contextlib.suppress(OSError):  # A file that can't be looked at is refused later, by its name.
            size += file.stat().st_size
        group.append(file)
        if len(group) >= FILES_AT_ONCE or size >= CHUNK_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _walk(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    for where, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            if not name.startswith("."):
                yield pathlib.Path(where, name)


def _class_of(folder: pathlib.Path, file: pathlib.Path) -> str | None:
    """Give the class of a file; those that lie in the folder itself have none."""
    parent = file.parent
    return None if parent == folder else _shown(parent.relative_to(folder).as_posix())


def _shown(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _problem(folder: pathlib.Path, file: pathlib.Path) -> Refusal | None:
    name = str(file.relative_to(folder))
    if not is_utf8(name):
        return Refusal(_shown(name), "invalid-value", "the name of the file is not UTF-8")
    try:
        status = file.stat()
        if not os.access(file, os.R_OK):
            return Refusal(name, "permission-denied", "the file cannot be read")
    except OSError as error:
        return Refusal(name, "source-not-found", str(error))
    if not file.is_file():
        return Refusal(name, "invalid-value", "it is no regular file")
    if status.st_size > LARGEST_FILE_BYTES:
        return Refusal(name, "media-too-large", f"{status.st_size} bytes, at most {LARGEST_FILE_BYTES} are imported")
    return None

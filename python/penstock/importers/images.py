"""A folder of images: every image is a sample, and its parent folder is its class.

A file counts as an image if its first bytes or its suffix indicate one. Files of other kinds (README.md, a manifest) are left out and
counted. An image that is damaged, or in an unsupported format, is refused and reported, because the user may expect it in the dataset.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Generator, Iterator
from typing import Any

from penstock import _core
from penstock.columns.column_type import ColumnType
from penstock.columns.image import Image
from penstock.columns.label import Label
from penstock.columns.mask import Mask
from penstock.columns.text import Text
from penstock.errors import InvalidInputError
from penstock.importers.source import Chunk, FolderOptions, OpenedSource, Refusal
from penstock.values.checks import is_utf8

# Limits for a chunk of files, which is held in memory. The last file in a chunk may push the chunk over the byte limit.
FILES_AT_ONCE = 256
CHUNK_BYTES = 16 << 20
# Photographs are smaller than this, and each file must fit in memory.
LARGEST_FILE_BYTES = 1 << 30


def open_source(folder: pathlib.Path, options: FolderOptions) -> OpenedSource:
    """List the folder. Columns: image, path (relative), and label if images are in sub-folders."""
    if not folder.is_dir():
        raise InvalidInputError(f"cannot import `{folder}` as images: it is not a folder")
    files: list[pathlib.Path] = []
    left_out: list[pathlib.Path] = []
    # An `include` such as "*.dat" declares matching files to be images, regardless of their first bytes. "train/*" only selects a folder.
    endings = [pattern for pattern in options.include if (ending := pathlib.PurePosixPath(pattern).suffix) and not set(ending) & set("*?[")]
    said = dataclasses.replace(options, include=endings)
    for file in sorted(_walk(folder)):
        name = file.relative_to(folder).as_posix()
        offered = options.selects(name) and (
            (bool(endings) and said.selects(name)) or file.suffix.lower() in SUFFIXES or not file.is_file() or begins_as_image(_head(file))
        )
        (files if offered else left_out).append(file)
    if not files:
        found = f"no images, but {len(left_out)} files of other kinds" if left_out else "no files"
        if left_out and (options.include or options.exclude):
            found = f"{len(left_out)} files, none of them selected by include and exclude"
        raise InvalidInputError(f"cannot import `{folder}`: it contains {found}", hint="see --format, --include and --exclude")
    schema: dict[str, ColumnType] = {"image": options.types.get("image", Image()), "path": options.types.get("path", Text())}
    decoded = isinstance(schema["image"], Image | Mask)
    classes = _classes(folder, files, accepted=options.on_error == "skip" and decoded)
    unknown = [name for name in options.types if name not in (*schema, "label")]
    if unknown:
        raise InvalidInputError(f"cannot import `{folder}`: it has no column `{unknown[0]}`", hint="columns: image, path, label")
    if classes:
        schema["label"] = options.types.get("label", Label(classes))
    progress = {"done": 0}

    def chunks() -> Generator[Chunk, None, None]:
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

    shown = [_shown(file.relative_to(folder).as_posix()) for file in left_out]
    return OpenedSource(schema, chunks(), len(files), "files", lambda: progress["done"], shown)


# Suffixes of images, including formats that are not supported.
SUFFIXES = {
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".gif", ".bmp", ".webp", ".tif", ".tiff", ".heic", ".heif", ".avif", ".jp2", ".jxl",
    ".j2k", ".jpx", ".jpc", ".pbm", ".pgm", ".ppm", ".pnm", ".pam", ".tga", ".ico", ".psd", ".dib", ".exr", ".hdr", ".qoi",
}  # fmt: skip
# The first bytes of image formats. Source: each format's specification; `file(1)` uses the same bytes.
_BEGINNINGS = (
    b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF87a", b"GIF89a", b"II*\0", b"MM\0*", b"II+\0", b"MM\0+", b"\0\0\0\x0cjP  ",
    b"\0\0\0\x0cJXL ", b"8BPS\0",
)  # fmt: skip


def begins_as_image(head: bytes) -> bool:
    """Return whether these are the first bytes of an image, even in a format that is not supported.

    >>> begins_as_image(b"GIF89a"), begins_as_image(b"# Read me")
    (True, False)
    """
    boxed = head[4:8] == b"ftyp" and head[8:12] in (b"heic", b"heix", b"mif1", b"msf1", b"avif", b"avis")
    return head.startswith(_BEGINNINGS) or (head[:4] == b"RIFF" and head[8:12] == b"WEBP") or boxed


def _head(file: pathlib.Path) -> bytes:
    try:
        with file.open("rb") as opened:
            return opened.read(16)
    except OSError:
        return b""  # The file is left out. An unreadable file with an image suffix is refused later instead.


def _classes(folder: pathlib.Path, files: list[pathlib.Path], accepted: bool) -> list[str]:
    """List the classes: folders that contain an image. If `accepted` is true, counts only images that the import accepts."""
    found: set[str] = set()
    for file in files:
        name = _class_of(folder, file)
        if name is not None and name not in found and (not accepted or _accepted(folder, file)):
            found.add(name)
    return sorted(found)


def _accepted(folder: pathlib.Path, file: pathlib.Path) -> bool:
    if _problem(folder, file) is not None:
        return False
    try:
        return _core.check_media([file.read_bytes()], False, "header") == [None]
    except OSError:
        return False


def _groups(files: list[pathlib.Path]) -> Iterator[list[pathlib.Path]]:
    """Split the files into chunks of limited size."""
    group: list[pathlib.Path] = []
    size = 0
    for file in files:
        with contextlib.suppress(OSError):  # `_problem` refuses a file whose size cannot be read.
            size += file.stat().st_size
        group.append(file)
        if len(group) >= FILES_AT_ONCE or size >= CHUNK_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _walk(folder: pathlib.Path, within: tuple[str, ...] = ()) -> Iterator[pathlib.Path]:
    """Yield the files in a folder and its sub-folders. Follows links to folders, except links to a folder that contains the link."""
    real = os.path.realpath(folder)
    if any(f"{one}/".startswith(f"{real}/") for one in within):
        return
    try:
        with os.scandir(folder) as found:
            entries = sorted((entry for entry in found if not entry.name.startswith(".")), key=lambda entry: entry.name)
    except OSError as error:
        raise InvalidInputError(f"cannot import `{folder}`: {error}") from error
    for entry in entries:
        if entry.is_dir():
            yield from _walk(folder / entry.name, (*within, real))
        else:
            yield folder / entry.name


def _class_of(folder: pathlib.Path, file: pathlib.Path) -> str | None:
    """Return the class of a file, or None if the file is directly in the folder."""
    parent = file.parent
    return None if parent == folder else _shown(parent.relative_to(folder).as_posix())


def _shown(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _problem(folder: pathlib.Path, file: pathlib.Path) -> Refusal | None:
    name = str(file.relative_to(folder))
    if not is_utf8(name):
        return Refusal(_shown(name), "invalid-value", "the file name is not UTF-8")
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

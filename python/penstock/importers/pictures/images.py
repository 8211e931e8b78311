"""A folder of images: every image is a sample, and its parent folder is its class. Folders named `train` or `val` become a split.

A file counts as an image if its first bytes or its suffix indicate one. Files of other kinds (README.md, a manifest) are left out and
counted. An image that is damaged, or in an unsupported format, is refused and reported, because the user may expect it in the dataset.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import random
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from penstock.columns.category import Category
from penstock.columns.column_type import ColumnType
from penstock.columns.image import Image
from penstock.columns.label import Label
from penstock.columns.text import Text
from penstock.errors import InvalidInputError
from penstock.importers.pictures.beside import masks_among, unread_of
from penstock.importers.shared.chunks import CHUNK_BYTES, FILES_AT_ONCE, grouped, problem_of, size_of
from penstock.importers.shared.source import Chunk, FolderOptions, OpenedSource, Refusal
from penstock.values.media import begins_as_image

# Names of folders that are parts of a dataset rather than classes.
SPLITS = ("train", "training", "val", "valid", "validation", "dev", "test", "testing")


@dataclasses.dataclass(frozen=True)
class ImageOptions(FolderOptions):
    """Options for folders of images. If `split` is true, folders named `train`, `val`, `test` and the like become a column."""

    split: bool = True

    @property
    def may_split(self) -> bool:
        """Whether a column `split` is wanted, and the destination has one if it exists."""
        return self.split and (not self.defaults or "split" in self.defaults)

    def splits(self, names: Sequence[str]) -> bool:
        """Return whether the first folders of these paths are splits, and the destination has no other use for them."""
        return self.may_split and all("/" in name and name.partition("/")[0].lower() in SPLITS for name in names)


def open_source(folder: pathlib.Path, options: ImageOptions) -> OpenedSource:
    """List the folder. Columns: image, path (relative), split if the first folders are splits, and label if images are in sub-folders."""
    files, left_out = list_images(folder, options)
    names = [file.relative_to(folder).as_posix() for file in files]
    split = options.splits(names)
    if options.may_split and not split:
        _check_outside(folder, names)
    schema: dict[str, ColumnType] = {"image": options.types.get("image", Image()), "path": options.types.get("path", Text())}
    if split:
        schema["split"] = options.types.get("split", Category())
    decoded = schema["image"].is_picture
    classes = _classes(folder, files, split, schema["image"] if options.on_error == "skip" and decoded else None)
    options.check_types((*schema, "label"), folder)
    if classes:
        schema["label"] = options.types.get("label", Label(classes))

    def columns_of(group: Sequence[pathlib.Path]) -> dict[str, Any]:
        columns: dict[str, Any] = {"split": [shown(file.relative_to(folder).parts[0]) for file in group]} if split else {}
        if classes:
            columns["label"] = [_class_of(folder, file, split) for file in group]
        return columns

    others = [shown(file.relative_to(folder).as_posix()) for file in left_out]
    chunks = (
        dataclasses.replace(chunk, columns={**chunk.columns, "image": [file.absolute() for file in chunk.columns["image"]]})
        for chunk in image_chunks(folder, files, columns_of)
    )
    unread = unread_of(folder, files, left_out, options)
    return OpenedSource(schema, chunks, len(files), "files", others, files, by_path=True, unread=unread)


def _check_outside(folder: pathlib.Path, names: Sequence[str]) -> None:
    """Refuse a folder with several splits if some images are outside: labels would be `train/cat` and `val/cat`."""
    tops = [name.partition("/")[0] if "/" in name else "" for name in names]
    splits = sorted({top for top in tops if top.lower() in SPLITS})
    outside = [name for name, top in zip(names, tops, strict=True) if top not in splits]
    if len(splits) > 1 and outside:
        raise InvalidInputError(
            f"cannot import `{folder}`: it has the folders {' and '.join(splits)}, but `{outside[0]}` is outside them",
            hint=f"leave it out: exclude=[{outside[0]!r}] (--exclude), or pass split=False (--no-split) if these are classes",
        )


def image_chunks(
    folder: pathlib.Path, files: list[pathlib.Path], columns_of: Callable[[Sequence[pathlib.Path]], dict[str, Any]]
) -> Generator[Chunk, None, None]:
    """Yield images with their paths, and other columns of theirs."""
    done = 0
    for group in grouped(files, size_of, FILES_AT_ONCE, CHUNK_BYTES):  # `problem_of` refuses a file without a size.
        good: list[pathlib.Path] = []
        refused: list[Refusal] = []
        for file in group:
            problem = problem_of(os.path.relpath(file, folder), file)
            if problem is None:
                good.append(file)
            else:
                refused.append(problem)
        names = [os.path.relpath(file, folder) for file in good]
        done += len(group)
        yield Chunk({"image": good, "path": names, **columns_of(good)}, len(good), names.__getitem__, refused, done=done)


def list_images(
    folder: pathlib.Path, options: FolderOptions, others: Sequence[pathlib.Path] = ()
) -> tuple[list[pathlib.Path], list[pathlib.Path]]:
    """List the images of a folder, and of other folders, by name or shuffled. Also lists their other files, and images that are masks."""
    if not folder.is_dir():
        raise InvalidInputError(f"cannot import `{folder}` as images: it is not a folder")
    files: list[pathlib.Path] = []
    left_out: list[pathlib.Path] = []
    # An `include` such as "*.dat" declares matching files to be images, regardless of their first bytes. "train/*" only selects a folder.
    endings = [pattern for pattern in options.include if (ending := pathlib.PurePosixPath(pattern).suffix) and not set(ending) & set("*?[")]
    said = dataclasses.replace(options, include=endings)
    for file in sorted(itertools.chain(walk(folder), *map(walk, others))):
        name = pathlib.PurePath(os.path.relpath(file, folder)).as_posix()
        offered = options.selects(name) and (
            (bool(endings) and said.selects(name)) or file.suffix.lower() in SUFFIXES or not file.is_file() or begins_as_image(_head(file))
        )
        (files if offered else left_out).append(file)
    masks = masks_among(folder, files, files)
    left_out += sorted(masks)
    files = [file for file in files if file not in masks]
    if not files:
        found = f"no images, but {len(left_out)} files of other kinds" if left_out else "no files"
        if left_out and (options.include or options.exclude):
            found = f"{len(left_out)} files, none of them selected by include and exclude"
        raise InvalidInputError(f"cannot import `{folder}`: it contains {found}", hint="see --format, --include and --exclude")
    if options.shuffle_seed is not None:
        random.Random(options.shuffle_seed).shuffle(files)
    return files, left_out


# Suffixes of images, including formats that are not supported.
SUFFIXES = {
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".gif", ".bmp", ".webp", ".tif", ".tiff", ".heic", ".heif", ".avif", ".jp2", ".jxl",
    ".j2k", ".jpx", ".jpc", ".pbm", ".pgm", ".ppm", ".pnm", ".pam", ".tga", ".ico", ".psd", ".dib", ".exr", ".hdr", ".qoi",
}  # fmt: skip


def _head(file: pathlib.Path) -> bytes:
    try:
        with file.open("rb") as opened:
            return opened.read(16)
    except OSError:
        return b""  # The file is left out. An unreadable file with an image suffix is refused later instead.


def _classes(folder: pathlib.Path, files: list[pathlib.Path], split: bool, kind: ColumnType | None) -> list[str]:
    """List the classes: folders that contain an image. If `kind` is given, counts only images that a column of this type accepts."""
    found: set[str] = set()
    for file in files:
        name = _class_of(folder, file, split)
        if name is not None and name not in found and (kind is None or _accepted(folder, file, kind)):
            found.add(name)
    return sorted(found)


def _accepted(folder: pathlib.Path, file: pathlib.Path, kind: ColumnType) -> bool:
    if problem_of(str(file.relative_to(folder)), file) is not None:
        return False
    try:
        return kind.check_media([file.read_bytes()], "header") == [None]
    except OSError:
        return False


def walk(folder: pathlib.Path, within: tuple[str, ...] = ()) -> Iterator[pathlib.Path]:
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
        if _is_folder(entry):
            yield from walk(folder / entry.name, (*within, real))
        else:
            yield folder / entry.name


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # A link that leads to itself.
        return False


def _class_of(folder: pathlib.Path, file: pathlib.Path, split: bool) -> str | None:
    """Return the class of a file, or None if the file is directly in the folder, or in that of its split."""
    parts = file.relative_to(folder).parts[1 if split else 0 : -1]
    return shown("/".join(parts)) if parts else None


def shown(text: str) -> str:
    """Return text that can be printed: bytes that are not UTF-8 are escaped."""
    return text.encode("utf-8", "backslashreplace").decode()

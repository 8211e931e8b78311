"""Finds annotations among the files beside images, by their names and first bytes."""

from __future__ import annotations

import itertools
import mmap
import os
import pathlib
import re
from collections.abc import Iterable, Sequence

from penstock.importers.shared.source import FolderOptions, Unread
from penstock.importers.shared.unread import UNSELECTED

# What the files of a kind are, and what to do with them instead.
_KINDS = {
    "voc": ("of Pascal VOC", "convert them to COCO or YOLO first"),
    "xml": ("of XML that name images", "convert them to COCO or YOLO first"),
    "json": ("of JSON that belong to images", "convert them to COCO or to a table first"),
    "coco": ("of COCO annotations", "import the file itself: penstock import {file}"),
    "yolo": (
        "of boxes in YOLO format",
        "import it with --format yolo, which needs an image for each file, and the names of classes: --type labels=labels:cat,dog",
    ),
    "captions": ("of text named after images", "put the texts into a table that names the images"),
    "lists": ("of lists of images", "import the data.yaml that names them, or a table"),
    "table": ("of a table", "import the table and the images that it names: penstock import {file} … --type COLUMN=image"),
    "arrays": ("of arrays", "put their values into a table that names the images"),
    "masks": ("of masks", "import a table that names both: --type image=image --type mask=mask"),
    UNSELECTED: ("not selected", ""),
}
_TEXT_TABLES = (".csv", ".tsv", ".jsonl", ".ndjson")
_TABLES = (".parquet", ".pq", ".arrow", ".feather", ".ipc")
_ARRAYS = (".mat", ".npy", ".npz")
_PACKED = (".gz", ".bz2", ".zst", ".xz")
_MASKS = (".png", ".gif", ".bmp", ".tif", ".tiff", ".webp")
# Folders of masks, as datasets name them, without other letters than a to z.
_FOLDERS = re.compile(
    r"mask|masks|.*masks?|seg|segs|segmentation.*|labels?|gt|groundtruth|annotations?|annots|mattes?|trimaps?|panoptic.*|stuff.*"
)
_ENDING = re.compile(r"[_-](mask|masks|seg|segmentation|matte|label|labels|gt)$", re.I)
_HEAD_BYTES, _LINES = 64 << 10, 20
# Shorter names of images without their suffix, such as `1`, also occur in files that are not about images.
_SHORTEST_STEM = 4


def unread_of(
    folder: pathlib.Path, images: Sequence[pathlib.Path], left_out: Sequence[pathlib.Path], options: FolderOptions
) -> list[Unread]:
    """Return the annotations among the files of a folder that are left out. Cost: reads the first 64 KiB of text files."""
    known = _Names(images)
    masks = masks_among(folder, left_out, images)
    found: dict[str, list[str]] = {}
    for file in left_out:
        name = pathlib.PurePath(os.path.relpath(file, folder)).as_posix()
        kind = UNSELECTED if not options.selects(name) else "masks" if file in masks else known.kind_of(file)
        if kind is not None:
            found.setdefault(kind, []).append(name)
    made = []
    for kind, names in found.items():
        what, remedy = _KINDS[kind]
        files = f"{len(names)} file{'s' if len(names) > 1 else ''} {what}"
        made.append(Unread(kind, len(names), files, remedy.format(file=folder / names[0]), names[0], len(names)))
    return made


def masks_among(folder: pathlib.Path, files: Iterable[pathlib.Path], images: Iterable[pathlib.Path]) -> set[pathlib.Path]:
    """Return the files that are masks of images: `a_mask.png` beside `a.jpg`, or `masks/a.png` if there is an `a` in a folder of another name."""
    plain = {image.stem for image in images if not _in_masks(folder, image) and not _ENDING.search(image.stem)}

    def is_mask(file: pathlib.Path) -> bool:
        stem = _ENDING.sub("", file.stem)
        return file.suffix.lower() in _MASKS and stem in plain and (stem != file.stem or _in_masks(folder, file))

    return {file for file in files if is_mask(file)}


def _in_masks(folder: pathlib.Path, file: pathlib.Path) -> bool:
    above = pathlib.PurePath(os.path.relpath(file, folder)).parts[:-1]
    return any(_FOLDERS.fullmatch(re.sub("[^a-z]", "", part.lower())) for part in above)


def has_keys_of_coco(file: pathlib.Path) -> bool:
    """Return whether a JSON file has the keys of COCO. Cost: reads the file until both keys are found."""
    if not file.is_file() or not file.stat().st_size:
        return False
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as found:
        return found.find(b'"images"') >= 0 and found.find(b'"annotations"') >= 0


class _Names:
    """The names of images, by which files about them are recognised."""

    def __init__(self, images: Sequence[pathlib.Path]) -> None:
        self.stems = {image.stem for image in images}
        self.words = {image.name for image in images} | {stem for stem in self.stems if len(stem) >= _SHORTEST_STEM}
        # Names with spaces are not words.
        self.spaced = [image.name for image in itertools.islice((image for image in images if " " in image.name), 100)]

    def kind_of(self, file: pathlib.Path) -> str | None:
        """Return the kind of annotations in a file, or None."""
        suffix = file.suffix.lower()
        if suffix in _PACKED:
            return "table" if pathlib.PurePath(file.stem).suffix.lower() in _TEXT_TABLES else None
        if suffix in _TABLES or suffix in _ARRAYS:
            return "table" if suffix in _TABLES else "arrays"
        if suffix in (*_TEXT_TABLES, ".xml", ".json"):
            head, about = _head(file), file.stem in self.stems
            about = about or self._within(head)
            if suffix == ".xml":
                return "voc" if re.search(r"<annotation[\s>]", head) else "xml" if about else None
            if suffix == ".json":
                return "coco" if has_keys_of_coco(file) else "json" if about else None
            return "table" if about else None
        return self._kind_of_text(file) if suffix in (".txt", ".caption", ".captions") else None

    def _kind_of_text(self, file: pathlib.Path) -> str | None:
        lines = [words for line in _head(file).splitlines() if (words := line.split())][:_LINES]
        if lines and all(_is_yolo(words) for words in lines[:-1] or lines):  # The last line may be cut.
            return "yolo"
        if file.stem in self.stems:
            return "captions"
        listed = sum(self._is_name(re.split(r"[,;]", words[0])[0]) for words in lines)
        return "lists" if listed and 2 * listed >= len(lines) else None

    def _within(self, text: str) -> bool:
        words = re.split(r"[\s,;:|=\"'<>\[\](){}]+", text)
        return any(map(self._is_name, words)) or any(name in text for name in self.spaced)

    def _is_name(self, word: str) -> bool:
        return word.replace("\\", "/").rpartition("/")[2] in self.words


def _is_yolo(words: Sequence[str]) -> bool:
    """Return whether a line has a class and at least four fractions."""
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        return False
    return len(numbers) >= 5 and numbers[0].is_integer() and all(-1 <= number <= 2 for number in numbers[1:])


def _head(file: pathlib.Path) -> str:
    try:
        with file.open("rb") as opened:
            head = opened.read(_HEAD_BYTES)
    except OSError:
        return ""
    return head.decode("utf-16" if head[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig", "ignore")

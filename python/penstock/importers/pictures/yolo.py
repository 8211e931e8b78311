"""Reads folders in the form of YOLO: a text file beside each image, or in `labels/` instead of `images/`, with a class and a box per line.

Source: docs.ultralytics.com/datasets/detect.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from penstock import _core
from penstock.columns.boxes import Boxes, converted
from penstock.columns.category import Category
from penstock.columns.column_type import ColumnType
from penstock.columns.image import Image
from penstock.columns.label import Labels
from penstock.columns.text import Text
from penstock.errors import InvalidInputError, NotFoundError
from penstock.importers.pictures.beside import unread_of
from penstock.importers.pictures.images import SPLITS, SUFFIXES, ImageOptions, image_chunks, list_images, walk
from penstock.importers.shared.chunks import contents_of
from penstock.importers.shared.source import Chunk, OpenedSource, Refusal, Unread

_NAME_FILES = ("classes.txt", "obj.names", "labels/classes.txt")
# Rounding may put the edge of a box slightly outside the image.
_SLACK = 0.01


def is_yolo(folder: pathlib.Path) -> bool:
    """Return whether a folder has the form of YOLO: names of classes or `labels` beside `images`, and a text file for an image."""
    hinted = any((folder / name).is_file() for name in _NAME_FILES) or any(_looks_like_names(file) for file in folder.glob("*.y*ml"))
    hinted = hinted or any((inner / "labels").is_dir() for inner in (folder, *(folder / name for name in SPLITS)))
    if not hinted:
        return False
    images = (file for file in walk(folder) if file.suffix.lower() in SUFFIXES)
    return any(_labels_of(image) is not None for image in itertools.islice(images, IMAGES_TO_DETECT))


IMAGES_TO_DETECT = 1000


def open_source(folder: pathlib.Path, options: ImageOptions) -> OpenedSource:
    """List the folder, or that of a `data.yaml`. Columns: image, path, split if every path has a folder of that kind, boxes (cxcywh, in
    pixels), and labels.
    """
    own = None if folder.is_dir() else folder.absolute()
    named = None
    parts: list[_Part] = []
    if own is not None:
        named = _names_in(own)  # Parses only small files, so it comes first.
        if named is None:
            raise InvalidInputError(
                f"cannot import `{own}`: it names no classes", hint="add a line `names: [cat, dog]`, or import the folder"
            )
        folder, parts = _described(own)
    outside = {part.place for part in parts if part.listed is None and not part.place.is_relative_to(folder)}
    files, left_out = list_images(folder, options, sorted(outside))
    splits: dict[pathlib.Path, str | None] = {file: _split_of(file.relative_to(folder)) for file in files} if not parts else {}
    if parts:
        listed = itertools.chain(*(part.listed or () for part in parts))
        files = list(dict.fromkeys([*files, *(file for file in listed if options.selects(os.path.relpath(file, folder)))]))
        splits = {file: name for file in files if (name := _part_of(file, parts)) is not None}
        if options.may_split and (both := next((file for file in files if _is_in_several(file, parts)), None)) is not None:
            raise InvalidInputError(
                f"cannot import `{own}`: `{os.path.relpath(both, folder)}` is in several splits",
                hint="remove it from one of them, or pass split=False (--no-split)",
            )
        left_out = [*left_out, *(file for file in files if file not in splits)]
        files = list(splits)
    known = {file: _labels_of(file) for file in files}
    used = {path for path in known.values() if path is not None}
    if not used:
        raise InvalidInputError(
            f"cannot import `{folder}`: none of its {len(files)} images has a text file of boxes, in `labels` beside `images`, or beside the image",
            hint="for the images alone, pass --format images",
        )
    names = _names(folder, options) if named is None else named
    # If one place is two splits, such as `train` and `val`, its images have none.
    distinct = len({(part.place, part.split) for part in parts}) == len({part.place for part in parts})
    split = options.may_split and None not in splits.values() and distinct
    schema: dict[str, ColumnType] = {"image": Image(), "path": Text(), **({"split": Category()} if split else {})}
    schema |= {"boxes": Boxes("cxcywh", of="image"), "labels": Labels(names, of="boxes")}
    options.check_types(schema, folder)
    schema |= options.types
    boxes = {**schema, **options.defaults}["boxes"]

    def columns_of(group: Sequence[pathlib.Path]) -> dict[str, Any]:
        return {"split": [splits[file] for file in group]} if split else {}

    form = boxes.box_format or "cxcywh"
    points = max(map(_keypoint_numbers, [own] if own else sorted(folder.glob("*.y*ml"))), default=0)
    lines = _Lines(names, points, options.boxes)
    annotated = (_annotated(folder, chunk, known, lines, form) for chunk in image_chunks(folder, files, columns_of))
    read = {*used, own, *(part.place for part in parts)}
    left_out = [file for file in dict.fromkeys(left_out) if file.absolute() not in read]
    # The boxes of images that are in no split are left out with them.
    theirs = {_labels_of(file) for file in left_out if file.suffix.lower() in SUFFIXES}
    beside = [file for file in left_out if file.absolute() not in theirs]
    others = [
        one for one in unread_of(folder, files, beside, options) if not (parts and one.kind == "lists")
    ]  # Its data.yaml names the splits.
    unread = [*_unread(folder, sorted(used), points), *others]
    shown = [os.path.relpath(file, folder) for file in left_out]
    return OpenedSource(schema, annotated, len(files), "files", shown, [*files, *sorted(used)], by_path=True, unread=unread)


@dataclasses.dataclass(frozen=True)
class _Part:
    """A split in a `data.yaml`: a folder, or a text file with the images that it lists."""

    split: str
    place: pathlib.Path
    listed: Mapping[pathlib.Path, None] | None


def _part_of(file: pathlib.Path, parts: Sequence[_Part]) -> str | None:
    """Return the split of a file: that of the innermost folder, or of the list that has it."""
    inner = [part for part in parts if (file in part.listed if part.listed is not None else file.is_relative_to(part.place))]
    return max(inner, key=lambda part: len(part.place.parts)).split if inner else None


def _is_in_several(file: pathlib.Path, parts: Sequence[_Part]) -> bool:
    """Return whether a file is in the lists of several splits, or in a list of one and the folder of another. A place that is two splits
    counts once.
    """
    lists = [part for part in parts if part.listed is not None and file in part.listed]
    folders = [part for part in parts if part.listed is None and file.is_relative_to(part.place)]
    inner = [*lists, *(part for part in folders if len(part.place.parts) == max(len(other.place.parts) for other in folders))]
    return bool(lists) and len({part.split for part in inner}) > 1 and len({part.place for part in inner}) > 1


def _described(file: pathlib.Path) -> tuple[pathlib.Path, list[_Part]]:
    """Return the folder that a `data.yaml` describes, and its splits. Its `path` is relative to the file."""
    found = _yaml_of(file)
    path = found.get("path") if isinstance(found, dict) else None
    there = file.parent / path if isinstance(path, str) else file.parent
    folder = pathlib.Path(os.path.normpath(there if there.is_dir() else file.parent))
    named = [(name, found.get(name)) for name in ("train", "val", "test")] if isinstance(found, dict) else []
    parts = []
    for name, places in named:
        for place in [places] if isinstance(places, str) else places if isinstance(places, list) else []:
            part = pathlib.Path(os.path.normpath(folder / place))
            if not part.exists() and place.startswith("../"):  # Roboflow writes `../train/images` for `train/images`.
                part = pathlib.Path(os.path.normpath(folder / place[3:]))
            if place and not part.is_dir() and not (part.is_file() and part.suffix.lower() == ".txt"):
                raise NotFoundError(
                    f"cannot import `{file}`: its {name} is `{place}`, and `{part}` is neither a folder nor a .txt file",
                    code="source-not-found",
                    hint="import the folder of images and labels instead of the file",
                )
            parts += [_Part(name, part, None if part.is_dir() else _listed(part))] if place else []
    return folder, parts


def _listed(file: pathlib.Path) -> Mapping[pathlib.Path, None]:
    """Return the images in a text file with one path per line, relative to the file."""
    images = [pathlib.Path(os.path.normpath(file.parent / line)) for line in _lines_of(file, "the path of an image")]
    if missing := [image for image in images if not image.is_file()]:
        raise NotFoundError(f"cannot import the images in `{file}`: there is no file `{missing[0]}`", code="source-not-found")
    return dict.fromkeys(images)


def _unread(folder: pathlib.Path, files: Sequence[pathlib.Path], points: int) -> list[Unread]:
    """Count the polygons, of which only the box around is stored, and the files with keypoints. Cost: reads all files."""
    polygons: dict[pathlib.Path, int] = {}
    keypoints: list[pathlib.Path] = []
    for file in files:
        try:
            counts = [len(line.split()) - 5 for line in file.read_text(encoding="utf-8-sig").splitlines()]
        except (OSError, ValueError):  # It is refused with its image.
            continue
        if points and points in counts:
            keypoints.append(file)
        if outlines := sum(count > 0 and count % 2 == 0 and count != points for count in counts):
            polygons[file] = outlines
    made = []
    if polygons:
        total, first = sum(polygons.values()), os.path.relpath(next(iter(polygons)), folder)
        what = f"{total} polygon{'s' if total > 1 else ''} in {len(polygons)} file{'s' if len(polygons) > 1 else ''}"
        remedy = (
            "convert them to COCO first, and draw them with --masks; if you leave them out, objects get the boxes around their polygons"
        )
        made.append(Unread("polygons", total, what, remedy, first))
    if keypoints:
        what = f"{len(keypoints)} file{'s' if len(keypoints) > 1 else ''} with keypoints, as kpt_shape specifies"
        made.append(Unread("keypoints", len(keypoints), what, "convert them to COCO first", os.path.relpath(keypoints[0], folder)))
    return made


def _annotated(folder: pathlib.Path, chunk: Chunk, known: dict[pathlib.Path, pathlib.Path | None], lines: _Lines, form: str) -> Chunk:
    """Add the boxes and labels to images, which are read for their sizes."""
    images = chunk.columns["image"]
    bodies = [contents_of(file) for file in images]  # The appender refuses a file that cannot be read.
    boxes: list[Any] = []
    labels: list[Any] = []
    for row, (file, size) in enumerate(zip(images, _core.image_sizes(bodies, True), strict=True)):
        path = known[file]
        found = (np.zeros((0, 4), np.float64), list[int]())
        if path is not None and size is not None:  # The image's own problem is found later.
            try:
                found = lines.parsed(path.read_text(encoding="utf-8-sig"), size)
            except (OSError, ValueError) as error:
                refusal = Refusal(chunk.name(row), "invalid-value", f"cannot read `{os.path.relpath(path, folder)}`: {error}")
                chunk.problems = [*chunk.problems, (row, "boxes", refusal), (row, "labels", refusal)]
        boxes.append(converted(found[0], "cxcywh", form).astype(np.float32))
        labels.append([lines.names[code] for code in found[1]])
    chunk.columns |= {"image": [file.absolute() if body is None else body for file, body in zip(images, bodies, strict=True)]}
    chunk.columns |= {"boxes": boxes, "labels": labels}
    chunk.dropped_boxes, lines.dropped = lines.dropped, 0
    return chunk


@dataclasses.dataclass
class _Lines:
    """How lines of `class cx cy w h` are parsed. `points` numbers of keypoints may follow a box. `rule` says what happens to wrong boxes, and
    `dropped` counts those left out.
    """

    names: Sequence[str]
    points: int = 0
    rule: str = "refuse"
    dropped: int = 0

    def parsed(self, text: str, size: tuple[int, int]) -> tuple[npt.NDArray[np.float64], list[int]]:
        """Parse lines with fractions of the image, of a class and a box or a polygon. Returns the boxes in pixels, and the classes.

        >>> _Lines(["cat", "dog"]).parsed("1 0.5 0.5 0.2 0.4\\n0 0 0 0.5 0 0.5 1\\n", (100, 200))[0].tolist()
        [[100.0, 50.0, 40.0, 40.0], [50.0, 50.0, 100.0, 100.0]]
        """
        boxes: list[list[float]] = []
        labels: list[int] = []
        for number, line in enumerate(text.splitlines(), 1):
            words = line.split()
            if not words:
                continue
            try:
                code, values = float(words[0]), [float(word) for word in words[1:]]
            except ValueError:
                raise ValueError(f"line {number} is `{line[:80]}`, expected numbers") from None
            if not (code.is_integer() and 0 <= code < len(self.names)):
                raise ValueError(f"line {number} has class {words[0]}, but there are {len(self.names)} names")
            if self.points and len(values) == 4 + self.points:
                values = values[:4]
            if len(values) != 4 and (len(values) < 6 or len(values) % 2):
                raise ValueError(f"line {number} has {len(values)} numbers after the class, expected a box of 4 or a polygon of at least 6")
            if not all(math.isfinite(value) and -_SLACK <= value <= 1 + _SLACK for value in values):
                if self.rule == "refuse":
                    raise ValueError(f"line {number} is `{line[:80]}`, expected fractions of the image from 0 to 1")
                if self.rule == "drop":
                    self.dropped += 1
                    continue
            if len(values) > 4:
                xs, ys = values[::2], values[1::2]
                values = [(min(xs) + max(xs)) / 2, (min(ys) + max(ys)) / 2, max(xs) - min(xs), max(ys) - min(ys)]
            boxes.append(values)
            labels.append(int(code))
        height, width = size
        scaled = np.array(boxes, np.float64).reshape(-1, 4) * (width, height, width, height)
        return scaled, labels


def _labels_of(image: pathlib.Path) -> pathlib.Path | None:
    """Return the text file of an image, if there is one: in `labels` instead of a folder of images, or beside it."""
    image = image.absolute()  # The folders above the source count as well, however it is named.
    parts = list(image.parts)
    places = [image]
    for at in reversed(range(len(parts) - 1)):
        if parts[at].lower().endswith("images"):
            places += [pathlib.Path(*parts[:at], name, *parts[at + 1 :]) for name in ("labels", "Labels")]
    files = (place.with_suffix(suffix) for place in [*places[1:], places[0]] for suffix in (".txt", ".TXT"))
    return next((file for file in files if file.is_file()), None)


def _split_of(path: pathlib.Path) -> str | None:
    return next((part for part in path.parts[:-1] if part.lower() in SPLITS), None)


def _names(folder: pathlib.Path, options: ImageOptions) -> Sequence[str]:
    """Return the names of the classes in the folder; if it has none, those of the given type."""
    found = {file.name: names for file in sorted(folder.glob("*.y*ml")) if (names := _names_in(file)) is not None}
    if len({tuple(names) for names in found.values()}) > 1 and "data.yaml" not in found:
        raise InvalidInputError(
            f"cannot import `{folder}`: {' and '.join(found)} name different classes",
            hint="leave one of them in the folder, or name it data.yaml",
        )
    if found:
        return found.get("data.yaml") or next(iter(found.values()))
    for name in _NAME_FILES:
        if (folder / name).is_file():
            return _lines_of(folder / name)
    given = options.types.get("labels") or options.defaults.get("labels")
    classes: Sequence[str] | None = None if given is None or given.rank != 1 else given.classes
    if classes is not None:
        return classes
    raise InvalidInputError(
        f"cannot import `{folder}`: the names of its classes are neither in a .yaml file nor in {' or '.join(_NAME_FILES[:2])}",
        hint="pass them: --type labels=labels:cat,dog",
    )


def _lines_of(file: pathlib.Path, expected: str = "the name of a class") -> list[str]:
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8-sig").rstrip().splitlines()]
    except ValueError as error:
        raise InvalidInputError(f"cannot import `{file}`: it is not UTF-8: {error}") from error
    if "" in lines:
        raise InvalidInputError(f"cannot import `{file}`: line {lines.index('') + 1} is empty, expected {expected}")
    return lines


def _looks_like_names(file: pathlib.Path) -> bool:
    """Return whether a small file has the key `names`. It is parsed only by `_names_in`."""
    try:
        return file.is_file() and file.stat().st_size <= LARGEST_YAML_BYTES and b"\nnames:" in b"\n" + file.read_bytes()
    except OSError:
        return False


LARGEST_YAML_BYTES = 1 << 20


def _yaml_of(file: pathlib.Path) -> Any:
    """Parse a small YAML file. Values such as `no` stay text."""
    try:
        return yaml.load(file.read_text(encoding="utf-8-sig"), Loader=getattr(yaml, "CBaseLoader", yaml.BaseLoader))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise InvalidInputError(f"cannot import `{file}`: {error}", hint="repair the file, or pass --format images") from error


def _keypoint_numbers(file: pathlib.Path) -> int:
    """Return how many numbers of a line are keypoints, as `kpt_shape` of a `data.yaml` says."""
    shape = found.get("kpt_shape") if _looks_like_names(file) and isinstance(found := _yaml_of(file), dict) else None
    if shape is None:
        return 0
    if not isinstance(shape, list) or not all(isinstance(size, str) and size.isdecimal() for size in shape):
        raise InvalidInputError(f"cannot import `{file}`: its kpt_shape is {shape!r:.80}, expected two numbers")
    return math.prod(map(int, shape))


def _names_in(file: pathlib.Path) -> list[str] | None:
    """Return the names of classes in a `data.yaml`: a list, or a dict from codes to names."""
    if not _looks_like_names(file):
        return None
    found = _yaml_of(file)
    if not isinstance(found, dict):
        return None
    names = found.get("names")
    if isinstance(names, dict):
        wanted = [str(code) for code in range(len(names))]
        if sorted(names, key=str) != sorted(wanted):
            raise InvalidInputError(
                f"cannot import `{file}`: the codes of its names are {list(names)[:10]}, expected 0 to {len(names) - 1}"
            )
        names = [names[code] for code in wanted]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InvalidInputError(f"cannot import `{file}`: its names are {names!r:.80}, expected a list")
    return names

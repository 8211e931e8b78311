"""Reads folders in the form of YOLO: a text file beside each image, or in `labels/` instead of `images/`, with a class and a box per line.

Source: docs.ultralytics.com/datasets/detect.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from penstock import _core
from penstock.columns.boxes import Boxes
from penstock.columns.category import Category
from penstock.columns.column_type import ColumnType
from penstock.columns.image import Image
from penstock.columns.label import Labels
from penstock.columns.text import Text
from penstock.errors import InvalidInputError
from penstock.importers.pictures.images import SPLITS, ImageOptions, image_chunks, list_images
from penstock.importers.shared.source import Chunk, OpenedSource, Refusal

_NAME_FILES = ("classes.txt", "obj.names", "labels/classes.txt")
# Rounding may put the edge of a box slightly outside the image.
_SLACK = 0.01


def is_yolo(folder: pathlib.Path) -> bool:
    """Return whether a folder has the form of YOLO: names of classes, or `labels` beside `images`."""
    if any((folder / name).is_file() for name in _NAME_FILES[:2]):
        return True
    if any(_named(_parsed(file)) for file in sorted(folder.glob("*.y*ml"))):
        return True
    return any((inner / "images").is_dir() and (inner / "labels").is_dir() for inner in (folder, *(folder / name for name in SPLITS)))


def open_source(folder: pathlib.Path, options: ImageOptions) -> OpenedSource:
    """List the folder. Columns: image, path, split if every path has a folder of that kind, boxes (cxcywh, in pixels), and labels."""
    files, left_out = list_images(folder, options)
    known = {file: _labels_of(file) for file in files}
    used = {path for path in known.values() if path is not None}
    names = _names(folder, options)
    splits = {file: _split_of(file.relative_to(folder)) for file in files}
    split = options.split and (not options.defaults or "split" in options.defaults) and None not in splits.values()
    schema: dict[str, ColumnType] = {"image": Image(), "path": Text(), **({"split": Category()} if split else {})}
    schema |= {"boxes": Boxes("cxcywh", of="image"), "labels": Labels(names)}
    unknown = [name for name in options.types if name not in schema]
    if unknown:
        raise InvalidInputError(f"cannot import `{folder}`: it has no column `{unknown[0]}`", hint=f"columns: {', '.join(schema)}")
    schema |= options.types

    def columns_of(group: Sequence[pathlib.Path]) -> dict[str, Any]:
        return {"split": [splits[file] for file in group]} if split else {}

    done, chunks = image_chunks(folder, files, columns_of)
    annotated = (_annotated(folder, chunk, known, len(names)) for chunk in chunks)
    shown = [file.relative_to(folder).as_posix() for file in left_out if file not in used]
    return OpenedSource(schema, annotated, len(files), "files", done, shown, [*files, *sorted(used)])


def _annotated(folder: pathlib.Path, chunk: Chunk, known: dict[pathlib.Path, pathlib.Path | None], classes: int) -> Chunk:
    """Add the boxes and labels to images, which are read for their sizes."""
    images = chunk.columns["image"]
    bodies = [_body(file) for file in images]
    boxes: list[Any] = []
    labels: list[Any] = []
    for row, (file, size) in enumerate(zip(images, _core.image_sizes(bodies), strict=True)):
        path = known[file]
        found = (np.zeros((0, 4), np.float32), np.zeros(0, np.int64))
        if path is not None and size is not None:  # The image's own problem is found later.
            try:
                found = _parsed_lines(path.read_text(encoding="utf-8"), size, classes)
            except (OSError, ValueError) as error:
                place = path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)
                refusal = Refusal(chunk.name(row), "invalid-value", f"cannot read `{place}`: {error}")
                chunk.problems = [*chunk.problems, (row, "boxes", refusal), (row, "labels", refusal)]
        boxes.append(found[0])
        labels.append(found[1])
    chunk.columns |= {"image": [file if body is None else body for file, body in zip(images, bodies, strict=True)]}
    chunk.columns |= {"boxes": boxes, "labels": labels}
    return chunk


def _body(file: pathlib.Path) -> bytes | None:
    try:
        return file.read_bytes()
    except OSError:
        return None  # The appender refuses the file.


def _parsed_lines(text: str, size: tuple[int, int], classes: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Parse lines of `class cx cy w h`, in fractions of the image, or of a class and a polygon. Returns the boxes in pixels, and the classes.

    >>> _parsed_lines("1 0.5 0.5 0.2 0.4\\n0 0 0 0.5 0 0.5 1\\n", (100, 200), 2)[0].tolist()
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
        if not (code.is_integer() and 0 <= code < classes):
            raise ValueError(f"line {number} has the class {words[0]}, but there are {classes} names")
        if len(values) != 4 and (len(values) < 6 or len(values) % 2):
            raise ValueError(f"line {number} has {len(values)} numbers after the class, expected a box of 4 or a polygon of at least 6")
        if not all(math.isfinite(value) and -_SLACK <= value <= 1 + _SLACK for value in values):
            raise ValueError(f"line {number} is `{line[:80]}`, expected fractions of the image from 0 to 1")
        if len(values) > 4:
            xs, ys = values[::2], values[1::2]
            values = [(min(xs) + max(xs)) / 2, (min(ys) + max(ys)) / 2, max(xs) - min(xs), max(ys) - min(ys)]
        boxes.append(values)
        labels.append(int(code))
    height, width = size
    scaled = np.array(boxes, np.float64).reshape(-1, 4) * (width, height, width, height)
    return scaled.astype(np.float32), np.array(labels, np.int64)


def _labels_of(image: pathlib.Path) -> pathlib.Path | None:
    """Return the text file of an image, if there is one: in `labels` instead of the last `images`, or beside it."""
    parts = list(image.parts)
    places = [image.with_suffix(".txt")]
    if "images" in parts[:-1]:
        at = len(parts) - 2 - parts[-2::-1].index("images")
        places.insert(0, pathlib.Path(*parts[:at], "labels", *parts[at + 1 :]).with_suffix(".txt"))
    return next((place for place in places if place.is_file()), None)


def _split_of(path: pathlib.Path) -> str | None:
    return next((part for part in path.parts[:-1] if part.lower() in SPLITS), None)


def _names(folder: pathlib.Path, options: ImageOptions) -> Sequence[str]:
    """Return the names of the classes: those of the given type, or those in the folder."""
    given = options.types.get("labels") or options.defaults.get("labels")
    if isinstance(given, Labels):
        return given.names
    for file in sorted(folder.glob("*.y*ml")):
        found = _named(_parsed(file))
        if found:
            return found
    for name in _NAME_FILES:
        if (folder / name).is_file():
            return [line.strip() for line in (folder / name).read_text(encoding="utf-8").splitlines() if line.strip()]
    raise InvalidInputError(
        f"cannot import `{folder}`: the names of its classes are neither in a .yaml file nor in {' or '.join(_NAME_FILES[:2])}",
        hint="pass them: --type labels=labels:cat,dog",
    )


def _parsed(file: pathlib.Path) -> Any:
    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None


def _named(found: Any) -> list[str] | None:
    """Return the names of classes in the contents of a `data.yaml`: a list, or a dict from codes to names."""
    names = found.get("names") if isinstance(found, dict) else None
    if isinstance(names, dict) and sorted(names, key=str) and set(names) == set(range(len(names))):
        names = [names[code] for code in range(len(names))]
    return [str(name) for name in names] if isinstance(names, list) else None

"""Reads annotations in the form of COCO: one JSON file that names images and lists the objects in them.

Source: cocodataset.org/#format-data.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import mmap
import pathlib
import random
from collections.abc import Generator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.columns.boxes import Boxes
from penstock.columns.column_type import ColumnType
from penstock.columns.image import Image
from penstock.columns.json_text import Json
from penstock.columns.keypoints import Keypoints
from penstock.columns.label import Labels
from penstock.columns.mask import Mask
from penstock.columns.scalar import Scalar
from penstock.columns.tensor import Tensor
from penstock.columns.text import Text
from penstock.errors import InvalidInputError, NotFoundError
from penstock.importers.shared.source import Chunk, OpenedSource, Options, Refusal
from penstock.values.checks import is_whole

ROWS_AT_ONCE, MASKS_AT_ONCE = 256, 16
_FILES_TO_FIND = 5
# Parts of an entry that are not imported, and that would take most of the memory.
_UNUSED = {"license", "coco_url", "flickr_url", "date_captured", "url"}


@dataclasses.dataclass(frozen=True)
class CocoOptions(Options):
    """Options for COCO. `masks` adds a mask with the class of each pixel, plus 1 ("class"), or with the number of its object ("instance")."""

    masks: str | None = None


def is_coco(file: pathlib.Path) -> bool:
    """Return whether a JSON file has the keys of COCO. Cost: reads the file until both are found."""
    if not file.is_file() or not file.stat().st_size:
        return False
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as found:
        return found.find(b'"images"') >= 0 and found.find(b'"annotations"') >= 0


def within(folder: pathlib.Path) -> pathlib.Path | None:
    """Return the only COCO file in a folder or its sub-folders, if there is exactly one."""
    found = [file for file in itertools.chain(folder.glob("*.json"), folder.glob("*/*.json")) if is_coco(file)]
    return found[0] if len(found) == 1 else None


def open_source(path: pathlib.Path, options: CocoOptions) -> OpenedSource:
    """Parse the file, or the only such file in a folder. Columns: image, path and image_id; for objects boxes (xywh), labels, area and
    crowd, keypoints and a mask; for captions a list of texts.
    """
    path = within(path) or path if path.is_dir() else path
    if options.masks not in (None, "class", "instance"):
        raise InvalidInputError(f"masks={options.masks!r}, expected class or instance")
    file = _File(path, options)
    unknown = [name for name in options.types if name not in file.schema]
    if unknown:
        raise InvalidInputError(f"cannot import `{path}`: it has no column `{unknown[0]}`", hint=f"columns: {', '.join(file.schema)}")
    return OpenedSource(
        {**file.schema, **options.types}, file.chunks(), len(file.images), "files", lambda: file.done, files=[path], root=file.root
    )


class _File:
    """The contents of a file, and how far they have been read."""

    def __init__(self, path: pathlib.Path, options: CocoOptions) -> None:
        self.path, self.masks, self.done = path, options.masks, 0
        found = _parsed(path, bool(options.masks))
        self.images, annotations = found["images"], found["annotations"]
        self.of: dict[Any, list[dict[str, Any]]] = collections.defaultdict(list)
        for annotation in annotations:
            self.of[annotation.get("image_id")].append(annotation)
        known = {image.get("id") for image in self.images}
        self.lost = [annotation for image, each in self.of.items() if image not in known for annotation in each]
        self.objects = not annotations or any("bbox" in annotation or "category_id" in annotation for annotation in annotations)
        self.captions = any("caption" in annotation for annotation in annotations)
        points = next((annotation["keypoints"] for annotation in annotations if annotation.get("keypoints")), None)
        self.points = len(points) // 3 if isinstance(points, list) else 0
        names = {category["id"]: str(category["name"]) for category in found["categories"]}
        counts = collections.Counter(names.values())
        self.codes = {number: code for code, number in enumerate(names)}
        self.names = [name if counts[name] == 1 else f"{name} {number}" for number, name in names.items()]
        self.schema = self._schema()
        if options.shuffle_seed is not None:
            random.Random(options.shuffle_seed).shuffle(self.images)
        self.root = self._root(options.root)

    def _schema(self) -> dict[str, ColumnType]:
        schema: dict[str, ColumnType] = {"image": Image(), "path": Text(), "image_id": Scalar("int64")}
        if self.objects:
            schema |= {"boxes": Boxes("xywh", of="image"), "labels": Labels(self.names)}
            schema |= {"area": Tensor((None,), "float32"), "crowd": Tensor((None,), "bool")}
        if self.points:
            schema["keypoints"] = Keypoints(self.points, 3, of="image")
        if self.masks:
            schema["mask"] = Mask(of="image")
        if self.captions:
            schema["captions"] = Json()
        return schema

    def _root(self, given: pathlib.Path | None) -> pathlib.Path:
        """Return the folder of the images: the given one, or the first of the usual places that has one of the first images."""
        if given is not None:
            return given
        beside, above, split = self.path.parent, self.path.parent.parent, self.path.stem.rpartition("_")[2]
        inner = ("", "images", split, f"images/{split}")
        places = [place / name for place in (beside, above) for name in inner]
        wanted = [str(image.get("file_name", "")) for image in self.images[:_FILES_TO_FIND]]
        for place in places:
            if any(name and (place / name).is_file() for name in wanted):
                return place
        raise NotFoundError(
            f"cannot import `{self.path}`: its first image `{wanted[0][:200]}` is in none of {', '.join(f'`{place}`' for place in places)}",
            code="source-not-found",
            hint="pass the folder of the images: --root images/train",
        )

    def chunks(self) -> Generator[Chunk, None, None]:
        lost = [
            Refusal(f"{self.path}: annotation {annotation.get('id')}", "invalid-value", f"there is no image {annotation.get('image_id')!r}")
            for annotation in self.lost
        ]
        rows = MASKS_AT_ONCE if self.masks else ROWS_AT_ONCE
        for begin in range(0, len(self.images), rows):
            group = self.images[begin : begin + rows]
            names = [str(image.get("file_name", "")) for image in group]
            columns: dict[str, list[Any]] = {name: [] for name in self.schema}
            problems: list[tuple[int, str, Refusal]] = []
            for row, image in enumerate(group):
                refused: dict[str, str] = {}
                values = self._values(image, refused)
                problems += [(row, column, Refusal.of_value(names[row], column, why)) for column, why in refused.items()]
                for name in self.schema:
                    columns[name].append(values.get(name))
            self.done += len(group)
            yield Chunk(columns, len(group), names.__getitem__, lost if begin == 0 else (), problems)

    def _values(self, image: Mapping[str, Any], refused: dict[str, str]) -> dict[str, Any]:
        """Return the values of one image. Columns whose value is refused are added to `refused`, with the reason."""
        name, number = image.get("file_name"), image.get("id")
        values: dict[str, Any] = {"image": None, "path": name if isinstance(name, str) else None}
        if not isinstance(name, str) or not name:
            refused["image"] = "the image has no file_name"
        else:
            values["image"] = name
        if is_whole(number):
            values["image_id"] = number
        else:
            refused["image_id"] = f"the id is {number!r}, expected a whole number"
        annotations = self.of.get(number, [])
        found = [annotation for annotation in annotations if "bbox" in annotation or "category_id" in annotation]
        try:
            boxes = np.array([_box(annotation) for annotation in found], np.float32).reshape(-1, 4)
            labels = [self._code(annotation) for annotation in found]
        except ValueError as error:
            refused["boxes"] = str(error)
            return values
        areas = [_number(annotation.get("area"), float(box[2] * box[3])) for annotation, box in zip(found, boxes, strict=True)]
        values |= {"boxes": boxes, "labels": np.array(labels, np.int64), "area": np.array(areas, np.float32)}
        values["crowd"] = np.array([bool(annotation.get("iscrowd")) for annotation in found], bool)
        values["captions"] = [annotation["caption"] for annotation in annotations if "caption" in annotation]
        try:
            if self.points:
                values["keypoints"] = _keypoints(found, self.points)
            if self.masks:
                values["mask"] = _mask(image, found, [label + 1 for label in labels] if self.masks == "class" else None)
        except (ValueError, TypeError, KeyError) as error:
            refused["keypoints" if self.points and "keypoints" not in values else "mask"] = str(error)
        return values

    def _code(self, annotation: Mapping[str, Any]) -> int:
        number = annotation.get("category_id")
        if number not in self.codes:
            raise ValueError(f"annotation {annotation.get('id')} has the category {number!r}, which is not in the file")
        return self.codes[number]


def _parsed(path: pathlib.Path, polygons: bool) -> dict[str, list[dict[str, Any]]]:
    """Parse a file. Drops polygons, unless they are wanted, before the whole is in memory."""
    unused = _UNUSED if polygons else {*_UNUSED, "segmentation"}

    def kept(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {name: value for name, value in pairs if name not in unused}

    try:
        with path.open("rb") as opened:
            found = json.load(opened, object_pairs_hook=kept)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(
            f"cannot import `{path}`: it is not JSON: {error}", hint="for one object per line, pass --format jsonl"
        ) from error
    parts: dict[str, list[dict[str, Any]]] = {"categories": [], **found} if isinstance(found, dict) else {}
    for name in ("images", "annotations", "categories"):
        part = parts.get(name)
        if not isinstance(part, list) or not all(isinstance(entry, dict) for entry in part):
            raise InvalidInputError(
                f"cannot import `{path}`: it has no list `{name}` of objects, so it is not in the form of COCO",
                hint="for one object per line, pass --format jsonl",
            )
    if not parts["images"]:
        raise InvalidInputError(f"cannot import `{path}`: it lists no images")
    if not all(is_whole(category.get("id")) and "name" in category for category in parts["categories"]):
        raise InvalidInputError(f"cannot import `{path}`: a category has no id or no name")
    return parts


def _box(annotation: Mapping[str, Any]) -> list[float]:
    box = annotation.get("bbox")
    if not isinstance(box, list) or len(box) != 4 or not all(isinstance(side, int | float) for side in box):
        raise ValueError(f"annotation {annotation.get('id')} has the bbox {str(box)[:80]}, expected 4 numbers: left, top, width, height")
    return box


def _number(value: Any, otherwise: float) -> float:
    return float(value) if isinstance(value, int | float) else otherwise


def _keypoints(annotations: list[dict[str, Any]], count: int) -> npt.NDArray[np.float32]:
    """Return the keypoints (N, points, 3) of objects. An object without keypoints has zeros, which mean "not labelled"."""
    found = [annotation.get("keypoints") or [0] * (3 * count) for annotation in annotations]
    if any(not isinstance(points, list) or len(points) != 3 * count for points in found):
        raise ValueError(f"an annotation has other than {count} keypoints")
    return np.array(found, np.float32).reshape(-1, count, 3)


def _mask(image: Mapping[str, Any], annotations: list[dict[str, Any]], codes: list[int] | None) -> npt.NDArray[Any]:
    """Draw the objects, large ones first, so that small ones are on top. Pixels outside of all objects are 0."""
    try:
        from pycocotools import mask as drawing
    except ImportError as error:
        raise InvalidInputError("cannot draw masks: pycocotools is not installed", hint="pip install pycocotools") from error
    height, width = int(image["height"]), int(image["width"])
    numbers = codes if codes is not None else list(range(1, len(annotations) + 1))
    drawn = np.zeros((height, width), np.uint8 if max(numbers, default=0) < 256 else np.uint16)
    pieces = []
    for annotation, number in zip(annotations, numbers, strict=True):
        outline = annotation.get("segmentation")
        if not outline:
            continue
        runs = (
            drawing.frPyObjects(outline, height, width) if isinstance(outline, list) or isinstance(outline.get("counts"), list) else outline
        )
        inside = drawing.decode(drawing.merge(runs) if isinstance(runs, list) else runs).astype(bool)
        pieces.append((int(inside.sum()), number, inside))
    for _, number, inside in sorted(pieces, key=lambda piece: -piece[0]):
        drawn[inside] = number
    return drawn

"""Reads annotations in the form of COCO: one JSON file that names images and lists the objects in them.

Source: cocodataset.org/#format-data.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import math
import mmap
import os
import pathlib
import random
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock import _core
from penstock.columns.boxes import Boxes
from penstock.columns.category import Category
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
from penstock.importers.pictures.drawing import boxes_in, mask_of
from penstock.importers.pictures.images import SPLITS, list_images, shown
from penstock.importers.shared.chunks import grouped, with_files
from penstock.importers.shared.source import Chunk, FolderOptions, OpenedSource, Refusal
from penstock.values.checks import is_utf8, is_whole

ROWS_AT_ONCE = 256
# Masks of so many pixels are drawn before they are stored.
MASK_PIXELS = 1 << 25
_FILES_TO_FIND = 20
# Parts of an entry that are not imported, and that would take most of the memory.
_UNUSED = {"license", "coco_url", "flickr_url", "date_captured", "url"}
# Words in the names of annotation files. A folder of images may contain other JSON files.
_WORDS = ("annotation", "instances", "captions", "keypoints", "coco")
_OBJECT = ("bbox", "category_id", "segmentation", "keypoints")


@dataclasses.dataclass(frozen=True)
class CocoOptions(FolderOptions):
    """Options for COCO. `masks` adds a mask with the class of each pixel, plus 1 ("class"), or with the number of its object ("instance")."""

    masks: str | None = None


def _is_coco(file: pathlib.Path) -> bool:
    """Return whether a JSON file has the name and the keys of COCO. Cost: reads the file until both keys are found."""
    named = any(word in f"{file.parent.name}/{file.name}".lower() for word in _WORDS)
    if not named or not file.is_file() or not file.stat().st_size:
        return False
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as found:
        return found.find(b'"images"') >= 0 and found.find(b'"annotations"') >= 0


def within(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the COCO files in a folder and its sub-folders."""
    return [file for file in sorted(itertools.chain(folder.glob("*.json"), folder.glob("*/*.json"))) if _is_coco(file)]


def open_source(path: pathlib.Path, options: CocoOptions) -> OpenedSource:
    """Parse a file, or the files in a folder if there is one for each split. Columns: image, path and image_id; for objects boxes (xywh), labels,
    area and crowd, keypoints and a mask; for captions a list of texts; and `split` if there are several files.
    """
    if options.masks not in (None, "class", "instance"):
        raise InvalidInputError(f"masks={options.masks!r}, expected class or instance")
    files, left_out = ({"": path} if path.is_file() else _splits(path, options)), list[str]()
    found = [_File(file, options, split, path) for split, file in files.items()]
    chosen = options if path.is_file() else FolderOptions(exclude=options.exclude)
    found = [one for file in found if (one := file.selected(chosen)).images]
    if not found:
        raise InvalidInputError(f"cannot import `{path}`: include and exclude select none of its images")
    if path.is_dir():
        named = {(file.root / str(image.get("file_name"))).resolve() for file in found for image in file.images}
        others = itertools.chain(*list_images(path, FolderOptions()))
        left_out = [str(other.relative_to(path)) for other in others if other.resolve() not in named and other not in files.values()]
    images = _Images(found, options)
    root = path if found[0].split else found[0].root
    made = images.chunks(root)
    return OpenedSource(
        images.schema, made, len(images.items), "files", lambda: images.done, left_out, files=list(files.values()), root=root, by_path=True
    )


def _splits(folder: pathlib.Path, options: CocoOptions) -> dict[str, pathlib.Path]:
    """Return the files of annotations in a folder by their splits. A file's split is the end or the beginning of its name
    (instances_train2017.json), or its folder.
    """
    every = within(folder)
    files = [file for file in every if options.selects(file.relative_to(folder).as_posix())]
    if len(files) == 1:
        # What was left out may be another split.
        stem = files[0].stem
        for group in ([file for file in every if cut(file.stem) == cut(stem)] for cut in (_without_end, _without_beginning)):
            if len(named := _named(group)) > 1:
                return {split: file for split, file in named.items() if file == files[0]}
        return {"": files[0]}
    if splits := _named(files):
        return splits
    listed = ", ".join(str(file.relative_to(folder)) for file in files[:6])
    found = f"has {len(files)} files of annotations: {listed}" if files else "has no file of COCO annotations"
    example = (
        f"{files[0]}, or files that differ in their split only: --include '{_without_end(files[0].stem)}_*'"
        if files
        else "annotations.json"
    )
    raise InvalidInputError(
        f"cannot import `{folder}`: it {found}", hint=f"name one: penstock import {example}; for the images alone, pass --format images"
    )


def _without_end(stem: str) -> str:
    return stem.rpartition("_")[0]


def _without_beginning(stem: str) -> str:
    return stem.partition("_")[2]


def _named(files: Sequence[pathlib.Path]) -> dict[str, pathlib.Path]:
    """Return files by their splits, or nothing if they differ in something else, such as captions and instances."""
    parts = [(file.stem.rpartition("_"), file.stem.partition("_"), file.parent.name) for file in files]
    ways = (
        [(end[0], end[2]) for end, _, _ in parts],
        [(begin[2], begin[0]) for _, begin, _ in parts],
        [("".join(end), parent) for end, _, parent in parts],
    )
    for way in ways:
        splits = {split: file for (_, split), file in zip(way, files, strict=True) if split.lower().rstrip("0123456789") in SPLITS}
        if files and len(splits) == len(files) and len({kind for kind, _ in way}) == 1:
            return splits
    return {}


class _File:
    """The contents of a file. `split` is its split in `folder`, or empty if it is the only file."""

    def __init__(self, path: pathlib.Path, options: CocoOptions, split: str, folder: pathlib.Path) -> None:
        self.path, self.split, self.masks = path, split, options.masks
        found = _parsed(path, bool(options.masks))
        self.images, annotations = found["images"], found["annotations"]
        self.of: dict[int, list[dict[str, Any]]] = collections.defaultdict(list)
        self.lost: list[dict[str, Any]] = []
        known = {image["id"] for image in self.images if is_whole(image.get("id"))}
        for annotation in annotations:
            number = annotation.get("image_id")
            (self.of[number] if is_whole(number) and number in known else self.lost).append(annotation)
        self.objects = not annotations or any(_is_object(annotation) for annotation in annotations)
        self.captions = any("caption" in annotation for annotation in annotations)
        points = next((annotation["keypoints"] for annotation in annotations if annotation.get("keypoints")), None)
        self.points = len(points) // 3 if isinstance(points, list) else 0
        counts = collections.Counter(category["name"] for category in found["categories"])
        names = {category["id"]: category["name"] for category in found["categories"]}
        self.names = {number: name if counts[name] == 1 else f"{name} {number}" for number, name in names.items()}
        self.root = self._root(options.root)
        # Where its images are within the folder.
        self.within = pathlib.PurePath(os.path.relpath(self.root, folder)).as_posix() if split else ""

    def selected(self, options: FolderOptions) -> _File:
        """Return the file with the images that options select by their paths."""
        self.images = [image for image in self.images if options.selects(self.path_of(str(image.get("file_name"))))]
        return self

    def path_of(self, name: str) -> str:
        """Return the path of an image within the source."""
        return os.path.join(self.within, name) if self.within != "." else name

    def schema(self) -> dict[str, ColumnType]:
        schema: dict[str, ColumnType] = {"image": Image(), "path": Text(), "image_id": Scalar("int64")}
        if self.objects:
            schema |= {"boxes": Boxes("xywh", of="image"), "labels": Labels(list(self.names.values()))}
            schema |= {"area": Tensor((None,), "float32"), "crowd": Tensor((None,), "bool")}
        if self.points:
            schema["keypoints"] = Keypoints(self.points, 3, of="image")
        if self.masks:
            schema["mask"] = Mask(of="image")
        if self.captions:
            schema["captions"] = Json()
        if self.split:
            schema["split"] = Category()
        return schema

    def _root(self, given: pathlib.Path | None) -> pathlib.Path:
        """Return the folder of the images: the given one, or the one of the usual places that has most of the first images."""
        if given is not None:
            return given
        path = self.path.absolute()
        beside, above, split = path.parent, path.parent.parent, self.split or self.path.stem.rpartition("_")[2]
        places = [place / name for place in (beside, above) for name in (f"images/{split}", split, "images", "")]
        names = [name for image in self.images[:_FILES_TO_FIND] if isinstance(name := image.get("file_name"), str) and is_utf8(name)]
        counts = [sum((place / name).is_file() for name in names if name and "\0" not in name) for place in places]
        if max(counts) == 0:
            raise NotFoundError(
                f"cannot import `{self.path}`: its first images, such as `{names[0][:200] if names else None}`, are in none of "
                + ", ".join(f"`{place}`" for place in places),
                code="source-not-found",
                hint='pass the folder of the images: root="images/train" (--root images/train)',
            )
        return places[counts.index(max(counts))]

    def pixels_of(self, image: Mapping[str, Any]) -> int:
        """Return the number of pixels of an image's mask."""
        return math.prod(_size_of(image) or (0,)) if self.masks else 0

    def values(self, image: Mapping[str, Any], refused: dict[str, str], form: str, codes: Mapping[str, int]) -> dict[str, Any]:
        """Return the values of one image, with boxes in this form. Columns whose value is refused are added to `refused`, with the reason."""
        name, number = image.get("file_name"), image.get("id")
        values: dict[str, Any] = {"size": _size_of(image), "split": self.split}
        if isinstance(name, str) and name:
            values |= dict.fromkeys(("image", "path"), self.path_of(name))
        else:
            refused["image"] = "the image has no file_name"
        if is_whole(number):
            values["image_id"] = number
        else:
            refused["image_id"] = f"the id is {number!r}, expected a whole number"
        annotations = self.of.get(number, []) if is_whole(number) else []
        values["captions"] = [annotation["caption"] for annotation in annotations if "caption" in annotation]
        found = [annotation for annotation in annotations if _is_object(annotation)]
        try:
            boxes = np.array([_box(annotation) for annotation in found], np.float64).reshape(-1, 4)
            values |= {"boxes": boxes_in(boxes, "xywh", form), "labels": [self._name(annotation) for annotation in found]}
            values["area"] = np.array([_area(annotation) for annotation in found], np.float32)
            values["crowd"] = np.array([_crowd(annotation) for annotation in found], bool)
            if self.points:
                values["keypoints"] = np.array([_keypoints(annotation, self.points) for annotation in found], np.float32).reshape(
                    -1, self.points, 3
                )
        except ValueError as error:
            refused |= dict.fromkeys(("boxes", "labels", "area", "crowd", "keypoints", "mask"), str(error))
        if self.masks and "mask" not in refused:
            try:
                values["mask"] = mask_of(values["size"], found, self._numbers(found, codes))
            except ValueError as error:
                refused["mask"] = str(error)
        return values

    def _numbers(self, found: Sequence[Mapping[str, Any]], codes: Mapping[str, int]) -> list[int]:
        """Return the number of each object in the mask: its code in the destination plus 1, or its place."""
        if self.masks == "instance":
            return list(range(1, len(found) + 1))
        names = [self._name(annotation) for annotation in found]
        if unknown := [name for name in names if name not in codes]:
            raise ValueError(f"`{unknown[0]}` is not one of the labels")
        return [codes[name] + 1 for name in names]

    def _name(self, annotation: Mapping[str, Any]) -> str:
        number = annotation.get("category_id")
        if not is_whole(number) or number not in self.names:
            raise ValueError(f"annotation {annotation.get('id')} has the category {number!r:.80}, which is not in the file")
        return self.names[number]


class _Images:
    """The images of all files in the order of their samples, and how many have been read."""

    def __init__(self, files: Sequence[_File], options: CocoOptions) -> None:
        self.files, self.done = files, 0
        self.items = [(file, image) for file in files for image in file.images]
        if options.shuffle_seed is not None:
            random.Random(options.shuffle_seed).shuffle(self.items)
        self.schema: dict[str, ColumnType] = {}
        for file in files:
            self.schema = {**file.schema(), **self.schema}
        if len(counts := {file.points for file in files if file.points}) > 1:
            raise InvalidInputError(f"cannot import `{files[0].path}` and others: their objects have {sorted(counts)} keypoints")
        if "labels" in self.schema:
            self.schema["labels"] = Labels(list(dict.fromkeys(name for file in files for name in file.names.values())))
        if unknown := [name for name in options.types if name not in self.schema]:
            raise InvalidInputError(
                f"cannot import `{files[0].path}`: it has no column `{unknown[0]}`", hint=f"columns: {', '.join(self.schema)}"
            )
        self.schema |= options.types
        # The destination may have other codes for the names, and another form of boxes.
        kinds = {**self.schema, **options.defaults}
        labels, boxes = kinds.get("labels"), kinds.get("boxes")
        self.codes = {name: code for code, name in enumerate(labels.names)} if isinstance(labels, Labels) else {}
        self.form = boxes.format if isinstance(boxes, Boxes) else "xywh"

    def chunks(self, root: pathlib.Path) -> Generator[Chunk, None, None]:
        """Yield the images with their annotations, after a comparison of their sizes with those in the file."""
        for chunk in with_files(self._chunks(), ["image"], (), root):
            sizes = chunk.columns.pop("size")
            bodies = [body if isinstance(body, bytes) else None for body in chunk.columns["image"]]
            problems = list(chunk.problems)
            for row, (stated, found) in enumerate(zip(sizes, _core.image_sizes(bodies), strict=True)):
                if stated is not None and found is not None and tuple(stated) != tuple(found):
                    turned = " (upright)" if tuple(stated) == tuple(found)[::-1] else ""
                    why = f"the image has {found[1]} × {found[0]} pixels{turned}, but its annotations say {stated[1]} × {stated[0]}"
                    problems.append((row, "image", Refusal.of_value(chunk.name(row), "image", why)))
            chunk.problems = sorted(problems, key=lambda problem: problem[0])
            self.done += chunk.rows
            yield chunk

    def _chunks(self) -> Generator[Chunk, None, None]:
        lost = [
            Refusal(f"{file.path}: annotation {annotation.get('id')}", "invalid-value", f"there is no image {annotation.get('image_id')!r}")
            for file in self.files
            for annotation in file.lost
        ]
        for group in grouped(self.items, lambda item: item[0].pixels_of(item[1]), ROWS_AT_ONCE, MASK_PIXELS):
            names = [shown(str(image.get("file_name") or f"image {image.get('id')}")) for _, image in group]
            columns: dict[str, list[Any]] = {name: [] for name in (*self.schema, "size")}
            problems: list[tuple[int, str, Refusal]] = []
            for row, (file, image) in enumerate(group):
                refused: dict[str, str] = {}
                values = file.values(image, refused, self.form, self.codes)
                problems += [
                    (row, column, Refusal.of_value(names[row], column, why)) for column, why in refused.items() if column in columns
                ]
                for name, column in columns.items():
                    column.append(None if name in refused else values.get(name))
            yield Chunk(columns, len(group), names.__getitem__, lost, problems)
            lost = []


def _is_object(annotation: Mapping[str, Any]) -> bool:
    return "caption" not in annotation or any(name in annotation for name in _OBJECT)


def _size_of(image: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the height and width that the file states, if it does."""
    height, width = image.get("height"), image.get("width")
    return (height, width) if is_whole(height) and is_whole(width) and height > 0 and width > 0 else None


def _parsed(path: pathlib.Path, polygons: bool) -> dict[str, list[dict[str, Any]]]:
    """Parse a file. Drops polygons, unless they are wanted, before the whole is in memory."""
    unused = _UNUSED

    def kept(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {name: True if name == "segmentation" and not polygons else value for name, value in pairs if name not in unused}

    wrong = f"cannot import `{path}`: "
    lines = "for one object per line, name the file .jsonl or pass --format jsonl"
    try:
        with path.open("rb") as opened:
            found = json.load(opened, object_pairs_hook=kept)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{wrong}it is not JSON: {error}", hint=lines) from error
    parts: dict[str, list[dict[str, Any]]] = {"categories": [], **found} if isinstance(found, dict) else {}
    for name in ("images", "annotations", "categories"):
        part = parts.get(name)
        if not isinstance(part, list) or not all(isinstance(entry, dict) for entry in part):
            raise InvalidInputError(f"{wrong}it has no list `{name}` of objects, so it is not in the form of COCO", hint=lines)
    if not parts["images"]:
        raise InvalidInputError(f"{wrong}it lists no images")
    if any("segments_info" in annotation for annotation in parts["annotations"]):
        raise InvalidInputError(
            f"{wrong}panoptic annotations are not supported", hint="import the instances, and the PNG files as ps.Mask()"
        )
    if not all(is_whole(category.get("id")) and isinstance(category.get("name"), str) for category in parts["categories"]):
        raise InvalidInputError(f"{wrong}a category has no name, or its id is not a whole number")
    for name in ("images", "categories"):
        twice = [number for number, count in collections.Counter(str(entry.get("id")) for entry in parts[name]).items() if count > 1]
        if twice:
            raise InvalidInputError(f"{wrong}two of its {name} have the id {twice[0]}")
    return parts


def _finite(values: Any, count: int) -> bool:
    """Return whether this is a list of numbers that float32 represents."""
    good = isinstance(values, list) and len(values) == count
    return good and all(isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9 for value in values)


def _box(annotation: Mapping[str, Any]) -> list[float]:
    box = annotation.get("bbox")
    if not _finite(box, 4) or box is None or box[2] < 0 or box[3] < 0:
        raise ValueError(f"annotation {annotation.get('id')} has the bbox {box!r:.80}, expected 4 numbers: left, top, width, height")
    return list(box)


def _area(annotation: Mapping[str, Any]) -> float:
    """Return the area of an object; by default, that of its box."""
    area = annotation.get("area")
    if area is None:
        return float(annotation["bbox"][2] * annotation["bbox"][3])
    if not isinstance(area, int | float) or not 0 <= area < 1e18:
        raise ValueError(f"annotation {annotation.get('id')} has the area {area!r:.80}, expected a number")
    return float(area)


def _crowd(annotation: Mapping[str, Any]) -> bool:
    crowd = annotation.get("iscrowd", 0)
    if crowd not in (0, 1):
        raise ValueError(f"annotation {annotation.get('id')} has iscrowd {crowd!r:.80}, expected 0 or 1")
    return bool(crowd)


def _keypoints(annotation: Mapping[str, Any], count: int) -> npt.NDArray[np.float32]:
    """Return the keypoints of an object. One without keypoints has zeros, which mean "not labelled"."""
    points = annotation.get("keypoints") or [0] * (3 * count)
    if not _finite(points, 3 * count):
        raise ValueError(f"annotation {annotation.get('id')} has the keypoints {points!r:.80}, expected {3 * count} numbers")
    return np.array(points, np.float32)

"""Reads annotations in the form of COCO: one JSON file that names images and lists the objects in them.

Source: cocodataset.org/#format-data.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import os
import pathlib
import random
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import numpy as np

from penstock import _core
from penstock.columns.boxes import Boxes, converted
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
from penstock.importers.pictures.beside import has_keys_of_coco, unread_of
from penstock.importers.pictures.coco_entries import (
    KNOWN,
    area_of,
    box_of,
    is_crowd,
    is_good,
    is_id,
    is_object,
    keypoints_of,
    parsed,
    size_of,
)
from penstock.importers.pictures.drawing import Instances, mask_of, outlines_of
from penstock.importers.pictures.images import SPLITS, list_images, shown, walk
from penstock.importers.shared.chunks import grouped, with_files
from penstock.importers.shared.source import Chunk, FolderOptions, OpenedSource, Refusal, Unread
from penstock.values.checks import is_utf8
from penstock.values.large import TILED_BYTES

ROWS_AT_ONCE = 256
# Masks of so many pixels are drawn before they are stored.
MASK_PIXELS = 1 << 25
_FILES_TO_FIND = 20
# Words in the names of annotation files. A folder of images may contain other JSON files.
_WORDS = ("annotation", "instances", "captions", "keypoints", "coco")


@dataclasses.dataclass(frozen=True)
class CocoOptions(FolderOptions):
    """Options for COCO. `masks` adds a mask with the class of each pixel, plus 1 ("class"); or one with the number of its object, and the whole
    mask of each object ("instance").
    """

    masks: str | None = None


def _is_coco(file: pathlib.Path) -> bool:
    """Return whether a JSON file has the name and the keys of COCO."""
    return any(word in f"{file.parent.name}/{file.name}".lower() for word in _WORDS) and has_keys_of_coco(file)


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
    unread = _unread(found)
    if path.is_dir():
        named = {(file.root / str(image.get("file_name"))).resolve(): None for file in found for image in file.images}
        listed = itertools.chain(*list_images(path, FolderOptions()))
        others = [other for other in listed if other.resolve() not in named and other not in files.values()]
        left_out = [str(other.relative_to(path)) for other in others]
        unread += unread_of(path, list(named), others, options)
    images = _Images(found, options)
    root = path if found[0].split else found[0].root
    read = list(files.values())
    return OpenedSource(images.schema, images.chunks(root), len(images.items), "files", left_out, read, root, by_path=True, unread=unread)


def _unread(files: Sequence[_File]) -> list[Unread]:
    """Count the polygons that are not drawn, and the fields that are not imported."""
    made = []
    if polygons := sum(file.polygons for file in files):
        what = f"{polygons} polygon{'s' if polygons > 1 else ''}, or runs of pixels"
        made.append(Unread("polygons", polygons, what, 'draw them: masks="class" or masks="instance" (--masks)'))
    fields: collections.Counter[str] = collections.Counter()
    for file in files:
        fields.update(file.fields)
    if fields:
        what = f"the fields {', '.join(f'`{name}` ({fields[name]})' for name in sorted(fields))}"
        made.append(Unread("fields", fields.total(), what))
    return made


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
    found = f"has {len(files)} annotation files: {listed}" if files else "has no COCO annotation file"
    example = (
        f"{files[0]}, or files that differ only in their split: --include '{_without_end(files[0].stem)}_*'"
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


def _distinct(names: Mapping[str, str]) -> dict[str, str]:
    """Return a different name for each category, by their ids. Those that share one get their ids behind it.

    >>> _distinct({"1": "cat", "2": "cat", "3": "cat 1", "4": "dog"})
    {'1': 'cat 1 1', '2': 'cat 2', '3': 'cat 1', '4': 'dog'}
    """
    counts = collections.Counter(names.values())
    made, taken = {}, set(names.values())
    for number, name in names.items():
        made[number] = name
        while counts[name] > 1 and made[number] in taken:
            made[number] += f" {number}"
        taken.add(made[number])
    return made


class _File:
    """The contents of a file. `split` is its split in `folder`, or empty if it is the only file."""

    def __init__(self, path: pathlib.Path, options: CocoOptions, split: str, folder: pathlib.Path) -> None:
        self.path, self.split, self.masks, self.rule = path, split, options.masks, options.boxes
        found = parsed(path, bool(options.masks))
        self.images, annotations = found["images"], found["annotations"]
        self.of: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
        self.lost: list[dict[str, Any]] = []
        known = {str(image["id"]) for image in self.images if is_id(image.get("id"))}
        # Ids are numbers or texts. Some tools write the number of an image as a text beside its objects.
        self.has_texts = any(isinstance(image.get("id"), str) for image in self.images)
        for annotation in annotations:
            number = annotation.get("image_id")
            (self.of[str(number)] if is_id(number) and str(number) in known else self.lost).append(annotation)
        self.polygons = 0 if self.masks else sum(bool(annotation.get("segmentation")) for annotation in annotations)
        self.fields = collections.Counter(
            name for entry in (*annotations, *self.images) for name in entry.keys() - KNOWN if entry[name] not in (None, "", 0)
            and entry[name] != [] and entry[name] != {}
        )  # fmt: skip
        self.objects = not annotations or any(is_object(annotation) for annotation in annotations)
        self.captions = any("caption" in annotation for annotation in annotations)
        points = next((annotation["keypoints"] for annotation in annotations if annotation.get("keypoints")), None)
        self.points = len(points) // 3 if isinstance(points, list) else 0
        self.names = _distinct({str(category["id"]): category["name"] for category in found["categories"]})
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
        schema: dict[str, ColumnType] = {"image": Image(), "path": Text(), "image_id": Text() if self.has_texts else Scalar("int64")}
        if self.objects:
            schema |= {"boxes": Boxes("xywh", of="image"), "labels": Labels(list(self.names.values()), of="boxes")}
            schema |= {"area": Tensor((None,), "float32"), "crowd": Tensor((None,), "bool")}
        if self.points:
            schema["keypoints"] = Keypoints(self.points, 3, of="image")
        if self.masks:
            schema["mask"] = Mask(of="image")
        if self.masks == "instance":
            schema["masks"] = Tensor((None, None, None), "bool", codec="zstd")
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
        names = [name for name in names if name and "\0" not in name]
        counts = [sum((place / name).is_file() for name in names) for place in places]
        if max(counts, default=0) > 0:
            return places[counts.index(max(counts))]
        # Any other folder beside the file, or if that is in a folder of annotations, beside this folder.
        top = above if any(word in beside.name.lower() for word in (*_WORDS, "annot", "label", "json")) else beside
        wanted = {pathlib.PurePosixPath(name).name for name in names}
        inner = {file.parents[depth] for file in walk(top) if file.name in wanted for depth in range(len(file.relative_to(top).parts))}
        having = {place: count for place in sorted(inner) if (count := sum((place / name).is_file() for name in names))}
        best = [place for place, count in having.items() if count == max(having.values())]
        if len(best) == 1:
            return best[0]
        listed = ", ".join(f"`{place}`" for place in (best or places)[:8])
        raise NotFoundError(
            f"cannot import `{self.path}`: its first images, such as `{names[0][:200] if names else None}`, are "
            + (f"in several folders: {listed}" if best else f"in none of {listed}, nor in any folder under `{top}`"),
            code="source-not-found",
            hint='pass the folder of the images: root="images/train" (--root images/train)',
        )

    def pixels_of(self, image: Mapping[str, Any]) -> int:
        """Return the number of pixels of an image's masks. Large ones of single objects are drawn when they are stored."""
        pixels = math.prod(size_of(image) or (0,)) if self.masks else 0
        objects = len(self.of.get(str(image.get("id")), ())) if self.masks == "instance" else 0
        return pixels + min(objects * pixels, TILED_BYTES)

    def values(self, image: Mapping[str, Any], refused: dict[str, str], form: str, codes: Mapping[str, int]) -> dict[str, Any]:
        """Return the values of one image, with boxes in this form. Columns whose value is refused are added to `refused`, with the reason."""
        name, number = image.get("file_name"), image.get("id")
        values: dict[str, Any] = {"size": size_of(image), "split": self.split}
        if isinstance(name, str) and name:
            values |= dict.fromkeys(("image", "path"), self.path_of(name))
        else:
            refused["image"] = "the image has no file_name"
        if is_id(number):
            values["image_id"] = number
        else:
            refused["image_id"] = f"the id is {number!r}, expected a whole number or text"
        annotations = self.of.get(str(number), []) if is_id(number) else []
        values["captions"] = [annotation["caption"] for annotation in annotations if "caption" in annotation]
        found = [annotation for annotation in annotations if is_object(annotation)]
        values["dropped"] = sum(not is_good(annotation) for annotation in found) if self.rule == "drop" else 0
        found = [annotation for annotation in found if is_good(annotation)] if values["dropped"] else found
        try:
            boxes = np.array([box_of(one, self.rule in ("keep", "clip")) for one in found], np.float64).reshape(-1, 4)
            values |= {
                "boxes": converted(boxes, "xywh", form).astype(np.float32),
                "labels": [self._name(annotation) for annotation in found],
            }
            values["area"] = np.array([area_of(annotation) for annotation in found], np.float32)
            values["crowd"] = np.array([is_crowd(annotation) for annotation in found], bool)
            if self.points:
                values["keypoints"] = np.array([keypoints_of(annotation, self.points) for annotation in found], np.float32).reshape(
                    -1, self.points, 3
                )
        except ValueError as error:
            refused |= dict.fromkeys(("boxes", "labels", "area", "crowd", "keypoints", "mask", "masks"), str(error))
        if self.masks and "mask" not in refused:
            try:
                outlines = outlines_of(values["size"], found)
                values["mask"] = mask_of(values["size"], outlines, self._numbers(found, codes))
                values["masks"] = Instances(values["size"], outlines)
            except ValueError as error:
                refused |= dict.fromkeys(("mask", "masks"), str(error))
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
        if not is_id(number) or str(number) not in self.names:
            raise ValueError(f"annotation {annotation.get('id')} has the category {number!r:.80}, which is not in the file")
        return self.names[str(number)]


class _Images:
    """The images of all files in the order of their samples."""

    def __init__(self, files: Sequence[_File], options: CocoOptions) -> None:
        self.files = files
        self.items = [(file, image) for file in files for image in file.images]
        if options.shuffle_seed is not None:
            random.Random(options.shuffle_seed).shuffle(self.items)
        self.schema: dict[str, ColumnType] = {}
        for file in files:
            self.schema = {**file.schema(), **self.schema}
        if any(file.has_texts for file in files):
            self.schema["image_id"] = Text()
        if len(counts := {file.points for file in files if file.points}) > 1:
            raise InvalidInputError(
                f"cannot import `{files[0].path}` and others: their objects have different numbers of keypoints: {sorted(counts)}"
            )
        if "labels" in self.schema:
            self.schema["labels"] = Labels(list(dict.fromkeys(name for file in files for name in file.names.values())), of="boxes")
        options.check_types(self.schema, files[0].path)
        self.schema |= options.types
        # The destination may have other codes for the names, and another form of boxes.
        kinds = {**self.schema, **options.defaults}
        labels, boxes = kinds.get("labels"), kinds.get("boxes")
        self.as_texts = "image_id" in kinds and kinds["image_id"].has_words
        self.codes = {name: code for code, name in enumerate(labels.classes or ())} if labels else {}
        self.form = (boxes and boxes.box_format) or "xywh"

    def chunks(self, root: pathlib.Path) -> Generator[Chunk, None, None]:
        """Yield the images with their annotations, after a comparison of their sizes with those in the file."""
        done = 0
        for chunk in with_files(self._chunks(), ["image"], (), root):
            sizes = chunk.columns.pop("size")
            bodies = [body if isinstance(body, bytes) else None for body in chunk.columns["image"]]
            problems = list(chunk.problems)
            for row, (stated, found) in enumerate(zip(sizes, _core.image_sizes(bodies, True), strict=True)):
                if stated is not None and found is not None and tuple(stated) != tuple(found):
                    turned = " (upright)" if tuple(stated) == tuple(found)[::-1] else ""
                    why = f"the image has {found[1]} × {found[0]} pixels{turned}, but its annotations say {stated[1]} × {stated[0]}"
                    problems.append((row, "image", Refusal.of_value(chunk.name(row), "image", why)))
            chunk.problems = sorted(problems, key=lambda problem: problem[0])
            done += chunk.rows
            chunk.done = done
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
            dropped = 0
            for row, (file, image) in enumerate(group):
                refused: dict[str, str] = {}
                values = file.values(image, refused, self.form, self.codes)
                dropped += values["dropped"]
                if self.as_texts and "image_id" in values:
                    values["image_id"] = str(values["image_id"])
                problems += [
                    (row, column, Refusal.of_value(names[row], column, why)) for column, why in refused.items() if column in columns
                ]
                for name, column in columns.items():
                    column.append(None if name in refused else values.get(name))
            yield Chunk(columns, len(group), names.__getitem__, lost, problems, dropped)
            lost = []

"""Parses a file in the form of COCO, and checks the values of its entries.

Source: cocodataset.org/#format-data.
"""

from __future__ import annotations

import collections
import json
import pathlib
from collections.abc import Mapping
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from penstock.errors import InvalidInputError
from penstock.values.checks import is_utf8, is_whole

# Parts of an entry that are not imported, and that would take most of the memory.
_UNUSED = {"license", "coco_url", "flickr_url", "date_captured", "url"}
_OBJECT = ("bbox", "category_id", "segmentation", "keypoints")
# The fields that are imported, or that say nothing about a sample.
KNOWN = frozenset(
    ("id", "image_id", "area", "iscrowd", "num_keypoints", "caption", "file_name", "width", "height", "extra", *_OBJECT, *_UNUSED)
)


def is_id(value: Any) -> TypeGuard[int | str]:
    return is_whole(value) or (isinstance(value, str) and bool(value) and is_utf8(value))


def is_object(annotation: Mapping[str, Any]) -> bool:
    return "caption" not in annotation or any(name in annotation for name in _OBJECT)


def size_of(image: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the height and width that the file states, if it does."""
    height, width = image.get("height"), image.get("width")
    return (height, width) if is_whole(height) and is_whole(width) and height > 0 and width > 0 else None


def parsed(path: pathlib.Path, polygons: bool) -> dict[str, list[dict[str, Any]]]:
    """Parse a file. Drops polygons, unless they are wanted, before the whole is in memory."""

    def kept(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {name: bool(value) if name == "segmentation" and not polygons else value for name, value in pairs if name not in _UNUSED}

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
            raise InvalidInputError(f"{wrong}it has no list `{name}` of objects, so it is not in COCO format", hint=lines)
    if not parts["images"]:
        raise InvalidInputError(f"{wrong}it lists no images")
    if any("segments_info" in annotation for annotation in parts["annotations"]):
        raise InvalidInputError(
            f"{wrong}panoptic annotations are not supported", hint="import the instances, and the PNG files as ps.Mask()"
        )
    if not all(is_id(category.get("id")) and isinstance(category.get("name"), str) for category in parts["categories"]):
        raise InvalidInputError(f"{wrong}a category has no name, or its id is neither a whole number nor text")
    for name in ("images", "categories"):
        twice = [number for number, count in collections.Counter(str(entry.get("id")) for entry in parts[name]).items() if count > 1]
        if twice:
            raise InvalidInputError(f"{wrong}two of its {name} have the id {twice[0]}")
    return parts


def _finite(values: Any, count: int) -> bool:
    """Return whether this is a list of numbers that float32 represents."""
    good = isinstance(values, list) and len(values) == count
    return good and all(isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9 for value in values)


def is_good(annotation: Mapping[str, Any]) -> bool:
    """Return whether an object has a box whose numbers are finite, and whose size is not negative."""
    box = annotation.get("bbox")
    return _finite(box, 4) and box is not None and box[2] >= 0 and box[3] >= 0


def box_of(annotation: Mapping[str, Any], any_numbers: bool) -> list[float]:
    """Return the box of an object. With `any_numbers`, these may be negative sizes and not finite: they are clipped or kept later."""
    box = annotation.get("bbox")
    numbers = any_numbers and isinstance(box, list) and len(box) == 4 and all(isinstance(value, float) or is_whole(value) for value in box)
    if box is None or not (numbers or is_good(annotation)):
        raise ValueError(f"annotation {annotation.get('id')} has the bbox {box!r:.80}, expected 4 numbers: left, top, width, height")
    return [float(value) for value in box]


def area_of(annotation: Mapping[str, Any]) -> float:
    """Return the area of an object; by default, that of its box."""
    area = annotation.get("area")
    if area is None:
        return max(0.0, float(annotation["bbox"][2] * annotation["bbox"][3]))
    if not isinstance(area, int | float) or not 0 <= area < 1e18:
        raise ValueError(f"annotation {annotation.get('id')} has the area {area!r:.80}, expected a number")
    return float(area)


def is_crowd(annotation: Mapping[str, Any]) -> bool:
    crowd = annotation.get("iscrowd", 0)
    if crowd not in (0, 1):
        raise ValueError(f"annotation {annotation.get('id')} has iscrowd {crowd!r:.80}, expected 0 or 1")
    return bool(crowd)


def keypoints_of(annotation: Mapping[str, Any], count: int) -> npt.NDArray[np.float32]:
    """Return the keypoints of an object. One without keypoints has zeros, which mean "not labelled"."""
    points = annotation.get("keypoints") or [0] * (3 * count)
    if not _finite(points, 3 * count):
        raise ValueError(f"annotation {annotation.get('id')} has the keypoints {points!r:.80}, expected {3 * count} numbers")
    return np.array(points, np.float32)

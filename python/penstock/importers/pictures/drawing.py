"""Draws objects as masks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock import _core
from penstock.errors import InvalidInputError

# Larger coordinates are mistakes, and would make pycocotools allocate all memory.
_LARGEST_COORDINATE = 1 << 20


# The pixels of an object, run-length encoded by pycocotools, or None if there are none.
Outline = Any


def _drawing() -> Any:
    try:
        from pycocotools import mask
    except ImportError as error:
        raise InvalidInputError("cannot draw masks: pycocotools is not installed", hint="pip install pycocotools") from error
    return mask


def outlines_of(size: tuple[int, int] | None, annotations: Sequence[Mapping[str, Any]]) -> list[Outline]:
    """Return the outlines of the objects of an image of COCO. Polygons of fewer than three points cover no pixels.

    Raises: ValueError for a segmentation that cannot be drawn.
    """
    drawing = _drawing()
    if size is None:
        raise ValueError("its height or width is missing from the annotations, so its mask cannot be drawn")
    if size[0] * size[1] > _core.configure()[2]:
        raise ValueError(f"its annotations say {size[1]} × {size[0]} pixels, but images may have at most {_core.configure()[2]}")
    outlines: list[Outline] = []
    for annotation in annotations:
        outline = annotation.get("segmentation") or None
        if outline is not None:
            _check(annotation, outline, size)
            outline = [polygon for polygon in outline if len(polygon) >= 6] or None if isinstance(outline, list) else outline
        if outline is not None:
            try:
                as_lists = isinstance(outline, list) or isinstance(outline["counts"], list)
                runs = drawing.frPyObjects(outline, *size) if as_lists else outline
                outline = drawing.merge(runs) if isinstance(runs, list) else runs
                drawing.area(outline)
            except Exception as error:  # pycocotools raises bare exceptions.
                raise ValueError(f"the segmentation of annotation {annotation.get('id')} cannot be drawn: {error}") from error
        outlines.append(outline)
    return outlines


def mask_of(size: tuple[int, int], outlines: Sequence[Outline], numbers: Sequence[int]) -> npt.NDArray[Any]:
    """Draw objects into one mask, large ones first, so that small ones are on top. Pixels outside of all objects are 0."""
    drawing = _drawing()
    if max(numbers, default=0) > np.iinfo(np.uint16).max:
        raise ValueError(f"it has more than {np.iinfo(np.uint16).max} objects")
    drawn = np.zeros(size, np.uint8 if max(numbers, default=0) < 256 else np.uint16)
    pieces = [(int(drawing.area(runs)), number, runs) for runs, number in zip(outlines, numbers, strict=True) if runs is not None]
    for _, number, runs in sorted(pieces, key=lambda piece: -piece[0]):
        drawn[_decoded(runs)] = number
    return drawn


def _decoded(runs: Outline) -> npt.NDArray[np.bool_]:
    with warnings.catch_warnings():  # pycocotools does not know the keyword `copy` of NumPy 2.
        warnings.simplefilter("ignore", DeprecationWarning)
        return np.asarray(_drawing().decode(runs)).astype(bool)


class Instances:
    """The masks of all objects of an image, with all of their pixels, drawn when they are read. Shapes: (objects, height, width) bool."""

    dtype = np.dtype(bool)

    def __init__(self, size: tuple[int, int], outlines: Sequence[Outline]) -> None:
        self.outlines = outlines
        self.shape = (len(outlines), *size)
        self.nbytes = math.prod(self.shape)
        self._last: tuple[int, npt.NDArray[np.bool_]] | None = None

    def __len__(self) -> int:
        return len(self.outlines)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return self[(slice(None),) * 3].astype(self.dtype if dtype is None else dtype, copy=False)

    def __getitem__(self, key: tuple[slice, slice, slice]) -> npt.NDArray[np.bool_]:
        places = range(len(self.outlines))[key[0]]
        wanted = (len(range(size)[part]) for size, part in zip(self.shape, key, strict=True))
        made = np.zeros(tuple(wanted), bool)
        for at, place in enumerate(places):
            if self.outlines[place] is not None:
                made[at] = self._drawn(place)[key[1:]]
        return made

    def _drawn(self, place: int) -> npt.NDArray[np.bool_]:
        if self._last is None or self._last[0] != place:  # Tiles of one object are read one after the other.
            self._last = (place, _decoded(self.outlines[place]))
        return self._last[1]


def _check(annotation: Mapping[str, Any], outline: Any, size: tuple[int, int]) -> None:
    """Refuse what would make pycocotools crash: polygons with other values than coordinates, and runs of another image size."""
    if isinstance(outline, list):
        numbers = [value for polygon in outline for value in (polygon if isinstance(polygon, list) else [None])]
        good = all(isinstance(polygon, list) and len(polygon) % 2 == 0 for polygon in outline)
        good = good and all(isinstance(value, int | float) and abs(value) < _LARGEST_COORDINATE for value in numbers)
    else:
        counts = outline.get("counts") if isinstance(outline, dict) else None
        good = isinstance(outline, dict) and outline.get("size") == list(size) and isinstance(counts, list | str | bytes)
        if good and isinstance(counts, list):
            good = all(isinstance(count, int) and count >= 0 for count in counts) and sum(counts) == size[0] * size[1]
        if good and isinstance(counts, str | bytes):
            good = _sum_of_runs(counts) == size[0] * size[1]
    if not good:
        raise ValueError(
            f"annotation {annotation.get('id')} has the segmentation {outline!r:.80}, expected polygons as lists of coordinates, or runs for "
            f"an image of size {list(size)} (height, width)"
        )


def _sum_of_runs(text: str | bytes) -> int | None:
    """Return the sum of compressed run lengths, or None if they are not in that form. Source: `rleFrString` in cocodataset/cocoapi.

    >>> _sum_of_runs("05"), _sum_of_runs("~")
    (5, None)
    """
    counts: list[int] = []
    value = shift = 0
    for byte in text.encode() if isinstance(text, str) else text:
        part = byte - 48
        if not 0 <= part < 64 or shift > 60:
            return None
        value |= (part & 31) << shift
        shift += 5
        if not part & 32:
            value -= (1 << shift) if part & 16 else 0
            counts.append(value + (counts[-2] if len(counts) > 2 else 0))
            value = shift = 0
            if counts[-1] < 0:
                return None
    return sum(counts) if shift == 0 else None

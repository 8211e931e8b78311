"""Transforms that change values or leave some out, but move no pixels."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.columns.boxes import FORMATS
from penstock.errors import InvalidInputError
from penstock.transforms.base import On, Transform, numbers_of, sizes_of


@dataclasses.dataclass(frozen=True)
class Normalize(Transform):
    """Compute (value - mean) / std per channel, after scaling whole numbers to 0–1. Returns float32, or an earlier ToDtype's dtype."""

    mean: Sequence[float]
    std: Sequence[float]
    on: On = None
    op = "normalize"

    def declared(self) -> dict[str, Any]:
        return {"mean": [float(m) for m in numbers_of(self.mean, "mean")], "std": [float(s) for s in numbers_of(self.std, "std")]}


@dataclasses.dataclass(frozen=True)
class ToDtype(Transform):
    """Convert to a dtype. With `scale`, as in torchvision, floats from 0 to 1 correspond to whole numbers from 0 to their largest."""

    dtype: Any
    scale: bool = False
    on: On = None
    op = "to-dtype"

    def declared(self) -> dict[str, Any]:
        name = str(self.dtype).removeprefix("torch.") if not isinstance(self.dtype, type) else np.dtype(self.dtype).name
        return {"dtype": name, "scale": self.scale}


@dataclasses.dataclass(frozen=True)
class ConvertBoxes(Transform):
    """Convert boxes to another format: xyxy, xywh or cxcywh, in pixels. By default, this converts all boxes that the loader returns.

    Its place among the transforms does not matter to them. Boxes that are stored in this format are not changed.

    >>> import penstock as ps
    >>> from penstock import transforms as T
    >>> ds = ps.create("memory://convert-boxes", {"boxes": ps.Boxes("xywh")})
    >>> receipt = ds.append({"boxes": [[[10, 20, 30, 40]]]})
    >>> [batch] = ds.loader(batch_size=1, transform=[T.ConvertBoxes("xyxy")])
    >>> batch["boxes"][0].tolist()
    [[10.0, 20.0, 40.0, 60.0]]
    """

    format: str = "xyxy"
    on: On = None
    op = "convert-boxes"

    def declared(self) -> dict[str, Any]:
        # torchvision's BoundingBoxFormat is an enumeration of the same names in capital letters.
        name = str(getattr(self.format, "value", self.format)).lower()
        if name not in FORMATS:
            raise InvalidInputError(f"format={self.format!r}", hint=f"one of {', '.join(FORMATS)}")
        return {"format": name}


@dataclasses.dataclass(frozen=True)
class SanitizeBoundingBoxes(Transform):
    """Remove boxes with a side below `min_size` pixels or an area below `min_area`.

    The same rows are also removed from other columns in `on` that have the same number of rows.
    """

    min_size: float = 1.0
    min_area: float = 1.0
    on: On = None
    op = "sanitize-bounding-boxes"

    def declared(self) -> dict[str, Any]:
        return {"min_size": float(self.min_size), "min_area": float(self.min_area)}


@dataclasses.dataclass(frozen=True)
class TokenChunks(Transform):
    """Cut `length` tokens out of each ragged sequence, at a random position or from its start. Shorter sequences are padded with `pad`.

    Shapes: a tensor (None,) becomes (B, length).
    """

    length: int
    pad: float = 0
    random: bool = True
    on: On = None
    op = "token-chunks"

    def declared(self) -> dict[str, Any]:
        length = sizes_of(self.length, "length", False)
        if len(length) != 1:
            raise InvalidInputError(f"length={self.length!r}, expected one number")
        return {"length": length[0], "pad": float(self.pad), "random": self.random}

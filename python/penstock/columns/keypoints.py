"""Columns of keypoints."""

from __future__ import annotations

import dataclasses
from typing import Any

from penstock.columns.column_type import ColumnType
from penstock.values.checks import Prepared
from penstock.values.ragged import ragged


@dataclasses.dataclass(frozen=True)
class Keypoints(ColumnType):
    """Points of the objects in an image. Shapes: (N, points, dimensions) float32, N free, points free if None."""

    points: int | None = None
    dimensions: int = 2
    of: str | None = None
    type = "keypoints"

    def spec(self) -> dict[str, Any]:
        return {**super().spec(), "points": self.points, "dimensions": self.dimensions, "of": self.of}

    def prepare(self, values: Any) -> Prepared:
        return ragged(values, (None, self.points, self.dimensions), "float32")

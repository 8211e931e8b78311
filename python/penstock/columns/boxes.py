"""Columns of boxes."""

from __future__ import annotations

import dataclasses
from typing import Any

from penstock.columns.column_type import ColumnType
from penstock.values.checks import Prepared
from penstock.values.ragged import ragged


@dataclasses.dataclass(frozen=True)
class Boxes(ColumnType):
    """Boxes in an image. Shapes: (N, 4) float32, N free; reads as `Ragged`. `format`: xyxy, xywh or cxcywh, in pixels."""

    format: str = "xyxy"
    of: str | None = None
    type = "boxes"

    def spec(self) -> dict[str, Any]:
        return {**super().spec(), "format": self.format, "of": self.of}

    def prepare(self, values: Any) -> Prepared:
        return ragged(values, (None, 4), "float32")

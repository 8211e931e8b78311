"""Keypoint columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.columns.column_type import ColumnType
from penstock.values.checks import Prepared
from penstock.values.ragged import ragged

if TYPE_CHECKING:
    import pyarrow as pa


@dataclasses.dataclass(frozen=True)
class Keypoints(ColumnType):
    """Keypoints of the objects in an image. Shapes: (N, points, dimensions) float32 for any N. `points=None` allows any number of points.

    `dimensions` is 2, 3 or 4. The first two coordinates are in pixels of the image column that `of` names.
    """

    points: int | None = None
    dimensions: int = 2
    of: str | None = None
    type = "keypoints"
    takes_arrow = "any"
    moves = True
    is_array = True

    def spec(self) -> dict[str, Any]:
        return {**super().spec(), "points": self.points, "dimensions": self.dimensions, "of": self.of}

    @property
    def coordinates(self) -> int:
        return self.dimensions

    @property
    def rank(self) -> int | None:
        return 3

    def prepare(self, values: Any) -> Prepared:
        return ragged(values, (None, self.points, self.dimensions), "float32")

    @classmethod
    def form_of(cls, spec: Mapping[str, Any]) -> str:
        return "ragged"

    def read_dtype(self) -> str | None:
        return "float32"

    def sample_shape(self) -> tuple[int | None, ...]:
        return (None, self.points, self.dimensions)

    def arrow_type(self) -> pa.DataType:
        from penstock.values.arrow import to_arrow

        return to_arrow.ragged_type("float32", 3)

    def to_torchvision(self, value: Any, size: tuple[int, int] | None, format: str | None) -> Any:
        from penstock.values import to_torch

        return to_torch.keypoints(value, size)

    def to_arrow(self, values: tuple[Any, ...], words: pa.Array | None) -> pa.Array:
        from penstock.values.arrow import to_arrow

        return to_arrow.ragged(values, "float32")

"""Keypoint columns."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.columns.column_type import ColumnType
from penstock.values.checks import Prepared
from penstock.values.ragged import ragged

if TYPE_CHECKING:
    import numpy.typing as npt


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

    def prepare(self, values: Any) -> Prepared:
        return ragged(values, self.sample_shape(), "float32")

    def read_dtype(self) -> str | None:
        return "float32"

    def sample_shape(self) -> tuple[int | None, ...]:
        return (None, self.points, self.dimensions)

    def to_torchvision(self, value: Any, size: tuple[int, int] | None, format: str | None) -> Any:
        from penstock.values import to_torch

        # torchvision moves x and y; what follows them stays.
        return to_torch.keypoints(value[..., :2] if self.dimensions > 2 else value, size)

    def from_torchvision(self, array: npt.NDArray[Any], before: Any) -> npt.NDArray[Any]:
        return array if before is None or self.dimensions == 2 else np.concatenate([array, before[..., 2:]], axis=-1)

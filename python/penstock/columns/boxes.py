"""Box columns."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from penstock.columns.column_type import ColumnType
from penstock.errors import InvalidInputError
from penstock.values.checks import Prepared
from penstock.values.ragged import ragged

if TYPE_CHECKING:
    import pyarrow as pa


FORMATS = ("xyxy", "xywh", "cxcywh")


def converted(boxes: npt.NDArray[Any], format: str, to: str) -> npt.NDArray[Any]:
    """Convert boxes (N, 4) to another format, with the arithmetic of the core: by their corners.

    >>> converted(np.array([[1, 2, 30, 40]], np.float32), "xywh", "cxcywh").tolist()
    [[16.0, 22.0, 30.0, 40.0]]
    """
    if format == to:
        return boxes
    low: Any = boxes[:, :2]
    high: Any = boxes[:, 2:]
    if format == "xywh":
        high = low + high
    elif format == "cxcywh":
        half = high / 2
        low, high = low - half, low + half
    if to == "xywh":
        high = high - low
    elif to == "cxcywh":
        low, high = (low + high) / 2, high - low
    return np.concatenate([low, high], axis=1)


@dataclasses.dataclass(frozen=True)
class Boxes(ColumnType):
    """Boxes in an image. Shapes: (N, 4) float32 for any N; reads as `Ragged`. `format`: xyxy, xywh or cxcywh, in pixels. `of` names the
    image column that the boxes belong to.
    """

    format: str = "xyxy"
    of: str | None = None
    type = "boxes"
    takes_arrow = "any"
    moves = True
    is_array = True

    @property
    def box_format(self) -> str | None:
        return self.format

    def prepare(self, values: Any) -> Prepared:
        return ragged(values, self.sample_shape(), "float32")

    @classmethod
    def from_text(cls, text: str) -> Self:
        if text not in ("", *FORMATS):
            raise ValueError(f"the box format is `{text}`, expected xyxy, xywh or cxcywh")
        return cls(text or "xyxy")

    def read_dtype(self) -> str | None:
        return "float32"

    def sample_shape(self) -> tuple[int | None, ...]:
        return (None, 4)

    def with_box_format(self, format: str) -> Self:
        return dataclasses.replace(self, format=format)

    def from_noted(self, array: pa.Array, noted: ColumnType | None) -> Any:
        return None if noted is None or noted.box_format in (None, self.format) else self.of_arrow(array, noted)

    def of_arrow(self, values: pa.Array | pa.ChunkedArray, stored: ColumnType | None) -> pa.Array | pa.ChunkedArray:
        """Convert Arrow values whose boxes have the format of `stored`. Raises: InvalidInputError for values that are not boxes, and for an unknown
        format.
        """
        from penstock.values.arrow import to_arrow

        format = None if stored is None else stored.box_format
        if format is None or format == self.format:
            return values
        if format not in FORMATS:
            raise InvalidInputError(
                f"the boxes have the format `{format}`, expected {', '.join(FORMATS[:-1])} or {FORMATS[-1]}",
                hint="convert the boxes first, and remove the metadata from their Arrow field",
            )
        _, flat, ends, shapes, validity = self.prepare(values)
        boxes = converted(np.asarray(flat).view(np.float32).reshape(-1, 4), format, self.format)
        counts = np.asarray(shapes).reshape(len(ends), 1)
        shapes = np.concatenate([counts, np.full_like(counts, 4)], axis=1)
        offsets = np.concatenate([[0], np.asarray(ends) // 4])
        nulls = None if validity is None else ~np.asarray(validity, bool)
        return to_arrow.ragged((np.ascontiguousarray(boxes).reshape(-1), offsets, shapes, nulls), "float32")

    def of_batch(self, values: Any, stored: ColumnType | None) -> Any:
        format = None if stored is None else stored.box_format
        if format is None or format == self.format:
            return values
        made = converted(values.values, format, self.format)
        return type(values)(made, values.offsets, values.shapes, values.nulls, values.form)

    def to_torchvision(self, value: Any, size: tuple[int, int] | None, format: str | None) -> Any:
        from penstock.values import to_torch

        return to_torch.boxes(value, format or self.format.upper(), size)

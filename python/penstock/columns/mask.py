"""Mask columns."""

from __future__ import annotations

import dataclasses
from typing import Any

from penstock.columns.column_type import ColumnType
from penstock.values.checks import Prepared
from penstock.values.media import pictures


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mask(ColumnType):
    """One class number per pixel, stored as PNG. Shapes: reads as (H, W) uint8 or uint16; palettes are not applied.
    `of` names the image column that the mask belongs to.

    Files are stored unchanged. In a JPEG file, compression may already have changed class numbers.
    """

    of: str | None = None
    type = "mask"
    is_picture = True
    moves = True
    may_be_file = True

    def sample_shape(self) -> tuple[int | None, ...]:
        return (None, None)

    def to_torchvision(self, value: Any, size: tuple[int, int] | None, format: str | None) -> Any:
        from penstock.values import to_torch

        return to_torch.mask(value)

    def prepare(self, values: Any) -> Prepared:
        return pictures(values, mask=True)

"""Image columns."""

from __future__ import annotations

import dataclasses
from typing import Any

from penstock.columns.column_type import ColumnType
from penstock.errors import InvalidInputError
from penstock.values.checks import Prepared
from penstock.values.media import pictures, refuse_one_image

MODES = ("RGB", "L", "RGBA", "I;16", "stored")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Image(ColumnType):
    """A still JPEG, PNG or WebP image, stored bit for bit. The pixels of arrays and Pillow images are stored as PNG, without EXIF
    data such as the orientation.

    Shapes: reads as (H, W, C) uint8 or uint16, where C is the stored number of channels: 1, 3 or 4. With `exif_orientation=False`,
    the EXIF orientation is ignored.
    `mode` is the mode that loaders return: "RGB" (alpha composited onto white), "L" (grey, by ITU-R 601), "RGBA", "I;16" (16-bit grey;
    8-bit values are multiplied by 257) or "stored". Loaders refuse to convert images with 16 bits per channel to an 8-bit mode, or
    colour images to "I;16".
    """

    mode: str = "RGB"
    exif_orientation: bool = True
    type = "image"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise InvalidInputError(f"mode={self.mode!r}", code="invalid-schema", hint=f"use one of {', '.join(MODES)}")

    def spec(self) -> dict[str, Any]:
        return {**super().spec(), "exif_orientation": self.exif_orientation, "mode": self.mode}

    def check_whole(self, values: Any) -> None:
        refuse_one_image(values)

    def sample_shape(self) -> tuple[int | None, ...]:
        return (None, None, None)

    @property
    def rank(self) -> int | None:
        return 3

    def prepare(self, values: Any) -> Prepared:
        return pictures(values, mask=False)

"""Image columns."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Self

from penstock import _core
from penstock.columns.column_type import ColumnType
from penstock.errors import InvalidInputError
from penstock.values.checks import Prepared
from penstock.values.media import pictures, refuse_one_image

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow as pa

MODES = ("RGB", "L", "RGBA", "I;16", "stored")
_CHANNELS = {"RGB": 3, "L": 1, "RGBA": 4, "I;16": 1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Image(ColumnType):
    """A still JPEG, PNG or WebP image, stored bit for bit. The pixels of arrays and Pillow images are stored as PNG, without EXIF
    data such as the orientation. Animations are refused.

    Shapes: reads as (H, W, C) in the declared mode. With `exif_orientation=False`, the EXIF orientation is ignored.
    `mode` is what every read returns: `ds[i]`, `take`, loaders, `ds.torch()` and functions. "RGB" is (H, W, 3) uint8, with alpha composited
    onto white; "L" is grey, by ITU-R 601, (H, W, 1) uint8; "RGBA" is (H, W, 4) uint8; "I;16" is 16-bit grey, (H, W, 1) uint16, with
    8-bit values multiplied by 257; "stored" does not convert. `decode=False` returns the stored bytes.
    Raises: UnsupportedError, on append and import, for images that the mode cannot hold: 16 bits per channel in an 8-bit mode, or colours in
    "I;16". The hint names the mode to declare.

    >>> import numpy as np, penstock as ps
    >>> ds = ps.create("memory://modes", {"image": ps.Image(), "kept": ps.Image(mode="stored")})
    >>> grey = np.zeros((30, 40), np.uint8)
    >>> receipt = ds.append({"image": [grey], "kept": [grey]})
    >>> ds[0]["image"].shape, ds[0]["kept"].shape
    ((30, 40, 3), (30, 40, 1))
    """

    mode: str = "RGB"
    exif_orientation: bool = True
    type = "image"
    takes_arrow = "plain"
    is_picture = True
    is_image = True
    may_be_file = True

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise InvalidInputError(f"mode={self.mode!r}", code="invalid-schema", hint=f"use one of {', '.join(MODES)}")

    def check_whole(self, values: Any) -> None:
        refuse_one_image(values)

    @classmethod
    def from_text(cls, text: str) -> Self:
        if text and text not in MODES:
            raise ValueError(f"the image mode is `{text}`, expected one of {', '.join(MODES)}")
        return cls(mode=text or "RGB")

    def sample_shape(self) -> tuple[int | None, ...]:
        return (None, None, _CHANNELS.get(self.mode))

    def parquet_type(self, arrow: pa.DataType) -> pa.DataType:
        import pyarrow as pa

        return pa.struct([("bytes", pa.binary()), ("path", pa.string())])

    def to_torchvision(self, value: Any, size: tuple[int, int] | None, format: str | None) -> Any:
        from penstock.values import to_torch

        return to_torch.image(value)

    def from_torchvision(self, array: npt.NDArray[Any], before: Any) -> npt.NDArray[Any]:
        return array.transpose(1, 2, 0) if array.ndim == 3 else array

    def check_media(self, bodies: list[bytes | None], how: str) -> list[Any]:
        return _core.check_media(bodies, self.mode, how)

    def image_sizes(self, bodies: list[bytes | None]) -> list[tuple[int, int] | None]:
        return _core.image_sizes(bodies, self.exif_orientation)

    def prepare(self, values: Any) -> Prepared:
        return pictures(values, mask=False)

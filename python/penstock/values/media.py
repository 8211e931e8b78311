"""Prepares images, masks and other bytes."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from penstock.values.checks import Array, Prepared, fail, is_null_word
from penstock.values.containers import from_torch, items_of
from penstock.values.from_arrow import flat_from_arrow


def blob(value: Any, row: int) -> Any:
    """Return a value as bytes, a Path, or None."""
    if is_null_word(value):
        return None
    if isinstance(value, bytes | bytearray | os.PathLike):
        return value
    if isinstance(value, memoryview) or (isinstance(value, np.void) and value.dtype.names is None):
        return value.tobytes()
    hint = "pass its bytes: file.read()" if hasattr(value, "read") else None
    raise fail(f"is a {type(value).__name__}, expected bytes, Path or None", row, hint=hint)


# Pillow modes that are stored unchanged, and modes that can be converted without visible loss.
_AS_THEY_ARE = ("L", "RGB", "RGBA", "I;16")
_CONVERTED = {"1": "L", "LA": "RGBA", "La": "RGBA", "PA": "RGBA", "RGBa": "RGBA", "RGBX": "RGB", "CMYK": "RGB", "YCbCr": "RGB"}


def from_pillow(image: Any, row: int, mask: bool) -> Array:
    """Return the pixels of a Pillow image: colours for an image, class numbers for a mask."""
    mode = image.mode
    # A camera's MPO file is a photograph with a preview, which Pillow also counts as a frame.
    if getattr(image, "is_animated", False) and image.format != "MPO":
        raise fail(
            f"is a Pillow image with {image.n_frames} frames", row, hint="choose a frame: image.seek(number), and append image.copy()"
        )
    if not mask and (mode == "P" or (mode in ("1", "L", "RGB") and "transparency" in image.info)):
        image = image.convert("RGBA" if "transparency" in image.info else "RGB")  # A PNG may declare one colour transparent.
    elif mode == "1" and mask:
        return np.asarray(image).astype(np.uint8)
    elif mode in _CONVERTED and not mask:
        image = image.convert(_CONVERTED[mode])
    elif mode not in _AS_THEY_ARE and not (mask and mode == "P"):
        raise fail(f"is a Pillow image of unsupported mode {mode}", row, hint="convert it to L, RGB, RGBA or I;16 first")
    return np.asarray(image)


def picture(value: Any, row: int, mask: bool) -> Any:
    """Return encoded bytes, a Path, None, or a tuple (height, width, channels, bits, pixels) that the core stores as PNG."""
    if hasattr(value, "mode") and hasattr(value, "convert"):
        value = from_pillow(value, row, mask)
    elif hasattr(value, "detach") and not hasattr(value, "read"):  # Files have the former, too.
        value = from_torch(value)
    if not isinstance(value, np.ndarray):
        return blob(value, row)
    if isinstance(value, np.ma.MaskedArray):
        raise fail("is a masked array", row, hint="fill it first")
    if value.dtype == bool and mask:
        value = value.astype(np.uint8)
    value = value if value.dtype.isnative else value.astype(value.dtype.newbyteorder("="))
    good = value.dtype in (np.uint8, np.uint16) and value.ndim in ((2,) if mask else (2, 3)) and value.size
    if not good or (value.ndim == 3 and value.shape[2] not in (1, 3, 4)):
        wanted = "(H, W)" if mask else "(H, W) or (H, W, C) with C 1, 3 or 4"
        hint = None
        if value.dtype.kind == "f":
            hint = "write (255 * image).astype(np.uint8), or store the values as ps.Tensor"
        elif value.ndim == 3 and value.shape[0] in (1, 3, 4):
            hint = "write image.transpose(1, 2, 0), or image.permute(1, 2, 0) in torch"
        raise fail(f"is an array {value.shape} of {value.dtype}, expected {wanted} of uint8 or uint16", row, hint=hint)
    height, width, channels = value.shape if value.ndim == 3 else (*value.shape, 1)
    return (height, width, channels, value.dtype.itemsize * 8, np.ascontiguousarray(value).reshape(-1).view(np.uint8))


def refuse_one_image(values: Any) -> None:
    """Refuse an array that could be either one image or many grey images."""
    shape = tuple(getattr(values, "shape", ()))
    if len(shape) == 3 and shape[2] in (1, 3, 4):
        raise fail(
            f"an array of shape {shape}, which could be either one image or {shape[0]} grey images",
            hint="write [array] for one image; pass grey images as (N, H, W, 1), or as a list",
        )


def pictures(values: Any, mask: bool) -> Prepared:
    """Prepare the values of an image or mask column. In an array, each row is an image."""
    flat = flat_from_arrow(values)
    return flat or ("items", [picture(value, row, mask) for row, value in enumerate(items_of(values))])


# The first bytes of image formats. Source: each format's specification; `file(1)` uses the same bytes.
_BEGINNINGS = (
    b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF87a", b"GIF89a", b"II*\0", b"MM\0*", b"II+\0", b"MM\0+", b"\0\0\0\x0cjP  ",
    b"\0\0\0\x0cJXL ", b"8BPS\0",
)  # fmt: skip


def begins_as_image(head: bytes) -> bool:
    """Return whether these are the first bytes of an image, even in a format that is not supported.

    >>> begins_as_image(b"GIF89a"), begins_as_image(b"# Read me")
    (True, False)
    """
    boxed = head[4:8] == b"ftyp" and head[8:12] in (b"heic", b"heix", b"mif1", b"msf1", b"avif", b"avis")
    return head.startswith(_BEGINNINGS) or (head[:4] == b"RIFF" and head[8:12] == b"WEBP") or boxed

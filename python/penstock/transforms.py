"""Transforms that the core applies, with the names, defaults and units of torchvision v2. Pass them to `loader(transform=[…])`.

Each transform applies to the results named in `on` (default: the only image). A transform's random numbers are drawn once per sample, so
boxes, masks and keypoints follow the image. Images have the mode set by `ps.Image(mode=…)`, RGB uint8 by default, until ToDtype or
Normalize is applied. Tensors keep their own dtype; crops, pads and flips apply to their first dimensions. Callables `fn(sample, rng)` come
after these transforms, and `PerBatch(fn)` and `Tokenize` come last.

>>> import numpy as np, penstock as ps
>>> from penstock import transforms as T
>>> ds = ps.create("memory://transforms", {"image": ps.Image(), "boxes": ps.Boxes(of="image")})
>>> receipt = ds.append({"image": [np.zeros((60, 80, 3), np.uint8)] * 4, "boxes": [[[10, 10, 30, 40]]] * 4})
>>> loader = ds.loader(batch_size=2, transform=[T.Resize((30, 40), on=("image", "boxes")), T.Normalize([0.5], [0.5], on="image")])
>>> batch = next(iter(loader))
>>> batch["image"].shape, str(batch["image"].dtype), batch["boxes"][0].tolist()
((2, 30, 40, 3), 'float32', [[5.0, 5.0, 15.0, 20.0]])
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from penstock.errors import InvalidInputError
from penstock.values.checks import is_whole

# The maximum number of pixels per side, or of elements per dimension.
MOST = 1 << 16

MOST_TOKENS = 1 << 24
On = str | Sequence[str] | None
INTERPOLATIONS = ("nearest", "nearest-exact", "bilinear", "bicubic", "lanczos")


def _numbers(value: Any, what: str) -> list[Any]:
    """Return one number, or a sequence of numbers, as a list."""
    if isinstance(value, numbers.Number) and not isinstance(value, bool):
        value = [value]
    try:
        values = [None] if isinstance(value, str | bytes) else list(value)
    except TypeError:
        values = [None]
    if not values or not all(isinstance(number, numbers.Number) and not isinstance(number, bool) for number in values):
        raise InvalidInputError(f"{what}={value!r}, expected a number or a sequence of numbers", code="invalid-argument")
    return [number.item() if isinstance(number, np.generic) else number for number in values]


def _sizes(value: Any, what: str, square: bool) -> list[int]:
    sizes = _numbers(value, what)
    if not all(isinstance(size, int) and 0 < size <= MOST for size in sizes):
        raise InvalidInputError(f"{what}={value!r}, expected whole numbers from 1 to {MOST}", code="invalid-argument")
    return sizes * 2 if square and len(sizes) == 1 else sizes


def _padding(value: Any) -> list[int]:
    """Parse torchvision's padding: one number for all sides, (left and right, top and bottom), or (left, top, right, bottom). For tensors,
    the padding may also contain two numbers per dimension, before and after.
    """
    sides = _numbers(value, "padding")
    if not all(isinstance(side, int) and abs(side) <= MOST for side in sides) or len(sides) not in (1, 2, 4, 6, 8):
        raise InvalidInputError(f"padding={value!r}, expected 1, 2, 4, 6 or 8 whole numbers", code="invalid-argument")
    return {1: sides * 4, 2: sides * 2}.get(len(sides), sides)


@dataclasses.dataclass(frozen=True)
class Transform:
    """Base class for the transforms that the core applies."""

    op: ClassVar[str]

    def declared(self) -> dict[str, Any]:
        """Return the transform's description for the core, without `on`."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Resize(Transform):
    """Resize to (height, width). One number sets the shorter side and keeps the aspect ratio. Masks use the nearest pixel.

    `interpolation`: nearest (the pixel at the corner), nearest-exact (at the centre) and bilinear match torchvision. Bicubic
    (a = -0.5, as in Pillow) and lanczos run the vertical pass first. Their results on noise therefore differ from torchvision and
    Pillow by up to 20 levels where a pass overshoots white or black. `decode`: "exact", or "fast". If a JPEG is much larger than the
    result, "fast" decodes it at half, a quarter or an eighth of its size.
    """

    size: int | Sequence[int]
    interpolation: str = "bilinear"
    max_size: int | None = None
    antialias: bool = True
    decode: str = "exact"
    on: On = None
    op = "resize"

    def declared(self) -> dict[str, Any]:
        return {
            "size": _sizes(self.size, "size", False), "max_size": self.max_size, "interpolation": _interpolation(self.interpolation), "antialias": self.antialias,
            "fast": _fast(self.decode),
        }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class CenterCrop(Transform):
    """Crop the centre. `size` is (height, width), or one number for a square. Smaller inputs are padded with zeros."""

    size: int | Sequence[int]
    on: On = None
    op = "center-crop"

    def declared(self) -> dict[str, Any]:
        return {"size": _sizes(self.size, "size", True)}


@dataclasses.dataclass(frozen=True)
class RandomCrop(Transform):
    """Crop a box at a random position, after padding. `size` is (height, width), or one number per dimension of a tensor."""

    size: int | Sequence[int]
    padding: int | Sequence[int] | None = None
    pad_if_needed: bool = False
    fill: float = 0
    on: On = None
    op = "random-crop"

    def declared(self) -> dict[str, Any]:
        padding = None if self.padding is None else _padding(self.padding)
        return {"size": _sizes(self.size, "size", True), "padding": padding, "pad_if_needed": self.pad_if_needed, "fill": float(self.fill)}


@dataclasses.dataclass(frozen=True)
class RandomResizedCrop(Transform):
    """Crop a box of random area (`scale`, relative to the image) and aspect ratio (`ratio`), and resize it.

    Cost: for a JPEG, decodes only the box. `decode="fast"` decodes the box at half, a quarter or an eighth of its size if the result
    is not larger than that. PSNR against an exact decode is 43 dB (median) and 29.6 dB (worst) on photographs.
    "exact" decodes the box at full size.
    """

    size: int | Sequence[int]
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    interpolation: str = "bilinear"
    antialias: bool = True
    decode: str = "fast"
    on: On = None
    op = "random-resized-crop"

    def declared(self) -> dict[str, Any]:
        scale, ratio = _numbers(self.scale, "scale"), _numbers(self.ratio, "ratio")
        if len(scale) != 2 or len(ratio) != 2:
            raise InvalidInputError(f"scale={self.scale!r}, ratio={self.ratio!r}, expected (low, high) for each", code="invalid-argument")
        return {
            "size": _sizes(self.size, "size", True)[:2], "scale": [float(s) for s in scale], "ratio": [float(r) for r in ratio],
            "interpolation": _interpolation(self.interpolation), "antialias": self.antialias, "fast": _fast(self.decode),
        }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RandomHorizontalFlip(Transform):
    """Flip horizontally with probability p."""

    p: float = 0.5
    on: On = None
    op = "random-horizontal-flip"

    def declared(self) -> dict[str, Any]:
        return {"p": float(self.p)}


@dataclasses.dataclass(frozen=True)
class RandomVerticalFlip(Transform):
    """Flip vertically with probability p."""

    p: float = 0.5
    on: On = None
    op = "random-vertical-flip"

    def declared(self) -> dict[str, Any]:
        return {"p": float(self.p)}


@dataclasses.dataclass(frozen=True)
class Pad(Transform):
    """Add borders filled with `fill`. `padding` is one number, (left and right, top and bottom), or (left, top, right, bottom).

    For tensors with more dimensions, `padding` contains two numbers per dimension, before and after.
    """

    padding: int | Sequence[int]
    fill: float = 0
    on: On = None
    op = "pad"

    def declared(self) -> dict[str, Any]:
        return {"padding": _padding(self.padding), "fill": float(self.fill)}


@dataclasses.dataclass(frozen=True)
class Normalize(Transform):
    """Compute (value - mean) / std per channel, after scaling whole numbers to 0–1. Returns float32, or an earlier ToDtype's dtype."""

    mean: Sequence[float]
    std: Sequence[float]
    on: On = None
    op = "normalize"

    def declared(self) -> dict[str, Any]:
        return {"mean": [float(m) for m in _numbers(self.mean, "mean")], "std": [float(s) for s in _numbers(self.std, "std")]}


@dataclasses.dataclass(frozen=True)
class ToDtype(Transform):
    """Convert to a dtype. With `scale`, whole numbers become floats from 0 to 1."""

    dtype: Any
    scale: bool = False
    on: On = None
    op = "to-dtype"

    def declared(self) -> dict[str, Any]:
        name = str(self.dtype).removeprefix("torch.") if not isinstance(self.dtype, type) else np.dtype(self.dtype).name
        return {"dtype": name, "scale": self.scale}


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
        length = _sizes(self.length, "length", False)
        if len(length) != 1:
            raise InvalidInputError(f"length={self.length!r}, expected one number", code="invalid-argument")
        return {"length": length[0], "pad": float(self.pad), "random": self.random}


class PerBatch:
    """Apply `fn(batch)` to whole batches, after all per-sample stages. `fn` returns the batch to deliver."""

    # The columns that this stage is known to add.
    gives: Sequence[str] = ()

    def __init__(self, fn: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.fn = fn

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return self.fn(batch)

    def __repr__(self) -> str:
        return f"PerBatch({self.fn!r})"


class Tokenize(PerBatch):
    """Tokenize a text column batch by batch with the `tokenizers` library. Adds `input_ids` and `attention_mask`, int64 (B, length).

    `tokenizer`: a `tokenizers.Tokenizer`, or any object with a compatible `encode_batch`. `length`: truncate or pad to this length,
    which must be at least 1; None pads to the longest text in the batch. Cost: runs on the library's own threads, without the GIL. Raises:
    InvalidInputError if the batch already has these columns.
    """

    gives = ("input_ids", "attention_mask")

    def __init__(self, tokenizer: Any, on: str, length: int | None = None, pad: int = 0) -> None:
        for what, value, low, high in (("length", length, 1, MOST_TOKENS), ("pad", pad, -(2**63), 2**63 - 1)):
            good = is_whole(value) and low <= value <= high
            if not good and not (what == "length" and value is None):
                raise InvalidInputError(
                    f"Tokenize: {what}={value!r}, expected a whole number from {low} to {high}", code="invalid-argument"
                )
        if not isinstance(on, str):
            raise InvalidInputError(f"Tokenize: on={on!r}, expected the name of a text column", code="invalid-argument")
        if not hasattr(tokenizer, "encode_batch"):
            raise InvalidInputError(
                f"Tokenize: {tokenizer!r} has no encode_batch", code="invalid-argument", hint="pass a tokenizers.Tokenizer"
            )
        self.tokenizer, self.on, self.length, self.pad = tokenizer, on, length, pad

    def __repr__(self) -> str:
        return f"Tokenize(on={self.on!r}, length={self.length}, pad={self.pad})"

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self.on not in batch:
            raise InvalidInputError(f"Tokenize needs `{self.on}`, but the batch has only {', '.join(batch)}", code="invalid-argument")
        if any(not isinstance(text, str | None) for text in batch[self.on]):
            raise InvalidInputError(f"Tokenize: column `{self.on}` is not text", code="invalid-argument")
        texts = [text or "" for text in batch[self.on]]
        found = self.tokenizer.encode_batch(texts)
        if len(found) != len(texts):
            raise InvalidInputError(
                f"Tokenize: encode_batch returned {len(found)} encodings for {len(texts)} texts", code="invalid-argument"
            )
        tokens = [_whole_numbers(encoding.ids, "ids", row) for row, encoding in enumerate(found)]
        length = self.length or max(map(len, tokens), default=0)
        ids, mask = np.full((len(found), length), self.pad, np.int64), np.zeros((len(found), length), np.int64)
        for row, (encoding, made) in enumerate(zip(found, tokens, strict=True)):
            ids[row, : len(made)] = made[:length]
            # A tokenizer that pads its output marks the tokens that represent text.
            marks = _whole_numbers(getattr(encoding, "attention_mask", np.ones(len(made), int)), "attention_mask", row)
            if len(marks) != len(made):
                raise InvalidInputError(
                    f"Tokenize: attention_mask of text {row} has {len(marks)} numbers for {len(made)} tokens", code="invalid-argument"
                )
            mask[row, : len(made)] = marks[:length]
        return {**batch, "input_ids": ids, "attention_mask": mask}


def _whole_numbers(values: Any, what: str, row: int) -> npt.NDArray[np.int64]:
    """Return the tokenizer's numbers for a text as an array. Raises: InvalidInputError unless they are whole numbers."""
    try:
        array = np.asarray(values)
        if array.ndim == 1 and (not len(array) or (array.dtype.kind in "iu" and int(array.max()) < 2**63)):
            return array.astype(np.int64)
    except (TypeError, ValueError):  # Lists of unequal lengths.
        pass
    raise InvalidInputError(f"Tokenize: {what} of text {row} are {str(values)[:80]}, expected whole numbers", code="invalid-argument")


def _interpolation(name: Any) -> str:
    text = str(getattr(name, "value", name)).lower()
    if text not in INTERPOLATIONS:
        raise InvalidInputError(f"interpolation={name!r}", code="invalid-argument", hint=f"valid values: {', '.join(INTERPOLATIONS)}")
    return text


def _fast(decode: Any) -> bool:
    if decode not in ("exact", "fast"):
        raise InvalidInputError(f"decode={decode!r}", code="invalid-argument", hint="one of exact, fast")
    return bool(decode == "fast")

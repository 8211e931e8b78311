"""Stages that change whole batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock import _core
from penstock.errors import InvalidInputError
from penstock.values.checks import is_whole

MOST_TOKENS = 1 << 24


class PerBatch:
    """Apply `fn(batch)` to whole batches, after all per-sample stages. `fn` returns the batch to deliver."""

    # The columns that this stage is known to add.
    gives: Sequence[str] = ()

    def __init__(self, fn: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        name = type(fn).__name__
        if type(fn).__module__.startswith("torchvision.") and name in ("MixUp", "CutMix"):
            raise InvalidInputError(f"torchvision's {name} takes two tensors", hint=f"write T.{name}(…) instead")
        self.fn = fn

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return self.fn(batch)

    def __repr__(self) -> str:
        return f"PerBatch({self.fn!r})"


class Mixing(PerBatch):
    """Base class for stages that mix each sample of a batch with its neighbour. Subclasses define `mixed`."""

    def __init__(self, num_classes: int | None = None, *, alpha: float = 1.0, image: str = "image", label: str = "label") -> None:
        good = isinstance(alpha, int | float) and not isinstance(alpha, bool) and 0 < alpha < np.inf
        if not good or not (num_classes is None or (is_whole(num_classes) and num_classes > 0)):
            text = f"{type(self).__name__}: num_classes={num_classes!r}, alpha={alpha!r}, expected numbers above 0"
            raise InvalidInputError(text, hint=f"write T.{type(self).__name__}(num_classes=10)")
        self.num_classes, self.alpha, self.image, self.label = num_classes, float(alpha), image, label

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_classes={self.num_classes}, alpha={self.alpha}, image={self.image!r}, label={self.label!r})"

    def bound(self, words: Callable[[str], list[str] | None]) -> Mixing:
        """Return the same stage with the number of classes, if that is not given: the number of the label's words."""
        names = words(self.label) if self.num_classes is None else None
        count = self.num_classes if names is None else len(names)
        return type(self)(count, alpha=self.alpha, image=self.image, label=self.label)

    def drawn(self, batch: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Mix a batch. The share of each sample's own image is drawn from Beta(alpha, alpha), once for the batch."""
        for name in (self.image, self.label):
            if name not in batch:
                raise InvalidInputError(f"{self!r} needs `{name}`, but the batch has only {', '.join(batch)}")
        images = batch[self.image]
        if not isinstance(images, np.ndarray) or images.dtype.kind != "f" or images.ndim < 3:
            found = f"{images.dtype} {images.shape}" if isinstance(images, np.ndarray) else f"a {type(images).__name__} of images"
            raise InvalidInputError(
                f"{type(self).__name__} needs floating-point images of one size, but `{self.image}` is {found}",
                hint='add T.Resize or a crop, and T.Normalize or T.ToDtype("float32", scale=True)',
            )
        labels = self._one_hot(batch[self.label])
        # Labels of an earlier stage have two dimensions, and the shares of others in them.
        if (valid := batch.get(f"{self.label}_valid")) is not None and np.ndim(batch[self.label]) == 1:
            labels[~np.asarray(valid, bool)] = 0  # A sample without a label has no class.
        images, share = self.mixed(np.ascontiguousarray(images), float(rng.beta(self.alpha, self.alpha)), rng)
        own = np.float32(share)
        return {**batch, self.image: images, self.label: labels * own + np.roll(labels, 1, axis=0) * (1 - own)}

    def mixed(self, images: npt.NDArray[Any], share: float, rng: np.random.Generator) -> tuple[npt.NDArray[Any], float]:
        """Return the mixed images, and the share of their own image in each."""
        raise NotImplementedError

    def _one_hot(self, labels: Any) -> npt.NDArray[np.float32]:
        """Return labels as (B, classes) float32. Labels that are that already, for example of an earlier MixUp, are kept."""
        labels = np.asarray(labels)
        if labels.ndim == 2 and labels.dtype.kind == "f":
            kept: npt.NDArray[np.float32] = labels.astype(np.float32)
            return kept
        if self.num_classes is None:
            text = f"{type(self).__name__}: num_classes is not given, and `{self.label}` has no names"
            raise InvalidInputError(text, hint=f"write T.{type(self).__name__}(num_classes=10)")
        if labels.ndim != 1 or labels.dtype.kind not in "iu" or (len(labels) and not 0 <= labels.min() <= labels.max() < self.num_classes):
            text = f"{type(self).__name__}: `{self.label}` is not one number from 0 to {self.num_classes - 1} for each sample"
            raise InvalidInputError(text)
        made = np.zeros((len(labels), self.num_classes), np.float32)
        made[np.arange(len(labels)), labels] = 1
        return made


class MixUp(Mixing):
    """Mix each image of a batch with the one before it: `share * image + (1 - share) * other`, with `share` from Beta(alpha, alpha).

    Shapes: labels become (B, num_classes) float32. `num_classes`: by default, the number of names of the label column. Images are
    floating point: put it after Normalize or ToDtype. Cost: one pass over the images, without a copy. Source: arXiv:1710.09412;
    values are those of torchvision's MixUp, up to rounding.

    >>> import numpy as np, penstock as ps
    >>> from penstock import transforms as T
    >>> ds = ps.create("memory://mixup", {"image": ps.Tensor((1, 1, 1), "float32"), "label": ps.Label(["cat", "dog"])})
    >>> receipt = ds.append({"image": np.array([0, 1], np.float32).reshape(2, 1, 1, 1), "label": ["cat", "dog"]})
    >>> [batch] = ds.loader(batch_size=2, transform=[T.MixUp(alpha=0.2)])
    >>> bool(np.allclose(batch["image"].reshape(2), batch["label"][:, 1])), batch["label"].sum(axis=1).tolist()
    (True, [1.0, 1.0])
    """

    def mixed(self, images: npt.NDArray[Any], share: float, rng: np.random.Generator) -> tuple[npt.NDArray[Any], float]:
        if images.dtype == np.float32 and len(images):
            _core.mix_rows(images.reshape(-1), len(images), share)
            return images, share
        return (images * share + np.roll(images, 1, axis=0) * (1 - share)).astype(images.dtype), share


class CutMix(Mixing):
    """Replace a box of each image of a batch by that of the image before it. The share of the box is 1 minus a draw from Beta(alpha, alpha).

    Parameters, labels and cost are those of `MixUp`. Source: arXiv:1905.04899; boxes are drawn as in torchvision's CutMix.

    >>> import numpy as np, penstock as ps
    >>> from penstock import transforms as T
    >>> ds = ps.create("memory://cutmix", {"image": ps.Tensor((8, 8, 1), "float32"), "label": ps.Label(["cat", "dog"])})
    >>> receipt = ds.append({"image": np.repeat(np.float32([0, 1]), 64).reshape(2, 8, 8, 1), "label": ["cat", "dog"]})
    >>> [batch] = ds.loader(batch_size=2, transform=[T.CutMix()])
    >>> bool(np.allclose(batch["image"].mean(axis=(1, 2, 3)), batch["label"][:, 1]))
    True
    """

    def mixed(self, images: npt.NDArray[Any], share: float, rng: np.random.Generator) -> tuple[npt.NDArray[Any], float]:
        height, width = images.shape[1:3]
        x, y = int(rng.integers(width)), int(rng.integers(height))
        half = 0.5 * np.sqrt(1 - share)
        (left, right), (top, bottom) = (
            (max(0, centre - int(half * size)), min(size, centre + int(half * size))) for centre, size in ((x, width), (y, height))
        )
        images[:, top:bottom, left:right] = np.roll(images[:, top:bottom, left:right], 1, axis=0)
        return images, 1 - (right - left) * (bottom - top) / (width * height)


class Tokenize(PerBatch):
    """Tokenize a text column batch by batch with the `tokenizers` library. Adds `input_ids` and `attention_mask`, int64 (B, length).

    `tokenizer`: a `tokenizers.Tokenizer`, a fast tokenizer of Hugging Face, or any object with a compatible `encode_batch`. `pad`: by
    default, the tokenizer's padding token, or 0. `length`: truncate or pad to this length,
    which must be at least 1; None pads to the longest text in the batch. Special tokens are kept, and the sides are the tokenizer's. Cost: runs on the library's own threads, without the GIL. Raises:
    InvalidInputError if the batch already has these columns.
    """

    gives = ("input_ids", "attention_mask")

    def __init__(self, tokenizer: Any, on: str, length: int | None = None, pad: int | None = None) -> None:
        for what, value, low, high in (("length", length, 1, MOST_TOKENS), ("pad", pad, -(2**63), 2**63 - 1)):
            if value is not None and not (is_whole(value) and low <= value <= high):
                raise InvalidInputError(f"Tokenize: {what}={value!r}, expected a whole number from {low} to {high}")
        if not isinstance(on, str):
            raise InvalidInputError(f"Tokenize: on={on!r}, expected the name of a text column")
        fast = getattr(tokenizer, "backend_tokenizer", tokenizer)  # That of a fast tokenizer of Hugging Face.
        if not hasattr(fast, "encode_batch"):
            raise InvalidInputError(
                f"Tokenize: {type(tokenizer).__name__} has no encode_batch",
                hint="pass a tokenizers.Tokenizer, or a fast tokenizer: AutoTokenizer.from_pretrained(name, use_fast=True)",
            )
        if pad is None:
            pad = getattr(tokenizer, "pad_token_id", None) or 0
        self.tokenizer, self.on, self.length, self.pad = fast, on, length, pad
        # A fast tokenizer of Hugging Face cuts texts itself: it keeps its special tokens, and cuts and pads on its own sides.
        self.whole = tokenizer if fast is not tokenizer and callable(tokenizer) else None
        if self.whole is None and length is not None:
            self.tokenizer = _cutting(fast, length)

    def __repr__(self) -> str:
        return f"Tokenize(on={self.on!r}, length={self.length}, pad={self.pad})"

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self.on not in batch:
            raise InvalidInputError(f"Tokenize needs `{self.on}`, but the batch has only {', '.join(batch)}")
        if any(not isinstance(text, str | None) for text in batch[self.on]):
            raise InvalidInputError(f"Tokenize: column `{self.on}` is not text")
        texts = [text or "" for text in batch[self.on]]
        if self.whole is not None:
            found = self.whole(texts, truncation=self.length is not None, max_length=self.length, padding=False, return_attention_mask=True)
            return {**batch, **self._padded(found, self.whole.padding_side == "left")}
        found = self.tokenizer.encode_batch(texts)
        if len(found) != len(texts):
            raise InvalidInputError(f"Tokenize: encode_batch returned {len(found)} encodings for {len(texts)} texts")
        tokens = [_whole_numbers(encoding.ids, "ids", row) for row, encoding in enumerate(found)]
        length = self.length or max(map(len, tokens), default=0)
        ids, mask = np.full((len(found), length), self.pad, np.int64), np.zeros((len(found), length), np.int64)
        for row, (encoding, made) in enumerate(zip(found, tokens, strict=True)):
            ids[row, : len(made)] = made[:length]
            # A tokenizer that pads its output marks the tokens that represent text.
            marks = _whole_numbers(getattr(encoding, "attention_mask", np.ones(len(made), int)), "attention_mask", row)
            if len(marks) != len(made):
                raise InvalidInputError(f"Tokenize: attention_mask of text {row} has {len(marks)} numbers for {len(made)} tokens")
            mask[row, : len(made)] = marks[:length]
        return {**batch, "input_ids": ids, "attention_mask": mask}

    def _padded(self, found: Any, left: bool) -> dict[str, npt.NDArray[np.int64]]:
        """Pad the lists of a tokenizer of Hugging Face, on its side."""
        tokens, marks = found["input_ids"], found["attention_mask"]
        length = self.length or max(map(len, tokens), default=0)
        ids, mask = np.full((len(tokens), length), self.pad, np.int64), np.zeros((len(tokens), length), np.int64)
        for row, (own, marked) in enumerate(zip(tokens, marks, strict=True)):
            place = slice(length - len(own), length) if left else slice(0, len(own))
            ids[row, place], mask[row, place] = own, marked
        return {"input_ids": ids, "attention_mask": mask}


def _cutting(tokenizer: Any, length: int) -> Any:
    """Return a copy of a `tokenizers.Tokenizer` that cuts texts to a length, so that its special tokens stay. Returns others unchanged."""
    try:
        copy = type(tokenizer).from_str(tokenizer.to_str())
        copy.enable_truncation(length)
    except Exception:  # It has parts in Python, or is none of that library. Its tokens are cut.
        return tokenizer
    return copy


def _whole_numbers(values: Any, what: str, row: int) -> npt.NDArray[np.int64]:
    """Return the tokenizer's numbers for a text as an array. Raises: InvalidInputError unless they are whole numbers."""
    try:
        array = np.asarray(values)
        if array.ndim == 1 and (not len(array) or (array.dtype.kind in "iu" and int(array.max()) < 2**63)):
            return array.astype(np.int64)
    except (TypeError, ValueError):  # Lists of unequal lengths.
        pass
    raise InvalidInputError(f"Tokenize: {what} of text {row} are {str(values)[:80]}, expected whole numbers")

"""Stages that change whole batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import InvalidInputError
from penstock.values.checks import is_whole

MOST_TOKENS = 1 << 24


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

    `tokenizer`: a `tokenizers.Tokenizer`, a fast tokenizer of Hugging Face, or any object with a compatible `encode_batch`. `pad`: by
    default, the tokenizer's padding token, or 0. `length`: truncate or pad to this length,
    which must be at least 1; None pads to the longest text in the batch. Cost: runs on the library's own threads, without the GIL. Raises:
    InvalidInputError if the batch already has these columns.
    """

    gives = ("input_ids", "attention_mask")

    def __init__(self, tokenizer: Any, on: str, length: int | None = None, pad: int | None = None) -> None:
        for what, value, low, high in (("length", length, 1, MOST_TOKENS), ("pad", pad, -(2**63), 2**63 - 1)):
            if value is not None and not (is_whole(value) and low <= value <= high):
                raise InvalidInputError(
                    f"Tokenize: {what}={value!r}, expected a whole number from {low} to {high}", code="invalid-argument"
                )
        if not isinstance(on, str):
            raise InvalidInputError(f"Tokenize: on={on!r}, expected the name of a text column", code="invalid-argument")
        fast = getattr(tokenizer, "backend_tokenizer", tokenizer)  # That of a fast tokenizer of Hugging Face.
        if not hasattr(fast, "encode_batch"):
            raise InvalidInputError(
                f"Tokenize: {type(tokenizer).__name__} has no encode_batch",
                code="invalid-argument",
                hint="pass a tokenizers.Tokenizer, or a fast tokenizer: AutoTokenizer.from_pretrained(name, use_fast=True)",
            )
        if pad is None:
            pad = getattr(tokenizer, "pad_token_id", None) or 0
        self.tokenizer, self.on, self.length, self.pad = fast, on, length, pad

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

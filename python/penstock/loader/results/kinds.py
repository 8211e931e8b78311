"""The kind of each column of a batch, which is the same in every batch of a loader: one array, a `Ragged`, or a list.

The kind depends only on the column's type, the transforms and the options, never on the samples of a batch. Otherwise, a batch whose images
happen to have one size would differ from the next, and a resumed loader from an uninterrupted one.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.columns.column_type import ColumnType
from penstock.errors import InvalidInputError
from penstock.loader.results.nulls import is_mask
from penstock.ragged import Ragged
from penstock.views.readable import Batch

Positions = npt.NDArray[np.int64]
Results = Sequence[tuple[str, str, list[int | None], bool]]


def kinds_of(results: Results, types: Mapping[str, ColumnType], ragged: Collection[str], nulls: Mapping[str, Any]) -> dict[str, str]:
    """Return the kind of each result: "array", "ragged", "list" of arrays, or "values" such as text. `types` holds the column types.

    Images and masks become arrays, unless `ragged` names them. A null among images of unknown size has no size either, so they are a list.
    """
    kinds = {}
    for name, dtype, shape, _ in results:
        pixels, free = types[name].is_picture, None in shape
        if name in ragged or (dtype != "bytes" and pixels and free and is_mask(nulls.get(name))):
            kinds[name] = "list"
        else:
            kinds[name] = "values" if dtype == "bytes" else "ragged" if free and not pixels else "array"
    return kinds | {name: "list" for name in ragged}


def described(kinds: Mapping[str, str], results: Results, functions: bool) -> str:
    """Describe the kind of each column, which is the same in every batch."""
    words, parts = {"array": "one array", "ragged": "ps.Ragged", "list": "a list", "values": "a list"}, []
    for text in dict.fromkeys(words.values()):
        if those := [f"`{name}`" for name, kind in kinds.items() if words[kind] == text]:
            parts.append(f"{text}: {', '.join(those)}")
    loose = [name for name, _, shape, _ in results if kinds[name] == "array" and None in shape]
    if loose and not functions:
        names = ", ".join(f"`{name}`" for name in loose)
        parts.append(
            f"samples of {names} that differ in size are an error: T.Resize((height, width)) or a crop makes them equal, and "
            f"ragged={json.dumps(loose)} makes a list in every batch"
        )
    if functions:
        parts.append(
            "arrays, tensors and numbers that functions return are one array, and unequal ones are an error unless ragged= names them"
        )
    return "; ".join(parts)


def formed(batch: Batch, positions: Positions, kinds: Mapping[str, str]) -> Batch:
    """Give the columns of the core the kinds that it leaves to Python: lists, and arrays of images whose nulls were replaced."""
    for name, kind in kinds.items():
        if kind == "list" and not isinstance(batch[name], list):
            batch[name] = list(batch[name])
        elif kind == "array" and isinstance(batch[name], list):
            batch[name] = _stacked(name, batch[name], positions, "after their nulls were replaced")
    return batch


def collated(samples: Sequence[dict[str, Any]], positions: Positions, before: Batch, kinds: Mapping[str, str]) -> Batch:
    """Collate the samples that functions returned. Arrays, tensors and numbers become one array each. A column that was `Ragged` before
    remains so. Values such as text become lists, and so do the columns whose kind is "list".
    """
    batch: Batch = {}
    for name in dict.fromkeys(name for sample in samples for name in sample):
        values = []
        for index, sample in enumerate(samples):
            if name not in sample:
                raise InvalidInputError(
                    f"a function returned {sorted(sample)} for sample {positions[index]}: `{name}` is missing",
                    code="invalid-value",
                )
            values.append(sample[name])
        if kinds.get(name) == "list":
            batch[name] = values
        elif isinstance(before.get(name), Ragged):
            batch[name] = _ragged(name, values, positions, before[name])
        else:
            batch[name] = _stacked(name, values, positions, "after your functions")
    return batch


class Made:
    """What functions returned for each column in the first batch of a loader, with which all others are compared."""

    def __init__(self) -> None:
        self._first: dict[str, str] | None = None

    def check(self, batch: Batch, step: int) -> None:
        """Raise InvalidInputError if a column of this batch is of another kind or dtype than before, or if there are other columns."""
        found = {name: _kind_of(values) for name, values in batch.items()}
        first = self._first = found if self._first is None else self._first
        for name in {**first, **found} if found != first else ():
            if first.get(name) != found.get(name):
                raise InvalidInputError(
                    f"`{name}` in step {step} is {found.get(name, 'missing')}, but in the first batch, it was {first.get(name, 'missing')}",
                    code="invalid-value",
                    hint=f'return values of one type for all samples; or write ragged=["{name}"] for a list in every batch',
                )


def _kind_of(values: Any) -> str:
    if isinstance(values, list):
        return "a list"
    kind = type(values.values) if isinstance(values, Ragged) else type(values)
    shape = "ps.Ragged" if isinstance(values, Ragged) else "one tensor" if kind.__module__ == "torch" else "one array"
    dtype = getattr(values.values if isinstance(values, Ragged) else values, "dtype", None)
    if dtype is None:
        return f"a {kind.__name__}"
    return f"{shape} of text" if getattr(dtype, "kind", "") in "US" else f"{shape} of {dtype}"


def _form_of(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return "array"
    if type(value).__module__ == "torch" and hasattr(value, "detach"):
        return "tensor"
    return "number" if isinstance(value, np.generic | int | float | bool) else "object"


def _stacked(name: str, values: list[Any], positions: Positions, when: str) -> Any:
    """Return one array or tensor of equal values, or a list of values that are neither arrays nor numbers."""
    forms = [_form_of(value) for value in values]
    form = forms[0]
    if form == "object" and len(set(forms)) == 1:
        return values
    _check_equal(name, values, positions, when)
    if form == "array":
        return (np.ma.stack if any(isinstance(value, np.ma.MaskedArray) for value in values) else np.stack)(values)
    if form == "tensor":
        import torch

        return torch.stack(values)
    made = np.asarray(values)
    if made.dtype == object:  # Whole numbers of more than 64 bits.
        raise InvalidInputError(
            f"`{name}` in samples {positions[0]} to {positions[-1]} has whole numbers that do not fit 64 bits {when}", code="invalid-value",
            hint=f'return smaller numbers; or write ragged=["{name}"] for a list in every batch',
        )  # fmt: skip
    return made


def _described(value: Any) -> str:
    """Describe what must be equal in all samples."""
    form = _form_of(value)
    if form in ("array", "tensor"):
        return f"{tuple(value.shape)} {value.dtype}"
    if form == "number":
        dtype = np.asarray(value).dtype
        return type(value).__name__ if dtype.kind in "US" else str(dtype)
    return type(value).__name__


def _check_equal(name: str, values: list[Any], positions: Positions, when: str) -> None:
    """Raise InvalidInputError, which names the first sample that differs, unless all values can be stacked."""
    first, form = _described(values[0]), _form_of(values[0])
    like = values[0] if form == "tensor" or isinstance(values[0], np.ndarray | np.generic) else None
    for position, value in zip(positions, values, strict=True):
        if like is not None and type(value) is type(like) and value.shape == like.shape and value.dtype is like.dtype:
            continue  # Equal, as nearly always. Descriptions take 20 times as long.
        if _form_of(value) != form or _described(value) != first:
            raise InvalidInputError(
                f"`{name}` of sample {position} is {_described(value)} {when}, but that of sample {positions[0]} is {first}",
                code="invalid-value",
                hint=f'return values of one shape and type for all samples; or write ragged=["{name}"] for a list in every batch',
            )


def _ragged(name: str, values: list[Any], positions: Positions, before: Ragged) -> Any:
    """Return arrays of one rank and dtype as `Ragged`, also if some are null. Returns other values as a list."""
    arrays = [value.detach().numpy() if _form_of(value) == "tensor" else value for value in values]
    plain = [isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray) for value in arrays]
    nulls = [value is None for value in arrays]
    if not any(plain):
        return Ragged.joined(arrays, before.values.dtype, before.form) if all(nulls) else arrays
    first = arrays[plain.index(True)]
    for position, value, good, null in zip(positions, arrays, plain, nulls, strict=True):
        if not null and not (good and (value.ndim, value.dtype) == (first.ndim, first.dtype)):
            found = f"{value.ndim} dimensions of {value.dtype}" if good else f"a {type(value).__name__}"
            raise InvalidInputError(
                f"`{name}` of sample {position} has {found} after your functions, but that of sample {positions[plain.index(True)]} has "
                f"{first.ndim} dimensions of {first.dtype}",
                code="invalid-value",
                hint=f'return arrays of one rank and dtype, such as np.zeros((0, 4), "float32"); or write ragged=["{name}"] for a list in every batch',
            )
    shaped = [value for value in arrays if value is not None]
    fits = all(
        len(before.form) == value.ndim and all(a in (None, b) for a, b in zip(before.form, value.shape, strict=True)) for value in shaped
    )
    return Ragged.joined(arrays, first.dtype, before.form if fits else (None,) * first.ndim)


def check_masks(batch: Batch) -> None:
    """Raise InvalidInputError if a function returned masked values. Only NumPy's arrays can hold them."""
    for name, values in batch.items():
        if any(np.ma.is_masked(value) for value in (values if isinstance(values, list) else [values])):
            raise InvalidInputError(
                f"cannot make a tensor of `{name}`: a function returned an array with masked values", code="invalid-value",
                hint='fill them in the function, `array.filled(0)`, or use output="numpy"',
            )  # fmt: skip

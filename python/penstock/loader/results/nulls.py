"""Finds nulls in batches, and replaces them as `nulls=` says."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.columns.column_type import ColumnType
from penstock.errors import InvalidInputError
from penstock.ragged import Ragged
from penstock.values.dtypes import filler
from penstock.views.readable import Batch


def is_mask(value: Any) -> bool:
    """Return whether the nulls of a column stay, beside a column that marks them. `value` is what `nulls=` says about it."""
    return isinstance(value, str) and value == "mask"


def nulls_of(values: Any) -> int:
    """Count the nulls in a list or in ragged arrays. Returns 0 for plain arrays, whose nulls the core reports separately."""
    if isinstance(values, Ragged):
        return 0 if values.nulls is None else int(np.count_nonzero(values.nulls))
    return sum(value is None for value in values) if isinstance(values, list) else 0


def fill(name: str, value: Any, batch: Batch, nulls: npt.NDArray[np.bool_] | None) -> None:
    """Replace the nulls of a column with `value`; "mask" adds a column `<name>_valid` instead."""
    values = batch[name]
    if nulls is None:
        nulls = values.nulls if isinstance(values, Ragged) else None
        nulls = np.array([item is None for item in values], bool) if isinstance(values, list) else nulls
    there = np.ones(len(values), bool) if nulls is None else ~nulls
    if is_mask(value):
        batch[f"{name}_valid"] = there
    elif isinstance(values, list):
        # Each row gets its own copy, which the user may change.
        batch[name] = [item if valid else copy.deepcopy(value) for item, valid in zip(values, there, strict=True)]
    elif isinstance(values, np.ndarray) and not there.all():
        values[~there] = value


def check_nulls(
    wanted: Mapping[str, Any], results: Sequence[tuple[str, str, list[int | None], bool]], kinds: Mapping[str, ColumnType]
) -> None:
    """Refuse invalid replacements for nulls before anything is read. `kinds`: the column type of each result."""
    for name in wanted:
        if name not in kinds:
            hint = f"the loader's columns: {', '.join(kinds)}"
            raise InvalidInputError(f"nulls= refers to `{name}`, which the loader does not return", hint=hint)
    for name, value in wanted.items():
        if is_mask(value) and f"{name}_valid" in kinds:
            raise InvalidInputError(
                f"nulls in `{name}` cannot become a mask: the loader already has a column `{name}_valid`",
                hint="rename that column with outputs={…}",
            )
    for name, dtype, shape, _ in results:
        if name not in wanted or is_mask(wanted[name]):
            continue
        kind, value = kinds[name], wanted[name]
        if dtype != "bytes" and None in shape and not kind.is_picture:
            raise InvalidInputError(f"nulls in `{name}` cannot be filled: the column is ragged", hint='use "mask"; the nulls stay None')
        if None in shape or dtype == "bytes":
            if dtype == "bytes":
                wanted_type = {"text": str, "json": object}.get(kind.type, bytes)
                fits, expected = isinstance(value, wanted_type), wanted_type.__name__
            else:
                fits = isinstance(value, np.ndarray) and value.ndim == len(shape)
                expected = f"an array of {dtype} with {len(shape)} dimensions"
            if not fits:
                raise InvalidInputError(f"nulls in `{name}` cannot become {value!r}: expected {expected}")
            continue
        try:
            filler(value, dtype, tuple(size or 0 for size in shape))
        except InvalidInputError as error:
            raise InvalidInputError(f"nulls in `{name}` cannot become {value!r}: expected {dtype} of shape {tuple(shape)}") from error


def has_nulls(name: str, count: int) -> InvalidInputError:
    error = InvalidInputError(
        f"column `{name}` has {count} nulls in this batch", code="invalid-value",
        hint=f'choose a replacement: nulls={{"{name}": value}}, or "mask" for a column `{name}_valid`',
    )  # fmt: skip
    error.column = name
    return error

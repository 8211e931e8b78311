"""Checks for single values, and the error for a value that does not fit its column."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from penstock.errors import InvalidInputError

Prepared = tuple[Any, ...]
Array = npt.NDArray[Any]


def is_utf8(text: str) -> bool:
    """Return whether text can be stored. Text with a lone surrogate, as in some file names, cannot be stored.

    >>> is_utf8("é"), is_utf8("\\udce9")
    (True, False)
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def fail(text: str, row: int | None = None, hint: str | None = None) -> InvalidInputError:
    """Build the error for a value that does not fit its column. If a row is given, `text` follows the words `row n`."""
    return InvalidInputError(text, code="invalid-value", hint=hint, row=row)


def shown(value: Any) -> str:
    """Return the beginning of a value for an error message. Text is quoted; other values are formatted with `str`.

    >>> shown("2"), shown(2)
    ("'2'", '2')
    """
    return repr(value[:80]) if isinstance(value, str) else str(value)[:80]


def is_null(value: Any) -> bool:
    """Return whether a value is null: None, pandas' NA, NaT, or a masked element."""
    if value is None or value is np.ma.masked or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, np.datetime64 | np.timedelta64) and bool(np.isnat(value))


def is_whole(value: Any) -> TypeGuard[int]:
    """Return whether a value is a whole number. Bools and durations do not count, although NumPy treats a duration as an integer.

    >>> is_whole(np.int8(1)), is_whole(True), is_whole(np.timedelta64(1, "s"))
    (True, False, False)
    """
    return isinstance(value, int | np.integer) and not isinstance(value, bool | np.timedelta64)


def holds_bool(value: Any) -> bool:
    """Return whether a value is a bool or an array of bools, or a list that has one. Beside numbers, NumPy would make a number of it.

    >>> holds_bool([1, [2, True]]), holds_bool((1, 2.5)), holds_bool(np.array([True]))
    (True, False, True)
    """
    if isinstance(value, list | tuple):
        return not set(map(type, value)) <= {int, float} and any(map(holds_bool, value))
    return isinstance(value, bool) or getattr(getattr(value, "dtype", None), "kind", None) == "b"


def is_null_word(value: Any) -> bool:
    """Return whether a value in a list of words is null. In such a list, a float NaN is also null, as in pandas."""
    return is_null(value) or (isinstance(value, float) and value != value)


def is_arrow(values: Any) -> bool:
    """Return whether values are a pyarrow Array or ChunkedArray, without importing pyarrow."""
    return hasattr(values, "null_count") and any(base.__module__.partition(".")[0] == "pyarrow" for base in type(values).__mro__)


def first_row(bad: Array) -> int:
    """Return the first row of a bool array (N, …) that contains True."""
    return int(np.argmax(bad.reshape(len(bad), -1).any(axis=1)))


def without_dimensions(item: Any) -> Any:
    """Return the number in a zero-dimensional array; return other values unchanged."""
    return item[()] if isinstance(item, np.ndarray) and item.ndim == 0 else item


def whole(value: Any, what: str, least: int, below: int = 2**62) -> int:
    """Return a whole number that is at least `least` and less than `below`. Raises: InvalidInputError for anything else."""
    if not is_whole(value) or not least <= value < below:
        power = below.bit_length() - 1
        raise InvalidInputError(f"{what}={value!r}, expected a whole number of at least {least} and less than 2^{power}")
    return int(value)


def whole_seed(value: Any) -> int:
    """Return a seed. Any unsigned 64-bit number is valid, as in torch."""
    return whole(value, "seed", 0, 2**64)


def storage_pairs(given: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Return the options of a store as pairs of texts."""
    if given is None:
        return []
    if not isinstance(given, Mapping):
        raise InvalidInputError(f"storage_options is a {type(given).__name__}, expected a dict of option names to values")
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, str | bool | int | float | os.PathLike):
            raise InvalidInputError(f"storage_options[{name!r}] is a {type(value).__name__}, expected str, number, bool or Path")
    return [(name, os.fspath(value) if isinstance(value, os.PathLike) else str(value)) for name, value in given.items()]

"""Identifies rows in memory by their contents, so that an import notices that it imports them again."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.values.checks import is_arrow
from penstock.values.containers import from_torch

# Of long texts, bytes and arrays, only the beginning and the length count.
_BYTES = 64 << 10
_ROWS = 1000
# Larger arrays of other libraries are not read, because they may lie in files.
_READ_BYTES = 16 << 20


class Content:
    """The first of some rows: a list of rows, or a dict of columns. Rows that begin with them are the same ones, or the same and more."""

    def __init__(self, first: Any) -> None:
        self._first = first
        columns = first.values() if isinstance(first, Mapping) else [first]
        self.rows = min(_ROWS, min((len(values) for values in columns), default=0))

    def digest(self, rows: int) -> str | None:
        """Return a digest of the first rows, of which there must be so many. Returns None if a value has no contents that can be compared."""
        made = hashlib.blake2b(digest_size=16)
        try:
            if isinstance(self._first, Mapping):
                _add(made, {name: values[:rows] for name, values in self._first.items()})
            else:
                _add(made, self._first[:rows])
        except (TypeError, ValueError, RecursionError, AttributeError):
            return None
        return made.hexdigest()


def _add(made: Any, value: Any) -> None:
    if is_arrow(value):
        value = value[:_ROWS].to_pylist()
    if hasattr(value, "detach"):
        value = from_torch(value)
    if hasattr(value, "isna"):  # The text of a pandas array leaves out the values between.
        value = value[:_ROWS].tolist()
    elif hasattr(value, "__array__") and not isinstance(value, np.ndarray | np.generic):
        value = _array_of(value)
    made.update(type(value).__name__.encode())
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _add(made, str(key))
            _add(made, inner)
    elif isinstance(value, list | tuple):
        made.update(str(len(value)).encode())
        for inner in value[:_ROWS]:
            _add(made, inner)
    elif isinstance(value, np.ndarray) and value.dtype.kind != "O":
        made.update(f"{value.dtype} {value.shape}".encode())
        made.update(np.ascontiguousarray(value[:_ROWS] if value.ndim else value).reshape(-1).view(np.uint8)[:_BYTES].tobytes())
    elif isinstance(value, np.ndarray):
        _add(made, value[:_ROWS].tolist())
    elif isinstance(value, bytes | bytearray | memoryview):
        made.update(f"{len(value)} ".encode() + bytes(value[:_BYTES]))
    elif isinstance(value, str):
        made.update(f"{len(value)} {value[:_BYTES]} ".encode("utf-8", "surrogatepass"))
    elif getattr(type(value), "__repr__", None) is getattr(object, "__repr__", None):
        raise TypeError  # Its text would be its address.
    else:
        text = repr(value)
        if " at 0x" in text:
            raise ValueError(text)
        made.update(f"{len(text)} {text[:_BYTES]} ".encode("utf-8", "surrogatepass"))


def _array_of(value: Any) -> Any:
    """Return an array of another library as one of NumPy. Raises: TypeError for a large one."""
    if getattr(value, "nbytes", 0) > _READ_BYTES:
        raise TypeError
    return np.asarray(value)

"""Cuts input into slices of bounded size, based on the size of the converted values."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock import _core
from penstock.changes.arrow_sizes import becomes_objects, row_bytes_of
from penstock.values.checks import is_arrow
from penstock.values.streams import is_source

# Maximum bytes per call to the core. Limited to an eighth of the budget, so that a large append stays within the budget.
SLICE_BYTES = 16 << 20
# Texts and bytes up to this length are not measured individually.
SHORT_BYTES = 256


def size_of(value: Any) -> int:
    """Estimate the bytes that a value takes while it is appended. A path counts as its file's size, and a Pillow image as its pixels."""
    if isinstance(value, str | bytes | bytearray):
        return len(value)
    if isinstance(value, os.PathLike):
        with contextlib.suppress(OSError):  # The core reports the unreadable file.
            return os.stat(value).st_size
        return 0
    nbytes = getattr(value, "nbytes", None)
    if isinstance(nbytes, int | np.integer):
        return int(nbytes)
    if is_source(value):
        return SLICE_BYTES  # A value that is read while it is written is the last one of its slice.
    if hasattr(value, "mode") and hasattr(value, "size") and isinstance(value.size, tuple):
        return 4 * int(np.prod(value.size))
    try:
        if isinstance(value, Mapping):
            return 32 + sum(size_of(key) + size_of(inner) for key, inner in value.items())
        return sum(map(size_of, value)) if isinstance(value, list | tuple) else 32
    except RecursionError:  # The value contains itself, so the column refuses it as invalid JSON.
        return 32


def slices(columns: Iterable[Any], rows: int, least: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Cut rows into slices of bounded size. `least`: the minimum bytes per row of each column, regardless of the values.

    Cost: reads every value in a Python list and the offsets of Arrow text and lists, but does not read array values.
    """
    slice_bytes = min(SLICE_BYTES, _core.configure()[0] // 8)
    even, uneven = 0.0, []
    for values, bytes_there in zip(columns, least, strict=True):
        sizes = _sizes(values)
        if isinstance(sizes, float):
            even += max(sizes, bytes_there)
        else:
            uneven.append(np.maximum(sizes, bytes_there) if bytes_there else sizes)
    if not uneven:
        step = max(1, int(slice_bytes / even) if even else rows)
        yield from ((start, min(start + step, rows)) for start in range(0, max(rows, 1), step))
        return
    ends = np.cumsum(np.sum(uneven, axis=0) + even)  # Total bytes of all rows up to and including each row.
    start, before = 0, 0.0
    while start < rows:
        end = min(int(np.searchsorted(ends, before + slice_bytes)) + 1, rows)
        yield start, end
        start, before = end, float(ends[end - 1])
    if rows == 0:
        yield 0, 0


# Estimated memory overhead, in bytes, of appending a small Python value, and of appending an array or other object.
_PLAIN_BYTES = 96.0
_OBJECT_BYTES = 256.0
# {"a": 1, "b": "2"} takes 20 bytes in Arrow and 370 in Python.
_ARROW_TO_PYTHON = 20.0
_PLAIN = {int, float, bool, complex, type(None)}


def _sizes(values: Any) -> float | npt.NDArray[np.float64]:
    """Estimate the bytes that each value takes while it is appended. Returns a single number if the estimate is the same for all values."""
    if isinstance(values, list):
        kinds = set(map(type, values))
        if kinds <= _PLAIN:
            return _PLAIN_BYTES
        if kinds <= {str, bytes, type(None)}:
            longest = max(map(len, filter(None, values) if type(None) in kinds else values), default=0)
            if longest <= SHORT_BYTES:  # An upper bound is accurate enough for choosing slice sizes.
                return float(longest) + _PLAIN_BYTES
            return np.fromiter((len(value or "") for value in values), np.float64, len(values)) + _PLAIN_BYTES
        return np.fromiter(map(size_of, values), np.float64, len(values)) + _OBJECT_BYTES
    if is_arrow(values):
        return row_bytes_of(values) * (_ARROW_TO_PYTHON if becomes_objects(values) else 1.0)
    return float(values.nbytes) / max(1, len(values))

"""`Ragged`: n arrays of different shape in one buffer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt


class Ragged(Sequence[Any]):
    """N arrays of one dtype and different shapes, stored back to back.

    Shapes: shapes (N, ndim) int64; item i has shape `shapes[i]`. Where only the first dimension is free, values is
    (M, …) and offsets (N + 1,) count along it; else values is (M,) elements. `nulls` (N,) bool, or None for no nulls.

    >>> import numpy as np, penstock as ps
    >>> boxes = ps.Ragged.from_arrays([np.zeros((2, 4), "float32"), np.ones((1, 4), "float32")])
    >>> boxes.values.shape, boxes.offsets.tolist(), boxes[1].shape
    ((3, 4), [0, 2, 3], (1, 4))
    """

    __slots__ = ("nulls", "offsets", "shapes", "values")

    def __init__(
        self,
        values: npt.NDArray[Any],
        offsets: npt.NDArray[np.int64],
        shapes: npt.NDArray[np.int64],
        nulls: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        self.values = values
        self.offsets = offsets
        self.shapes = shapes
        self.nulls = nulls

    @classmethod
    def from_arrays(cls, arrays: Sequence[npt.NDArray[Any]]) -> Ragged:
        """Copy arrays of equal rank and dtype into one buffer."""
        flat = np.concatenate([np.ravel(array) for array in arrays]) if arrays else np.empty(0)
        offsets = np.cumsum([0] + [array.size for array in arrays]).astype(np.int64)
        shapes = np.array([array.shape for array in arrays], dtype=np.int64).reshape(len(arrays), -1)
        return from_core((flat, offsets, shapes, None))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} arrays")
        index %= len(self)
        if self.nulls is not None and self.nulls[index]:
            return None
        return self.values[self.offsets[index] : self.offsets[index + 1]].reshape(self.shapes[index])

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return f"Ragged({len(self)} arrays, {self.values.dtype}, {self.values.nbytes} bytes)"


def from_core(parts: tuple[Any, Any, Any, Any]) -> Ragged:
    """Give flat values their fixed inner dimensions, where only the first one is free."""
    flat, offsets, shapes, nulls = parts
    inner = shapes[:, 1:]
    valid = inner if nulls is None else inner[~nulls]
    if len(valid) and (valid == valid[0]).all() and valid[0].all():
        cell = int(np.prod(valid[0]))
        flat = flat.reshape(-1, *valid[0])
        offsets = offsets // cell
    return Ragged(flat, offsets, shapes, nulls)

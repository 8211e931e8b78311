"""`Ragged`: N arrays of different shapes in one buffer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from penstock.errors import InvalidInputError
from penstock.values.dtypes import filler


class Padded(NamedTuple):
    """Ragged values padded to a common shape, and a mask that marks the real values."""

    values: Any
    mask: Any


class Ragged(Sequence[Any]):
    """N arrays of the same dtype and different shapes, stored back to back.

    Shapes: `shapes` is (N, ndim) int64, and array i has the shape `shapes[i]`. `offsets` is (N + 1,). If only the first dimension is
    free, `values` is (M, …) and the offsets count along that dimension; otherwise, `values` is (M,) and the offsets count elements.
    `nulls` is (N,) bool, or None if all values are present.

    >>> import numpy as np, penstock as ps
    >>> boxes = ps.Ragged.from_arrays([np.zeros((2, 4), "float32"), np.ones((1, 4), "float32")])
    >>> boxes.values.shape, boxes.offsets.tolist(), boxes[1].shape
    ((3, 4), [0, 2, 3], (1, 4))
    """

    __slots__ = ("form", "nulls", "offsets", "shapes", "values")

    def __init__(
        self,
        values: npt.NDArray[Any],
        offsets: npt.NDArray[np.int64],
        shapes: npt.NDArray[np.int64],
        nulls: npt.NDArray[np.bool_] | None = None,
        form: tuple[int | None, ...] | None = None,
    ) -> None:
        self.values = values
        self.offsets = offsets
        self.shapes = shapes
        self.nulls = nulls
        inner = tuple(int(size) for size in values.shape[1:])
        # The sizes of the dimensions, with None for each free dimension, as in a schema.
        self.form = (None,) * (shapes.shape[1] - len(inner)) + inner if form is None else form

    @classmethod
    def from_arrays(cls, arrays: Sequence[npt.NDArray[Any]]) -> Ragged:
        """Copy one or more arrays of equal rank and dtype into one buffer."""
        if not len(arrays):
            raise InvalidInputError("cannot join an empty list: the rank and dtype are unknown")
        flat = np.concatenate([np.ravel(array) for array in arrays])
        offsets = np.cumsum([0] + [array.size for array in arrays]).astype(np.int64)
        shapes = np.array([array.shape for array in arrays], dtype=np.int64).reshape(len(arrays), -1)
        inner = shapes[:, 1:]
        same = len(inner) and (inner == inner[0]).all() and inner[0].all()
        return from_core((flat, offsets, shapes, None), (None, *(inner[0].tolist() if same else [None] * inner.shape[1])))

    @classmethod
    def joined(cls, items: Sequence[npt.NDArray[Any] | None], dtype: Any, form: tuple[int | None, ...]) -> Ragged:
        """Copy arrays of this dtype, and nulls, into one buffer. `form` has the sizes of their dimensions, with None for free ones."""
        flat = [np.ravel(item) for item in items if item is not None]
        sizes = [0 if item is None else item.size for item in items]
        shapes = np.array([(0,) * len(form) if item is None else item.shape for item in items], np.int64)
        nulls = np.array([item is None for item in items], bool)
        values = np.concatenate([np.empty(0, dtype), *flat])
        offsets = np.cumsum([0, *sizes]).astype(np.int64)
        return from_core((values, offsets, shapes.reshape(len(items), len(form)), nulls if nulls.any() else None), form)

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
        return self.values[self.offsets[index] : self.offsets[index + 1]].reshape(tuple(self.shapes[index].tolist()))

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    @property
    def cu_seqlens(self) -> Any:
        """Offsets along the first dimension as int32 (N + 1,), as variable-length attention kernels expect."""
        offsets = self.offsets
        if len(self) and self.values.ndim == 1 and self.shapes.shape[1] > 1:
            offsets = np.concatenate([[0], np.cumsum(self.shapes[:, 0])])
        return self._like(offsets.astype(np.int32))

    def to_padded(self, value: float = 0, multiple_of: int = 1) -> Padded:
        """Pad with `value` to a common shape, in which each free dimension is a multiple of `multiple_of`.

        Shapes: values (N, …); mask (N, …) over the free dimensions only, True for real values. A null is filled with `value`.
        Cost: one copy.

        >>> import numpy as np, penstock as ps
        >>> ragged = ps.Ragged.from_arrays([np.array([1, 2, 3]), np.array([4])])
        >>> padded = ragged.to_padded(-1, multiple_of=4)
        >>> padded.values.tolist(), padded.mask.sum(1).tolist()
        ([[1, 2, 3, -1], [4, -1, -1, -1]], [3, 1])
        """
        if not isinstance(multiple_of, int) or multiple_of < 1:
            raise InvalidInputError(f"multiple_of={multiple_of!r}, expected a whole number above 0")
        dtype = str(self.values.dtype).removeprefix("torch.")
        try:
            filler(value, dtype)
        except InvalidInputError as error:
            raise InvalidInputError(f"value={value!r} cannot be stored as {dtype}") from error
        most = self.shapes.max(axis=0, initial=0)
        free = [axis for axis, size in enumerate(self.form) if size is None]
        sizes = [-(-int(most[axis]) // multiple_of) * multiple_of if size is None else size for axis, size in enumerate(self.form)]
        mask = np.zeros((len(self), *(sizes[axis] for axis in free)), bool)
        if isinstance(self.values, np.ndarray):
            values: Any = np.full((len(self), *sizes), value, self.values.dtype)
        else:
            values = self.values.new_full((len(self), *sizes), value)
        for index, item in enumerate(self):
            if item is not None:
                place: list[Any] = [slice(0, int(size)) for size in self.shapes[index]]
                values[(index, *place)] = item
                mask[(index, *(place[axis] for axis in free))] = True
        return Padded(values, self._like(mask))

    def to_nested(self) -> Any:
        """Return a torch nested tensor. If only the first dimension is free, the result has the jagged layout and shares memory with this
        object.
        """
        import torch

        from penstock.values.to_torch import tensor_of

        values = self.values if isinstance(self.values, torch.Tensor) else tensor_of(self.values)
        if self.nulls is not None and self.nulls.any():
            raise InvalidInputError("a nested tensor cannot contain nulls", code="invalid-value", hint="leave out the null samples")
        if self.form[1:] == tuple(values.shape[1:]):
            return torch.nested.nested_tensor_from_jagged(values, torch.from_numpy(self.offsets))
        items = [
            values[self.offsets[index] : self.offsets[index + 1]].reshape(tuple(shape)) for index, shape in enumerate(self.shapes.tolist())
        ]
        return torch.nested.nested_tensor(items)

    def _like(self, array: npt.NDArray[Any]) -> Any:
        """Return the array as a tensor if `values` is a tensor."""
        if isinstance(self.values, np.ndarray):
            return array
        import torch

        return torch.from_numpy(array)

    def __repr__(self) -> str:
        return f"Ragged({len(self)} arrays, {self.values.dtype}, {self.values.nbytes} bytes)"


def from_core(parts: tuple[Any, Any, Any, Any], form: tuple[int | None, ...]) -> Ragged:
    """Build a `Ragged` from the core's flat values. If only the first dimension is free, `values` keeps the fixed inner dimensions."""
    flat, offsets, shapes, nulls = parts
    inner = form[1:]
    if form and form[0] is None and None not in inner:
        cell = math.prod(size for size in inner if size is not None)
        flat, offsets = flat.reshape(-1, *inner), offsets // cell
    return Ragged(flat, offsets, shapes, nulls, form)

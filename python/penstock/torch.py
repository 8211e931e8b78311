"""The PyTorch leaf: a map-style Dataset and its collate function. Nothing else of Penstock imports torch.

>>> import penstock as ps, torch
>>> ds = ps.create("memory://torch", {"x": ps.Tensor((2,), "float32"), "label": ps.Label(["a", "b"])})
>>> receipt = ds.append({"x": [[0, 1], [2, 3], [4, 5]], "label": ["a", "b", "a"]})
>>> loader = torch.utils.data.DataLoader(ds.torch(), batch_size=2, collate_fn=ps.torch.collate)
>>> [batch["label"].tolist() for batch in loader]
[[0, 1], [0]]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from penstock.errors import InvalidInputError
from penstock.ragged import Ragged
from penstock.view import Batch, Sample, View, unwrap


class TorchDataset(torch.utils.data.Dataset[Any]):  # type: ignore[misc]
    """Samples of a view by position. Picklable, and safe after fork: each worker reads for itself, without locks of its parent.

    Cost: `DataLoader` asks for a whole batch at once (`__getitems__`), which is one `take`.
    """

    def __init__(self, view: View, columns: Sequence[str] | None = None) -> None:
        self.view = view
        self.columns = None if columns is None else list(columns)
        view.take([], columns=self.columns)  # Raises for a column that is not there.

    def __len__(self) -> int:
        return len(self.view)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.view._sample(self.view.take([index], columns=self.columns), 0)

    def __getitems__(self, indices: Sequence[int]) -> Samples:
        return Samples(self.view.take(indices, columns=self.columns), len(indices), self.view._images)


class Samples(Sequence[Any]):
    """The samples of one batch as `default_collate` wants them: dicts, made when looked at. `collate` takes `batch` as it is."""

    def __init__(self, batch: Batch, count: int, images: frozenset[str]) -> None:
        self.batch, self.samples = batch, count
        self.images = images

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self.samples))]
        if not -self.samples <= index < self.samples:
            raise IndexError(f"index {index} is out of range for {self.samples} samples")
        sample = Sample((name, unwrap(values, index)) for name, values in self.batch.items())
        sample.images = self.images
        return sample


def collate(samples: Any) -> dict[str, Any]:
    """Make tensors of a batch: fixed shapes become (B, …) tensors, images of one size (B, C, H, W) in channels_last memory.

    Images of different size become a list of (C, H, W), ragged values a list of tensors; text, JSON and bytes stay lists.
    Timestamps become int64 microseconds. Cost: no copy for fixed shapes. Raises: InvalidInputError for nulls in a fixed column.
    """
    if hasattr(samples, "batch"):
        batch, images = samples.batch, samples.images
    elif isinstance(samples, Mapping):
        batch, images = samples, frozenset()  # Of a batch the kind of its values tells: images are lists of arrays.
    else:
        batch, images = _transpose(samples), frozenset.union(*(getattr(sample, "images", frozenset()) for sample in samples))
        return {name: _tensor(name, values, image=name in images) for name, values in batch.items()}
    return {name: _tensor(name, values, image=isinstance(values, list)) for name, values in batch.items()}


def tensors(batch: Batch, images: frozenset[str]) -> dict[str, Any]:
    """Make tensors of a loader's batch: zero-copy; images become (B, C, H, W) in channels_last memory. Ragged values stay `Ragged`, of tensors."""
    return {name: _loaded(name, values, name in images) for name, values in batch.items()}


def _loaded(name: str, values: Any, image: bool) -> Any:
    if isinstance(values, Ragged):
        return Ragged(_from_numpy(values.values), values.offsets, values.shapes, values.nulls)
    if image and isinstance(values, np.ndarray) and values.ndim == 4:
        return _from_numpy(values).permute(0, 3, 1, 2)
    if image and isinstance(values, list):
        return [_from_numpy(value).permute(2, 0, 1) if isinstance(value, np.ndarray) and value.ndim == 3 else value for value in values]
    if isinstance(values, list):
        return [_from_numpy(value) if isinstance(value, np.ndarray) else value for value in values]
    return _from_numpy(values) if isinstance(values, np.ndarray) else values


def _transpose(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Samples → columns; scalars become an array again."""
    batch: dict[str, Any] = {}
    for name in samples[0] if samples else ():
        values = [sample[name] for sample in samples]
        first = values[0]
        scalars = isinstance(first, np.generic) or type(first).__module__ == "ml_dtypes"
        batch[name] = np.array(values, dtype=np.asarray(first).dtype) if scalars and None not in values else values
    return batch


def _tensor(name: str, values: Any, image: bool) -> Any:
    if isinstance(values, np.ma.MaskedArray):
        raise InvalidInputError(
            f"cannot make a tensor of column `{name}`: some of its samples are null", code="invalid-value",
            hint="select the samples that have a value, or collate the column yourself",
        )  # fmt: skip
    if isinstance(values, np.ndarray):
        return _from_numpy(values)
    if isinstance(values, Ragged):
        return [None if value is None else _from_numpy(np.ascontiguousarray(value)) for value in values]
    if not isinstance(values, list) or not values or not all(isinstance(value, np.ndarray) for value in values):
        return values
    same = all(value.shape == values[0].shape and value.dtype == values[0].dtype for value in values)
    if image and values[0].ndim == 3:  # (H, W, C) → (C, H, W)
        if same:
            return _from_numpy(np.stack(values)).permute(0, 3, 1, 2)  # channels_last memory
        return [_from_numpy(value).permute(2, 0, 1) for value in values]
    return _from_numpy(np.stack(values)) if same else [_from_numpy(np.ascontiguousarray(value)) for value in values]


def _from_numpy(array: Any) -> torch.Tensor:
    if array.dtype.kind == "M":
        return torch.from_numpy(array.view(np.int64))
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)

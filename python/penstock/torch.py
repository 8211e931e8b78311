"""The PyTorch leaf module: a map-style Dataset, its collate function, and a sampler. Other modules import torch only inside functions.

>>> import penstock as ps, torch
>>> ds = ps.create("memory://torch", {"x": ps.Tensor((2,), "float32"), "label": ps.Label(["a", "b"])})
>>> receipt = ds.append({"x": [[0, 1], [2, 3], [4, 5]], "label": ["a", "b", "a"]})
>>> loader = torch.utils.data.DataLoader(ds.torch(), batch_size=2, collate_fn=ps.torch.collate)
>>> [batch["label"].tolist() for batch in loader]
[[0, 1], [0]]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from penstock.errors import InvalidInputError, unpicklable
from penstock.loadable import LastBatch
from penstock.ragged import Ragged
from penstock.values.to_torch import tensor_of
from penstock.views.concat import Concat
from penstock.views.readable import Batch
from penstock.views.sample import Sample
from penstock.views.view import View


class TorchDataset(torch.utils.data.Dataset[Any]):  # type: ignore[misc]
    """Samples of a view by position. Picklable and safe after fork: each worker reads independently of its parent's locks.

    Cost: one `take` per batch, because `DataLoader` requests whole batches (`__getitems__`).
    """

    def __init__(self, view: View | Concat, columns: Sequence[str] | None = None) -> None:
        self.view = view
        self.columns = None if columns is None else list(columns)
        view.take([], columns=self.columns)  # Raises an error if a column is missing.

    def __len__(self) -> int:
        return len(self.view)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.view._sample(self.view.take([index], columns=self.columns), 0)

    def __getitems__(self, indices: Sequence[int]) -> Samples:
        return Samples(self.view.take(indices, columns=self.columns), len(indices), self.view._forms)


class Samples(Sequence[Any]):
    """The samples of one batch as dicts, created on access, for `default_collate`. `collate` uses `batch` directly."""

    def __init__(self, batch: Batch, count: int, forms: Mapping[str, str]) -> None:
        self.batch, self.samples = batch, count
        self.forms = forms

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self.samples))]
        if not -self.samples <= index < self.samples:
            raise IndexError(f"index {index} is out of range for {self.samples} samples")
        return Sample.of(self.batch, index, self.forms)


class Sampler(torch.utils.data.Sampler[int]):  # type: ignore[misc]
    """Penstock's order for a DataLoader: `DataLoader(view.torch(), batch_size=B, sampler=Sampler(view, batch_size=B, seed=0), …)`.

    Yields this rank's positions for one epoch, in the order of `view.loader(batch_size=B, shuffle=…, seed=…)`. Call `set_epoch` as with
    DistributedSampler. A DataLoader requests positions before it delivers their batches, so pass the number of this epoch's batches that
    you have trained on: `state_dict(batches=…)`. Every rank gets the same number of positions. If positions do not divide evenly, some
    positions in the last batch are repeated; with `last_batch="drop"`, that batch is left out.

    >>> import penstock as ps, torch
    >>> ds = ps.create("memory://sampler", {"number": "int64"})
    >>> receipt = ds.append({"number": range(10)})
    >>> sampler = ps.torch.Sampler(ds, batch_size=4, seed=1)
    >>> loader = torch.utils.data.DataLoader(ds.torch(), batch_size=4, sampler=sampler, collate_fn=ps.torch.collate)
    >>> ours = ds.loader(batch_size=4, shuffle=True, seed=1)
    >>> [b["number"].tolist() for b in loader] == [b["number"].tolist() for b in ours]
    True
    """

    # Over 6 parameters: each is a training option, passed by keyword.
    def __init__(
        self,
        view: View,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: Any = True,
        rank: int | None = None,
        world_size: int | None = None,
        last_batch: LastBatch = "short",
    ) -> None:
        columns: list[str] = [] if shuffle in (True, False) else list(view.schema)
        self._loader = view.loader(
            batch_size=batch_size, shuffle=shuffle, seed=seed, columns=columns, rank=rank, world_size=world_size, last_batch=last_batch
        )
        self._began = self._asked = 0

    def __len__(self) -> int:
        loader = self._loader
        whole, rest = divmod(loader._core.epoch_samples, loader.global_batch_size)
        each = loader.global_batch_size // loader.world_size
        last = {"drop": 0, "pad": each}.get(loader.options.last_batch, -(-rest // loader.world_size))
        return whole * each + (last if rest else 0)

    def __iter__(self) -> Iterator[int]:
        loader = self._loader
        at = loader._position
        self._began = at.step
        at.step = at.core.end_of_epoch(self._began) if len(loader) else 0
        self._asked = 0
        for step in range(self._began, at.step):
            yield from at.core.places(step)[2].tolist()
            self._asked += 1

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration start at the beginning of `epoch`."""
        self._loader.set_epoch(epoch)
        self._began = self._asked = 0

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """Return the state after `batches` batches of the latest iteration. A `Loader` can also load this state.

        By default, all requested batches are counted. That number is correct after an epoch; during an epoch, it is ahead of training.
        """
        left = max(0, self._loader._position.step - self._began)
        number = self._asked if batches is None else batches
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= max(left, self._asked):
            raise InvalidInputError(f"batches={batches!r}, expected a whole number up to {left}")
        epoch, draw = self._loader._core.begin_of(self._began + number)
        return {**self._loader.state_dict(), "epoch": epoch, "draw": draw}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state; see `Loader.load_state_dict`."""
        self._loader.load_state_dict(state)
        self._began = self._asked = 0

    def __reduce__(self) -> NoReturn:
        raise unpicklable("a Sampler", "make one where you need it, and pass its state: sampler.state_dict(batches=…)")


def collate(samples: Any, *, ragged: Sequence[str] = ()) -> dict[str, Any]:
    """Convert a batch to tensors. Fixed shapes become (B, …), and images become (B, C, H, W) in channels_last memory.

    The kind of a column is the same in every batch. Images and masks of unequal size are an error, unless `ragged` names the column, which
    makes it a list of tensors always: `functools.partial(ps.torch.collate, ragged=["image"])`. Ragged values become a list of tensors.
    Text, JSON and bytes remain lists. Times become int64 microseconds.
    Cost: no copy for fixed shapes. Raises: InvalidInputError for nulls in a fixed column, and for images of unequal size.
    """
    if hasattr(samples, "batch") or isinstance(samples, Mapping):
        # In a batch, the columns that are lists of arrays are images.
        batch = samples.batch if hasattr(samples, "batch") else samples
        return {name: _tensor(name, values, isinstance(values, list), name in ragged) for name, values in batch.items()}
    forms = {name: form for sample in samples for name, form in getattr(sample, "forms", {}).items()}
    return {name: _joined(name, values, forms.get(name), name in ragged) for name, values in _transpose(samples).items()}


def tensors(batch: Batch, images: frozenset[str]) -> dict[str, Any]:
    """Convert a loader's batch to tensors without copies. Images become (B, C, H, W) in channels_last memory; `Ragged` contains tensors."""
    return {name: _loaded(name, values, name in images) for name, values in batch.items()}


def _loaded(name: str, values: Any, image: bool) -> Any:
    if isinstance(values, Ragged):
        return Ragged(tensor_of(values.values), values.offsets, values.shapes, values.nulls, values.form)
    if image and isinstance(values, np.ndarray) and values.ndim == 4:
        return tensor_of(values).permute(0, 3, 1, 2)
    if image and isinstance(values, list):
        return [tensor_of(value).permute(2, 0, 1) if isinstance(value, np.ndarray) and value.ndim == 3 else value for value in values]
    if isinstance(values, list):
        return [tensor_of(value) if isinstance(value, np.ndarray) else value for value in values]
    numbers = isinstance(values, np.ndarray) and (values.dtype.kind in "biufcmM" or values.dtype.name == "bfloat16")
    return tensor_of(values) if numbers else values


def _transpose(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Convert samples to columns; scalars become an array again."""
    batch: dict[str, Any] = {}
    for name in samples[0] if samples else ():
        values = [sample[name] for sample in samples]
        first = values[0]
        scalars = isinstance(first, np.generic) or type(first).__module__ == "ml_dtypes"
        batch[name] = np.array(values, dtype=np.asarray(first).dtype) if scalars and None not in values else values
    return batch


def _joined(name: str, values: Any, form: str | None, listed: bool) -> Any:
    """Collate the values of a column, read sample by sample. The result has the form that the column has in a batch."""
    if form == "ragged":
        return [None if value is None else tensor_of(np.ascontiguousarray(value)) for value in values]
    if form == "fixed" and isinstance(values, list) and any(value is None for value in values):
        raise _nulls(name)
    return _tensor(name, values, form == "image", listed)


def _nulls(name: str) -> InvalidInputError:
    return InvalidInputError(
        f"cannot make a tensor of column `{name}`: some samples are null", code="invalid-value",
        hint="select the samples that have a value, or collate the column yourself",
    )  # fmt: skip


def _tensor(name: str, values: Any, image: bool, listed: bool) -> Any:
    if isinstance(values, np.ma.MaskedArray):
        raise _nulls(name)
    if isinstance(values, np.ndarray):
        return list(tensor_of(values)) if listed else tensor_of(values)
    if isinstance(values, Ragged):
        return [None if value is None else tensor_of(np.ascontiguousarray(value)) for value in values]
    if not isinstance(values, list) or not any(isinstance(value, np.ndarray) for value in values):
        return values
    pixels = image and any(isinstance(value, np.ndarray) and value.ndim == 3 for value in values)
    if listed:
        each = [value if value is None else tensor_of(np.ascontiguousarray(value)) for value in values]
        return [value.permute(2, 0, 1) if pixels and value is not None else value for value in each]
    for row, value in enumerate(values):
        if value is None:
            raise _nulls(name)
        if value.shape != values[0].shape or value.dtype != values[0].dtype:
            raise InvalidInputError(
                f"cannot make a tensor of column `{name}`: sample {row} of the batch has {value.shape} {value.dtype}, but the first one has "
                f"{values[0].shape} {values[0].dtype}",
                code="invalid-value", hint=f'make them equal first, or always return a list: ps.torch.collate(samples, ragged=["{name}"])',
            )  # fmt: skip
    stacked = tensor_of(np.stack(values))
    return stacked.permute(0, 3, 1, 2) if pixels else stacked  # (B, H, W, C) → (B, C, H, W) in channels_last memory

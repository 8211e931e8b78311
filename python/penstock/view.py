"""`View`: a dataset, whole or narrowed to chosen positions. Reading, and nothing else."""

from __future__ import annotations

import json
import operator
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

# By name: NumPy imports `np.ma` and `np.random` when they are first asked for, and a child forked meanwhile would wait for ever.
from numpy.ma import MaskedArray

from penstock import _core
from penstock.errors import InvalidInputError, NotFoundError, OutOfRangeError, UnsupportedError
from penstock.schema import Schema, Tensor, from_json

if TYPE_CHECKING:
    from penstock.loader import Loader

Batch = dict[str, Any]
_INT64 = np.dtype(np.int64)
_MOST = np.iinfo(np.int64).max


def positions_of(key: Any, length: int) -> npt.NDArray[np.int64]:
    """Turn a list, tuple, range or array of whole numbers, or a mask of `length` bools, into int64 positions."""
    if type(key) is np.ndarray and key.dtype is _INT64 and key.ndim == 1:
        return key
    array = _whole_numbers(key, "position")
    if array.dtype == bool:
        if array.shape != (length,):
            raise InvalidInputError(f"a mask of shape {array.shape}, expected ({length},)")
        return np.flatnonzero(array).astype(np.int64)
    if array.dtype == np.uint64 and len(beyond := np.flatnonzero(array > _MOST)):
        place = int(beyond[0])
        raise OutOfRangeError(f"cannot take position {array[place]}: no dataset has so many samples", rows=[place])
    return np.ascontiguousarray(array, dtype=np.int64)


def _row_ids_of(key: Any) -> npt.NDArray[np.int64]:
    """Turn a list, tuple, range or array of row ids into an int64 array."""
    array = _whole_numbers(key, "row id")
    if array.dtype == bool:
        raise InvalidInputError("row ids are bools, expected whole numbers", hint="a mask goes where positions go")
    if array.dtype == np.uint64 and len(beyond := np.flatnonzero(array > _MOST)):
        raise NotFoundError(f"cannot find row id {array[beyond[0]]}: it is beyond 64 bits", code="row-id-not-found")
    return np.ascontiguousarray(array, dtype=np.int64)


def _whole_numbers(key: Any, what: str) -> npt.NDArray[Any]:
    """Make an array of one dimension, of whole numbers or bools."""
    if isinstance(key, MaskedArray):
        raise InvalidInputError(f"{what}s are a masked array", hint="leave the masked ones out first")
    try:
        array = np.asarray(key)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidInputError(f"{what}s make no array: {error}") from error
    if array.size == 0 and array.dtype != bool:
        return np.empty(0, np.int64)
    if array.dtype != bool and (array.dtype.kind not in "iu" or array.ndim != 1):
        raise InvalidInputError(f"{what}s are an array {array.shape} of {array.dtype}, expected (N,) of whole numbers")
    return array


def one_position(key: Any) -> int | None:
    """Give a single position, or None where the key is none."""
    if isinstance(key, bool | np.bool_):
        raise InvalidInputError(
            f"cannot take {key}: a position is a whole number", hint="a mask is an array of as many bools as there are samples"
        )
    try:
        position = operator.index(key)
    except TypeError:
        return None
    if not -(2**63) <= position < 2**63:
        raise OutOfRangeError(f"cannot take position {position}: no dataset has so many samples", rows=[0])
    return position


class Sample(dict[str, Any]):
    """One sample: column → value. `forms` tells `ps.torch.collate` which columns are images, ragged, or of one shape ("fixed")."""

    forms: Mapping[str, str] = types.MappingProxyType({})


def _form(column: Mapping[str, Any]) -> str:
    """How values of a column go together in a batch."""
    if column["type"] in ("scalar", "label", "category"):
        return "fixed"
    if column["type"] == "tensor":
        return "ragged" if None in column["shape"] else "fixed"
    return "ragged" if column["type"] in ("boxes", "keypoints") else str(column["type"])


class View:
    """Samples of one snapshot, in the order chosen. Picklable, safe after fork, in threads.

    >>> import penstock as ps
    >>> ds = ps.create("memory://view", {"number": "int32"})
    >>> receipt = ds.append({"number": range(10)})
    >>> view = ds.select([9, 3, 3])
    >>> view["number"][:].tolist(), len(view), view[0]
    ([9, 3, 3], 3, {'number': np.int32(9)})
    """

    _snapshot: _core.Snapshot
    _view: _core.View
    # A column beside the snapshot's, in files of its own.
    _files: _core.Files | None = None

    def __init__(self, snapshot: _core.Snapshot, view: _core.View) -> None:
        self._snapshot = snapshot
        self._view = view
        self._forms = {column["name"]: _form(column) for column in json.loads(snapshot.columns)}

    @property
    def uri(self) -> str:
        """Where the dataset is."""
        return self._snapshot.uri

    @property
    def snapshot(self) -> str:
        """The id of the snapshot this reads, for `ps.open(snapshot=…)`."""
        return self._snapshot.id

    @property
    def schema(self) -> Schema:
        """Column name → type."""
        return from_json(self._snapshot.columns)

    @property
    def _identity(self) -> str:
        """What states know the dataset by."""
        return self._snapshot.dataset_id

    def _as_it_is(self) -> View:
        """Give a view that stays at its snapshot."""
        return self

    def _pin(self, name: str) -> None:
        self._snapshot.pin(name)

    def _other(self, what: str, samples: int) -> str:
        """What to do with a state of so many samples that is of another `what`."""
        return f"open the same {what} that the state was taken of"

    def _column_bytes(self, columns: Sequence[str]) -> tuple[int, int, int, int, float]:
        """Bytes of these columns, of the whole snapshot: stored, decoded, of a block of each whose samples share blocks, from its first to its last block.

        And of a sample, decoded, by the mean of the fragments that have the column.
        """
        return self._snapshot.column_bytes(list(columns))

    def _counts(self) -> int:
        """What `stats` counts: the same number for views that count together."""
        return self._snapshot.handle()

    def _kept_bytes(self, columns: Sequence[str]) -> tuple[int, int, int]:
        """Bytes that reading these columns keeps of data files, if they are not mapped: of all, of the largest, and what may be kept."""
        return self._snapshot.kept_bytes(list(columns))

    def __len__(self) -> int:
        return len(self._view)

    def take(
        self,
        positions: npt.ArrayLike | None = None,
        *,
        row_ids: npt.ArrayLike | None = None,
        columns: Sequence[str] | None = None,
        decode: bool = True,
        on_corrupt: str = "raise",
    ) -> Batch:
        """Read samples by position, or by row id, in the order asked; doubles are allowed, negative positions count from the end.

        Shapes: positions (N,) → fixed columns (N, …) ndarray, a MaskedArray where there are nulls; text, bytes, JSON and
        images lists; ragged tensors, boxes and keypoints `Ragged`. `columns` may name `_row_id` and `_position` too.
        Cost: one copy; a block is verified once a process. `decode=False` gives the stored bytes of media.
        Raises: OutOfRangeError (position-out-of-range), NotFoundError (row-id-not-found, column-not-found), CorruptError
        (block-checksum, media-undecodable), unless `on_corrupt="null"`.
        Source: spec/format-v1.md section 11.
        """
        if (positions is None) == (row_ids is None):
            raise InvalidInputError("cannot take: give positions or row_ids, one of them")
        form = "decoded" if decode else "stored"
        names = _names(columns)
        if row_ids is not None:
            found = self._view.positions_of(_row_ids_of(row_ids))
            chosen = self._view.positions()
            if chosen is not None:
                outside = np.flatnonzero(~np.isin(np.asarray(found, np.int64), chosen))
                if len(outside):
                    wrong = np.asarray(row_ids).reshape(-1)[outside[0]]
                    raise NotFoundError(
                        f"cannot find row id {wrong}: its sample is not in this view",
                        code="row-id-not-found",
                        hint="take it from the dataset",
                    )
            return self._view.take(np.asarray(found, dtype=np.int64), names, form, on_corrupt, absolute=True)
        return self._view.take(positions_of(positions, len(self)), names, form, on_corrupt)

    def __getitem__(self, key: Any) -> Any:
        """`ds[5]` a sample as dict; `ds[5:10]`, `ds[[9, 2]]`, a mask: a batch; `ds["image"]` a column; `ds["volume"][7, 0:64]`."""
        if isinstance(key, str):
            return Column(self, key)
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            which: Any = (start, max(start, stop)) if step == 1 else np.arange(start, stop, step, dtype=np.int64)
            return self._view.take(which)
        position = one_position(key)
        if position is None:
            return self._view.take(positions_of(key, len(self)))
        return self._sample(self._view.take(np.array([position], dtype=np.int64)), 0)

    def _sample(self, batch: Batch, index: int) -> Sample:
        sample = Sample((name, unwrap(values, index)) for name, values in batch.items())
        sample.forms = self._forms
        return sample

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._as_it_is()._samples()

    def _samples(self) -> Iterator[dict[str, Any]]:
        for start in range(0, len(self), 64):
            batch = self._view.take((start, start + 64))
            for index in range(min(64, len(self) - start)):
                yield self._sample(batch, index)

    def select(self, positions: npt.ArrayLike) -> View:
        """Narrow to positions of this view, in that order; doubles are allowed. Cost: 8 bytes a position, nothing read."""
        return View(self._snapshot, self._view.select(positions_of(positions, len(self))))

    def scan(self, columns: Sequence[str] | None = None, *, batch_size: int = 1024) -> Iterator[Any]:
        """Read all samples in order as pyarrow.RecordBatch of `batch_size` rows, or of fewer where those would take more than an eighth of the
        memory budget. What is appended meanwhile does not come.

        Cost: one copy; holds one batch, or where files are not mapped three groups of 8 MiB and more (at most 1/32 of the memory
        budget each), two of them read ahead. Labels and categories come as dictionary<string>, images as binary, ragged tensors
        as struct{data, shape}. The view is an Arrow C stream as well: `duckdb.from_arrow`, `polars.from_arrow`,
        `pyarrow.table(ds)` take it as it is. In a child that was forked while another thread was inside pyarrow, pyarrow's allocator
        may wait for ever: start children by spawn, or set ARROW_DEFAULT_MEMORY_POOL=system; `take` has no such limit.
        """
        from penstock import arrow

        return arrow.scan(self, columns, batch_size)

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        from penstock import arrow

        return arrow.reader(self, None, 4096).__arrow_c_stream__(requested_schema)

    def torch(self, columns: Sequence[str] | None = None) -> Any:
        """Give a map-style torch Dataset of these samples; use it with `ps.torch.collate`."""
        from penstock.torch import TorchDataset

        return TorchDataset(self, columns)

    def loader(self, **options: Any) -> Loader:
        """Make a loader of these samples: batches for training, in one order for any ranks and threads, resumable at any step.

        All options are keywords:
        `batch_size` of a rank, or `global_batch_size`. `shuffle` True (a full permutation), False, `ps.Window` or `ps.Replacement`; `seed`.
        `columns`, or `outputs` {result: column} for two results of one column; columns may name `_row_id`, `_position`, `_step`, `_valid`, `_source`.
        `transform` a list of `penstock.transforms`, then functions `fn(sample, rng)`, then `T.PerBatch`. `decode=False` gives images as stored bytes.
        `output` "numpy", "torch" or "jax". `last_batch` "short", "drop" or "pad". `rank` and `world_size`, by default as torchrun says.
        `on_corrupt` "raise", "substitute" (another sample stands in) or "mask" (that, and `_valid` is False). `nulls` {column: value or "mask"}.
        `order_block_samples`: draws that lanes and mixtures share out at a time, by default a global batch. `memory_bytes` and `threads`: budgets, by
        default those of `ps.configure`. `python_workers`: processes for your functions. `progress`: a live line.
        `pin=True` keeps the snapshot, and that of a state that is loaded, from being collected until `ds.unpin`: a record in the dataset, so it must be writable.

        Shapes: images (B, H, W, 3) uint8 where a transform makes them equal, else a list; torch (B, 3, H, W) in channels_last memory; fixed columns
        (B, …), ragged ones `Ragged`, text and bytes lists. Batches are yours: owned and writable.
        Cost: at most `memory_bytes` of batches are made ahead; resuming costs one batch.
        Raises: InvalidInputError before anything is read, where something does not fit; CorruptError names the samples.

        >>> import penstock as ps
        >>> ds = ps.create("memory://loading", {"number": "int32"})
        >>> receipt = ds.append({"number": range(5)})
        >>> [batch["number"].tolist() for batch in ds.loader(batch_size=2)]
        [[0, 1], [2, 3], [4]]
        """
        from penstock.loader import Loader

        return Loader(self, **options)

    def stats(self) -> dict[str, int]:
        """Count what this handle asked of storage so far.

        `reads`, `ranges`, `maps`, `lookups`, `lists`, `puts`, `creates`, `syncs`, `deletes` and their `…_bytes` are what the dataset
        asked; `requests`, `received_bytes`, `retries` and `hedges` what went over the network for it. Cost: nothing.

        >>> import penstock as ps
        >>> ps.create("memory://stats", {"year": "int32"}).stats()["creates"]
        1
        """
        return dict(self._snapshot.counters())

    def __reduce__(self) -> tuple[Any, ...]:
        if self.uri.startswith("memory://"):
            raise UnsupportedError(f"cannot pickle `{self.uri}`: memory:// lives in one process", code="unsupported-storage")
        positions = self._view.positions()
        return (_reopen, (self.uri, self.snapshot, self._snapshot.options(), positions))

    def __repr__(self) -> str:
        return f"<penstock.{type(self).__name__} {self.uri!r}: {len(self)} samples, {len(self.schema)} columns, snapshot {self.snapshot}>"


def _reopen(uri: str, snapshot: str, options: tuple[list[tuple[str, str]], str], positions: npt.NDArray[np.int64] | None) -> View:
    core = _core.open(uri, snapshot, *options)
    return View(core, core.view(positions))


def _names(columns: Sequence[str] | None) -> list[str] | None:
    if isinstance(columns, str):
        raise InvalidInputError(f"columns={columns!r}, expected a list of names", hint=f"write columns=[{columns!r}]")
    return None if columns is None else list(columns)


def unwrap(values: Any, index: int = 0) -> Any:
    """Give one value of a batch's column; a null is None."""
    value = values[index]
    if isinstance(values, MaskedArray):
        masked = np.ma.getmaskarray(values)[index]
        if np.all(masked) and np.size(masked):
            return None
        return values.data[index]
    return value


def window_of(key: tuple[Any, ...], shape: Sequence[int]) -> tuple[list[tuple[int, int]], tuple[Any, ...]]:
    """Find the smallest window that holds what NumPy would give for this key, and the key that picks it from the window.

    >>> window_of((3, slice(10, 2, -4)), (5, 20, 7))
    ([(3, 4), (6, 11), (0, 7)], (0, slice(4, None, -4)))
    """
    key = tuple(np.asarray(part) if isinstance(part, list) and part else part for part in key)
    named = sum(_axes_of(part) for part in key)
    window: list[tuple[int, int]] = []
    inner: list[Any] = []
    for part in key:
        axes = len(shape) - named if part is Ellipsis else _axes_of(part)
        if len(window) + axes > len(shape):
            raise OutOfRangeError(f"cannot read {key}: more indices than the {len(shape)} dimensions of the sample", rows=[])
        if axes != 1 or part is Ellipsis:  # Masks of several dimensions; None, True and False, which take up none.
            window += [(0, size) for size in shape[len(window) : len(window) + axes]]
            inner.append(part)
            continue
        size = shape[len(window)]
        low, high, within = _along(part, size)
        window.append((low, high))
        inner.append(within)
    window += [(0, size) for size in shape[len(window) :]]
    return window, tuple(inner)


def _axes_of(part: Any) -> int:
    """How many dimensions an index takes up by itself."""
    if part is None or part is Ellipsis or isinstance(part, bool | np.bool_):
        return 0
    return part.ndim if isinstance(part, np.ndarray) and part.dtype == bool else 1


def _along(part: Any, size: int) -> tuple[int, int, Any]:
    """Range of one dimension that an index needs, and the index inside that range."""
    if isinstance(part, slice):
        chosen = range(size)[part]
        if not chosen:
            return 0, 0, slice(0, 0)
        low, high = min(chosen[0], chosen[-1]), max(chosen[0], chosen[-1]) + 1
        return low, high, slice(None, None, chosen.step) if chosen.step > 0 else slice(chosen[0] - low, None, chosen.step)
    try:
        index = operator.index(part)
    except TypeError:
        chosen_ones = np.asarray(part)
        if chosen_ones.dtype == bool or chosen_ones.ndim != 1 or chosen_ones.size == 0:
            return 0, size, part  # NumPy says what is wrong with it, or that nothing is.
        if chosen_ones.dtype.kind not in "iu":
            raise InvalidInputError(
                f"cannot read {part!r}: indices are whole numbers, slices or masks, found {chosen_ones.dtype}"
            ) from None
        bad = (chosen_ones < -size) | (chosen_ones >= size)
        if bad.any():
            raise _outside(chosen_ones[bad][0], size) from None
        chosen_ones = chosen_ones.astype(np.int64)
        ones = np.where(chosen_ones < 0, chosen_ones + size, chosen_ones)
        return int(ones.min()), int(ones.max()) + 1, ones - ones.min()
    if not -size <= index < size:
        raise _outside(index, size)
    return index % size, index % size + 1, 0


def _outside(index: Any, size: int) -> OutOfRangeError:
    return OutOfRangeError(f"cannot read index {index}: the dimension has {size} elements", rows=[])


class Column:
    """One column of a view, with the indexing of the view: `ds["image"][5]`, `ds["label"][:]`, `ds["volume"][7, 0:64, 10]`."""

    def __init__(self, view: View, name: str) -> None:
        if name not in view.schema and name not in ("_row_id", "_position"):
            view._view.take((0, 0), [name])  # Raises the error that names the columns there are.
        self._view = view
        self.name = name

    def __len__(self) -> int:
        return len(self._view)

    def __getitem__(self, key: Any) -> Any:
        """Read values; a tuple is a sample's position (or several) and a slice of its tensor.

        Cost: as `take` of this column; of tiled samples the tiles that meet the smallest box around what is asked for.
        """
        view = self._view._view
        if isinstance(key, tuple):
            if len(key) < 2:
                return self[key[0] if key else slice(None)]
            kind = self._view.schema[self.name].type
            if kind in ("text", "json", "bytes"):
                raise InvalidInputError(f"cannot read a part of column `{self.name}`: values of {kind} come whole", code="invalid-argument")
            return self._parts(key[0], key[1:])
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            which: Any = (start, max(start, stop)) if step == 1 else np.arange(start, stop, step, dtype=np.int64)
            return view.take(which, [self.name])[self.name]
        position = one_position(key)
        if position is None:
            return view.take(positions_of(key, len(self)), [self.name])[self.name]
        return unwrap(view.take(np.array([position], dtype=np.int64), [self.name])[self.name])

    def _parts(self, which: Any, key: tuple[Any, ...]) -> Any:
        """Read a part of one sample, or of each of several: of tiled samples no more than the tiles that hold it."""
        position = one_position(which) if not isinstance(which, slice) else None
        if isinstance(which, slice):
            positions = np.arange(len(self), dtype=np.int64)[which]
        else:
            positions = positions_of(which if position is None else [position], len(self))
        kind = self._view.schema.get(self.name)
        shapes = self._view._view.shapes(positions, self.name) if isinstance(kind, Tensor) else None
        if shapes is None:
            values = self[positions]
            each = [unwrap(values, index) for index in range(len(values))]
            parts = [None if value is None else value[key] for value in each]
        else:
            windows = [([], ()) if shape is None else window_of(key, shape) for shape in shapes]
            there = [index for index, shape in enumerate(shapes) if shape is not None]
            read = self._view._view.windows(positions[there], self.name, [windows[index][0] for index in there])
            parts = [None] * len(shapes)
            for index, array in zip(there, read, strict=True):
                part = array[windows[index][1]]
                # A few elements must not hold on to the whole window.
                parts[index] = part.copy() if isinstance(part, np.ndarray) and 2 * part.nbytes < array.nbytes else part
        return parts if position is None else parts[0]

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self), 256):
            values = self[start : start + 256]
            yield from (unwrap(values, index) for index in range(len(values)))

    def __repr__(self) -> str:
        return f"<penstock.Column {self.name!r} of {self._view!r}>"

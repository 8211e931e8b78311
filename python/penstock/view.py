"""`View`: a whole dataset, or selected positions in it. Views only read; `dataset.py` writes."""

from __future__ import annotations

import functools
import json
import operator
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock import _core
from penstock.columns.tensor import Tensor
from penstock.errors import InvalidInputError, NotFoundError, OutOfRangeError, UnsupportedError
from penstock.loadable import Loadable
from penstock.schema import TYPES, Schema, from_json

Batch = dict[str, Any]
_INT64 = np.dtype(np.int64)
_MOST = np.iinfo(np.int64).max


def positions_of(key: Any, length: int) -> npt.NDArray[np.int64]:
    """Convert a list, tuple, range or array of whole numbers, or a mask of `length` bools, to int64 positions."""
    if type(key) is np.ndarray and key.dtype is _INT64 and key.ndim == 1:
        return key
    array = _whole_numbers(key, "position")
    if array.dtype == bool:
        if array.shape != (length,):
            raise InvalidInputError(f"the mask has shape {array.shape}, expected ({length},)")
        return np.flatnonzero(array).astype(np.int64)
    if array.dtype == np.uint64 and len(beyond := np.flatnonzero(array > _MOST)):
        place = int(beyond[0])
        raise OutOfRangeError(f"cannot take position {array[place]}: no dataset has that many samples", rows=[place])
    return np.ascontiguousarray(array, dtype=np.int64)


def row_ids_of(key: Any) -> npt.NDArray[np.int64]:
    """Convert a list, tuple, range or array of row ids to an int64 array."""
    array = _whole_numbers(key, "row id")
    if array.dtype == bool:
        raise InvalidInputError("row ids are bools, expected whole numbers", hint="pass a mask as positions")
    if array.dtype == np.uint64 and len(beyond := np.flatnonzero(array > _MOST)):
        raise NotFoundError(f"cannot find row id {array[beyond[0]]}: it does not fit int64", code="row-id-not-found")
    return np.ascontiguousarray(array, dtype=np.int64)


def _whole_numbers(key: Any, what: str) -> npt.NDArray[Any]:
    """Return a one-dimensional array of whole numbers or bools."""
    if isinstance(key, np.ma.MaskedArray):
        raise InvalidInputError(f"{what}s are a masked array", hint="leave out the masked elements first")
    try:
        array = np.asarray(key)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidInputError(f"{what}s do not form an array: {error}") from error
    if array.size == 0 and array.dtype != bool:
        return np.empty(0, np.int64)
    if array.dtype != bool and (array.dtype.kind not in "iu" or array.ndim != 1):
        raise InvalidInputError(f"{what}s are an array {array.shape} of {array.dtype}, expected whole numbers (N,)")
    return array


def one_position(key: Any) -> int | None:
    """Return the key as a single position, or None if it is not a whole number."""
    if isinstance(key, bool | np.bool_):
        raise InvalidInputError(f"cannot take {key}: expected a whole number", hint="a mask is an array with one bool per sample")
    try:
        position = operator.index(key)
    except TypeError:
        return None
    if not -(2**63) <= position < 2**63:
        raise OutOfRangeError(f"cannot take position {position}: no dataset has that many samples", rows=[0])
    return position


@functools.lru_cache(maxsize=64)
def _forms_of(columns: str) -> Mapping[str, str]:
    """Return the form that batches use for each column, given the schema's JSON."""
    return {column["name"]: TYPES[column["type"]].form_of(column) for column in json.loads(columns)}


class Sample(dict[str, Any]):
    """One sample as a dict. `forms` shows `ps.torch.collate` which columns are images, ragged, or of fixed shape ("fixed")."""

    forms: Mapping[str, str] = types.MappingProxyType({})


class View(Loadable):
    """Samples from one snapshot, in the chosen order. Picklable, and safe after fork and across threads.

    >>> import penstock as ps
    >>> ds = ps.create("memory://view", {"number": "int32"})
    >>> receipt = ds.append({"number": range(10)})
    >>> view = ds.select([9, 3, 3])
    >>> view["number"][:].tolist(), len(view), view[0]
    ([9, 3, 3], 3, {'number': np.int32(9)})
    """

    _snapshot: _core.Snapshot
    _view: _core.View
    # An extra column that is stored in its own files, as in `ps.files`.
    _files: _core.Files | None = None

    def __init__(self, snapshot: _core.Snapshot, view: _core.View) -> None:
        self._snapshot = snapshot
        self._view = view
        self._forms = _forms_of(snapshot.columns)

    @property
    def uri(self) -> str:
        """The location of the dataset."""
        return self._snapshot.uri

    @property
    def snapshot(self) -> str:
        """The id of the snapshot that this view reads, for `ps.open(snapshot=…)`."""
        return self._snapshot.id

    @property
    def schema(self) -> Schema:
        """The column types by name."""
        return from_json(self._snapshot.columns)

    @property
    def _identity(self) -> str:
        """The id by which loader states identify the dataset."""
        return self._snapshot.dataset_id

    def _as_it_is(self) -> View:
        """Return a view that stays at its snapshot."""
        return self

    def _pin(self, name: str) -> None:
        self._snapshot.pin(name)

    def _other(self, what: str, samples: int) -> str:
        """Return the error hint for a state whose `what` differs and which was taken with `samples` samples."""
        return f"open the {what} that the state was taken with"

    def _column_bytes(self, columns: Sequence[str]) -> tuple[int, int, int, int, float]:
        """Return sizes of these columns in bytes: stored, decoded, one block of each, the range from first to last block, and one sample.

        Block sizes count only columns whose samples share blocks. The size of one sample is its decoded size: the mean over the fragments
        that have the column.
        """
        return self._snapshot.column_bytes(list(columns))

    def _counts(self) -> int:
        """Return the id of the counters that `stats` reads. Views that share counters return the same id."""
        return self._snapshot.handle()

    def _kept_bytes(self, columns: Sequence[str]) -> tuple[int, int, int]:
        """Return how many bytes of unmapped data files remain in memory after these columns are read: the total, the maximum per file, and
        the limit.
        """
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
        """Read samples by position or row id, in the given order. Duplicates are allowed; negative positions count from the end.

        Shapes: for positions (N,), fixed columns are (N, …) arrays, masked where there are nulls; text, bytes, JSON and images are lists;
        ragged tensors, boxes and keypoints are `Ragged`. `columns` may also name `_row_id` and `_position`.
        Cost: one copy; a block is verified once per process. `decode=False` returns the stored bytes of media.
        Raises: OutOfRangeError (position-out-of-range), NotFoundError (row-id-not-found, column-not-found), CorruptError
        (block-checksum, media-undecodable), unless `on_corrupt="null"`.
        Source: spec/format-v1.md section 11.
        """
        if (positions is None) == (row_ids is None):
            raise InvalidInputError("cannot take: expected either positions or row_ids")
        form = "decoded" if decode else "stored"
        names = _names(columns)
        if row_ids is not None:
            found = self._view.positions_of(row_ids_of(row_ids))
            chosen = self._view.positions()
            if chosen is not None:
                outside = np.flatnonzero(~np.isin(np.asarray(found, np.int64), chosen))
                if len(outside):
                    wrong = np.asarray(row_ids).reshape(-1)[outside[0]]
                    raise NotFoundError(
                        f"cannot find row id {wrong}: its sample is not in this view",
                        code="row-id-not-found",
                        hint="take the sample from the dataset",
                    )
            return self._view.take(np.asarray(found, dtype=np.int64), names, form, on_corrupt, absolute=True)
        return self._view.take(positions_of(positions, len(self)), names, form, on_corrupt)

    def __getitem__(self, key: Any) -> Any:
        """Read a sample (`ds[5]`) or a batch (`ds[5:10]`, `ds[[9, 2]]`, a mask), or return a column (`ds["image"]`, see `Column`)."""
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
        """Select positions of this view, in the given order. Duplicates are allowed. Cost: 8 bytes per position; no reads."""
        return View(self._snapshot, self._view.select(positions_of(positions, len(self))))

    def scan(self, columns: Sequence[str] | None = None, *, batch_size: int = 1024) -> Iterator[Any]:
        """Read all samples in order as record batches of `batch_size` rows. Samples appended during the scan are not included.

        A batch has fewer rows if it would otherwise take more than an eighth of the memory budget. Labels and categories become
        dictionary<string>, images become binary, and ragged tensors become struct{data, shape}. The view is also an Arrow C stream,
        so `duckdb.from_arrow`, `polars.from_arrow` and `pyarrow.table(ds)` accept it directly.
        Cost: one copy. Holds one batch or, if files are not mapped, three groups, two of which are read ahead. A group takes 8 MiB or
        more, up to 1/32 of the memory budget. If another thread is in a pyarrow call during a fork, pyarrow's allocator may deadlock in
        the child. To avoid this, spawn children or set ARROW_DEFAULT_MEMORY_POOL=system. `take` does not have this limitation.
        """
        from penstock import arrow

        return arrow.scan(self, columns, batch_size)

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        from penstock import arrow

        return arrow.reader(self, None, 4096).__arrow_c_stream__(requested_schema)

    def vocabulary(self, column: str) -> list[str]:
        """List the words of a label or category column in code order."""
        kind = self.schema.get(column)
        names = getattr(kind, "names", None)
        return list(names) if names is not None else self._snapshot.vocabulary(column)

    def torch(self, columns: Sequence[str] | None = None) -> Any:
        """Return a map-style torch Dataset of these samples, for use with `ps.torch.collate`."""
        from penstock.torch import TorchDataset

        return TorchDataset(self, columns)

    def stats(self) -> dict[str, int]:
        """Return counts of this handle's storage operations so far.

        `reads`, `ranges`, `maps`, `lookups`, `lists`, `puts`, `creates`, `syncs`, `deletes` and their `…_bytes` count operations on
        the dataset. `requests`, `received_bytes`, `retries` and `hedges` count the resulting network traffic. Cost: no reads.

        >>> import penstock as ps
        >>> ps.create("memory://stats", {"year": "int32"}).stats()["creates"]
        1
        """
        return dict(self._snapshot.counters())

    def __reduce__(self) -> tuple[Any, ...]:
        if self.uri.startswith("memory://"):
            raise UnsupportedError(f"cannot pickle `{self.uri}`: memory:// exists in only one process", code="unsupported-storage")
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
    if columns is not None and not (isinstance(columns, Iterable) and all(isinstance(name, str) for name in columns)):
        raise InvalidInputError(f"columns={columns!r}, expected a list of names")
    return None if columns is None else list(columns)


def unwrap(values: Any, index: int = 0) -> Any:
    """Return one value from a batch column, or None for a null."""
    value = values[index]
    if isinstance(values, np.ma.MaskedArray):
        masked = np.ma.getmaskarray(values)[index]
        if np.all(masked) and np.size(masked):
            return None
        return values.data[index]
    return value


def slice_of(key: tuple[Any, ...], shape: Sequence[int]) -> tuple[list[tuple[int, int]], tuple[Any, ...]]:
    """Find the smallest slice containing the elements that NumPy would return for this key, and the key that picks them from that slice.

    >>> slice_of((3, slice(10, 2, -4)), (5, 20, 7))
    ([(3, 4), (6, 11), (0, 7)], (0, slice(4, None, -4)))
    """
    key = tuple(np.asarray(part) if isinstance(part, list) and part else part for part in key)
    named = sum(_axes_of(part) for part in key)
    box: list[tuple[int, int]] = []
    inner: list[Any] = []
    for part in key:
        axes = len(shape) - named if part is Ellipsis else _axes_of(part)
        if len(box) + axes > len(shape):
            raise OutOfRangeError(f"cannot read {key}: it has more indices than the {len(shape)} dimensions of the sample", rows=[])
        if axes != 1 or part is Ellipsis:  # Masks of several dimensions, and None, True and False, which consume no dimension.
            box += [(0, size) for size in shape[len(box) : len(box) + axes]]
            inner.append(part)
            continue
        size = shape[len(box)]
        low, high, within = _along(part, size)
        box.append((low, high))
        inner.append(within)
    box += [(0, size) for size in shape[len(box) :]]
    return box, tuple(inner)


def _axes_of(part: Any) -> int:
    """Return how many dimensions one index consumes."""
    if part is None or part is Ellipsis or isinstance(part, bool | np.bool_):
        return 0
    return part.ndim if isinstance(part, np.ndarray) and part.dtype == bool else 1


def _along(part: Any, size: int) -> tuple[int, int, Any]:
    """Return the range of one dimension that an index needs, and the index relative to that range."""
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
            return 0, size, part  # NumPy later accepts or refuses this index.
        if chosen_ones.dtype.kind not in "iu":
            raise InvalidInputError(f"cannot read {part!r}: found {chosen_ones.dtype}, expected whole numbers, slices or masks") from None
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
    """One column of a view, indexed like the view: `ds["image"][5]`, `ds["label"][:]`, `ds["volume"][7, 0:64, 10]`."""

    def __init__(self, view: View, name: str) -> None:
        if name not in view.schema and name not in ("_row_id", "_position"):
            view._view.take((0, 0), [name])  # Raises an error that lists the columns.
        self._view = view
        self.name = name

    def __len__(self) -> int:
        return len(self._view)

    def __getitem__(self, key: Any) -> Any:
        """Read values. If the key is a tuple, its first item selects one or more samples, and the rest is an index into each tensor.

        Costs the same as `take` for this column. For tiled samples, reads only the tiles that overlap the smallest contiguous slice around
        the key.
        """
        view = self._view._view
        if isinstance(key, tuple):
            if len(key) < 2:
                return self[key[0] if key else slice(None)]
            kind = self._view.schema[self.name].type
            if kind in ("text", "json", "bytes"):
                raise InvalidInputError(
                    f"cannot read a part of column `{self.name}`: {kind} values can only be read whole", code="invalid-argument"
                )
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
        """Read a part of one sample, or of each of several samples. For tiled samples, reads only the tiles that contain the part."""
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
            slices = [([], ()) if shape is None else slice_of(key, shape) for shape in shapes]
            there = [index for index, shape in enumerate(shapes) if shape is not None]
            read = self._view._view.slices(positions[there], self.name, [slices[index][0] for index in there])
            parts = [None] * len(shapes)
            for index, array in zip(there, read, strict=True):
                part = array[slices[index][1]]
                # Copy a small part so that it does not keep the whole slice in memory.
                parts[index] = part.copy() if isinstance(part, np.ndarray) and 2 * part.nbytes < array.nbytes else part
        return parts if position is None else parts[0]

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self), 256):
            values = self[start : start + 256]
            yield from (unwrap(values, index) for index in range(len(values)))

    def __repr__(self) -> str:
        return f"<penstock.Column {self.name!r} of {self._view!r}>"

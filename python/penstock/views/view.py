"""`View`: a whole dataset, or selected positions in it. Views only read; `dataset.py` writes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock import _core
from penstock.errors import InvalidInputError, NotFoundError, UnsupportedError
from penstock.schema import Schema, from_json
from penstock.values.checks import whole
from penstock.views.column import Column
from penstock.views.keys import chosen_of, names_of, positions_of, row_ids_of, span_of
from penstock.views.readable import EXTRAS, Batch, Readable


@functools.lru_cache(maxsize=64)
def _forms_of(columns: str) -> Mapping[str, str]:
    """Return the form that batches use for each column, given the schema's JSON."""
    return {name: kind.form for name, kind in from_json(columns).items()}


class View(Readable):
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
    # The columns that this view has, or None for all.
    _chosen: tuple[str, ...] | None = None

    def __init__(self, snapshot: _core.Snapshot, view: _core.View, columns: tuple[str, ...] | None = None) -> None:
        self._snapshot = snapshot
        self._view = view
        self._forms = _forms_of(snapshot.columns)
        self._chosen = columns

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
        schema = from_json(self._snapshot.columns)
        return schema if self._chosen is None else Schema({name: schema[name] for name in self._chosen})

    @property
    def _identity(self) -> str:
        """The id by which loader states identify the dataset."""
        return self._snapshot.dataset_id

    def _parts(self) -> Sequence[View]:
        """Return the views that are read one after the other."""
        return (self,)

    def _as_it_is(self) -> View:
        return self

    def _pin(self, name: str) -> None:
        self._snapshot.pin(name)

    def _other(self, what: str, samples: int) -> str:
        """Return the error hint for a state whose `what` differs and which was taken with `samples` samples."""
        return f"open the {what} that the state was saved with"

    def _column_bytes(self, columns: Sequence[str]) -> tuple[int, int, float]:
        """Return sizes of these columns in bytes: stored, one block of each, and one sample.

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
        names = self._named(columns)
        if row_ids is not None:
            found = self._view.positions_of(row_ids_of(row_ids))
            if not self._view.is_all() and (outside := self._view.first_outside(found)) is not None:
                raise NotFoundError(
                    f"cannot find row id {np.asarray(row_ids).reshape(-1)[outside]}: its sample is not in this view",
                    code="row-id-not-found",
                    hint="take the sample from the dataset",
                )
            return self._view.take(found, names, form, on_corrupt, absolute=True)
        return self._view.take(positions_of(positions, len(self)), names, form, on_corrupt)

    def _shown(self, count: int, columns: Sequence[str] | None = None, on_corrupt: str = "raise") -> Batch:
        """Read the first samples for a preview: images with the channels and bits in which they are stored."""
        return self._view.take((0, count), self._named(columns), "shown", on_corrupt)

    def _named(self, columns: Sequence[str] | None) -> list[str] | None:
        """Return the columns to read, or None for all. Refuses columns that this view does not have."""
        if self._chosen is None:
            return names_of(columns)
        return self._checked(columns, self._chosen)

    def _one(self, position: int) -> Batch:
        return self._view.take(np.array([position], dtype=np.int64), self._named(None))

    def _column(self, name: str) -> Column:
        return Column(self, name)

    def _read(self, key: Any) -> Batch:
        wanted = span_of(key, len(self)) if isinstance(key, slice) else positions_of(key, len(self))
        return self._view.take(wanted, self._named(None))

    def select(self, positions: npt.ArrayLike | slice) -> View:
        """Select positions of this view, in the given order: a list, array, range, slice or mask. Duplicates are allowed.

        Cost: no reads. Holds what it describes: nothing for a slice or range, a bit per sample for a mask, and at most 8 bytes per listed position.

        >>> import penstock as ps
        >>> ds = ps.create("memory://select", {"number": "int32"})
        >>> receipt = ds.append({"number": range(10)})
        >>> ds.select([9, 3])["number"][:].tolist(), ds.select(slice(-2, None))["number"][:].tolist()
        ([9, 3], [8, 9])
        """
        return self._narrowed(self._view.select(chosen_of(positions, len(self))))

    def _narrowed(self, view: _core.View) -> View:
        """Return other samples of the same snapshot, with the columns of this view."""
        return View(self._snapshot, view, self._chosen)

    def _from(self, origin: str) -> View:
        """Return the same view. States of its loaders say where its samples came from."""
        return self._narrowed(self._view.named(origin))

    def select_columns(self, columns: Sequence[str]) -> View:
        """Choose the columns that reads, loaders and Arrow streams of the returned view have, in this order. Cost: no reads.

        Raises: NotFoundError (column-not-found).

        >>> import penstock as ps
        >>> ds = ps.create("memory://select-columns", {"year": "int32", "caption": ps.Text()})
        >>> receipt = ds.append({"year": [1999], "caption": ["a cat"]})
        >>> ds.select_columns(["caption"])[0], ds[["caption", "year"]].columns
        ({'caption': 'a cat'}, ['caption', 'year'])
        """
        names = names_of(columns) or []
        if not names:
            raise InvalidInputError("cannot choose columns: the list is empty", hint=f"columns: {', '.join(self.schema)}")
        view = self._as_it_is()
        view._view.take((0, 0), view._named(names))  # Raises an error if a column is missing.
        if extra := [name for name in names if name in EXTRAS]:
            raise InvalidInputError(f"cannot choose `{extra[0]}`: it is not a column", hint=f'request it in reads: columns=["{extra[0]}"]')
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InvalidInputError(f"cannot choose column `{twice}` twice", hint="loaders can return a column twice: outputs=")
        return View(self._snapshot, self._view, tuple(names))

    def head(self, count: int = 5) -> View:
        """Select the first samples. Notebooks show them as a table.

        >>> import penstock as ps
        >>> ds = ps.create("memory://head", {"number": "int32"})
        >>> receipt = ds.append({"number": range(10)})
        >>> ds.head(2)["number"][:].tolist()
        [0, 1]
        """
        return self.select(slice(0, whole(count, "count", 0)))

    def sample(self, count: int, seed: int = 0) -> View:
        """Select `count` different samples at random. Which ones depends only on the seed and their row ids.

        >>> import penstock as ps
        >>> ds = ps.create("memory://sample", {"number": "int32"})
        >>> receipt = ds.append({"number": range(100)})
        >>> ds.sample(3, seed=1)["number"][:].tolist() == ds.select(range(100)).sample(3, seed=1)["number"][:].tolist()
        True
        """
        from penstock.views import choose

        return choose.sample(self, count, seed)

    def split(self, fractions: Mapping[str, float], *, seed: int = 0, by: str | None = None, group: str | None = None) -> dict[str, View]:
        """Split the samples at random into parts with these fractions, which add up to 1. Returns a dict of views, each in this view's order.

        The part of a sample depends only on its row id, the seed and the fractions. It stays the same when samples are appended or deleted,
        so a test sample never becomes a training sample. Sizes are therefore within a few samples of the fractions.
        `group` is a column: all samples with the same value are in the same part. Groups are dealt in the order of their first row ids, each
        to a part that lacks samples. So no part is empty, and sizes differ from the fractions by about one group. Samples without a value are
        groups of their own. New groups never move older ones. If samples are added to older groups, or deleted, groups that
        appeared later can move. `by` is a column, such as a label: each of its values is split with sizes that differ by less than one sample
        from the fractions. New samples can then move a few others to another part. To prevent this, store the parts in a column.

        Cost: of a whole dataset without `by` and `group`, reads the manifest and holds 4 bytes per thousand samples. Otherwise, reads the row ids
        and these two columns, and holds a bit per sample and part; 6 s per million groups. Source: Owen, "Randomly permuted (t,m,s)-nets" (1995).
        Raises: InvalidInputError (also for fewer groups than parts), NotFoundError (column-not-found). Warns with numbers if a part is empty,
        or differs from its fraction by more than a tenth of all samples.

        >>> import penstock as ps
        >>> ds = ps.create("memory://split", {"label": ps.Label(["cat", "dog"])})
        >>> receipt = ds.append({"label": ["cat", "dog"] * 50})
        >>> {name: len(part) for name, part in ds.split({"train": 0.8, "test": 0.2}).items()}
        {'train': 80, 'test': 20}
        >>> sum(ds.split({"train": 0.8, "test": 0.2}, by="label")["test"]["label"][:])
        np.int64(10)
        """
        from penstock.views import choose

        return {name: part for name, [part] in choose.split([self], fractions, seed, (by, group)).items()}

    def filter(
        self,
        function: Callable[[dict[str, Any]], Any] | str,
        *,
        columns: Sequence[str] | None = None,
        progress: Callable[[int, int], None] | bool = False,
    ) -> View:
        """Select the samples for which an SQL condition is true, or for which `function(sample)` returns true.

        DuckDB evaluates the condition, as for `tx.delete(where=…)`. It may also name `_row_id` and `_position`, the position in the dataset. Only the columns that it names are
        read. A null is not true.

        The function gets a dict of `columns`: name only those that it needs, because all of them are read. They may also be `_row_id` and
        `_position`. `progress=True` shows a
        progress bar; a function is called as `progress(done, total)` after each batch.

        >>> import penstock as ps
        >>> ds = ps.create("memory://filter", {"number": "int32"})
        >>> receipt = ds.append({"number": range(10)})
        >>> ds.filter(lambda sample: sample["number"] % 5 == 0, columns=["number"])["number"][:].tolist()
        [0, 5]
        >>> ds.filter("number % 5 = 0 AND _position > 0")["number"][:].tolist()
        [5]
        """
        from penstock.views import choose

        view = self._as_it_is()
        found = view.select(choose.filtered(view, function, columns, progress))
        what = function if isinstance(function, str) else getattr(function, "__qualname__", type(function).__name__)
        return found._from(f"filter({what!r}) of {view._view.origin()}")

    def vocabulary(self, column: str) -> list[str]:
        """List the words of a label or category column in code order."""
        self._named([column])
        kind = self.schema.get(column)
        names = getattr(kind, "names", None)
        return list(names) if names is not None else self._snapshot.vocabulary(column)

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
        description = None if self._view.is_all() else self._view.description(True)
        return (_reopen, (self.uri, self.snapshot, self._snapshot.options(), description, self._chosen))

    def __repr__(self) -> str:
        return f"<penstock.{type(self).__name__} {self.uri!r}: {len(self)} samples, {len(self.schema)} columns, snapshot {self.snapshot}>"


def _reopen(
    uri: str,
    snapshot: str,
    options: tuple[list[tuple[str, str]], str],
    description: bytes | None,
    columns: tuple[str, ...] | None,
) -> View:
    core = _core.open(uri, snapshot, *options)
    return View(core, core.view(description), columns)

"""`ps.concat`: several views as one. Labels and categories are matched by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Never

import numpy as np
import numpy.typing as npt

from penstock.columns.column_type import ColumnType
from penstock.errors import InvalidInputError, OutOfRangeError
from penstock.ragged import Ragged
from penstock.schema import Schema
from penstock.values.checks import whole
from penstock.views import choose
from penstock.views.column import JoinedColumn
from penstock.views.keys import chosen_of, positions_of
from penstock.views.readable import Batch, Readable
from penstock.views.view import View


def union_of(vocabularies: Sequence[Sequence[str]]) -> tuple[list[str], list[list[int]]]:
    """Return the words of all vocabularies, and for each vocabulary the places of its words there.

    >>> union_of([["cat", "dog"], ["emu", "cat"]])
    (['cat', 'dog', 'emu'], [[0, 1], [2, 0]])
    """
    words = list(dict.fromkeys(word for vocabulary in vocabularies for word in vocabulary))
    place = {word: at for at, word in enumerate(words)}
    return words, [[place[word] for word in vocabulary] for vocabulary in vocabularies]


# Samples of several views: their rows in the result, and the values.
Shares = list[tuple[npt.NDArray[np.int64], Batch]]
# At most this many views are made by `select`.
_RUNS = 4096


class Concat(Readable):
    """Views that `ps.concat` joined. Reads like a view, and its loaders shuffle the samples of all of them together.

    `select`, `split`, `filter` and `head` choose samples. `_row_id` is the one in each sample's own dataset, and `_position` the place
    among all samples, except in a loader, which has `_source` beside it.
    """

    def __init__(self, parts: Sequence[View]) -> None:
        self.parts = tuple(parts)
        self._ends = np.cumsum([len(part) for part in self.parts])
        self._begins = np.concatenate([[0], self._ends[:-1]])
        self._forms = self.parts[0]._forms
        self._words: dict[str, tuple[list[str], list[list[int]]]] = {}

    @property
    def schema(self) -> Schema:
        """The column types by name: those of the first view, with the labels of all."""
        made = Schema(self.parts[0].schema)
        for name, kind in made.items():
            if kind.classes is not None:
                made[name] = kind.with_classes(self.vocabulary(name))
        return made

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _as_it_is(self) -> Concat:
        return self

    def _parts(self) -> Sequence[View]:
        return self.parts

    def _named(self, columns: Sequence[str] | None) -> list[str]:
        return self._checked(columns, list(self.parts[0].schema))

    def vocabulary(self, column: str) -> list[str]:
        """List the words of a label or category column of all views in code order: those of the first view, then others."""
        return list(self._union(column)[0])

    def _union(self, column: str) -> tuple[list[str], list[list[int]]]:
        if column not in self._words:
            self._words[column] = union_of([part.vocabulary(column) for part in self.parts])
        return self._words[column]

    def take(
        self,
        positions: npt.ArrayLike | slice,
        *,
        columns: Sequence[str] | None = None,
        decode: bool = True,
        on_corrupt: str = "raise",
    ) -> Batch:
        """Read samples by position, in the given order, as `View.take` does. Positions count through all views.

        Cost: as for a `take` of each view that has some of them, and a copy of the values if several have.
        """
        names = self._named(columns)
        places, which = self._found(positions_of(positions, len(self)), "take")
        used = np.unique(which).tolist() or [0]
        shares: Shares = []
        for part in used:
            rows = np.flatnonzero(which == part)
            batch = self.parts[part].take(places[rows] - self._begins[part], columns=names, decode=decode, on_corrupt=on_corrupt)
            shares.append((rows, self._alike(batch, part)))
        batch = shares[0][1] if len(shares) == 1 else self._together(shares, len(places))
        if "_position" in batch:
            batch["_position"] = places
        return batch

    def _found(self, wanted: npt.NDArray[Any], doing: str) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """Return positions without negative ones, and the view that each is in. Refuses those of no sample."""
        places = np.where(wanted < 0, wanted + len(self), wanted)
        if len(bad := np.flatnonzero((places < 0) | (places >= len(self)))):
            row = int(bad[0])
            raise OutOfRangeError(f"cannot {doing} position {wanted[row]}: there are {len(self)} samples", rows=[row])
        return places, np.searchsorted(self._ends, places, side="right")

    def _shown(self, count: int, columns: Sequence[str] | None = None, on_corrupt: str = "raise") -> Batch:
        """Read the first samples for a preview; see `View._shown`."""
        left = count
        shares: Shares = []
        for part, view in enumerate(self.parts):
            own = min(left, len(view))
            if own or not part:
                rows = np.arange(count - left, count - left + own)
                shares.append((rows, self._alike(view._shown(own, self._named(columns), on_corrupt), part)))
            left -= own
        return self._together(shares, count)

    def _together(self, shares: Shares, count: int) -> Batch:
        """Put the samples of several views at their rows."""
        return {name: _joined([(rows, own[name]) for rows, own in shares], count) for name in shares[0][1]}

    def _alike(self, batch: Batch, part: int) -> Batch:
        return {name: self._matched(name, values, part) for name, values in batch.items()}

    def _matched(self, name: str, values: Any, part: int) -> Any:
        """Convert the codes of one view to those of all views, and its boxes to the format of the first view."""
        kind, own = self.parts[0].schema.get(name), self.parts[part].schema.get(name)
        if kind is None or not kind.is_coded:
            return values if kind is None else kind.of_batch(values, own)
        codes = np.array([*self._union(name)[1][part], 0], np.int64)
        if isinstance(values, Ragged):
            return Ragged(codes[values.values], values.offsets, values.shapes, values.nulls, values.form)
        made = codes[np.ma.filled(values, -1)]
        return np.ma.MaskedArray(made, np.ma.getmaskarray(values)) if isinstance(values, np.ma.MaskedArray) else made

    def _column(self, name: str) -> JoinedColumn:
        return JoinedColumn(self, name)

    def _read(self, key: Any) -> Batch:
        return self.take(key)

    def select_columns(self, columns: Sequence[str]) -> Concat:
        """Choose the columns that reads, loaders and Arrow streams have; see `View.select_columns`."""
        return Concat([part.select_columns(columns) for part in self.parts])

    def head(self, count: int = 5) -> Concat:
        """Select the first samples."""
        left, parts = whole(count, "count", 0), []
        for part in self.parts:
            parts.append(part.head(min(left, len(part))))
            left -= len(parts[-1])
        return Concat(parts)

    def filter(
        self,
        function: Callable[[dict[str, Any]], Any] | str,
        *,
        columns: Sequence[str] | None = None,
        progress: Callable[[int, int], None] | bool = False,
    ) -> Concat:
        """Select the samples for which an SQL condition is true, or for which `function(sample)` returns true; see `View.filter`. Codes of words are those of all views."""
        return self.select(choose.filtered(self, function, columns, progress))

    def select(self, positions: npt.ArrayLike | slice | range) -> Concat:
        """Select samples by position, in the given order; see `View.select`.

        Cost: a view for each run of positions in one view. Raises: InvalidInputError for more than 4,096 of them, because the order is random.
        """
        wanted = chosen_of(positions, len(self))
        if isinstance(wanted, tuple):
            chosen = range(wanted[0], wanted[0] + wanted[1] * wanted[2], wanted[1])
            if not chosen or 0 <= min(chosen[0], chosen[-1]) <= max(chosen[0], chosen[-1]) < len(self):
                return self._joined(self._ranges(chosen))
            wanted = positions_of(positions, len(self))
        if wanted.dtype == bool:
            return self._joined([part.select(own) for part, own in zip(self.parts, np.split(wanted, self._ends[:-1]), strict=True)])
        places, which = self._found(wanted, "select")
        cuts = np.flatnonzero(np.diff(which)) + 1
        if len(cuts) >= _RUNS:
            raise InvalidInputError(
                "cannot select samples of joined views in random order", hint="sort the positions; a loader shuffles: shuffle=True"
            )
        runs = np.split(places, cuts) if len(places) else []
        found = [int(which[begin]) for begin in [0, *cuts]] if len(places) else []
        return self._joined(self.parts[part].select(run - self._begins[part]) for part, run in zip(found, runs, strict=True))

    def _ranges(self, chosen: range) -> Iterator[View]:
        """Select a range, view by view."""
        for part in range(len(self.parts))[:: 1 if chosen.step > 0 else -1]:
            low, high = int(self._begins[part]), int(self._ends[part]) - 1
            ends = (low, high + 1) if chosen.step > 0 else (high, low - 1)
            begin, end = (min(max(0, -((chosen.start - bound) // chosen.step)), len(chosen)) for bound in ends)
            if begin < end:
                own = chosen[begin:end]
                yield self.parts[part].select(range(own.start - low, own.stop - low, own.step))

    def _joined(self, parts: Iterable[View]) -> Concat:
        # Empty views of all datasets keep the codes of words.
        datasets = {id(part._snapshot): part.head(0) for part in reversed(self.parts)}
        return Concat([*reversed(datasets.values()), *parts])

    def split(self, fractions: Mapping[str, float], *, seed: int = 0, by: str | None = None, group: str | None = None) -> dict[str, Concat]:
        """Split each view, and join the parts of one name; see `View.split`. A group is in one part, also if several views have it."""
        return {name: Concat(parts) for name, parts in choose.split(self.parts, fractions, seed, (by, group)).items()}

    @property
    def uri(self) -> str:
        """The places of the datasets, for messages and tables."""
        return ", ".join(dict.fromkeys(part.uri for part in self.parts))

    def __repr__(self) -> str:
        return f"<penstock.Concat of {len(self.parts)} views: {len(self)} samples, {len(self.columns)} columns>"


def _joined(shares: list[tuple[npt.NDArray[np.int64], Any]], count: int) -> Any:
    """Put the values of several batches at their rows."""
    first = shares[0][1]
    if all(isinstance(values, np.ndarray) for _, values in shares):
        array = np.empty((count, *first.shape[1:]), first.dtype)
        mask = np.zeros(array.shape, bool) if any(isinstance(values, np.ma.MaskedArray) for _, values in shares) else None
        for rows, values in shares:
            array[rows] = np.ma.getdata(values)
            if mask is not None:
                mask[rows] = np.ma.getmaskarray(values)
        return array if mask is None else np.ma.MaskedArray(array, mask)
    listed: list[Any] = [None] * count
    for rows, values in shares:
        for row, value in zip(rows.tolist(), values, strict=True):
            listed[row] = value
    return Ragged.joined(listed, first.values.dtype, first.form) if isinstance(first, Ragged) else listed


def concat(views: Sequence[View | Concat], *others: Never) -> Concat:
    """Join views with the same columns, of one dataset or several. Samples of the first view come first.

    Columns have the same names and types, apart from codecs, tiles and formats of boxes. Labels and categories are matched by name: the codes
    in reads and loaders are places in `vocabulary(column)` of the result. Boxes have the format of the first view. Cost: no reads, until
    words are needed.

    >>> import penstock as ps
    >>> one = ps.create("memory://concat-one", {"label": ps.Label(["cat", "dog"]), "n": "int32"})
    >>> two = ps.create("memory://concat-two", {"n": "int32", "label": ps.Label(["emu", "dog"])})
    >>> receipts = one.append({"label": ["dog"], "n": [1]}), two.append({"label": ["dog", "emu"], "n": [2, 3]})
    >>> both = ps.concat([one, two])
    >>> both["label"][:].tolist(), both.vocabulary("label"), both[2]
    ([1, 1, 2], ['cat', 'dog', 'emu'], {'label': np.int64(2), 'n': np.int32(3)})
    >>> sorted(next(iter(both.loader(batch_size=3, shuffle=True)))["n"].tolist())
    [1, 2, 3]
    """
    if others or not isinstance(views, list | tuple) or not views or not all(isinstance(view, View | Concat) for view in views):
        raise InvalidInputError(f"cannot join {views!r}: expected a list of views", hint="write ps.concat([one, other])")
    given = [part._as_it_is() for view in views for part in (view.parts if isinstance(view, Concat) else [view])]
    names = list(given[0].schema)
    parts = [part if list(part.schema) == names else _ordered(part, names) for part in given]
    for part in parts[1:]:
        for name, kind in parts[0].schema.items():
            one, other = (_essence(spec) for spec in (kind, part.schema[name]))
            if one != other:
                found = _described(kind, part.schema[name]), _described(part.schema[name], kind)
                raise InvalidInputError(
                    f"cannot join views: column `{name}` is {found[0]} in `{parts[0].uri}` and {found[1]} in `{part.uri}`",
                    code="invalid-schema",
                    hint="choose other columns with ds.select_columns, or widen one with tx.widen_column",
                )
    return Concat(parts)


def _ordered(view: View, names: list[str]) -> View:
    """Return a view with the columns in this order."""
    if lacking := set(names) ^ set(view.schema):
        raise InvalidInputError(
            f"cannot join views: only one of them has column `{min(lacking)}`",
            code="invalid-schema",
            hint="choose the columns that all views have: ds.select_columns([…])",
        )
    return view.select_columns(names)


def _essence(kind: Any) -> dict[str, Any]:
    """Return what must be the same in all views. Words are matched by name, and boxes are converted."""
    # What labels belong to matters only when samples are added.
    own = {"boxes": ["format"], "labels": ["of"]}.get(kind.type, [])
    left_out = ("codec", "tile", "names", *own)
    return {name: value for name, value in {**vars(kind), "type": kind.type}.items() if name not in left_out}


def _described(kind: ColumnType, other: ColumnType) -> str:
    """Describe a type, with its parameters if the description of another one is the same."""
    text, theirs = kind.describe(), _essence(other)
    different = [f"{name}={value!r}" for name, value in _essence(kind).items() if theirs.get(name, value) != value]
    return text if text != other.describe() else f"{text} ({', '.join(different)})"

"""Chooses samples of a view: `sample`, `split` and `filter`. The core makes random choices, which are functions of the seed and the row ids."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import hashlib
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock import _core
from penstock.errors import InvalidInputError
from penstock.values.checks import whole, whole_seed
from penstock.views.keys import names_of

if TYPE_CHECKING:
    from penstock.views.concat import Concat
    from penstock.views.view import View

# Samples whose values are looked at together.
_CODED = 1 << 20
# A part is far from its wanted size if it differs by more than this share of all samples.
_FAR = 0.1


def sample(view: View, count: int, seed: int) -> View:
    """Select the samples with the smallest hashes."""
    view, count, seed = view._as_it_is(), whole(count, "count", 0), whole_seed(seed)
    if count > len(view):
        raise InvalidInputError(f"cannot choose {count} samples: there are {len(view)}", hint="choose fewer, or write select(range(…))")
    return view._narrowed(view._view.sample(seed, count))


def split(
    views: Sequence[View], fractions: Mapping[str, float], seed: int, columns: tuple[str | None, str | None]
) -> dict[str, list[View]]:
    """Split views; `columns` are `by` and `group`. Returns for each name a part of each view.

    A group is in one part, also if several views have samples of it.
    """
    shares, seed, views = _checked(fractions), whole_seed(seed), [view._as_it_is() for view in views]
    by, group = columns
    bounds = np.cumsum(shares)[:-1].tolist()
    classes = [None if by is None else _codes(view, by, "split by") for view in views]
    if group is not None:
        parts = _dealt(
            views, [_codes(view, group, "group by") for view in views], classes, (group, dict(zip(fractions, shares, strict=True))), seed
        )
    else:
        parts = [
            view._view.split(seed, bounds) if own is None else view._view.split_classes(own.codes, own.classes(), seed, bounds)
            for view, own in zip(views, classes, strict=True)
        ]
    found = {name: [view._narrowed(own[part]) for view, own in zip(views, parts, strict=True)] for part, name in enumerate(fractions)}
    how = "".join(f", {what}={column!r}" for what, column in (("by", by), ("group", group)) if column is not None)
    origins = [view._view.origin() for view in views]
    # A part of a split of a whole dataset says so itself.
    if how or any(origin != "all" for origin in origins):
        text = f"split({dict(fractions)!r}, seed={seed}{how}) of"
        for name, own in found.items():
            own[:] = [part._from(f"part {name!r} of {text} {origin}") for part, origin in zip(own, origins, strict=True)]
    counts = [sum(map(len, own)) for own in found.values()]
    _warn_of_sizes(counts, dict(zip(fractions, shares, strict=True)), group)
    return found


def _warn_of_sizes(counts: Sequence[int], shares: Mapping[str, float], group: str | None) -> None:
    """Warn of parts that are empty, or whose size is far from the wanted one."""
    total = sum(counts)
    far = [
        f"`{name}` has {count} samples instead of {share * total:.4g}"
        for (name, share), count in zip(shares.items(), counts, strict=True)
        if share > 0 and total and (count == 0 or abs(count - share * total) > max(1, _FAR * total))
    ]
    if far:
        why = "there are few samples" if group is None else f"the groups of `{group}` are few or unequal"
        text = f"of the {total} samples in this split, {'; '.join(far)}: {why}. Choose other fractions, or store the parts in a column"
        warnings.warn(text, stacklevel=4)


def _checked(fractions: Any) -> list[float]:
    """Return the fractions as shares of 1."""
    example = 'write {"train": 0.8, "test": 0.2}'
    if not isinstance(fractions, Mapping) or not fractions:
        raise InvalidInputError(f"cannot split by {fractions!r}: expected a dict of names to fractions", hint=example)
    for name, share in fractions.items():
        good = isinstance(share, int | float | np.number) and not isinstance(share, bool) and 0 <= share < math.inf
        if not isinstance(name, str) or not good:
            raise InvalidInputError(f"cannot split: {name!r} has the fraction {share!r}, expected a number from 0 to 1", hint=example)
    total = math.fsum(fractions.values())
    if abs(total - 1) > 1e-6:
        raise InvalidInputError(f"cannot split: the fractions add up to {total:g}, expected 1", hint=f"add a part for the rest: {example}")
    return [float(share) / total for share in fractions.values()]


@dataclasses.dataclass
class _Coded:
    """The values of a column: a code for each sample, which is 0 for a null, and a number for each code, which is equal for equal values."""

    codes: _core.Codes | npt.NDArray[np.unsignedinteger]
    # That of nulls is 0.
    numbers: npt.NDArray[np.int64]

    @staticmethod
    def of(codes: _core.Codes | npt.NDArray[np.unsignedinteger], values: Any) -> _Coded:
        """Number the values of all codes after 0, in Arrow."""
        return _Coded(codes, np.append(np.zeros(1, np.int64), _numbers(values)))

    def classes(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """Return the class of each code, and the number of each class."""
        numbers, classes = np.unique(self.numbers, return_inverse=True)
        return classes.astype(np.uint32), numbers


def _codes(view: View, column: str, doing: str) -> _Coded:
    """Return the codes of a column. Cost: reads the column; holds its different values, and of texts 1, 2 or 4 bytes per sample."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not isinstance(column, str):
        raise InvalidInputError(f"cannot {doing} {column!r}: expected the name of a column")
    view._named([column])
    kind = view.schema.get(column)
    if kind is not None and not kind.has_groups:
        raise InvalidInputError(f"cannot {doing} column `{column}`: it is {kind.describe()}", hint="use a label, category, text or scalar")
    if kind is not None and kind.has_codes:
        codes, values = view._view.codes(column)
        return _Coded.of(codes, kind.of_codes(values, view.vocabulary(column) if kind.is_coded else ()))
    held: npt.NDArray[np.unsignedinteger] = np.zeros(len(view), np.uint8)
    start, known = 0, pa.array([], pa.null() if kind is None else kind.arrow_type())
    for batch in view.scan([column], batch_size=_CODED):
        coded = batch.column(0).dictionary_encode()
        known = known.cast(coded.dictionary.type)
        new = coded.dictionary.filter(pc.is_null(pc.index_in(coded.dictionary, value_set=known)))
        known = pa.concat_arrays([known, new])
        place = np.append(0, np.asarray(pc.index_in(coded.dictionary, value_set=known)) + 1)
        held = held.astype(np.min_scalar_type(max(255, len(known))), copy=False)
        held[start : start + len(coded)] = place.astype(held.dtype)[np.asarray(coded.indices.fill_null(-1)) + 1]
        start += len(coded)
    return _Coded.of(held, known)


def _numbers(values: Any) -> npt.NDArray[np.int64]:
    """Hash Arrow values to whole numbers, equal for equal values."""
    import pyarrow as pa

    if pa.types.is_timestamp(values.type):
        values = values.cast(pa.int64())  # Python's times end in the year 9999.
    zero = pa.types.is_floating(values.type)
    texts = (str(value + 0.0 if zero else value) for value in values.to_pylist())  # 0.0 and -0.0 are equal.
    return np.frombuffer(b"".join(hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts), np.int64)


@dataclasses.dataclass
class _Groups:
    """The groups of one view or of several: their numbers, how many samples they have, and their least row ids."""

    numbers: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    first: npt.NDArray[np.int64]
    # Counts of samples by (group, class), as three arrays.
    counted: tuple[npt.NDArray[np.int64], ...]

    @staticmethod
    def of(view: View, coded: _Coded, kinds: _Coded | None, every: npt.NDArray[np.int64]) -> tuple[_Groups, npt.NDArray[np.int64]]:
        """Return a group for each code, then one for each sample without a value, and the places of these samples.

        `every` has the numbers of all classes. Cost: reads the row ids.
        """
        kind = None if kinds is None else (kinds.codes, np.searchsorted(every, kinds.numbers).astype(np.uint32), len(every))
        (sizes, first), (places, ids, kind_of_null), pairs = view._view.tally(coded.codes, len(coded.numbers), kind)
        ones, ends = np.ones(len(ids), np.int64), len(sizes) + np.arange(len(ids))
        counted = (np.append(pairs[0], ends), np.append(pairs[1], kind_of_null), np.append(pairs[2], ones))
        return _Groups(np.append(coded.numbers, ids), np.append(sizes, ones), np.append(first, ids), counted), places

    @staticmethod
    def joined(all_groups: Sequence[_Groups]) -> tuple[_Groups, npt.NDArray[np.int64]]:
        """Join groups of several views that have equal numbers. Returns also the joined group of each group, in the order of all views."""
        given = np.concatenate([own.numbers for own in all_groups])
        sizes = np.concatenate([own.sizes for own in all_groups])
        numbers = np.unique(given[sizes > 0])
        unit = np.minimum(np.searchsorted(numbers, given), max(0, len(numbers) - 1))  # Groups without samples may get any number.
        total, first = np.zeros(len(numbers), np.int64), np.full(len(numbers), np.iinfo(np.int64).max)
        if len(numbers):
            np.add.at(total, unit, sizes)
            np.minimum.at(first, unit[sizes > 0], np.concatenate([own.first for own in all_groups])[sizes > 0])
        begins = np.cumsum([0] + [len(own.numbers) for own in all_groups])[:-1]
        groups = np.concatenate([own.counted[0] + begin for own, begin in zip(all_groups, begins, strict=True)])
        kinds, times = (np.concatenate([own.counted[which] for own in all_groups]) for which in (1, 2))
        return _Groups(numbers, total, first, (unit[groups] if len(numbers) else groups, kinds, times)), unit

    def most_common(self) -> npt.NDArray[np.int64]:
        """Return for each group the class of most of its samples, and of several such classes the last."""
        groups, kinds, times = self.counted
        pairs, place = np.unique(np.stack([groups, kinds], axis=1), axis=0, return_inverse=True)
        counts = np.bincount(place.reshape(-1), times, minlength=len(pairs))
        rising = np.argsort(counts, kind="stable")
        common = np.zeros(len(self.numbers), np.int64)
        common[pairs[rising, 0]] = pairs[rising, 1]  # NumPy keeps the last assignment, which is the most common class.
        return common


def _dealt(
    views: Sequence[View], coded: Sequence[_Coded], classes: Sequence[_Coded | None], wanted: tuple[str, Mapping[str, float]], seed: int
) -> list[list[_core.View]]:
    """Return the parts of each view, which have whole groups, given the codes of groups and classes of each view.

    A sample without a value is a group of its own, whose number is its row id.
    """
    every = np.unique(np.concatenate([np.zeros(1, np.int64), *(own.numbers for own in classes if own is not None)]))
    found = [_Groups.of(view, own, kinds, every) for view, own, kinds in zip(views, coded, classes, strict=True)]
    joined, unit = _Groups.joined([own for own, _ in found])
    part_of = np.append(_parts_of(joined, wanted, seed), 0)
    parts: list[list[_core.View]] = []
    for view, own, (groups, nulls) in zip(views, coded, found, strict=True):
        mine, unit = part_of[unit[: len(groups.numbers)]], unit[len(groups.numbers) :]
        count, most = len(own.numbers), len(wanted[1])
        given = mine.astype(np.uint32)
        parts.append(view._view.split_codes(own.codes, given[:count], (nulls, given[count:]), most))
    return parts


def _parts_of(groups: _Groups, wanted: tuple[str, Mapping[str, float]], seed: int) -> npt.NDArray[np.int64]:
    """Return the part of each group: they are dealt to parts in the order in which they first appeared.

    `wanted` has the name of their column and the shares of the parts. The first groups get a part each, the
    largest the largest share. Each later group gets a part that lacks samples, or the one that lacks more than the whole group. Chances are
    such that each of many groups of one size is in a part as often as the part's share. With classes, parts that lack samples of the group's most common class come first. Groups that appear later
    therefore never move earlier ones, and shares are exact up to about one group.
    """
    column, shares = wanted
    distinct, sizes, first, common = groups.numbers, groups.sizes, groups.first, groups.most_common()
    order = np.lexsort((distinct, first))
    parts, targets = np.flatnonzero(list(shares.values())).tolist(), [share for share in shares.values() if share > 0]
    count = len(parts)
    if 0 < len(distinct) < count:
        raise InvalidInputError(
            f"cannot split by the groups of `{column}`: there are {len(distinct)} groups, expected at least {count}, one for each part",
            hint="use fewer parts, or split without `group`",
        )
    chances = _core.chances(seed, distinct)
    begin = order[:count][np.lexsort((chances[order[:count]], -sizes[order[:count]]))]
    given = dict(zip(begin.tolist(), sorted(range(count), key=lambda part: -targets[part]), strict=False))
    dealt: list[int] = []
    filled, total = [0.0] * count, 0
    of_class = {kind: ([0.0] * count, [0]) for kind in np.unique(common).tolist()}  # What the parts have of it, and how much there is.
    for one, size, kind, chance in zip(order.tolist(), sizes[order].tolist(), common[order].tolist(), chances[order].tolist(), strict=True):
        own, seen = of_class[kind]
        total, seen[0] = total + size, seen[0] + size
        part = given.get(one)
        if part is None:
            lacks = [target * total - has for target, has in zip(targets, filled, strict=True)]
            least = max(lacks) if max(lacks) >= (1 - (count - 2) / 10) * size else 0.0  # Of several parts, two may lack that much at once.
            open_to = [lack > 0 and lack >= least for lack in lacks]
            wanting = [target * seen[0] - has for target, has in zip(targets, own, strict=True)]
            for missing in (wanting, lacks):
                weights = [max(min(lack, target * size), 0.0) * may for lack, target, may in zip(missing, targets, open_to, strict=True)]
                if any(weights):
                    break
            ends = list(itertools.accumulate(weights))
            part = min(bisect.bisect(ends, chance * ends[-1]), count - 1)
        filled[part] += size
        own[part] += size
        dealt.append(parts[part])
    of_group = np.empty(len(distinct), np.int64)
    of_group[order] = dealt
    return of_group


def filtered(
    view: View | Concat,
    function: Callable[[dict[str, Any]], Any] | str,
    columns: Sequence[str] | None,
    progress: Callable[[int, int], None] | bool,
) -> npt.NDArray[np.int64] | npt.NDArray[np.bool_]:
    """Return the positions of the samples for which an SQL condition is true, or a mask of those for which a function returns true."""
    view = view._as_it_is()
    if isinstance(function, str):
        from penstock.query import predicate

        if columns is not None or progress is not False:
            raise InvalidInputError(
                "cannot filter by SQL with `columns` or `progress`", hint="leave them out: SQL reads only the columns that it names"
            )
        return predicate.positions(view, function)
    if not callable(function):
        raise InvalidInputError(
            f"cannot filter by {function!r}: expected a function of a sample, or SQL",
            hint='write "year > 1999" or lambda sample: sample["year"] > 1999',
        )
    names = view.columns if columns is None else names_of(columns)
    view.take(range(0), columns=names)  # Raises an error if a column is missing.
    media = any(kind.is_picture for name, kind in view.schema.items() if name in (names or ()))
    kept = np.zeros(len(view), bool)
    with _progress(progress, len(view)) as report:
        for start in range(0, len(view), size := 16 if media else 256):
            batch = view.take(range(start, min(start + size, len(view))), columns=names)
            for index in range(min(size, len(view) - start)):
                try:
                    kept[start + index] = bool(function(view._sample(batch, index)))
                except Exception as error:
                    error.add_note(f"in the function given to ds.filter, for the sample at position {start + index}")
                    raise
            report(min(start + size, len(view)), len(view))
    return kept


@contextlib.contextmanager
def _progress(progress: Callable[[int, int], None] | bool, total: int) -> Iterator[Callable[[int, int], None]]:
    """Return the function to report progress to."""
    if progress is not True:
        yield progress or (lambda done, total: None)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as shown:
        task = shown.add_task("filtering", total=total)
        yield lambda done, total: shown.update(task, completed=done)

"""Chooses samples of a view: `sample`, `split` and `filter`. Random choices are functions of the seed and the row ids."""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.errors import InvalidInputError
from penstock.values.checks import whole, whole_seed
from penstock.views.keys import names_of

if TYPE_CHECKING:
    from penstock.views.concat import Concat
    from penstock.views.view import View

Hashes = npt.NDArray[np.uint64]
# Purposes of hashes, so that one seed gives independent choices.
_SAMPLE, _SPLIT, _GROUP = 1, 2, 3
# Digits of row ids that are spread evenly over the parts of a split.
_DIGITS = 3
# A part is far from its wanted size if it differs by more than this share of all samples.
_FAR = 0.1
# Column types whose values can form groups.
_GROUPS = ("scalar", "text", "label", "category", "json")


def _hash(*parts: Any) -> Hashes:
    """Hash whole numbers, or arrays of them, to 64 bits. Source: SplitMix64 (Steele, Lea and Flood, 2014)."""
    state: Any = np.zeros(1, np.uint64)
    for part in parts:
        given = np.asarray(part)
        state = state + np.uint64(0x9E3779B97F4A7C15) + (given.view(np.uint64) if given.dtype == np.int64 else given.astype(np.uint64))
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    hashes: Hashes = state
    return hashes


def _unit(hashes: Hashes) -> npt.NDArray[np.float64]:
    """Convert hashes to numbers in [0, 1)."""
    return (hashes >> np.uint64(11)).astype(np.float64) / 2**53


def _spread(ids: npt.NDArray[np.int64], seed: int) -> npt.NDArray[np.float64]:
    """Hash row ids to [0, 1) such that each ten, hundred and thousand consecutive ids are spread evenly.

    A random permutation turns each digit of an id into a digit of the result. There is one for each combination of the id's higher digits
    and the digits drawn before. Source: nested uniform scrambling (Owen, 1995). There, a permutation does not depend on the higher digits, so samples
    that alternate between two classes would be split by class.

    >>> parts = _spread(np.arange(1000), seed=0)
    >>> np.histogram(parts[70:80], 10, (0, 1))[0].tolist(), np.unique(np.histogram(parts, 1000, (0, 1))[0]).tolist()
    ([1, 1, 1, 1, 1, 1, 1, 1, 1, 1], [1])
    """
    drawn = np.zeros(len(ids), np.int64)
    for level in range(_DIGITS):
        digit, higher = ids // 10**level % 10, ids // 10 ** (level + 1)
        key = _hash(_SPLIT, seed, level, higher, drawn)
        own = _hash(key, digit)
        drawn = drawn * 10 + sum((_hash(key, other) < own).astype(np.int64) for other in range(10))
    return np.asarray((drawn + _unit(_hash(_SPLIT, seed, _DIGITS, ids))) / 10**_DIGITS)


def _row_ids(view: View) -> npt.NDArray[np.int64]:
    return np.asarray(view._view.take((0, len(view)), ["_row_id"])["_row_id"], np.int64)


def sample(view: View, count: int, seed: int) -> View:
    """Select the samples with the smallest hashes."""
    view, count, seed = view._as_it_is(), whole(count, "count", 0), whole_seed(seed)
    if count > len(view):
        raise InvalidInputError(f"cannot choose {count} samples: there are {len(view)}", hint="write select(range(…)), or use fewer")
    return view.select(np.argsort(_hash(_SAMPLE, seed, _row_ids(view)), kind="stable")[:count])


def split(
    views: Sequence[View], fractions: Mapping[str, float], seed: int, columns: tuple[str | None, str | None]
) -> dict[str, list[View]]:
    """Split views; `columns` are `by` and `group`. Returns for each name a part of each view.

    A group is in one part, also if several views have samples of it.
    """
    shares, seed, views = _checked(fractions), whole_seed(seed), [view._as_it_is() for view in views]
    by, group = columns
    ids = [_row_ids(view) for view in views]
    ends = np.cumsum([len(own) for own in ids])[:-1]
    classes = None if by is None else np.concatenate([_classes(view, by) for view in views])
    if group is not None:
        units = np.concatenate([_groups(view, group, own) for view, own in zip(views, ids, strict=True)])
        parts = np.split(_dealt(units, np.concatenate(ids), classes, (group, dict(zip(fractions, shares, strict=True))), seed), ends)
    else:
        places = [_spread(own, seed) for own in ids]
        if classes is not None:
            places = [_ranked(own, each, seed) for own, each in zip(np.split(classes, ends), ids, strict=True)]
        parts = [np.searchsorted(np.cumsum(shares)[:-1], own, side="right") for own in places]
    _warn_of_sizes(np.concatenate(parts), dict(zip(fractions, shares, strict=True)), group)
    return {
        name: [view.select(np.flatnonzero(own == part)) for view, own in zip(views, parts, strict=True)]
        for part, name in enumerate(fractions)
    }


def _warn_of_sizes(parts: npt.NDArray[np.int64], shares: Mapping[str, float], group: str | None) -> None:
    """Warn of parts that are empty, or whose size is far from the wanted one."""
    counts, total = np.bincount(parts, minlength=len(shares)).tolist(), len(parts)
    far = [
        f"`{name}` has {count} samples, {share * total:.4g} were wanted"
        for (name, share), count in zip(shares.items(), counts, strict=True)
        if share > 0 and total and (count == 0 or abs(count - share * total) > max(1, _FAR * total))
    ]
    if far:
        why = "there are few samples" if group is None else f"the groups of `{group}` are few or unequal"
        text = f"of the {total} samples of this split, {'; '.join(far)}: {why}. Choose other fractions, or store the parts in a column"
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


def _codes(view: View, column: str, doing: str) -> tuple[npt.NDArray[np.int64], Any]:
    """Return a number for each sample, equal for equal values and -1 for nulls, and the values that the numbers mean, in Arrow."""
    import pyarrow as pa

    if not isinstance(column, str):
        raise InvalidInputError(f"cannot {doing} {column!r}: expected the name of a column")
    view._named([column])
    kind = view.schema.get(column)
    if kind is not None and (kind.type not in _GROUPS or "complex" in getattr(kind, "dtype", "")):
        raise InvalidInputError(f"cannot {doing} column `{column}`: it is {kind.describe()}", hint="use a label, category, text or scalar")
    reader = view.scan([column], batch_size=1 << 16)
    values = pa.chunked_array([batch.column(0) for batch in reader], None if kind is None else kind.arrow_type())
    coded = (values if pa.types.is_dictionary(values.type) else values.dictionary_encode()).combine_chunks()
    if isinstance(coded, pa.ChunkedArray):
        coded = coded.unify_dictionaries().combine_chunks().chunk(0)
    return np.asarray(coded.indices.fill_null(-1)).astype(np.int64), coded.dictionary


def _classes(view: View, column: str) -> npt.NDArray[np.int64]:
    """Return a number for each sample that depends only on its value, and 0 for a null."""
    codes, values = _codes(view, column, "split by")
    return np.append(_numbers(values), 0)[codes]


def _groups(view: View, column: str, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return a number for each sample that depends only on the value of its group. A sample without a value is a group of its own."""
    codes, values = _codes(view, column, "group by")
    numbers = _numbers(values)
    return np.where(codes < 0, ids, numbers[codes] if len(numbers) else ids)


def _numbers(values: Any) -> npt.NDArray[np.int64]:
    """Hash Arrow values to whole numbers, equal for equal values."""
    import pyarrow as pa

    if pa.types.is_timestamp(values.type):
        values = values.cast(pa.int64())  # Python's times end in the year 9999.
    zero = pa.types.is_floating(values.type)
    texts = (str(value + 0.0 if zero else value) for value in values.to_pylist())  # 0.0 and -0.0 are equal.
    return np.frombuffer(b"".join(hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts), np.int64)


def _ranked(classes: npt.NDArray[np.int64], ids: npt.NDArray[np.int64], seed: int) -> npt.NDArray[np.float64]:
    """Return for each sample its place among the samples of its class, ordered by the hashes of their row ids, from 0 to 1.

    Each class begins at a random part of a sample, so that parts of small classes are as large on average as their fractions.
    """
    kinds, own, counts = np.unique(classes, return_inverse=True, return_counts=True)
    order = np.lexsort((_hash(_GROUP, seed, ids), own))
    begins = np.cumsum(counts) - counts
    places = np.empty(len(ids))
    places[order] = (np.arange(len(ids)) - begins[own[order]] + _unit(_hash(_SPLIT, seed, kinds))[own[order]]) / counts[own[order]]
    return places


def _dealt(
    units: npt.NDArray[np.int64],
    ids: npt.NDArray[np.int64],
    classes: npt.NDArray[np.int64] | None,
    wanted: tuple[str, Mapping[str, float]],
    seed: int,
) -> npt.NDArray[np.int64]:
    """Return the part of each sample: whole groups are dealt to parts in the order in which they first appeared.

    `units` are numbers of groups, and `wanted` the name of their column and the shares of the parts. The first groups get a part each, the
    largest the largest share. Each later group gets a part that lacks samples, or the one that lacks more than the whole group. Chances are
    such that each of many groups of one size is in a part as often as the part's share. With classes, parts that lack samples of the group's most common class come first. Groups that appear later
    therefore never move earlier ones, and shares are exact up to about one group.
    """
    column, shares = wanted
    distinct, unit, sizes = np.unique(units, return_inverse=True, return_counts=True)
    first = np.full(len(distinct), np.iinfo(np.int64).max)
    np.minimum.at(first, unit, ids)
    common = np.zeros(len(distinct), np.int64) if classes is None else _most_common(unit, np.unique(classes, return_inverse=True)[1])
    order = np.lexsort((distinct, first))
    parts, targets = np.flatnonzero(list(shares.values())).tolist(), [share for share in shares.values() if share > 0]
    count = len(parts)
    if 0 < len(distinct) < count:
        raise InvalidInputError(
            f"cannot split by the groups of `{column}`: there are {len(distinct)} groups, expected at least {count}, one for each part",
            hint="use fewer parts, or split without `group`",
        )
    chances = _unit(_hash(_GROUP, seed, distinct))
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
    return np.asarray(of_group[unit])


def _most_common(unit: npt.NDArray[np.int64], classes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return for each group the class of most of its samples."""
    pairs, counts = np.unique(np.stack([unit, classes], axis=1), axis=0, return_counts=True)
    rising = np.argsort(counts, kind="stable")
    common = np.empty(int(unit.max(initial=-1)) + 1, np.int64)
    common[pairs[rising, 0]] = pairs[rising, 1]  # NumPy keeps the last assignment, which is the most common class.
    return common


def filtered(
    view: View | Concat,
    function: Callable[[dict[str, Any]], Any] | str,
    columns: Sequence[str] | None,
    progress: Callable[[int, int], None] | bool,
) -> npt.NDArray[np.int64]:
    """Return the positions of the samples for which a function returns true, or an SQL condition is true."""
    view = view._as_it_is()
    if isinstance(function, str):
        from penstock.query import predicate

        if columns is not None or progress is not False:
            raise InvalidInputError("cannot filter by SQL with `columns` or `progress`", hint="leave them out: SQL reads what it names")
        return predicate.positions(view, function)
    if not callable(function):
        raise InvalidInputError(
            f"cannot filter by {function!r}: expected a function of a sample, or SQL",
            hint='write "year > 1999" or lambda sample: sample["year"] > 1999',
        )
    names = view.columns if columns is None else names_of(columns)
    view.take(range(0), columns=names)  # Raises an error if a column is missing.
    media = any(kind.type in ("image", "mask") for name, kind in view.schema.items() if name in (names or ()))
    kept: list[int] = []
    with _progress(progress, len(view)) as report:
        for start in range(0, len(view), size := 16 if media else 256):
            batch = view.take(range(start, min(start + size, len(view))), columns=names)
            for index in range(min(size, len(view) - start)):
                try:
                    if bool(function(view._sample(batch, index))):
                        kept.append(start + index)
                except Exception as error:
                    error.add_note(f"in the function given to ds.filter, for the sample at position {start + index}")
                    raise
            report(min(start + size, len(view)), len(view))
    return np.array(kept, np.int64)


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

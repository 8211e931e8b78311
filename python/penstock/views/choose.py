"""Chooses samples of a view: `sample`, `split` and `filter`. Random choices are functions of the seed and the row ids."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.errors import InvalidInputError
from penstock.values.checks import whole, whole_seed

if TYPE_CHECKING:
    from penstock.views.concat import Concat
    from penstock.views.view import View

Hashes = npt.NDArray[np.uint64]
# Purposes of hashes, so that one seed gives independent choices.
_SAMPLE, _SPLIT, _GROUP = 1, 2, 3
# Digits of row ids that are spread evenly over the parts of a split.
_DIGITS = 3
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
    units = ids if group is None else [_groups(view, group, own) for view, own in zip(views, ids, strict=True)]
    if by is not None:
        classes = [_classes(view, by) for view in views]
        places = [_ranked(own, unit, seed) for own, unit in zip(classes, units, strict=True)]
        if group is not None:
            joint = _ranked(np.concatenate(classes), np.concatenate(units), seed)
            places = np.split(joint, np.cumsum([len(unit) for unit in units])[:-1])
    else:
        places = [_spread(own, seed) if group is None else _unit(_hash(_GROUP, seed, own)) for own in units]
    parts = [np.searchsorted(np.cumsum(shares)[:-1], own, side="right") for own in places]
    return {
        name: [view.select(np.flatnonzero(own == part)) for view, own in zip(views, parts, strict=True)]
        for part, name in enumerate(fractions)
    }


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
    if kind is not None and kind.type not in _GROUPS:
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


def _ranked(hashes: npt.NDArray[np.int64], units: npt.NDArray[np.int64], seed: int) -> npt.NDArray[np.float64]:
    """Return for each sample the place of its unit among the units of its class, ordered by their hashes, from 0 to 1.

    `hashes` are those of the samples' classes. `units` are row ids or groups. The class of a group is the one of most of its samples. Each class begins at a random part of a unit, so that parts of small classes are as large on average as their fractions.
    """
    kinds, classes = np.unique(hashes, return_inverse=True)
    distinct, unit, sizes = np.unique(units, return_inverse=True, return_counts=True)
    pairs, counts = np.unique(np.stack([unit, classes], axis=1), axis=0, return_counts=True)
    own = np.empty(len(distinct), np.int64)
    rising = np.argsort(counts, kind="stable")
    own[pairs[rising, 0]] = pairs[rising, 1]  # NumPy keeps the last assignment, which is the most common class.
    order = np.lexsort((_hash(_GROUP, seed, distinct), own))
    sizes, own = sizes[order], own[order]
    ends = np.cumsum(sizes)
    first = np.searchsorted(own, own, side="left")  # The first unit of the same class.
    begins = (ends - sizes)[first]
    totals = ends[np.searchsorted(own, own, side="right") - 1] - begins
    places = np.empty(len(distinct))
    shift = _unit(_hash(_SPLIT, seed, kinds[own]))
    places[order] = (ends - sizes * (1 - shift) - begins) / totals
    return np.asarray(places[unit])


def filtered(
    view: View | Concat,
    function: Callable[[dict[str, Any]], Any],
    columns: Sequence[str] | None,
    progress: Callable[[int, int], None] | bool,
) -> npt.NDArray[np.int64]:
    """Return the positions of the samples for which a function returns true."""
    if not callable(function):
        raise InvalidInputError(
            f"cannot filter by {function!r}: expected a function of a sample", hint='lambda sample: sample["year"] > 1999'
        )
    view = view._as_it_is()
    chosen = view if columns is None else view.select_columns(columns)
    media = any(kind.type in ("image", "mask") for kind in chosen.schema.values())
    kept: list[int] = []
    with _progress(progress, len(view)) as report:
        for start in range(0, len(view), size := 16 if media else 256):
            batch = chosen[start : start + size]
            for index in range(min(size, len(view) - start)):
                try:
                    if bool(function(chosen._sample(batch, index))):
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

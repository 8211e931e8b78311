"""Splits by group: no part is empty, sizes are as wanted up to one group, and new groups never move older ones."""

import itertools
import math
import random
import warnings

import numpy as np
import penstock as ps
import pytest
from anything import SEEDS
from penstock.views.choose import _Groups, _parts_of


def sizes_of(rng: random.Random, count: int) -> list[int]:
    draw = rng.choice([lambda: 5, lambda: rng.randint(1, 9), lambda: rng.expovariate(0.1), lambda: min(rng.paretovariate(0.8), 3000)])
    return [1 + int(draw()) for _ in range(count)]


def shares_of(rng: random.Random, count: int) -> dict[str, float]:
    raw = [rng.random() + 0.05 for _ in range(count)]
    return {str(part): one / sum(raw) for part, one in enumerate(raw)}


def dealt(sizes: list[int], shares: dict[str, float], seed: int) -> np.ndarray:
    """Return the part of each group."""
    numbers, counts = np.arange(len(sizes)), np.array(sizes)
    groups = _Groups(numbers * 7919, counts, np.cumsum(counts) - counts, (numbers, np.zeros_like(numbers), counts))
    return _parts_of(groups, ("g", shares), seed)


def best(sizes: list[int], targets: np.ndarray) -> float:
    """Return the least possible largest difference, by trying all assignments without empty parts."""
    found = np.inf
    for parts in itertools.product(range(len(targets)), repeat=len(sizes)):
        if len(set(parts)) == len(targets):
            found = min(found, np.abs(np.bincount(parts, sizes, len(targets)) - targets).max())
    return float(found)


def test_no_part_is_empty_and_shares_are_within_one_group_of_the_best():
    """10,000 random lists of sizes. Where there are few groups, all assignments are tried. Where there are more, there are two bounds for the best.
    A part that is smaller than any group has one, which the other parts lack. All counts are multiples of what divides all sizes."""
    rng = random.Random(SEEDS[0] if SEEDS else 0)
    for trial in range(10_000):
        shares = shares_of(rng, rng.choice([2, 2, 3, 4]))
        sizes = sizes_of(rng, rng.randint(len(shares), 40))
        counts = np.bincount(dealt(sizes, shares, trial), sizes, len(shares))
        targets = np.array(list(shares.values())) * sum(sizes)
        assert (counts > 0).all(), (sizes, shares, trial)
        off = np.abs(counts - targets).max()
        if off > max(sizes):
            step = math.gcd(*sizes)
            least = max(np.maximum(min(sizes) - targets, 0).sum(), np.abs(targets - step * np.round(targets / step)).max())
            least = best(sizes, targets) if len(sizes) <= 9 else least
            assert off <= least + max(sizes), (sizes, shares, trial)


def test_new_groups_never_move_older_ones():
    rng = random.Random(1)
    for trial in range(200):
        shares, sizes = shares_of(rng, rng.choice([2, 3])), sizes_of(rng, 30)
        whole = dealt(sizes, shares, trial)
        for count in range(len(shares), 30):
            assert (dealt(sizes[:count], shares, trial) == whole[:count]).all()


def test_each_group_is_as_likely_in_each_part_as_any_other():
    """Except for the first five, of which one is the first of its part."""
    parts = np.array([dealt([3] * 40, {"train": 0.8, "test": 0.2}, seed) for seed in range(500)])
    share = (parts == 1).mean(axis=0)
    assert abs(share[5:] - 0.2).max() < 5 * np.sqrt(0.16 / 500), share
    assert len(np.unique(parts, axis=0)) > 490


def speakers(name: str, count: int, each: int = 10) -> ps.Dataset:
    ds = ps.create(f"memory://groups-{name}", {"who": ps.Text(), "label": ps.Label(["a", "b"])})
    ds.append({"who": [f"s{n % count}" for n in range(count * each)], "label": [n % count % 2 for n in range(count * each)]})
    return ds


@pytest.mark.parametrize("by", [None, "label"])
@pytest.mark.parametrize("fractions", [{"train": 0.8, "test": 0.2}, {"train": 0.7, "val": 0.15, "test": 0.15}])
def test_six_speakers_are_in_all_parts(fractions, by):
    ds = speakers(f"{len(fractions)}-{by}", 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(100):
            parts = ds.split(fractions, group="who", by=by, seed=seed)
            assert all(len(part) for part in parts.values()) and sum(map(len, parts.values())) == 60
            assert abs(len(parts["train"]) - 60 * fractions["train"]) <= 10


def test_classes_of_groups_are_balanced():
    """Half of the groups have class a. In each part, the classes differ by about one group."""
    ds = speakers("classes", 60)
    for seed in range(20):
        for part in ds.split({"train": 0.7, "test": 0.3}, group="who", by="label", seed=seed).values():
            of_class = np.bincount(part["label"][:], minlength=2) / 10
            assert abs(of_class[0] - of_class[1]) <= 2, (seed, of_class)


def test_fewer_groups_than_parts_are_refused():
    with pytest.raises(ps.InvalidInputError, match="there are 2 groups, expected at least 3"):
        speakers("few", 2).split({"train": 0.6, "val": 0.2, "test": 0.2}, group="who")


def test_parts_far_from_their_share_are_reported_with_numbers():
    ds = ps.create("memory://groups-far", {"who": ps.Text()})
    ds.append({"who": ["a"] * 60 + ["b"] * 40})
    with pytest.warns(UserWarning, match=r"`train` has 60 samples instead of 95; `test` has 40 samples instead of 5: the groups of `who`"):
        ds.split({"train": 0.95, "test": 0.05}, group="who")
    with pytest.warns(UserWarning, match=r"of the 3 samples in this split, `test` has 0 samples instead of 0\.03: there are few samples"):
        ds.head(3).split({"train": 0.99, "test": 0.01})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(ds.select([]).split({"train": 0.5, "test": 0.5})["train"]) == 0
        ds.split({"train": 1.0, "test": 0.0})
        ds.split({"train": 0.8, "test": 0.2})


@pytest.mark.parametrize("by", [None, "label"])
@pytest.mark.parametrize("seed", range(4))
def test_the_order_of_a_view_does_not_move_groups(seed, by):
    """A part depends on the samples of a view, not on their order."""
    rng = np.random.default_rng(seed)
    ds = ps.create(f"memory://groups-order-{seed}-{by}", {"g": "int64", "label": "int64"})
    ds.append({"g": rng.integers(0, 40, 300), "label": rng.integers(0, 3, 300)})
    chosen = np.sort(rng.permutation(300)[:220])

    def groups(view):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parts = view.split({"train": 0.6, "val": 0.2, "test": 0.2}, group="g", by=by, seed=seed)
        return {name: set(part["g"][:].tolist()) for name, part in parts.items()}

    expected = groups(ds.select(chosen))
    assert sum(map(len, expected.values())) == len(set().union(*expected.values()))
    for order in (chosen[::-1], rng.permutation(chosen), rng.permutation(chosen)):
        assert groups(ds.select(order)) == expected

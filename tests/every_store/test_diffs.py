"""Test `ds.diff` on every store against a comparison of all values, and that it costs what differs."""

import random

import numpy as np
import penstock as ps
import pytest
from anything import SCHEMA, values
from handles import newest, spent


def cells(ds):
    """Return all values by row id and column, in a form that can be compared."""
    batch = ds.take(range(len(ds)), columns=[*ds.schema, "_row_id"], decode=False)
    found = {}
    for name, kind in ds.schema.items():
        words = ds.vocabulary(name) if isinstance(kind, ps.Category | ps.Label) else None
        for place, row in enumerate(batch["_row_id"].tolist()):
            value = batch[name][place] if isinstance(batch[name], list) else ps.views.sample.unwrap(batch[name], place)
            value = words[int(value)] if words and value is not None else value
            found.setdefault(row, {})[name] = (
                value if value is None or isinstance(value, str | bytes) else (np.shape(value), np.asarray(value).tobytes())
            )
    return found


def expected(one, other):
    both = one.keys() & other.keys()
    changed = {(row, name) for row in both for name in other[row] if one[row][name] != other[row][name]}
    return other.keys() - one.keys(), one.keys() - other.keys(), changed


def found(ds, since, until=None):
    added, deleted, changed = set(), set(), set()
    for difference in ds.diff(since, until):
        rows = difference.row_ids.tolist()
        assert rows == sorted(set(rows)) and (difference.column is None) == (difference.kind != "changed")
        if difference.kind == "changed":
            assert not changed & {(row, difference.column) for row in rows}
            changed |= {(row, difference.column) for row in rows}
        else:
            part = added if difference.kind == "added" else deleted
            assert not part & set(rows)
            part |= set(rows)
    return added, deleted, changed


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_any_two_snapshots(root, seed):
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    names = ["number", "text", "word", "label", "cloud", "tiled", "fixed", "flag", "meta"]
    ds = ps.create(root, {name: SCHEMA[name] for name in names})
    snapshots, states = [ds.snapshot], [{}]
    for _ in range(60):
        with ds.transaction() as tx:
            tx.append({name: values(numbers, name, SCHEMA[name], rng.randint(0, 3)) for name in [rng.choice(names)]})
            known = list(states[-1])
            if known and rng.random() < 0.8:
                chosen = rng.sample(known, min(len(known), rng.choice([1, 2, 30])))
                changed = rng.sample(names, 2)
                tx.update({name: values(numbers, name, SCHEMA[name], len(chosen)) for name in changed}, row_ids=chosen)
            if len(known) > 20 and rng.random() < 0.4:
                tx.delete(row_ids=rng.sample(known, 3))
        snapshots.append(ds.snapshot)
        states.append(cells(ds))
    for _ in range(15):
        one, other = sorted(rng.sample(range(len(states)), 2))
        assert found(ds, snapshots[one], snapshots[other]) == expected(states[one], states[other]), (one, other)
    one, other = len(states) - 1, rng.randrange(len(states))
    assert found(ds, snapshots[one], snapshots[other]) == expected(states[one], states[other]), "backwards"
    ds.create_tag("begin", snapshots[10])
    assert found(ds, "begin") == expected(states[10], states[-1])
    assert found(ds, ps.open(root, tag="begin")) == expected(states[10], states[-1]) and found(ds, ds) == (set(), set(), set())


def test_what_cannot_be_compared(root):
    ds = ps.create(root, {"n": "int32"})
    for which, error in (("nothing", ps.NotFoundError), ("0-7-" + "0" * 32, ps.NotFoundError), (7, ps.InvalidInputError)):
        with pytest.raises(error):
            list(ds.diff(which))
    other = ps.create(root / "other" if hasattr(root, "joinpath") else f"{root}/other", {"n": "int32"})
    with pytest.raises(ps.Error):
        list(ds.diff(other))


@pytest.mark.local
def test_a_diff_costs_what_differs(tmp_path):
    ds = ps.create(tmp_path / "set", {"n": "int64", "vector": ps.Tensor((64,), "float32")})
    for number in range(200):
        ds.append({"n": range(1000 * number, 1000 * number + 1000), "vector": np.zeros((1000, 64), np.float32)})
    before = ds.snapshot
    with ds.transaction() as tx:
        tx.update({"vector": np.ones((50, 64), np.float32), "n": range(0, 50_000, 1000)}, row_ids=range(0, 50_000, 1000))
        tx.delete(row_ids=range(7, 100_000, 1000))
        tx.append({"n": [1]})
    found_there = ps.open(tmp_path / "set", io="buffered")
    kinds = {}

    def compare():
        for difference in found_there.diff(before):
            kinds[difference.kind, difference.column] = len(difference.row_ids)

    cost = spent(found_there, compare)
    assert kinds == {("added", None): 1, ("deleted", None): 100, ("changed", "vector"): 50}, "the numbers are those of before"
    # Two tails and blocks for each of 50 fragments, of 66 KB each: not the 51 MB of the dataset.
    assert cost["range_bytes"] < 8 << 20 and len(newest(found_there, 1)) == 199_901

"""Statistics of columns by fragment: bounds are never too narrow, whatever changes, and a query touches few fragments."""

import math
import random

import numpy as np
import penstock as ps
import pytest
from anything import SEEDS
from penstock import _core
from spec_reader import Dataset

pytestmark = pytest.mark.local
SCHEMA = {
    "n": "int16",
    "u": "uint64",
    "small": "uint8",
    "f": "float32",
    "h": "float16",
    "b": "bool",
    "t": "timestamp",
    "text": ps.Text(),
    "word": ps.Category(),
}
SCHEMA |= {"label": ps.Label(["a", "b", "c"]), "blob": ps.Bytes()}
LONG = "zz" * 9


def value(rng, name):
    """Return a value, sometimes null, NaN, infinite, empty or long."""
    if rng.random() < 0.15:
        return None
    around = rng.choice([0, 1000, 20_000])
    text = rng.choice(["", f"{around + rng.randrange(99):06}", LONG, LONG + "z", "ü\U0010ffff" * 5, "a\0", "a"])
    return {
        "n": around + rng.randrange(99) - 50, "u": rng.choice([around, (1 << 64) - 1 - around]), "b": rng.random() < 0.5,
        "f": rng.choice([around + rng.random(), math.nan, math.inf, -math.inf, -0.0]), "h": rng.choice([float(around), math.nan, -1.5]),
        "small": rng.randrange(200), "t": around, "text": text, "word": text or "empty", "label": rng.choice("abc"), "blob": b"x", "new": around, "more": around,
    }[name]  # fmt: skip


def rows(rng, ds, names=None):
    count = rng.choice([1, 1, 2, 5])
    return {name: [value(rng, name.split("-")[0]) for _ in range(count)] for name in names or ds.schema}


def change(rng, ds, verb):
    """Make one commit, or several."""
    ids = ds.take(range(len(ds)), columns=["_row_id"])["_row_id"].tolist() if len(ds) else []
    if verb == "append":
        ds.append(rows(rng, ds, rng.sample(list(ds.schema), rng.randint(1, len(ds.schema)))))
    elif verb == "update" and ids:
        name = rng.choice(list(ds.schema))
        chosen = rng.sample(ids, rng.randint(1, min(4, len(ids))))
        ds.update({name: [value(rng, name.split("-")[0]) for _ in chosen]}, row_ids=chosen)
    elif verb == "delete" and ids:
        with ds.transaction() as tx:
            tx.delete(row_ids=rng.sample(ids, rng.randint(1, min(3, len(ids)))))
    elif verb == "compact":
        ds.compact()
    elif verb == "schema":
        with ds.transaction() as tx:
            choice = rng.randrange(4)
            if choice == 0 and "new" not in ds.schema:
                tx.add_column("new", "int32", fill=rng.choice([7, 900]))
            elif choice == 1:
                # Whole numbers may become floats, and unsigned ones may become signed.
                name, wider = rng.choice([("n", ["int32", "float32"]), ("small", ["int16", "uint32", "float64"]), ("h", ["float64"])])
                if ds.schema[name].dtype == SCHEMA[name]:
                    tx.widen_column(name, rng.choice(wider))
            elif choice == 2 and "more" not in ds.schema:
                tx.add_column("more", "float64")
            elif choice == 3 and "more" in ds.schema:
                tx.drop_column("more", force=True)
    elif verb == "merge":
        branch = ds.create_branch(f"b{rng.random()}")
        for _ in range(rng.randint(1, 3)):
            change(rng, branch, rng.choice(["append", "update", "delete", "compact"]))
        if rng.random() < 0.5:
            ds.append(rows(rng, ds))
        ds.merge(branch, on_conflict="theirs")
    elif verb == "reset" and len(ds.log()) > 3:
        ds.reset(rng.choice(ds.log()[1:4]).snapshot)


def stored(ds, name):
    """Return the values of a column as bounds compare them: labels as places, texts as bytes. None for nulls."""
    batch = ds.take(range(len(ds)), columns=[name])[name]
    if isinstance(ds.schema[name], ps.Category | ps.Text):
        words = ds.vocabulary(name) if isinstance(ds.schema[name], ps.Category) else None
        masked = np.ma.getmaskarray(batch) if words is not None else [one is None for one in batch]
        texts = [None if null else (words[int(one)] if words is not None else one) for one, null in zip(batch, masked, strict=True)]
        return [None if text is None else text.encode() for text in texts]
    data, mask = np.ma.getdata(batch), np.ma.getmaskarray(batch)
    data = data.astype("i8") if data.dtype.kind in "Mm" else data
    return [None if null else one for one, null in zip(data.tolist(), mask.tolist(), strict=True)]


def check(ds):
    """Compare the statistics of all columns with all values. Return how many fragments there are."""
    for name, kind in ds.schema.items():
        found = _core.statistics(ds._snapshot, name)
        assert [end for _, end, _ in found[:-1]] == [first for first, _, _ in found[1:]]
        assert not len(ds) or (found[0][0], found[-1][1]) == (0, len(ds))
        if isinstance(kind, ps.Bytes):
            batch = ds.take(range(len(ds)), columns=[name])[name]
            assert all(
                sum(one is None for one in batch[first:end]) <= known["nulls"] and not known.get("span") for first, end, known in found
            )
            continue
        values = stored(ds, name)
        for first, end, known in found:
            own = values[first:end]
            assert known is not None, f"nothing is known of `{name}`"
            assert sum(one is None for one in own) <= known["nulls"]
            nan = [one for one in own if isinstance(one, float) and math.isnan(one)]
            assert known["has_nan"] or not nan
            numbers = [one for one in own if one is not None and not (isinstance(one, float) and math.isnan(one))]
            if not numbers:
                continue
            least, most = known["span"]
            assert least <= min(numbers) and (most is None or max(numbers) <= most), (name, known, own)
        for probe in random.Random(len(ds)).sample(
            [one for one in values if one is not None], min(2, len([v for v in values if v is not None]))
        ):
            if (isinstance(probe, float) and math.isnan(probe)) or (isinstance(probe, int) and probe >= 1 << 63):
                continue
            places = {place for place, one in enumerate(values) if one == probe}
            runs = _core.may_have(ds._snapshot, name, probe, probe)
            assert places <= {place for first, end in runs for place in range(first, end)}, (name, probe, runs)
    return len(found)


@pytest.mark.parametrize("seed", SEEDS)
def test_bounds_contain_all_values_after_any_changes(seed, tmp_path):
    rng = random.Random(seed)
    ds = ps.create(tmp_path / "set", SCHEMA)
    for _ in range(rng.randint(3, 14)):
        if rng.random() < 0.05:
            ds.append({"n": [1] * 70})
            for _ in range(65):  # Until a root is written.
                ds.append({"n": [rng.randrange(9)]})
        change(
            rng,
            ds,
            rng.choice(["append"] * 5 + ["update"] * 4 + ["delete", "delete", "compact", "schema", "schema", "merge", "merge", "reset"]),
        )
        check(ds)
    # Another process knows no more than what is stored.
    again = ps.open(tmp_path / "set", cache=None)
    check(again)
    assert not again.verify()["problems"]
    if seed % 4 == 0:
        second = Dataset(tmp_path / "set")
        [second.column(name) for name in ds.schema]


def test_a_rare_value_of_a_clustered_column_touches_few_fragments(tmp_path):
    ds = ps.create(tmp_path / "set", {"n": "int64", "text": ps.Text()})
    for first in range(0, 100_000, 500):
        ds.append({"n": range(first, first + 500), "text": [f"{n:08}" for n in range(first, first + 500)]})
    fragments = len(_core.statistics(ds._snapshot, "n"))
    assert fragments == 200
    for name, least, most in [("n", 40_000, 40_099), ("text", b"00040000", b"00040099")]:  # 0.1 % of the samples
        runs = _core.may_have(ds._snapshot, name, least, most)
        touched = sum(end - first for first, end in runs) / 500
        assert touched <= 0.02 * fragments, runs
        [chosen] = runs
        assert chosen[0] <= 40_000 and chosen[1] >= 40_100


def test_statistics_of_pages_cost_one_object_and_no_tails(tmp_path):
    ds = ps.create(tmp_path / "set", {"n": "int64", "big": ps.Bytes()})
    with ds.transaction() as tx:
        for n in range(40):
            tx.append({"n": [n], "big": [bytes(1 << 20)]})
    for n in range(70):
        ds.append({"n": [n]})
    code = ps.open(tmp_path / "set")
    before = code.stats()
    found = _core.statistics(code._snapshot, "n")
    after = code.stats()
    assert (len(found) == len(_core.statistics(ds._snapshot, "n")) and found[0][2]["span"] == (0, 39)) or len(found) > 70
    assert after["requests"] - before["requests"] <= 4 + sum(1 for _ in (tmp_path / "set" / "log" / ("0" * 16)).iterdir()) % 64

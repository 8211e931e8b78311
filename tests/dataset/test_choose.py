"""Views with some columns or samples: `select_columns`, `split`, `sample`, `filter`, `batches` and comparisons of columns."""

import datetime
import pickle

import numpy as np
import penstock as ps
import pytest
from spreading import spread


def made(name, samples=200):
    ds = ps.create(
        f"memory://choose-{name}",
        {"n": "int64", "label": ps.Label(["a", "b", "c"]), "who": ps.Category(), "t": ps.Text(), "v": ps.Tensor((2,), "float32")},
    )
    ds.append(
        {
            "n": range(samples),
            "label": ["a" if n % 2 else "b" for n in range(samples)],
            "who": [f"p{n // 7}" for n in range(samples)],
            "t": [None if n % 5 == 0 else f"t{n}" for n in range(samples)],
            "v": np.zeros((samples, 2)),
        }
    )
    return ds


def test_a_view_with_some_columns_has_only_these_everywhere(tmp_path):
    ds = made("columns")
    view = ds.select(range(10))[["t", "n"]]
    assert view.columns == ["t", "n"] == list(view.schema) and "label" not in view and len(view) == 10
    assert list(view[0]) == list(view[:2]) == list(view[[1, 2]]) == list(next(iter(view))) == list(next(view.batches(3))) == ["t", "n"]
    assert (
        list(next(iter(view.loader(batch_size=4, nulls={"t": ""}))))
        == list(next(view.scan()).schema.names)
        == list(view.torch()[0])
        == ["t", "n"]
    )
    assert (
        view.select([3])[0] == {"t": "t3", "n": 3} and view.select_columns(["n"]).columns == ["n"] and view.take([1], columns=["_row_id"])
    )
    for use in (
        lambda: view["v"],
        lambda: view.take([0], columns=["v"]),
        lambda: view.scan(["v"]),
        lambda: view.loader(batch_size=1, columns=["v"]),
        lambda: view.select_columns(["v"]),
        lambda: view.vocabulary("who"),
        lambda: view.torch(["v"]),
        lambda: view.split({"a": 1}, by="label"),
    ):
        with pytest.raises(ps.NotFoundError, match="the view has no such column") as caught:
            use()
        assert caught.value.hint == "columns: t, n"
    for wrong, text in ([], "empty"), (["n", "n"], "twice"), (["_row_id"], "is not a column"), ("n", "expected a list of names"):
        with pytest.raises(ps.InvalidInputError, match=text):
            ds.select_columns(wrong)
    stored = ps.create(tmp_path / "set", {"a": "int32", "b": "int32"})
    stored.append({"a": [1, 2], "b": [3, 4]})
    again = pickle.loads(pickle.dumps(stored[["b"]].select([1])))
    assert again[0] == {"b": 4} and again.columns == ["b"]


def test_a_view_with_some_columns_reads_no_others(tmp_path):
    ds = ps.create(tmp_path / "set", {"t": ps.Text(), "image": ps.Bytes()})
    ds.append({"t": [f"text {n}" for n in range(64)], "image": [bytes(100_000)] * 64})
    for read in (lambda view: view[:], lambda view: view.to_arrow(), lambda view: list(view.loader(batch_size=8))):
        ds = ps.open(tmp_path / "set", io="buffered")
        read(ds[["t"]])
        assert ds.stats()["range_bytes"] < 20_000


def parts_of(ds, **arguments):
    return {name: view["n"][:].tolist() for name, view in ds.split({"train": 0.7, "val": 0.1, "test": 0.2}, **arguments).items()}


def test_a_split_is_a_function_of_row_ids():
    ds = made("split", 1000)
    parts = parts_of(ds, seed=5)
    assert {name: len(part) for name, part in parts.items()} == {"train": 700, "val": 100, "test": 200}
    assert sorted(n for part in parts.values() for n in part) == list(range(1000)) and all(part == sorted(part) for part in parts.values())
    assert parts == parts_of(ds, seed=5) != parts_of(ds, seed=6)
    with ds.transaction() as tx:
        tx.append({"n": range(1000, 1500)})
        tx.delete(row_ids=range(0, 1000, 3))
    later = parts_of(ds, seed=5)
    for name, part in later.items():
        assert {n for n in part if n < 1000} == {n for n in parts[name] if n % 3}
    assert {name: len(part) for name, part in parts_of(ds.select(slice(None, None, -1))).items()} == {
        name: len(part) for name, part in parts_of(ds).items()
    }


@pytest.mark.long
def test_each_sample_is_as_likely_in_each_part_as_any_other_and_pairs_are_independent():
    """Counts over 4,000 seeds. A sample is in the part with probability 0.2; two of one ten with 2/10 × 1/9, others with about 0.04."""
    drawn = np.array([spread(np.arange(40), seed) >= 0.8 for seed in range(4000)], np.float64)
    assert abs(drawn.mean(axis=0) - 0.2).max() < 5 * np.sqrt(0.16 / 4000)
    pairs = drawn.T @ drawn / 4000
    same_ten = np.equal.outer(np.arange(40) // 10, np.arange(40) // 10)
    apart = ~np.eye(40, dtype=bool)
    assert abs(pairs[same_ten & apart] - 2 / 90).max() < 5 * np.sqrt(2 / 90 / 4000)
    assert abs(pairs[~same_ten] - 0.04).max() < 6 * np.sqrt(0.04 / 4000)
    assert abs(pairs[~same_ten].mean() - 0.04) < 0.002


def test_a_split_by_class_is_exact_in_each_class_and_one_by_group_keeps_groups_together():
    ds = made("by", 700)
    by = ds.split({"train": 0.8, "test": 0.2}, by="label")
    assert [np.bincount(view["label"][:]).tolist() for view in by.values()] == [[280, 280], [70, 70]]
    grouped = ds.split({"train": 0.5, "test": 0.5}, group="who", seed=1)
    one, other = ({*view["who"][:].tolist()} for view in grouped.values())
    assert not one & other and len(one | other) == 100 and len(one) in (49, 50, 51)
    both = ds.split({"train": 0.8, "test": 0.2}, group="who", by="label")
    one, other = ({*view["who"][:].tolist()} for view in both.values())
    assert not one & other and len(one | other) == 100 and 553 <= len(both["train"]) <= 567
    for fractions in ({"train": 0.9, "test": 0.1}, {"train": 0.8, "val": 0.1, "test": 0.1}, {"test": 0.2, "train": 0.8}):
        small = ps.create(f"memory://small-{'-'.join(map(str, fractions.values()))}", {"kind": ps.Text()})
        small.append({"kind": [f"kind {n // 3}" for n in range(3000)]})
        sizes = {name: len(part) for name, part in small.split(fractions, by="kind").items()}
        assert all(abs(sizes[name] - 3000 * share) < 5 * np.sqrt(1000 * 0.25) for name, share in fractions.items()), (
            "rounding favours no part"
        )
    zeros = ps.create("memory://zeros", {"f": "float64", "t": "timestamp"})
    zeros.append({"f": [0.0, -0.0] * 20, "t": np.array([2**62, 2**62] * 20).view("datetime64[us]")})
    zeros.append({"f": [1.0] * 40, "t": np.zeros(40, np.int64).view("datetime64[us]")})
    for column in ("f", "t"):
        assert {len(part) for part in zeros.split({"a": 0.5, "b": 0.5}, group=column).values()} == {40}
    nulls = ds.split({"train": 0.5, "test": 0.5}, group="t")
    assert 20 < sum(value is None for value in nulls["train"]["t"][:]) < 120, "a sample without a value is a group of its own"
    for wrong in (
        {"fractions": [0.8, 0.2]},
        {"fractions": {}},
        {"fractions": {"a": 0.8}},
        {"fractions": {"a": -1, "b": 2}},
        {"fractions": {"a": True}},
        {"fractions": {1: 1.0}},
        {"fractions": {"a": float("nan")}},
        {"fractions": {"a": 1}, "by": "v"},
        {"fractions": {"a": 1}, "by": 3},
        {"fractions": {"a": 1}, "seed": "x"},
    ):
        with pytest.raises(ps.InvalidInputError):
            ds.split(**wrong)
    with pytest.raises(ps.NotFoundError, match="no such column"):
        ds.split({"a": 1}, by="nothing")
    assert {name: len(view) for name, view in ds.select([]).split({"a": 0.5, "b": 0.5}, by="label").items()} == {"a": 0, "b": 0}


def test_filter_functions_get_positions_and_row_ids_as_reads_do():
    ds = ps.create("memory://filter-extras", {"n": "int64", "t": ps.Text()})
    ds.append({"n": range(10), "t": ["x"] * 10})
    with ds.transaction() as tx:
        tx.delete(row_ids=[0])
    chosen = ds.select([8, 2, 5])
    views = {"dataset": ds, "selection": chosen, "columns": chosen[["n"]], "joined": ps.concat([ds, chosen])}
    for what, view in views.items():
        for name in ("_position", "_row_id"):
            wanted = [int(value) for value in view["n"][:][view[name][:] >= 5]]
            assert view.filter(lambda sample, name=name: sample[name] >= 5, columns=[name])["n"][:].tolist() == wanted, (what, name)
        seen = []
        view.filter(lambda sample, seen=seen: seen.append(sample), columns=iter(["n", "_row_id"]))
        assert [list(sample) for sample in seen] == [["n", "_row_id"]] * len(view)
    with pytest.raises(ps.NotFoundError, match="no such column"):
        ds.head(0).filter(lambda sample: True, columns=["m"])


def test_samples_are_chosen_by_seed_and_filters_name_the_sample(capfd):
    ds = made("sample")
    chosen = ds.sample(20, seed=3)["n"][:].tolist()
    assert len({*chosen}) == 20 and chosen == ds.sample(20, seed=3)["n"][:].tolist() != ds.sample(20, seed=4)["n"][:].tolist()
    assert sorted(ds.sample(200)["n"][:].tolist()) == list(range(200)) and len(ds.sample(0)) == 0
    counts = np.bincount(np.concatenate([ds.sample(10, seed=seed)["n"][:] for seed in range(400)]), minlength=200)
    assert counts.min() > 3 and counts.max() < 45
    seen = []
    kept = ds.filter(lambda sample: sample["n"] % 50 == 0, columns=["n"], progress=lambda done, total: seen.append((done, total)))
    assert kept["n"][:].tolist() == [0, 50, 100, 150] and kept.columns == ds.columns and seen[-1] == (200, 200)
    assert len(ds.filter(lambda sample: list(sample) == ["t"], columns=["t"], progress=True)) == 200
    with pytest.raises(IndexError) as caught:
        ds.filter(lambda sample: [1, 2, 3][sample["n"]], columns=["n"])
    assert caught.value.__notes__ == ["in the function given to ds.filter, for the sample at position 3"]
    for wrong in (lambda: ds.sample(201), lambda: ds.sample(-1), lambda: ds.filter(3), lambda: ds.batches(0), lambda: ds.head(-1)):
        with pytest.raises(ps.InvalidInputError):
            wrong()
    assert [len(batch["n"]) for batch in ds.batches(90)] == [90, 90, 20] and len(ds.head()) == 5 and len(ds.head(1000)) == 200


def test_columns_compare_by_value_and_never_quietly():
    ds = ps.create(
        "memory://compare",
        {"n": "int32", "when": "timestamp", "label": ps.Label(["a", "b"]), "c": ps.Category(), "t": ps.Text(), "i": ps.Image()},
    )
    ds.append(
        {
            "n": [1, 2, None],
            "when": ["2020-01-01", "2021-01-01", None],
            "label": ["a", "b", None],
            "c": ["b", "x", None],
            "t": ["b", None, "z"],
        }
    )
    for found, expected in (
        (ds["n"] == 2, [False, True, False]),
        (ds["n"] != 2, [True, False, True]),
        (ds["n"] < 2, [True, False, False]),
        (ds["n"] >= [1, 3, 1], [True, False, False]),
        (ds["label"] == "b", [False, True, False]),
        (ds["label"] == 1, [False, True, False]),
        (ds["label"] == ["a", "a", "a"], [True, False, False]),
        (ds["label"] != "b", [True, False, True]),
        (ds["label"] == ds["c"], [False, False, False]),
        (ds["c"] == ds["t"], [True, False, False]),
        (ds["n"] == ds["n"], [True, True, False]),
        (ds["n"] != ds["n"], [False, False, False]),
        (ds["t"] < "m", [True, False, False]),
        (ds["c"] == "unknown", [False] * 3),
        (ds["when"] < "2020-06-01", [True, False, False]),
        (ds["when"] == np.datetime64("2021-01-01"), [False, True, False]),
        (ds["_row_id"] == 1, [False, True, False]),
        (ds["n"] == ds["n"][:], [True, True, False]),
        (ds["n"] != np.ma.MaskedArray([1, 2, 3], [True, False, True]), [True, False, False]),
        (np.int64(1) < ds["n"], [False, True, False]),
        (np.array([0, 5, 0]) < ds["n"], [True, False, False]),
        (ds["when"] < datetime.datetime(2020, 5, 5), [True, False, False]),
        (ds["when"] == datetime.date(2021, 1, 1), [False, True, False]),
        (ds["when"] >= [datetime.datetime(2021, 1, 1, tzinfo=datetime.UTC)] * 3, [False, True, False]),
    ):
        assert found.tolist() == expected
    assert ds[ds["n"] == 2]["t"] == [None] and len({ds["n"], ds["n"]}) == 2
    for wrong in (
        lambda: ds["n"] == "x",
        lambda: ds["n"] == None,  # noqa: E711
        lambda: ds["n"] == [1, 2],
        lambda: ds["n"] == np.ones((3, 1)),
        lambda: ds["n"] == object(),
        lambda: ds["t"] == 3,
        lambda: ds["label"] == "c",
        lambda: ds["when"] == 3,
        lambda: ds["when"] < "soon",
        lambda: ds["i"] == 3,
        lambda: 3 in ds,
    ):
        with pytest.raises(ps.InvalidInputError):
            wrong()
    shapes = {name: (ds[name].dtype, ds[name].shape) for name in ds.columns}
    assert shapes["n"] == (np.int32, (3,)) and shapes["i"] == (None, (3, None, None, 3)) and shapes["label"][0] == np.int64
    assert "n" in ds and "m" not in ds and ds._ipython_key_completions_() == ds.columns

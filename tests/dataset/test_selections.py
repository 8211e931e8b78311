"""Selections: slices, masks, splits and lists of views, compared with lists of indices in NumPy."""

import pickle

import numpy as np
import penstock as ps
import penstock.views.view
import pyarrow as pa
import pytest
import spreading
from penstock.views import keys
from penstock.views.choose import _numbers


def grown(path, random):
    """Return a dataset whose row ids are runs with gaps, by appends, deletes and layouts."""
    ds = ps.create(path, {"n": "int64", "t": ps.Text(), "label": "int32"})
    for _ in range(int(random.integers(1, 6))):
        begin = len(ds)
        count = int(random.choice([1, 7, 300, 1500, 2600]))
        ds.append({"n": np.arange(count) + 10_000 * begin, "t": [f"t{n}" for n in range(count)], "label": random.integers(0, 3, count)})
        change = random.random()
        if change < 0.3:
            with ds.transaction() as tx:
                tx.delete(row_ids=ds.take(np.unique(random.integers(0, len(ds), len(ds) // 9 + 1)), columns=["_row_id"])["_row_id"])
        elif change < 0.5:
            first = int(random.integers(0, len(ds)))
            with ds.transaction() as tx:
                tx.delete(row_ids=ds.take(range(first, min(len(ds), first + 1200)), columns=["_row_id"])["_row_id"])
        elif change < 0.7:
            ds.compact()
    return ds


def sliced(random, count):
    bounds = [None if random.random() < 0.3 else int(random.integers(-count - 2, count + 3)) for _ in range(2)]
    return slice(*bounds, None if random.random() < 0.3 else int(random.choice([-40, -7, -2, -1, 1, 2, 3, 7, 33, 900])))


def narrowed(random, view, indices, ids):
    """Narrow a view and the list of its indices in one of many ways."""
    count, way = len(indices), random.choice(["slice", "mask", "bands", "list", "sorted", "split", "head", "sample", "range"])
    if way == "slice":
        chosen = sliced(random, count)
        return view.select(chosen), indices[chosen]
    if way == "range":
        chosen = range(int(random.integers(-count, 1)), int(random.integers(0, count + 1)), int(random.integers(1, 5)))
        return view.select(chosen), indices[np.array(chosen, np.int64)]
    if way == "mask":
        mask = random.random(count) < random.choice([0.001, 0.1, 0.5, 0.95])
        return view.select(mask), indices[mask]
    if way == "bands":
        mask = np.arange(count) // int(random.integers(1, 200)) % 3 == 0
        return view.select(mask), indices[mask]
    if way == "head":
        return view.head(int(most := random.integers(0, count + 2))), indices[:most]
    if way == "split" or not count:
        shares, seed = ([0.7, 0.1, 0.2], [0.5, 0.5], [0.0, 1.0], [1 / 3, 1 / 3, 1 / 3])[random.integers(4)], int(random.integers(100))
        part = int(random.integers(len(shares)))
        views = list(view.split({str(number): share for number, share in enumerate(shares)}, seed=seed).values())
        return views[part], indices[spreading.parts(ids[indices], shares, seed) == part]
    if way == "sample":
        some, seed = int(random.integers(0, min(count, 50) + 1)), int(random.integers(100))
        return view.sample(some, seed), indices[spreading.sampled(ids[indices], some, seed)]
    places = random.integers(-count, count, int(random.integers(1, 2 * count + 2)))
    places = np.unique(places % count) if way == "sorted" else places
    return view.select(places.tolist() if random.random() < 0.5 else places), indices[places]


def check(random, view, indices, numbers, ids):
    """Compare all ways of reading a view with a list of indices."""
    assert len(view) == len(indices)
    expected, n = ids[indices], numbers[indices]
    whole = view.take(range(len(indices)), columns=["n", "_row_id", "_position"])
    assert (
        whole["_position"].tolist() == indices.tolist()
        and whole["_row_id"].tolist() == expected.tolist()
        and whole["n"].tolist() == n.tolist()
    )
    chosen = sliced(random, len(indices))
    assert view[chosen]["n"].tolist() == view["n"][chosen].tolist() == n[chosen].tolist()
    if len(indices):
        some = random.integers(-len(indices), len(indices), 20)
        assert view.take(some, columns=["n"])["n"].tolist() == n[some].tolist()
        assert view.take(row_ids=expected[some], columns=["n"])["n"].tolist() == n[some].tolist()
    outside = np.setdiff1d(ids, expected)
    if len(outside):
        with pytest.raises(ps.NotFoundError, match=f"row id {outside[0]}: its sample is not in this view"):
            view.take(row_ids=[*expected[:3], outside[0]])
    size = int(random.choice([100, 1000, 100_000]))
    assert view.scan(["n"], batch_size=size).read_all()["n"].to_pylist() == n.tolist()


def check_loaders(random, view, indices, numbers):
    n = numbers[indices]
    for shuffle in (False, True, ps.Window(bytes=4096)):
        loader = view.loader(batch_size=64, columns=["n"], shuffle=shuffle, seed=3)
        read = [batch["n"] for batch in loader]
        assert sorted(np.concatenate([*read, []]).tolist()) == sorted(n.tolist())
        if shuffle is False:
            assert np.concatenate([*read, []]).tolist() == n.tolist()
        if len(read) > 1:
            step = int(random.integers(len(read)))
            assert loader.batch_at(step)["n"].tolist() == read[step].tolist()
            again = pickle.loads(pickle.dumps(view)).loader(batch_size=64, columns=["n"], shuffle=shuffle, seed=3)
            again.load_state_dict(loader.state_dict(step=step))
            assert next(iter(again))["n"].tolist() == read[step].tolist()


def run(seed, path, steps=6):
    random = np.random.default_rng(seed)
    ds = grown(path, random)
    read = ds.take(range(len(ds)), columns=["n", "_row_id"])
    numbers, ids = np.asarray(read["n"]), np.asarray(read["_row_id"])
    view, indices = ds.select(slice(None)), np.arange(len(ds))
    if random.random() < 0.5:
        shares = [0.6, 0.3, 0.1]
        part = int(random.integers(3))
        view = list(ds.split({"a": 0.6, "b": 0.3, "c": 0.1}, seed=seed).values())[part]
        indices = np.flatnonzero(spreading.parts(ids, shares, seed) == part)
    for _ in range(steps):
        view, indices = narrowed(random, view, indices, ids)
        check(random, view, indices, numbers, ids)
        if random.random() < 0.3:
            view = pickle.loads(pickle.dumps(view))
        if len(indices) > 20_000:
            view, indices = view.head(20_000), indices[:20_000]
    check_loaders(random, view, indices, numbers)
    other = ds.select(slice(None, None, -3))
    both, places = ps.concat([view, other, view]), np.concatenate([indices, np.arange(len(ds))[::-3], indices])
    for _ in range(3):
        chosen = sliced(random, len(places))
        assert both.select(chosen)["n"][:].tolist() == numbers[places[chosen]].tolist() == both[chosen]["n"].tolist()
    mask = random.random(len(places)) < 0.3
    assert both.select(mask)["n"][:].tolist() == numbers[places[mask]].tolist()


@pytest.mark.filterwarnings("ignore:of the .* samples in this split")
@pytest.mark.parametrize("seed", range(60))
def test_random_programs_of_selections_agree_with_lists_of_indices(seed, tmp_path):
    run(seed, tmp_path / "set")


@pytest.mark.filterwarnings("ignore:of the .* samples in this split")
def test_a_planted_mistake_is_caught(tmp_path, monkeypatch):
    """A range that goes backwards begins one sample late."""

    def shifted(key, length):
        chosen = keys.chosen_of(key, length)
        return (chosen[0] + chosen[1], *chosen[1:]) if isinstance(chosen, tuple) and chosen[1] < 0 and chosen[0] > chosen[2] else chosen

    monkeypatch.setattr(penstock.views.view, "chosen_of", shifted)
    caught = 0
    for seed in range(8):
        try:
            run(seed, tmp_path / str(seed))
        except AssertionError:
            caught += 1
    assert caught > 2


def test_selections_hold_and_pickle_what_they_describe(tmp_path):
    count = 1_000_000
    ds = ps.create(tmp_path / "set", {"n": "uint8"})
    ds.append({"n": np.zeros(count, np.uint8)})
    ds.append({"n": np.zeros(7, np.uint8)})
    ds = ps.open(tmp_path / "set", io="buffered")
    whole, before = len(pickle.dumps(ds.select_columns(["n"]))), ds.stats()
    mask = np.random.default_rng(0).random(len(ds)) < 0.5
    parts = ds.split({"train": 0.8, "val": 0.1, "test": 0.1})
    described = [
        (ds.select(slice(None, None, -2)), 0, 60),
        (ds.select(range(-9, 9, 2)), 2 * 28, 120),  # Two runs: from the end, then from the beginning.
        (ds.head(7).select(slice(1, 3)), 0, 60),
        (ds.select(mask), 15_626 * 8 + 490 * 8, 125_100),
        (parts["train"], 1002 * 4 + 8 + 32, 60),
        (parts["val"], 2 * (1002 * 4 + 8) + 32, 60),
        (parts["test"].select(slice(None, None, -3)), 1002 * 4 + 8 + 32, 80),
        (ds.select(np.random.default_rng(0).permutation(1000)), 8000, 8100),
    ]
    for view, held, pickled in described:
        assert view._view.held_bytes() == held, view._view.origin()
        assert len(pickle.dumps(view)) - whole < pickled, view._view.origin()
    assert ds.stats() == before, "selections read nothing"
    for view, _, _ in described:
        loader = view.loader(batch_size=8, shuffle=True)
        state = loader.state_dict(step=0)
        assert len(str(state)) < 1000 and state["sources"][0]["origin"] == view._view.origin()


def test_a_state_of_another_selection_is_refused_with_both_origins(tmp_path):
    ds = ps.create(tmp_path / "set", {"n": "int64"})
    ds.append({"n": range(3000)})
    mask = np.random.default_rng(1).random(3000) < 0.4
    views = {
        "all": ds,
        r"1500 samples from 0 in steps of 2 of all": ds.select(slice(None, None, 2)),
        r"the split with seed 3 from 0 to 0.5": ds.split({"a": 0.5, "b": 0.5}, seed=3)["a"],
        r"the split with seed 3 from 0.5 to 1": ds.split({"a": 0.5, "b": 0.5}, seed=3)["b"],
        rf"{mask.sum()} chosen samples of all": ds.select(mask),
        r"20 samples in 2 runs of all": ds.select([*range(10), *range(100, 110)]),
        r"a list of 5 samples": ds.select([5, 3, 8, 1, 2]),
        "red flowers": ps.View(ds._snapshot, ds.head(9)._view.named("red flowers")),
    }
    for origin, view in views.items():
        loader = view.loader(batch_size=2)
        state = loader.state_dict(step=1)
        assert state["sources"][0]["origin"] == origin
        loader.load_state_dict(state)
        for another, other in views.items():
            if other is not view:
                with pytest.raises(ps.InvalidInputError) as caught:
                    other.loader(batch_size=2).load_state_dict(state)
                assert f"its selection is {origin} (" in str(caught.value) and f"this loader reads {another} (" in str(caught.value)


def test_a_state_says_where_its_samples_came_from(tmp_path):
    ds = ps.create(tmp_path / "set", {"n": "int64", "label": ps.Label(["a", "b"])})
    ds.append({"n": range(100), "label": ["a", "b"] * 50})

    def origin(view):
        [source] = view.loader(batch_size=4).state_dict()["sources"]
        return source["origin"]

    few = ds.filter("n < 50")
    by = {"seed": 3, "by": "label"}
    assert (origin(ds), origin(few)) == ("all", "filter('n < 50') of all")
    assert origin(few.select(slice(3, 9))) == "a part of filter('n < 50') of all"
    shares = {"train": 0.8, "test": 0.2}
    assert origin(ds.split(shares, **by)["test"]) == f"part 'test' of split({shares}, seed=3, by='label') of all"
    assert origin(few.split(shares, seed=3)["train"]) == f"part 'train' of split({shares}, seed=3) of filter('n < 50') of all"
    assert origin(ds.split(shares, seed=3)["train"]) == "the split with seed 3 from 0 to 0.8"
    again = pickle.loads(pickle.dumps(few))
    assert origin(again) == origin(few)


def test_a_loader_of_a_split_continues_after_later_commits(tmp_path):
    ds = ps.create(tmp_path / "set", {"n": "int64"})
    ds.append({"n": range(3000)})
    before = ds.split({"a": 0.5, "b": 0.5})["a"].loader(batch_size=7, shuffle=True)
    expected, state = [batch["n"].tolist() for batch in before], before.state_dict(step=11)
    with ds.transaction() as tx:
        tx.append({"n": range(3000, 5000)})
        tx.delete(row_ids=range(0, 3000, 7))
    later = ds.split({"a": 0.5, "b": 0.5})["a"].loader(batch_size=7, shuffle=True)
    later.load_state_dict(state)
    assert [batch["n"].tolist() for batch in later] == expected[11:]
    masked = ds.select(np.arange(len(ds)) % 3 > 0).loader(batch_size=7)
    with pytest.raises(ps.InvalidInputError, match="its selection is"):
        masked.load_state_dict(state)


def test_a_mask_means_the_same_after_appends(tmp_path):
    """The description of a mask does not depend on samples behind the last chosen one."""
    ds = ps.create(tmp_path / "set", {"n": "int64"})
    ds.append({"n": range(3000)})
    chosen = np.random.default_rng(1).random(3000) < 0.5
    state = ds.select(chosen).loader(batch_size=7).state_dict(step=3)
    ds.append({"n": range(3000, 9000)})
    loader = ds.select(np.append(chosen, np.zeros(6000, bool))).loader(batch_size=7)
    loader.load_state_dict(state)
    assert next(iter(loader))["n"].tolist() == np.flatnonzero(chosen)[21:28].tolist()


@pytest.mark.filterwarnings("ignore:of the .* samples in this split")
@pytest.mark.parametrize("seed", range(12))
def test_splits_by_class_are_those_of_the_definition(seed, tmp_path):
    random = np.random.default_rng(seed)
    ds = grown(tmp_path / "set", random)
    read = ds.take(range(len(ds)), columns=["_row_id", "label"])
    ids, label, numbers = np.asarray(read["_row_id"]), read["label"], _numbers(pa.array([0, 1, 2], pa.int32()))
    for view, places in ((ds, np.arange(len(ds))), (ds.select(slice(None, None, -3)), np.arange(len(ds))[::-3])):
        for shares in ([0.7, 0.1, 0.2], [0.0, 0.5, 0.5]):
            parts = view.split({str(part): share for part, share in enumerate(shares)}, by="label", seed=seed)
            expected = spreading.ranked(numbers[label[places]], ids[places], shares, seed)
            for part, own in enumerate(parts.values()):
                assert own.take(range(len(own)), columns=["_position"])["_position"].tolist() == places[expected == part].tolist()


@pytest.mark.parametrize("by", [None, "label", "group"])
def test_a_sample_that_a_view_has_several_times_is_in_one_part(by, tmp_path):
    ds = ps.create(tmp_path / "set", {"label": ps.Label(["a", "b"]), "group": "int32"})
    ds.append({"label": ["a", "b", "b", "a", "b"] * 8, "group": [n // 3 for n in range(40)]})
    view = ds.select([n for n in range(40) for _ in range(3)] + [7, 7])
    given = {None: {}, "label": {"by": "label"}, "group": {"group": "group"}}[by]
    for seed in range(20):
        parts = view.split({"train": 0.55, "test": 0.25, "rest": 0.2}, seed=seed, **given)
        places = [part.take(range(len(part)), columns=["_position"])["_position"].tolist() for part in parts.values()]
        assert sum(map(len, places)) == len(view) and sum(len(set(part)) for part in places) == 40, seed


def test_steps_beyond_the_integers_choose_one_sample():
    ds = ps.create("memory://steps", {"n": "int64"})
    ds.append({"n": range(10)})
    for step in (10, 1 << 62, 1 << 63, 1 << 200):
        assert ds.select(slice(None, None, step))["n"][:].tolist() == [0] and ds.select(slice(None, None, -step))["n"][:].tolist() == [9]
        assert ds[::step]["n"].tolist() == [0] and ds["n"][::-step].tolist() == [9]


def test_selections_refuse_what_is_not_there():
    ds = ps.create("memory://refused-selections", {"n": "int64"})
    ds.append({"n": range(10)})
    for wrong, row in ((range(5, 12), 5), (range(-11, 0), 0), (range(9, -13, -2), 10), ([3, 10], 1)):
        for view in (ds, ds.select(slice(None))):
            with pytest.raises(ps.OutOfRangeError) as caught:
                view.select(wrong)
            assert (caught.value.code, caught.value.rows) == ("position-out-of-range", [row])
    with pytest.raises(ps.InvalidInputError, match=r"the mask has shape \(9,\), expected \(10,\)"):
        ds.select(np.ones(9, bool))
    both = ps.concat([ds, ds])
    with pytest.raises(ps.OutOfRangeError, match="cannot select position 20: there are 20 samples"):
        both.select(range(15, 22))
    assert both.select(range(-3, 3))["n"][:].tolist() == [7, 8, 9, 0, 1, 2]
    for body in (b"", b"\x09", ds.select(slice(4, 8))._view.description(True)[:-3]):
        with pytest.raises(ps.Error):
            ds._snapshot.view(body)

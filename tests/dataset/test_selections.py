"""Selections: slices, masks, splits and lists of views, compared with lists of indices in NumPy."""

import pickle

import numpy as np
import penstock as ps
import pytest
import spreading


def grown(path, random):
    """Return a dataset whose row ids are runs with gaps, by appends, deletes and layouts."""
    ds = ps.create(path, {"n": "int64", "t": ps.Text()})
    for _ in range(int(random.integers(1, 6))):
        begin = len(ds)
        count = int(random.choice([1, 7, 300, 1500, 2600]))
        ds.append({"n": np.arange(count) + 10_000 * begin, "t": [f"t{n}" for n in range(count)]})
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


@pytest.mark.filterwarnings("ignore:of the .* samples of this split")
@pytest.mark.parametrize("seed", range(60))
def test_random_programs_of_selections_agree_with_lists_of_indices(seed, tmp_path):
    run(seed, tmp_path / "set")

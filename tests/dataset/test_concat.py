"""`ps.concat`: reads, Arrow, torch and loaders over several views, with words matched by name; and words in mixtures."""

import json
import pickle

import duckdb
import numpy as np
import penstock as ps
import pyarrow as pa
import pytest
import torch
from penstock.views.sample import unwrap


def made(name, first, count, labels, columns=None):
    kinds = {
        "n": "int64",
        "label": ps.Label(labels),
        "word": ps.Category(),
        "text": ps.Text(),
        "boxes": ps.Boxes(),
        "free": ps.Tensor((None, None), "int16"),
        "image": ps.Image(),
        "matrix": ps.Tensor((2, 2), "float32"),
    }
    ds = ps.create(f"memory://concat-{name}", {name: kinds[name] for name in columns or kinds})
    numbers = range(first, first + count)
    values = {
        "n": numbers,
        "label": [None if n % 5 == 4 else labels[n % len(labels)] for n in numbers],
        "word": [f"{name[0]}{n % 3}" if n % 2 else "both" for n in numbers],
        "text": [None if n % 7 == 0 else f"t{n}" for n in numbers],
        "boxes": [None if n % 6 == 0 else np.full((n % 3, 4), n) for n in numbers],
        "free": [np.full((n % 4, 1 + n % 2), n, np.int16) for n in numbers],
        "image": [np.full((2 + n % 3, 3, 3), n, np.uint8) for n in numbers],
        "matrix": [None if n % 9 == 8 else np.full((2, 2), n) for n in numbers],
    }
    ds.append({name: values[name] for name in ds.columns})
    return ds


@pytest.fixture(scope="module")
def parts():
    one, two, three = made("one", 0, 11, ["cat", "dog"]), made("two", 11, 7, ["emu", "dog", "cat"]), made("three", 18, 5, ["dog"])
    order = ["matrix", "n", "label", "word", "text", "boxes", "free", "image"]
    return [one, two.select(slice(None, None, -1)).select_columns(order), three.select([])[one.columns], three]


def expected(parts):
    """Return the samples of all parts, with words instead of codes."""
    found = []
    for part in parts:
        for sample in part:
            words = {name: None if sample[name] is None else part.vocabulary(name)[sample[name]] for name in ("label", "word")}
            found.append({**sample, **words})
    return found


def same(one, other):
    return (one is None and other is None) or (one is not None and other is not None and np.array_equal(one, other))


def worded(sample, vocabulary):
    words = {name: None if sample[name] is None else vocabulary(name)[sample[name]] for name in ("label", "word")}
    return {**sample, **words}


def test_joined_views_read_as_one(parts):
    both, wanted = ps.concat(parts), expected(parts)
    assert (
        len(both) == 23
        and both.columns == parts[0].columns
        and both.vocabulary("label") == ["cat", "dog", "emu"] == list(both.schema["label"].names)
    )
    assert both.vocabulary("word")[:4] == parts[0].vocabulary("word") and "n" in both and "m" not in both
    for read in (
        lambda: list(both),
        lambda: [both[index] for index in range(23)],
        lambda: [sample for batch in both.batches(4) for sample in rows(batch)],
        lambda: rows(both[:]),
        lambda: rows(both.take(list(range(-23, 0)))),
        lambda: rows(both.filter(lambda sample: True)[:]),
    ):
        found = [worded(sample, both.vocabulary) for sample in read()]
        assert all(same(one[name], other[name]) for one, other in zip(found, wanted, strict=True) for name in both.columns)
    picked = [22, 0, 5, 15, 5, 11]
    found = [worded(sample, both.vocabulary) for sample in rows(both.take(picked))]
    assert all(same(one[name], wanted[at][name]) for one, at in zip(found, picked, strict=True) for name in both.columns)
    assert both.take(picked, columns=["_position"])["_position"].tolist() == picked and isinstance(both.take(picked)["boxes"], ps.Ragged)
    assert (
        both[np.arange(23) % 2 == 0]["n"].tolist() == [sample["n"] for sample in wanted[::2]]
        and both["n"][3] == 3
        and len(both[[]]["n"]) == 0
    )
    assert both.take([3, 20], columns=["image"], decode=False)["image"][0].startswith(b"\x89PNG")
    assert both[["n"]][22] == {"n": 22} and len(both.head(13)) == 13 and both.head(13)["n"][:].tolist()[-2:] == [17, 16]
    for wrong, kind in (
        (lambda: both[23], IndexError),
        (lambda: both["m"], ps.NotFoundError),
        (lambda: both[["m"]], ps.NotFoundError),
        (lambda: both.take([0.5]), ps.InvalidInputError),
    ):
        with pytest.raises(kind):
            wrong()


def rows(batch):
    return [{name: unwrap(values, index) for name, values in batch.items()} for index in range(len(batch["n"]))]


def test_joined_views_are_arrow_frames_and_torch(parts):
    both, wanted = ps.concat(parts), expected(parts)
    table = both.to_arrow()
    assert isinstance(both.scan(), pa.RecordBatchReader) and pa.table(both)["n"].to_pylist() == [sample["n"] for sample in wanted]
    for name in ("label", "word", "text"):
        assert table[name].to_pylist() == [sample[name] for sample in wanted] == both.to_pandas()[name].replace({np.nan: None}).tolist()
        assert both.to_polars([name])[name].to_list() == [sample[name] for sample in wanted]
    loaded = torch.utils.data.DataLoader(both.torch(["n", "boxes"]), batch_size=5, collate_fn=ps.torch.collate)
    assert torch.cat([batch["n"] for batch in loaded]).tolist() == [sample["n"] for sample in wanted]
    assert both.to_torch(["n"])["n"].shape == (23,)


def labels_of(loader, batch):
    words = loader.vocabulary("label")
    mask = np.ma.getmaskarray(batch["label"])
    return [None if gone else words[code] for code, gone in zip(np.ma.getdata(batch["label"]).tolist(), mask, strict=True)]


@pytest.mark.parametrize("order", ["shuffled", "in order", "replacement", "window"])
def test_a_loader_of_joined_views_visits_each_sample_once_in_one_order(parts, order):
    both, wanted = ps.concat(parts), {sample["n"]: sample for sample in expected(parts)}
    shuffle = {"shuffled": True, "in order": False, "replacement": ps.Replacement(samples=40), "window": ps.Window(bytes=200, lanes=1)}[
        order
    ]
    options = {
        "batch_size": 4,
        "shuffle": shuffle,
        "seed": 3,
        "columns": ["n", "label", "word", "text", "image"],
        "nulls": {"label": "mask", "text": ""},
        "ragged": ["image"],
    }
    loader = both.loader(**options)
    batches = list(loader)
    seen = np.concatenate([batch["n"] for batch in batches]).tolist()
    assert sorted(seen) == list(range(23)) if order != "replacement" else len(seen) == 40 and {*seen} <= {*range(23)}
    assert order != "in order" or seen == [sample["n"] for sample in expected(parts)]
    for batch in batches:
        for index, n in enumerate(batch["n"].tolist()):
            word = loader.vocabulary("label")[batch["label"][index]] if batch["label_valid"][index] else None
            assert word == wanted[n]["label"] and loader.vocabulary("word")[batch["word"][index]] == wanted[n]["word"]
            assert batch["text"][index] == (wanted[n]["text"] or "") and same(batch["image"][index], wanted[n]["image"])
    state = json.loads(json.dumps(loader.state_dict(step=2)))
    again = ps.concat(parts).loader(**options)
    again.load_state_dict(state)
    assert np.concatenate([batch["n"] for batch in again]).tolist() == seen[8:]
    ranks = [list(both.loader(**{**options, "batch_size": 2}, rank=rank, world_size=2)) for rank in range(2)]
    together = [np.concatenate([one["n"], other["n"]]).tolist() for one, other in zip(*ranks, strict=True)]
    assert {n for step in together for n in step} == {*seen} and [sorted(step) for step in together[:5]] == [
        sorted(batch["n"].tolist()) for batch in batches[:5]
    ]
    assert f"{40 if order == 'replacement' else 23} samples in" in str(loader.explain())


def test_every_order_of_joined_views_is_as_likely():
    parts = [made(f"likely-{at}", 10 * at, count, ["a"], ["n"]) for at, count in enumerate((1, 2, 1))]
    counts = {}
    for seed in range(2400):
        [batch] = ps.concat(parts).loader(batch_size=4, shuffle=True, seed=seed)
        order = tuple(batch["n"].tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24 and min(counts.values()) > 50 and max(counts.values()) < 160


def test_new_words_do_not_change_the_codes_of_a_resumed_loader():
    one, two = made("resumed-one", 0, 8, ["cat"], ["n", "word"]), made("resumed-two", 8, 8, ["cat"], ["n", "word"])
    options = {"batch_size": 4, "columns": ["n", "word"]}
    loader = ps.concat([one, two]).loader(**options)
    first = list(loader)
    state = loader.state_dict(step=1)
    one.append({"n": [100], "word": ["a new word"]})
    again = ps.concat([one, two]).loader(**options)
    assert again.vocabulary("word") != loader.vocabulary("word")
    again.load_state_dict(state)
    assert again.vocabulary("word") == loader.vocabulary("word")
    assert [batch["word"].tolist() for batch in again] == [batch["word"].tolist() for batch in first[1:]]


def test_words_in_a_mixture_are_matched_by_name(parts):
    mixed = ps.mix({"one": (parts[0], 1), "two": (parts[1], 1)}, epoch_samples=40)
    loader = mixed.loader(batch_size=8, shuffle=True, columns=["n", "label", "word"], nulls={"label": "mask"})
    wanted = {sample["n"]: sample for sample in expected(parts)}
    for batch in loader:
        for index, n in enumerate(batch["n"].tolist()):
            assert (loader.vocabulary("label")[batch["label"][index]] if batch["label_valid"][index] else None) == wanted[n]["label"]
            assert loader.vocabulary("word")[batch["word"][index]] == wanted[n]["word"]


def test_joined_views_split_and_pickle(tmp_path):
    stored = []
    for number in range(2):
        ds = ps.create(tmp_path / str(number), {"n": "int64", "label": ps.Label(["a", "b"])})
        ds.append({"n": range(100 * number, 100 * number + 100), "label": ["a", "b"] * 50})
        stored.append(ds)
    both = ps.concat(stored)
    split = both.split({"train": 0.8, "test": 0.2}, by="label")
    assert {name: len(part) for name, part in split.items()} == {"train": 160, "test": 40}
    assert sorted(np.concatenate([part["n"] for part in split.values()]).tolist()) == list(range(200))
    again = pickle.loads(pickle.dumps(both))
    assert again["n"][:].tolist() == list(range(200)) and repr(again) == "<penstock.Concat of 2 views: 200 samples, 2 columns>"
    stored[0].append({"n": [7]})
    assert len(both) == 200, "the views stay at their snapshots"
    assert len(ps.concat([both, stored[0]])) == 301


def test_views_that_do_not_fit_are_refused(parts):
    other = ps.create("memory://concat-other", {"n": "int32"})
    fewer, codec = (
        ps.create("memory://concat-fewer", {"m": "int64"}),
        ps.create("memory://concat-codec", {"n": ps.Scalar("int64", codec="zstd")}),
    )
    codec.append({"n": [7]})
    assert ps.concat([parts[0][["n"]], codec])["n"][:].tolist()[-1] == 7
    for wrong, text in (
        ([parts[0][["n"]], other], "column `n` is int64 in `memory://concat-one` and int32"),
        ([parts[0][["n"]], fewer], "only one of them has column `m`"),
        ([], "expected a list of views"),
        (parts[0], "expected a list of views"),
        ([parts[0], 3], "expected a list of views"),
    ):
        with pytest.raises(ps.InvalidInputError, match=text):
            ps.concat(wrong)


@pytest.mark.parametrize("shuffle", [True, ps.Window(bytes=3000, lanes=1), ps.Window(bytes=1000, lanes=2)], ids=str)
def test_joined_views_that_are_not_mapped_are_shuffled_within_windows(tmp_path, shuffle):
    views, wanted = [], []
    for number, count in enumerate((50, 7, 100)):
        ds = ps.create(tmp_path / str(number), {"n": "int64", "v": ps.Tensor((20,), "float32")})
        numbers = range(1000 * number, 1000 * number + count)
        ds.append({"n": numbers, "v": [np.full(20, n) for n in numbers]})
        views.append(ps.open(tmp_path / str(number), io="buffered"))
        wanted += numbers
    for world_size in (1, 2):
        ranks = [
            list(ps.concat(views).loader(batch_size=4, shuffle=shuffle, seed=9, rank=rank, world_size=world_size, last_batch="pad"))
            for rank in range(world_size)
        ]
        seen = np.concatenate([batch["n"] for rank in ranks for batch in rank])
        assert {*seen.tolist()} == {*wanted} and all((batch["v"] == batch["n"][:, None]).all() for rank in ranks for batch in rank)


def test_columns_of_joined_views_compare_by_word_and_read_parts():
    one, two = (
        ps.create("memory://joined-column-one", SMALL),
        ps.create("memory://joined-column-two", SMALL | {"label": ps.Label(["dog", "cat"])}),
    )
    for ds in (one, two):
        ds.append({"label": ["cat", "dog", None], "text": ["a", None, "b"], "v": [[1, 2], [3, 4], [5, 6]]})
    both = ps.concat([one, two])
    assert (both["label"] == "dog").tolist() == [False, True, False] * 2 and (both["text"] != "a").tolist() == [False, True, True] * 2
    assert len(both["label"]) == 6 and both["label"].dtype == np.int64 and both["v"].shape == (6, 2)
    assert both["text"][:] == ["a", None, "b"] * 2 and both["text"][-1] == "b" and both["v"][[5, 0], 1] == [6, 2] and both["v"][4, 0] == 3
    assert [None if code is None else int(code) for code in both["label"]] == [0, 1, None] * 2
    with pytest.raises(ps.InvalidInputError, match="labels: cat, dog"):
        print(both["label"] == "bird")
    with pytest.raises(ps.InvalidInputError, match="cannot compare column `v`"):
        print(both["v"] == 3)
    with pytest.raises(ps.NotFoundError):
        print(both["nothing"])


SMALL = {"label": ps.Label(["cat", "dog"]), "text": ps.Text(), "v": ps.Tensor((2,), "int64")}


def test_a_group_that_two_views_have_is_in_one_part():
    def made(name, first):
        ds = ps.create(f"memory://grouped-{name}", {"l": ps.Label(["a", "b"]), "g": "int32"})
        ds.append({"l": ["a", "b"] * 60, "g": [first + row // 2 for row in range(120)]})
        return ds

    both = ps.concat([made("x", 0), made("y", 30)])
    for seed in range(20):
        parts = both.split({"train": 0.7, "test": 0.3}, seed=seed, by="l", group="g")
        groups = [set(part["g"][:].tolist()) for part in parts.values()]
        assert not groups[0] & groups[1] and len(parts["train"]) + len(parts["test"]) == 240 and 120 < len(parts["train"]) < 216


def test_joined_views_are_chosen_by_position_and_by_functions():
    """Codes of words are those of all views, also if one of the views has no sample left."""
    one = ps.create("memory://chosen-one", {"l": ps.Label(["cat"]), "n": "int32"})
    two = ps.create("memory://chosen-two", {"l": ps.Label(["emu", "cat"]), "n": "int32"})
    one.append({"l": ["cat"] * 3, "n": range(3)}), two.append({"l": ["emu", "cat", "emu"], "n": range(3, 6)})
    both = ps.concat([one, two])
    emus = both.filter(lambda sample: sample["l"] == 1)
    assert emus["n"][:].tolist() == [3, 5] and emus["l"][:].tolist() == [1, 1] and emus.vocabulary("l") == ["cat", "emu"]
    assert both.select([5, 0, 4, 1, -1])["n"][:].tolist() == [5, 0, 4, 1, 5] and both.select(slice(2, 5))["n"][:].tolist() == [2, 3, 4]
    assert sorted(next(iter(emus.loader(batch_size=2, shuffle=True)))["n"].tolist()) == [3, 5] and len(both.select([])) == 0
    with pytest.raises(ps.InvalidInputError, match="random order"):
        both.select([0, 5] * 3000)
    with pytest.raises(ps.OutOfRangeError):
        both.select([6])


def test_joined_views_are_a_table_for_other_libraries(tmp_path):
    one = ps.create("memory://out-one", {"l": ps.Label(["cat"]), "n": "int32", "x": ps.Bytes()})
    two = ps.create("memory://out-two", {"l": ps.Label(["emu", "cat"]), "n": "int32", "x": ps.Bytes()})
    (
        one.append({"l": ["cat", None], "n": range(2), "x": [b"a", b"b"]}),
        two.append({"l": ["emu", "cat"], "n": range(2, 4), "x": [b"c", b"d"]}),
    )
    both = ps.concat([one, two])
    table = both.to_arrow_dataset()
    assert table.to_table()["l"].to_pylist() == ["cat", None, "emu", "cat"] == both.to_arrow()["l"].to_pylist()
    photos = table  # noqa: F841
    assert duckdb.connect().sql("SELECT x, l FROM photos WHERE n > 0 AND n < 3").fetchall() == [(b"b", None), (b"c", "emu")]
    assert table.count_rows() == 4 and table.take([3, 0], ["n"])["n"].to_pylist() == [3, 0]
    assert both.to_parquet(tmp_path / "both.parquet") == 4
    ps.importers.import_data(tmp_path / "both.parquet", tmp_path / "ds")
    again = ps.open(tmp_path / "ds")
    assert again.schema["l"].names == ("cat", "emu") and again.to_arrow()["l"].to_pylist() == ["cat", None, "emu", "cat"]

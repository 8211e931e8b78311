"""Loaders over files that are not in a dataset."""

from __future__ import annotations

import itertools
import os
import shutil

import numpy as np
import penstock as ps
import pytest
from PIL import Image


def arrays(folder, *values):
    folder.mkdir(parents=True, exist_ok=True)
    for number, value in enumerate(values):
        np.save(folder / f"{number}.npy", value)
    return folder / "*.npy"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.array(["2024-05-06"], "datetime64[ns]"), "does not count microseconds"),
        (np.array(["2024-05-06"], "datetime64[s]"), "does not count microseconds"),
        (np.ones(3, ">f4"), "not in native byte order"),
        (np.array(["abc"]), "unknown dtype"),
        (np.array([1], "timedelta64[s]"), "does not count microseconds"),
        (np.array([{}], object), "Python objects"),
        (np.ones(2, [("a", "f4")]), "unknown dtype"),
        (np.asfortranarray(np.ones((3, 2))), "Fortran order"),
    ],
)
def test_arrays_that_cannot_be_loaded_say_why(tmp_path, value, text):
    with pytest.raises(ps.UnsupportedError, match=text) as caught:
        ps.files(arrays(tmp_path / "given", value))
    assert "0.npy" in str(caught.value)


def test_timestamps_of_files_are_what_they_are(tmp_path):
    moment = np.array(["2024-05-06T07:08:09"], "datetime64[us]")
    assert (next(iter(ps.files(arrays(tmp_path / "given", moment)).loader(batch_size=1)))["array"] == moment).all()


def test_names_and_patterns_that_cannot_be(tmp_path):
    place = arrays(tmp_path / "[br]", np.ones(2))
    with pytest.raises(ps.NotFoundError, match=r"glob\.escape"):
        ps.files(place.parent / "0.npy")
    with pytest.raises(ps.NotFoundError, match=r"not their folder"):
        ps.files(tmp_path / "[br]")
    for given in (5, ["a"], None):
        with pytest.raises(ps.InvalidInputError, match="expected a glob"):
            ps.files(given)
    with open(os.fsencode(tmp_path) + b"/\xff.npy", "wb") as file:
        np.save(file, np.ones(2))
    with pytest.raises(ps.InvalidInputError, match="not UTF-8"):
        ps.files(tmp_path / "*.npy")


def test_errors_of_files_name_them(tmp_path):
    pattern = arrays(tmp_path / "plain", *[np.arange(50.0)] * 5)
    shape = arrays(tmp_path / "free", *[np.arange(50.0 + number) for number in range(5)])
    for io, given in itertools.product(("auto", "buffered", "direct"), (pattern, shape)):
        files = ps.files(given, io=io)
        broken = given.parent / "3.npy"
        body = broken.read_bytes()
        for changed in (body[:-8], None, body + bytes(8)):
            broken.unlink() if changed is None else broken.write_bytes(changed)
            with pytest.raises(ps.Error, match=r"3\.npy.*\(sample 3\)") as caught:
                next(iter(files.loader(batch_size=5)))
            assert caught.value.rows == [3] and "list them again" in str(caught.value)
            broken.write_bytes(body)
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(4):
        Image.new("RGB", (20, 20)).save(folder / f"{number}.jpg")
    (folder / "2.jpg").write_bytes(b"\xff\xd8\xff\xe0" + bytes(200))
    with pytest.raises(ps.CorruptError, match=r"2\.jpg"):
        next(iter(ps.files(folder / "*.jpg").loader(batch_size=4)))


def test_direct_files_of_any_length_pass_by_the_page_cache(tmp_path):
    values = [np.random.default_rng(number).random(20_000 + number) for number in range(8)]
    files = ps.files(arrays(tmp_path / "given", *values), io="direct")
    loader = files.loader(batch_size=4, shuffle=True, columns=["array", "_position"])
    for batch in loader:
        for position, array in zip(batch["_position"], batch["array"], strict=True):
            assert (array == values[position]).all()
    read = loader.stats()["read"]
    assert read["direct_bytes"] >= sum(value.nbytes for value in values) and "read_bytes" not in read


def test_states_of_files_go_with_names_and_sizes(tmp_path):
    first = arrays(tmp_path / "first", *[np.full(3, number) for number in range(10)])
    loader = ps.files(first).loader(batch_size=2, shuffle=True)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    os.utime(tmp_path / "first" / "3.npy", (1, 1))
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    for place in ("first", "second"):
        again = ps.files(tmp_path / place / "*.npy").loader(batch_size=2, shuffle=True)
        again.load_state_dict(state)
        assert (next(iter(again))["array"] == next(batches)["array"]).all()
        again.close()
        batches = iter(ps.files(first).loader(batch_size=2, shuffle=True))
        next(batches)
    np.save(tmp_path / "second" / "10.npy", np.ones(3, int))
    grown = ps.files(tmp_path / "second" / "*.npy").loader(batch_size=2, shuffle=True)
    with pytest.raises(ps.InvalidInputError, match=r"the state has 10 files, .* has 11"):
        grown.load_state_dict(state)


def test_two_folders_can_be_mixed_and_joined_with_their_labels(tmp_path):
    for place in ("one/a", "one/b", "two/c", "two/b"):
        arrays(tmp_path / place, *[np.ones(3)] * 2)
    one, two = (ps.files(tmp_path / name / "*" / "*.npy") for name in ("one", "two"))
    for both in (ps.mix({"one": one, "two": two}), ps.concat([one, two])):
        loader = both.loader(batch_size=2, columns=["array", "path", "label"])
        words = loader.vocabulary("label")
        assert words == ["a", "b", "c"] and len(loader) == 4
        seen = [(words[code], path) for batch in loader for code, path in zip(batch["label"].tolist(), batch["path"], strict=True)]
        assert len(seen) == 8 and all(path.startswith(f"{word}/") for word, path in seen)

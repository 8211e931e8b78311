"""Places: a handle keeps its dataset, a race to create a dataset has one winner, leftovers are reused, and gaps in logs are reported."""

import os
import pathlib
import shutil
import threading

import numpy as np
import penstock as ps
import pytest
from racing import race_to_create


def files_below(folder):
    return sorted(str(path.relative_to(folder)) for path in pathlib.Path(folder).rglob("*") if path.is_file())


def replaced(change, one, two):
    """Check that `change` raises `dataset-replaced` and that the message names both dataset ids."""
    with pytest.raises(ps.ConflictError) as caught:
        change()
    assert caught.value.code == "dataset-replaced", caught.value
    assert one._snapshot.dataset_id in str(caught.value) and two._snapshot.dataset_id in str(caught.value)


@pytest.fixture(params=["link", "anew"])
def moved(tmp_path, request):
    """Return a handle whose symlink was retargeted or whose folder was recreated, the dataset now at its path, and the path."""
    first = ps.create(tmp_path / "one", {"n": "int32", "word": ps.Category()})
    first.append({"n": [1, 2, 3], "word": ["a", "b", "c"]})
    place = tmp_path / "latest"
    if request.param == "link":
        place.symlink_to("one")
    else:
        shutil.move(tmp_path / "one", place)
    handle = ps.open(place)
    if request.param == "link":
        place.unlink()
        place.symlink_to("two")
    else:
        shutil.rmtree(place)
    target = tmp_path / "two" if request.param == "link" else place
    other = ps.create(target, {"text": ps.Text()})
    other.append({"text": ["x"]})
    return handle, other, target


def test_a_handle_never_writes_to_another_dataset(moved):
    handle, other, place = moved
    before, snapshot = files_below(place), other.snapshot
    replaced(lambda: handle.append({"n": [4]}), handle, other)
    replaced(lambda: handle.append({"n": range(100_000), "word": [f"w{i}" for i in range(100_000)]}), handle, other)
    replaced(lambda: handle._snapshot.pin("kept"), handle, other)
    replaced(lambda: handle.loader(batch_size=1, pin=True), handle, other)
    replaced(lambda: handle.unpin("kept"), handle, other)
    assert files_below(place) == before and ps.open(place).snapshot == snapshot and not ps.open(place).verify()["problems"]


def test_a_handle_never_moves_to_another_dataset(moved):
    handle, other, _ = moved
    replaced(handle.refresh, handle, other)
    replaced(handle.pins, handle, other)
    replaced(lambda: handle[0], handle, other)
    assert len(handle) == 3, "the handle keeps its snapshot"


def test_a_transaction_that_began_before_is_not_committed_elsewhere(tmp_path):
    for name in ("one", "two"):
        ps.create(tmp_path / name, {"n": "int32"})
    (tmp_path / "latest").symlink_to("one")
    handle = ps.open(tmp_path / "latest")
    other = ps.open(tmp_path / "two")

    def commit():
        with handle.transaction() as tx:
            tx.append({"n": [1]})
            (tmp_path / "latest").unlink()
            (tmp_path / "latest").symlink_to("two")

    replaced(commit, handle, other)
    assert len(ps.open(tmp_path / "one")) == len(ps.open(tmp_path / "two")) == 0


def test_a_longer_log_elsewhere_is_not_gone_on_with(tmp_path):
    """The other dataset already has a record with the number that the handle would commit next."""
    one, two = (ps.create(tmp_path / name, {"n": "int32"}) for name in ("one", "two"))
    for _ in range(5):
        two.append({"n": [1]})
    (tmp_path / "latest").symlink_to("one")
    handle = ps.open(tmp_path / "latest")
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("two")
    replaced(lambda: handle.append({"n": [1]}), one, two)


def test_a_handle_of_a_folder_that_was_renamed_leaves_nothing_behind(tmp_path):
    ds = ps.create(tmp_path / "old", {"n": "int64"})
    (tmp_path / "old").rename(tmp_path / "new")
    for rows in (1, 3_000_000):
        with pytest.raises(ps.NotFoundError, match="moved or removed"):
            ds.append({"n": np.arange(rows)})
    assert not (tmp_path / "old").exists() and len(ps.open(tmp_path / "new")) == 0


@pytest.mark.long
def test_one_of_two_creators_wins(tmp_path):
    race_to_create([tmp_path / f"place{number}" / "dataset" for number in range(60)])


def test_one_of_eight_creators_wins(tmp_path):
    race_to_create([tmp_path / f"place{number}" / "dataset" for number in range(10)], racers=8)


@pytest.mark.long
def test_one_of_two_creators_wins_in_a_bucket(bucket):
    race_to_create([bucket / f"place{number}" for number in range(15)])


@pytest.mark.soak
def test_one_of_two_creators_wins_a_thousand_times(tmp_path, bucket):
    race_to_create([tmp_path / f"place{number}" / "dataset" for number in range(1000)])
    race_to_create([bucket / f"place{number}" for number in range(1000)])


def test_one_of_eight_threads_wins(tmp_path):
    for number in range(20):
        told = []

        def make(place=tmp_path / f"place{number}", told=told):
            try:
                ps.create(place, {"n": "int32"})
                told.append("made")
            except ps.AlreadyExistsError:
                told.append("exists")

        threads = [threading.Thread(target=make) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(told) == ["exists"] * 7 + ["made"]


def test_leftovers_of_an_unfinished_create_are_taken_over(root):
    ds = ps.create(root, {"n": "int32"})
    ds.append({"n": [1]})
    for path in root.rglob("*"):  # Restore the state before commit 0: objects exist, but no records.
        if path.is_file() and len(path.name) == 20 and path.name.isdigit():
            path.unlink()
    with pytest.raises(ps.NotFoundError) as caught:
        ps.open(root)
    assert caught.value.code == "dataset-not-found"
    again = ps.create(root, {"n": "int64"})
    again.append({"n": [7]})
    assert ps.open(root)["n"][:].tolist() == [7] and not ps.open(root).verify()["problems"]


@pytest.mark.parametrize("name", ["photo.jpg", "d/photo.jpg", "log/0000000000000000/notes", "refs/x/y", "probe/x", "data/x"])
def test_what_is_not_ours_is_left_alone(root, name):
    path = root / name
    if isinstance(path, pathlib.Path):
        path.parent.mkdir(parents=True)
    path.write_bytes(b"mine")
    with pytest.raises(ps.InvalidInputError) as caught:
        ps.create(root, {"n": "int32"})
    assert caught.value.code == "folder-not-empty" and name.split("/")[0] in str(caught.value) and path.read_bytes() == b"mine"


def test_empty_folders_that_are_not_ours_are_left_alone(tmp_path):
    (tmp_path / "place" / "mine").mkdir(parents=True)
    with pytest.raises(ps.InvalidInputError, match="mine"):
        ps.create(tmp_path / "place", {"n": "int32"})


def record(place, number):
    return place / "log" / "0000000000000000" / f"{2**64 - 1 - number:020}"


@pytest.fixture
def ten(tmp_path):
    ds = ps.create(tmp_path / "ten", {"n": "int32"})
    for number in range(9):
        ds.append({"n": [number]})
    return tmp_path / "ten"


@pytest.mark.parametrize("missing", [(9,), (8,), (7, 8), (5, 6, 7), (1,)])
def test_a_log_with_a_hole_is_refused_or_named(ten, missing):
    """Remove records. `open` refuses the dataset if the newest record, which the hint names, is missing. Otherwise, `verify` names a
    missing record.
    """
    for number in missing:
        record(ten, number).unlink()
    try:
        ds = ps.open(ten)
    except ps.CorruptError as error:
        assert error.code == "log-incomplete" and str(missing[0]) in str(error)
    else:
        problems = [str(problem) for _, problem in ds.verify()["problems"]]
        assert any(f"record {missing[0]} is missing" in problem for problem in problems), problems
        assert len(ds) == 9, "the newest record exists: only older ones are missing"
    assert (9 in missing) == (not can_open(ten))


def can_open(place):
    try:
        ps.open(place)
    except ps.CorruptError:
        return False
    return True


def test_an_append_never_takes_the_number_of_a_record_that_exists(ten, separate_files):
    """The hint is older than the missing record, as in a copy in which `hint` was copied first."""
    hint = ten / "log" / "0000000000000000" / "hint"
    early = pathlib.Path(str(ten) + "-early")
    ds = ps.create(early, {"n": "int32"})
    for number in range(6):
        ds.append({"n": [number]})
    handle = ps.open(ten)
    hint.write_bytes((early / "log" / "0000000000000000" / "hint").read_bytes())  # This hint names record 6.
    record(ten, 7).unlink()
    before = files_below(ten)
    with pytest.raises(ps.CorruptError) as caught:
        ps.open(ten)
    assert caught.value.code == "log-incomplete"
    handle.append({"n": [99]})  # The handle has read record 9, so it writes record 10.
    assert not record(ten, 7).exists() and record(ten, 10).exists() and len(files_below(ten)) == len(before) + 2


@pytest.mark.parametrize("kind", ["folder", "secret", "garbage", "missing"])
def test_an_unreadable_hint_is_ignored(ten, kind):
    hint = ten / "log" / "0000000000000000" / "hint"
    hint.unlink()
    if kind == "folder":
        hint.mkdir()
    elif kind == "secret":
        hint.symlink_to("/proc/self/mem")  # This file opens, but reading it fails.
    elif kind == "garbage":
        hint.write_bytes(b"\0" * 16)
    ds = ps.open(ten)
    assert len(ds) == 9
    ds.append({"n": [9]})
    assert ps.open(ten)["n"][:].tolist() == list(range(10))


def test_two_writers_that_add_one_word_show_it_once(root):
    ds = ps.create(root, {"word": ps.Category()})
    ds.append({"word": ["a"]})
    one, two = ps.open(root), ps.open(root)
    with one.transaction() as first, two.transaction() as second:
        first.append({"word": ["b", "c", "a"]})
        second.append({"word": ["d", "c", "b"]})
    ds.refresh()
    while len(ds) < 7:
        ds.refresh()
    words = ds.vocabulary("word")
    assert sorted(words) == ["a", "b", "c", "d"] and len(words) == 4
    codes = ds["word"][:]
    assert sorted(words[code] for code in codes) == ["a", "a", "b", "b", "c", "c", "d"]
    table = next(ds.scan(batch_size=100))
    frame = table.to_pandas()
    assert sorted(frame["word"]) == sorted(words[code] for code in codes) and list(frame["word"].cat.categories) == words
    ds.append({"word": codes[:3]})
    assert ds["word"][7:].tolist() == codes[:3].tolist(), "codes read from a column may be appended"
    ds.append({"word": ["e"]})
    assert ds.vocabulary("word") == [*words, "e"] and ds["word"][10:].tolist() == [4] and not ds.verify()["problems"]


def test_a_link_that_is_turned_stages_nothing_in_the_other_dataset(tmp_path):
    """A transaction whose commit fails leaves no data files in either dataset."""
    for name in ("one", "other"):
        ps.create(tmp_path / name, {"v": ps.Tensor((1 << 20,), "uint8")})
    link = tmp_path / "latest"
    link.symlink_to("one")
    transaction = ps.open(link).transaction()
    link.unlink()
    link.symlink_to("other")
    transaction.append({"v": np.zeros((40, 1 << 20), np.uint8)})  # The transaction keeps using its original folder.
    with pytest.raises(ps.Error) as caught:
        transaction.commit()
    assert caught.value.code == "dataset-replaced"
    transaction.abort()
    assert len(ps.open(tmp_path / "one")) == 0 and not files_below(tmp_path / "one" / "d")
    assert not (tmp_path / "other" / "d").exists() or not list((tmp_path / "other" / "d").iterdir())


@pytest.mark.local
@pytest.mark.parametrize("how", ["link", "rename"])
def test_paths_that_turn_at_any_moment_lose_nothing(tmp_path, how):
    """Each append must report correctly whether it committed, even while the path switches to another dataset and back."""
    one, other, latest = tmp_path / "one", tmp_path / "other", tmp_path / "latest"
    for place in (one, other):
        ps.create(place, {"n": "int64"})

    def lead_to(place):
        if how == "link":
            os.symlink(place.name, tmp_path / "turned")
            os.replace(tmp_path / "turned", latest)
        else:
            for name, home in (("one", one), ("other", other)):
                if latest.exists() and ps.open(latest)._snapshot.dataset_id == ids[name]:
                    latest.rename(home)
            place.rename(latest)

    ids = {"one": ps.open(one)._snapshot.dataset_id, "other": ps.open(other)._snapshot.dataset_id}
    told = []

    def turn_path(go, spins):
        """Switch the path to the other dataset shortly after `go` is set, during one of the commits below."""
        go.wait()
        for _ in range(spins):
            pass
        lead_to(other)

    for turn in range(40):
        lead_to(one)
        handle = ps.open(latest)
        go = threading.Event()
        turning = threading.Thread(target=turn_path, args=(go, turn * 2000))
        turning.start()
        for part in range(20):
            if part == turn % 10:
                go.set()
            try:
                handle.append({"n": [100 * turn + part]})
                told.append(100 * turn + part)
            except ps.Error as error:
                assert error.code in ("dataset-replaced", "dataset-not-found", "object-not-found"), error
                break
        turning.join()
    if how == "rename":
        latest.rename(other)
    assert ps.open(one)["n"][:].tolist() == told and len(ps.open(other)) == 0 and len(told) >= sum(turn % 10 for turn in range(40))
    assert not ps.open(one).verify()["problems"] and not ps.open(other).verify()["problems"]


def test_a_diverged_copy_refuses_further_commits(tmp_path):
    ds = ps.create(tmp_path / "set", {"c": ps.Category(), "x": "int64"})
    ds.append({"c": ["a"], "x": [0]})
    reader = ps.open(tmp_path / "set")
    shutil.copytree(tmp_path / "set", tmp_path / "copy")
    ds.append({"c": ["b"], "x": [1]})
    reader.refresh()
    for rows in ([2], [2, 5]):  # The copy first has as many commits as the handle has seen, then more.
        if len(rows) == 2:
            (tmp_path / "set").rename(tmp_path / "copy")
            (tmp_path / "old").rename(tmp_path / "set")
        ps.open(tmp_path / "copy").append({"c": ["c"], "x": rows[-1:]})
        (tmp_path / "set").rename(tmp_path / "old")
        (tmp_path / "copy").rename(tmp_path / "set")
        for change in (lambda: ds.append({"c": ["b", "d"], "x": [3, 4]}), reader.refresh, lambda: ds.append({"x": [1]})):
            with pytest.raises(ps.ConflictError) as caught:
                change()
            assert caught.value.code == "dataset-replaced", caught.value
        copy = ps.open(tmp_path / "set")
        assert copy["x"][:].tolist() == [0, *rows[: len(rows)]] and not copy.verify()["problems"]


@pytest.mark.local
def test_a_broken_link_is_reported(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ps.NotFoundError) as caught:
        ps.create(link, {"n": "int64"})
    assert str(link) in str(caught.value) and "broken symbolic link" in caught.value.hint
    (tmp_path / "nowhere").mkdir()
    assert len(ps.create(link, {"n": "int64"})) == 0

"""A dataset's files are replaced in place, by those of a backup or of another dataset, right after a commit. No handle then commits to what is gone."""

import shutil

import numpy as np
import penstock as ps
import pytest

pytestmark = pytest.mark.local


def replace(place, source):
    """Put other files into the same folder."""
    for folder in place.iterdir():
        shutil.rmtree(folder)
    shutil.copytree(source, place, dirs_exist_ok=True)


@pytest.fixture
def saved(tmp_path):
    """Return a handle that has just committed twice, the place of its dataset, and a backup without these commits."""
    place, backup = tmp_path / "set", tmp_path / "backup"
    ds = ps.create(place, {"n": "int64"})
    ds.append({"n": [1]})
    ds.create_tag("first")
    shutil.copytree(place, backup)
    for number in (2, 3):
        ds.append({"n": [number]})
        ds.create_tag(f"tag {number}")
    return ds, place, backup


def test_commits_after_a_restore_follow_the_backup(saved):
    ds, place, backup = saved
    replace(place, backup)
    again = ps.open(place)
    again.append({"n": [9]})
    with pytest.raises(ps.ConflictError) as caught:
        ds.append({"n": [4]})
    assert caught.value.code == "dataset-replaced"
    found = ps.open(place)
    assert found["n"][:].tolist() == [1, 9] and found.verify()["problems"] == []


def test_a_history_that_differs_is_noticed(saved, tmp_path):
    ds, place, backup = saved
    other = ps.open(backup)
    for number in (7, 8):
        other.append({"n": [number]})
    replace(place, backup)
    with pytest.raises(ps.ConflictError) as caught:
        ds.append({"n": [4]})
    assert caught.value.code == "dataset-replaced"
    ps.open(place).append({"n": [5]})
    assert ps.open(place)["n"][:].tolist() == [1, 7, 8, 5] and ps.open(place).verify()["problems"] == []


def test_another_dataset_in_the_same_folder(saved):
    ds, place, _ = saved
    for folder in place.iterdir():
        shutil.rmtree(folder)
    new = ps.create(place, {"n": "int64"})
    new.append({"n": [100]})
    with pytest.raises(ps.ConflictError) as caught:
        ds.append({"n": [4]})
    assert caught.value.code == "dataset-replaced"
    new.append({"n": [101]})
    assert ps.open(place)["n"][:].tolist() == [100, 101]


@pytest.mark.parametrize("change", ["create_tag", "create_branch", "tags", "delete_tag"])
def test_names_of_a_backup_are_kept(saved, change):
    ds, place, backup = saved
    replace(place, backup)
    other = ps.open(place)
    other.create_tag("keep")
    other.create_branch("important").append({"n": [5]})
    calls = {
        "create_tag": lambda: ds.create_tag("new"),
        "create_branch": lambda: ds.create_branch("new"),
        "tags": ds.tags,
        "delete_tag": lambda: ds.delete_tag("first"),
    }
    with pytest.raises(ps.Error) as caught:
        calls[change]()
    assert caught.value.code in ("dataset-replaced", "snapshot-not-found")
    found = ps.open(place)
    assert set(found.tags()) == {"first", "keep"} and set(found.branches()) == {"main", "important"}
    assert ps.open(place, branch="important")["n"][:].tolist() == [1, 5]


def test_a_copy_that_lacks_a_record_of_another_branch(tmp_path):
    place, copy = tmp_path / "set", tmp_path / "copy"
    ds = ps.create(place, {"n": "int64"})
    ds.append({"n": [1]})
    branch = ds.create_branch("b")
    branch.append({"n": np.arange(3)})
    ds.merge("b")
    shutil.copytree(place, copy)
    # A merge has the data of the other log's records, so it can be read without those.
    (copy / "log" / f"{1:016x}" / f"{(1 << 64) - 2}").unlink()
    (copy / "log" / f"{1:016x}" / "hint").unlink()
    assert ps.open(copy)["n"][:].tolist() == [1, 0, 1, 2]
    for record in (copy / "log" / f"{0:016x}").glob("1844*4"):
        record.unlink()
    # A branch without commits of its own names the records of its parent.
    with pytest.raises(ps.CorruptError) as caught:
        ps.open(copy, branch="b")
    assert caught.value.code == "copy-incomplete" and f"log/{0:016x}/{(1 << 64) - 2}" in str(caught.value)

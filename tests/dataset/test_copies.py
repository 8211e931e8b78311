"""Copies of a local dataset. Whatever the copy order, opening a copy fails if the copy lacks an object that its snapshot needs."""

import json
import multiprocessing
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import penstock as ps
import pytest

pytestmark = pytest.mark.usefixtures("separate_files")

SCHEMA = {"n": "int32", "word": ps.Category()}


def batch(number):
    return {"n": [number] * 3, "word": [f"word {number}"] * 3}


@pytest.fixture
def source(tmp_path):
    """Return a dataset made by 100 appends, with some fragments in pages and the rest in the newest record."""
    ds = ps.create(tmp_path / "source", SCHEMA)
    for number in range(100):
        ds.append(batch(number))
    return ds


def copy_of(ds, name="copy"):
    place = pathlib.Path(ds.uri).with_name(name)
    subprocess.run(["cp", "-r", ds.uri, place], check=True)
    return place


def below(place, folder):
    return sorted((place / folder).rglob("*"), key=lambda path: path.name)


def listings(ds):
    return ds.stats()["lists"]


def test_a_copy_is_looked_through_until_it_is_written_to(source):
    assert listings(ps.open(source.uri)) == 0, "opening the original never lists folders"
    place = copy_of(source)
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*")}
    for _ in range(2):
        copied = ps.open(place)
        assert listings(copied) > 0 and not copied.verify()["problems"]
    assert {path: path.stat().st_mtime_ns for path in place.rglob("*")} == before, "opening and reading a copy must not write anything"
    copied.append(batch(100))
    assert listings(ps.open(place)) == 0
    place = place.rename(place.with_name("renamed"))
    assert listings(ps.open(place)) == 0 and len(ps.open(place)) == 303, "a renamed dataset is not a copy"


def test_a_copy_of_links_is_whole(source):
    place = pathlib.Path(source.uri).with_name("links")
    subprocess.run(["cp", "-rs", source.uri, place], check=True)
    copy = ps.open(place).take(range(300))
    assert all(np.array_equal(copy[name], values) for name, values in source.take(range(300)).items())


@pytest.mark.parametrize("how", ["missing", "cut short"])
def test_the_newest_root_that_was_copied_in_part_stops_it(source, how):
    newest = max(below(pathlib.Path(source.uri), "r"), key=lambda path: path.stat().st_mtime_ns)
    place = copy_of(source)
    victim = place / newest.relative_to(source.uri)
    victim.unlink() if how == "missing" else victim.write_bytes(victim.read_bytes()[:-9])
    with pytest.raises(ps.CorruptError, match=victim.name) as caught:
        ps.open(place)
    assert caught.value.code == "copy-incomplete"


@pytest.mark.parametrize("folder", ["d", "o", "p", "w", "log"])
@pytest.mark.parametrize("how", ["missing", "cut short"])
def test_any_object_missing_from_a_copy_is_named(source, folder, how):
    """Remove or truncate objects of each kind in turn. The newest snapshot opens even if only objects of older snapshots are affected."""
    if folder == "o":
        with source.transaction() as tx:
            tx.update({"n": [0] * 100}, row_ids=range(0, 200, 2))
            tx.delete(row_ids=range(1, 100, 2))
    names = [path for path in below(pathlib.Path(source.uri), folder) if path.is_file() and path.name != "hint"]
    assert names
    refused = 0
    for index in range(0, len(names), max(1, len(names) // 7)):
        place = copy_of(source)
        victim = place / names[index].relative_to(source.uri)
        body = victim.read_bytes()
        victim.unlink() if how == "missing" else victim.write_bytes(body[:-1])
        try:
            opened = ps.open(place)
        except ps.CorruptError as error:
            refused += 1
            code = {"log": ["log-incomplete"] if how == "missing" else ["object-checksum", "object-truncated", "object-malformed"]}
            assert error.code in code.get(folder, ["copy-incomplete"]), error
            assert victim.name in str(error) or folder == "log", error
        else:
            assert folder in ("p", "log"), "only an old page or a truncated older record may go unnoticed"
            assert folder == "p" or how == "cut short" or index == 0, "a copy without its newest record is a copy of an earlier state"
            opened.take(range(len(opened)))
        if folder in ("d", "o", "w") and index == 0:
            report = subprocess.run([sys.executable, "-m", "penstock", "verify", "--json", place], capture_output=True, text=True)
            assert report.returncode == 1 and any(victim.name in json.dumps(problem) for problem in json.loads(report.stdout)["problems"])
        victim.write_bytes(body)
        ps.open(place).take(range(len(source)))
        shutil.rmtree(place)
    assert refused >= 1


@pytest.mark.parametrize("hint", ["first", "last"])
@pytest.mark.parametrize("order", [["d", "log"], ["log", "d"]])
def test_what_is_written_between_two_folders_is_right_or_refused(source, order, hint):
    """A copy is correct if the log is copied first, whether the hint is copied before or after the records. Otherwise, `open` fails."""
    place = pathlib.Path(source.uri).with_name("copy")
    place.mkdir()
    hints = pathlib.Path(source.uri) / "log" / "0000000000000000" / "hint"
    rest = [folder.name for folder in pathlib.Path(source.uri).iterdir() if folder.name not in order]
    for folder in [*order, *rest]:
        early = hints.read_bytes()
        shutil.copytree(pathlib.Path(source.uri) / folder, place / folder)
        source.append(batch(100))
        if folder == "log":
            (place / hints.relative_to(source.uri)).write_bytes(early if hint == "first" else hints.read_bytes())
    if order[0] == "log":
        copied = ps.open(place)
        assert copied.take(range(300))["n"].tolist() == np.repeat(np.arange(100), 3).tolist() and not copied.verify()["problems"]
        copied.append(batch(7))
        assert len(ps.open(place)) == 303
        return
    with pytest.raises(ps.CorruptError) as caught:
        ps.open(place)
    assert caught.value.code == "copy-incomplete" and "copy it again" in str(caught.value)
    subprocess.run(["cp", "-rn", f"{source.uri}/.", place], check=False)  # Adds the missing files. GNU cp may exit with status 1.
    assert not ps.open(place).verify()["problems"]


def test_an_older_snapshot_of_a_copy_is_held_to_what_it_rests_on(source):
    old = next(commit.snapshot for commit in source.log() if commit.samples == 150)
    place = copy_of(source)
    assert listings(ps.open(place, snapshot=old)) > 0
    for path in below(place, "d"):
        if path.stat().st_size:
            path.unlink()
    with pytest.raises(ps.CorruptError) as caught:
        ps.open(place, snapshot=old)
    assert caught.value.code == "copy-incomplete" and "50 of its objects" in str(caught.value)


def append_on(place, begun, over):
    ds = ps.open(place)
    while not over.is_set():
        ds.append(batch(0))
        begun.set()
        over.wait(0.01)  # This pause limits the dataset's size.


def test_cp_of_a_live_dataset_is_right_or_refused(tmp_path):
    ds = ps.create(tmp_path / "source", SCHEMA)
    context = multiprocessing.get_context("spawn")
    begun, over = context.Event(), context.Event()
    writers = [context.Process(target=append_on, args=(ds.uri, begun, over)) for _ in range(2)]
    for writer in writers:
        writer.start()
    assert begun.wait(300)
    for turn in range(10):
        place = tmp_path / f"copy-{turn}"
        subprocess.run(["cp", "-r", ds.uri, place], stderr=subprocess.DEVNULL)  # Temporary files may vanish while cp runs.
        try:
            copied = ps.open(place)
        except ps.Error as error:
            assert error.code in ("copy-incomplete", "log-incomplete", "object-not-found"), error
            continue
        assert len(copied) > 0 and not copied.verify()["problems"]
        copied.take(range(len(copied)))
    over.set()
    for writer in writers:
        writer.join(300)
        assert writer.exitcode == 0

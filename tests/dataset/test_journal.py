"""A transaction's journal: changes survive a crash, are repeated exactly once, and damage is noticed."""

import io
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import numpy as np
import penstock as ps
import pytest

pytestmark = pytest.mark.local

SCHEMA = {
    "n": "int64", "e": ps.Tensor((4,), "float32"), "c": ps.Category(), "t": ps.Text(), "r": ps.Tensor((None, 2), "int16"), "m": ps.Image(), "j": ps.Json(),
}  # fmt: skip


@pytest.fixture
def place(tmp_path):
    ds = ps.create(tmp_path / "set", SCHEMA)
    ds.append({"n": range(20), "c": ["old"] * 20})
    return tmp_path


def change(tx, rng, new):
    """Make a random change. Returns the row ids of appended samples."""
    ids = [*range(20), *new]
    picked = rng.choice(ids, 5)
    kind = rng.integers(5)
    if kind == 0:
        count = int(rng.integers(1, 4))
        new += tx.append(
            {
                "n": rng.integers(0, 99, count), "c": [str(rng.choice(["old", "a", "b"])) for _ in range(count)], "t": [None, "x", "y" * 300][:count],
                "r": [rng.integers(0, 9, (row, 2), np.int16) for row in range(count)], "m": [np.full((3, 4, 3), 9, np.uint8)] * count, "j": [{"a": 1}] * count,
            }
        ).tolist()  # fmt: skip
    elif kind == 1:
        tx.update({"e": rng.random((5, 4), np.float32), "c": ["c", None, "a", "old", "d"]}, row_ids=picked)
    elif kind == 2:
        tx.update({"n": tx.take(picked)["n"] + 1}, row_ids=picked)
    elif kind == 3 and len(new) > 2:
        tx.delete(row_ids=[new.pop()])
    else:
        new += [
            row_id
            for row_id in tx.upsert({"t": [f"u{rng.integers(3)}"], "n": [int(rng.integers(99))]}, key="t").tolist()
            if row_id not in ids
        ]


def content(view):
    return [
        {name: np.asarray(value).tolist() if not isinstance(value, bytes | str | dict | None) else value for name, value in sample.items()}
        for sample in view
    ]


@pytest.mark.parametrize("seed", range(6))
def test_a_journal_repeats_what_was_done(place, seed):
    rng, new = np.random.default_rng(seed), []
    ds, path = ps.open(place / "set"), place / "journal"
    tx = ds.transaction("train", journal=path)
    calls = 0
    for _ in range(4):
        for _ in range(5):
            before = path.stat().st_size
            change(tx, rng, new)
            calls += path.stat().st_size > before
        seen = content(tx._view())
        del tx
        tx = ps.open(place / "set", snapshot=ds.snapshot).transaction("train", journal=path)
        assert tx.restored == calls and content(tx._view()) == seen
    tx.commit()
    final = ps.open(place / "set")
    assert content(final) == seen and not path.exists() and not final.verify()["problems"] and len(final.log()) == 3


CHILD = """
import sys, numpy as np, penstock as ps
ds = ps.open(sys.argv[1])
with ds.transaction("train", journal=sys.argv[2]) as tx:
    print("begun", tx.restored, flush=True)
    for step in range(tx.restored, int(sys.argv[3])):
        ids = np.random.default_rng(step).integers(0, 20, 6)  # Row ids may be repeated.
        tx.update({"n": tx.take(ids)["n"] + step}, row_ids=ids)
        print(step, flush=True)
print("committed", flush=True)
"""


def test_no_acknowledged_change_is_lost_by_kill(place):
    expected = np.arange(20)
    steps = 60
    for step in range(steps):
        ids = np.random.default_rng(step).integers(0, 20, 6)
        expected[ids] = expected[ids] + step
    done, kills = 0, 0
    while True:
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, place / "set", place / "journal", str(steps)], stdout=subprocess.PIPE, text=True
        )
        word, restored = child.stdout.readline().split()
        assert word == "begun" and done <= int(restored) <= done + 1, "every acknowledged step is there, and at most one more"
        done = int(restored)
        for line in child.stdout:
            if line == "committed\n":
                break
            done = int(line) + 1
            if kills < 5 and done >= 10 * (kills + 1):
                child.kill()
        child.stdout.close()
        if child.wait() == 0:
            break
        assert child.returncode == -signal.SIGKILL
        kills += 1
    ds = ps.open(place / "set")
    assert kills == 5 and ds["n"][:].tolist() == expected.tolist() and len(ds.log()) == 3 and not (place / "journal").exists()


def test_a_committed_journal_is_not_repeated(place):
    """The process ends after the put of the record, and before the journal is deleted."""
    ds, path = ps.open(place / "set"), place / "journal"
    with ds.transaction("first", journal=path) as tx:
        tx.append({"n": [100]})
        tx._core.note_read(["n"], None)
        saved = path.read_bytes()
        inode = os.open(path, os.O_RDONLY)  # The final content, with the frame of the commit.
    path.write_bytes(os.pread(inode, 1 << 20, 0))
    assert path.stat().st_size > len(saved)
    for _ in range(40):
        ds.append({"n": [5]})
    with ps.open(place / "set", snapshot=ds.log()[-2].snapshot).transaction("second", journal=path) as tx:
        assert tx.restored == 0 and len(tx) == 61, "it begins anew, at the newest snapshot"
        tx.append({"n": [200]})
    assert sorted(ps.open(place / "set")["n"][:].tolist())[-2:] == [100, 200]
    # The same holds without the frame of the commit.
    path.write_bytes(saved)
    late = ps.open(place / "set").transaction("late", journal=path)
    assert late.restored == 0 and len(late) == 62
    late.abort()
    assert not path.exists()


def test_a_record_that_arrives_late_is_not_doubled(place):
    """The next process does not find the commit, but the record arrives before its own."""
    ds, path = ps.open(place / "set"), place / "journal"
    log = place / "set" / "log" / f"{0:016x}"
    with ds.transaction("first", journal=path) as tx:
        tx.append({"n": [100]})
        inode = os.open(path, os.O_RDONLY)
    path.write_bytes(os.pread(inode, 1 << 20, 0))
    [record] = (file for file in log.iterdir() if file.name.startswith("1844") and int(file.name) == (1 << 64) - 1 - 2)
    record.rename(place / "record")
    hint = (log / "hint").read_bytes()
    (log / "hint").unlink()
    second = ps.open(place / "set").transaction("first", journal=path)
    assert second.restored == 1
    (place / "record").rename(record)
    (log / "hint").write_bytes(hint)
    with pytest.raises(ps.ConflictError, match="another process committed this transaction"):
        second.commit()
    with ps.open(place / "set").transaction("third", journal=path) as tx:
        assert tx.restored == 0
    assert (ps.open(place / "set")["n"][:] == 100).sum() == 1


def test_reads_of_the_first_process_count(place):
    path = place / "journal"
    tx = ps.open(place / "set").transaction("train", journal=path)
    tx.update({"n": tx.take([1])["n"] * 2}, row_ids=[0])
    del tx
    other = ps.open(place / "set")
    with other.transaction("changes what was read") as meanwhile:
        meanwhile.update({"n": [50]}, row_ids=[1])
    tx = other.transaction("train", journal=path)
    assert tx.take([0])["n"][0] == 2, "the transaction continues at its own snapshot"
    with pytest.raises(ps.ConflictError, match="row id 1") as caught:
        tx.commit()
    assert str(path) in str(caught.value) and path.exists(), "the changes are not lost"
    for isolation in ("snapshot", "serializable"):
        if isolation == "snapshot":
            with pytest.raises(ps.InvalidInputError, match="isolation"):
                other.transaction(journal=path, isolation=isolation)
        else:
            other.transaction(journal=path).abort()
    assert not path.exists()


def test_what_a_journal_cannot_repeat_is_refused(place):
    ds, path = ps.open(place / "set"), place / "journal"
    stage = ds.stage({"n": [1]})
    np.save(place / "large.npy", np.zeros((50, 2), np.int16))
    with ds.transaction(journal=path) as tx:
        for call in (
            lambda: tx.add(stage), lambda: tx.add_column("x", "int8"), lambda: tx.drop_column("t"), lambda: tx.rename_column("t", "u"),
            lambda: tx.widen_column("e", "float64"), lambda: tx.overwrite({"n": [1]}),
        ):  # fmt: skip
            with pytest.raises(ps.InvalidInputError, match="has a journal"):
                call()
        size = path.stat().st_size
        for call in (
            lambda: tx.update({"n": [1]}, row_ids=[99]),
            lambda: tx.append({"c": [7]}),
            lambda: tx.delete(row_ids=[1 << 50]),
            lambda: tx.append({"m": [b"no image"]}),
        ):
            with pytest.raises(ps.Error):
                call()
        assert path.stat().st_size == size, "a refused call leaves nothing"
        tx.update({"n": [5]}, row_ids=[3])
    assert ds["n"][3] == 5
    old = ps.configure()["memory_bytes"]
    ps.configure(memory_bytes=16 << 20)
    try:
        with ds.transaction(journal=path) as tx:
            with pytest.raises(ps.InvalidInputError, match="in one call"):
                tx.append({"e": np.zeros((4_000_000, 4), np.float32)})
            tx.append({"e": np.zeros((10, 4), np.float32)})
    finally:
        ps.configure(memory_bytes=old)
    assert len(ds) == 30


def test_journals_of_others_and_damaged_ones_are_refused(place):
    ds, path = ps.open(place / "set"), place / "journal"
    tx = ds.transaction(journal=path)
    tx.append({"n": [7], "t": ["a value"]})
    with pytest.raises(ps.UnavailableError, match="another transaction uses it") as caught:
        ps.open(place / "set").transaction(journal=path)
    assert caught.value.code == "journal-in-use"
    tx.append({"n": [8]})
    del tx
    other = ps.create(place / "other", SCHEMA)
    with pytest.raises(ps.InvalidInputError, match="a dataset other than"):
        other.transaction(journal=path)
    branch = ds.create_branch("exp")
    with pytest.raises(ps.InvalidInputError, match="another branch"):
        branch.transaction(journal=path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    tx = ds.transaction(journal=path)
    assert tx.restored == 1, "the last frame was incomplete"
    del tx
    begin = len(whole) // 2
    path.write_bytes(whole[:begin] + bytes([whole[begin] ^ 1]) + whole[begin + 1 :])
    with pytest.raises(ps.CorruptError, match="damaged") as caught:
        ds.transaction(journal=path)
    assert "delete it" in str(caught.value)
    for place_of in range(16, len(whole) - 16, 16):
        path.write_bytes(whole[:place_of] + bytes(16) + whole[place_of + 16 :])
        try:
            tx = ds.transaction(journal=path)
            assert tx.restored == 1, "only the last frame may be unfinished"
            del tx
        except ps.CorruptError:
            assert len(path.read_bytes()) == len(whole), "a damaged journal is left as it is"
    path.write_bytes(b"something else entirely")
    with pytest.raises(ps.InvalidInputError, match="not a journal"):
        ds.transaction(journal=path)
    for wrong in (7, "", "a\0b"):
        with pytest.raises((ps.Error, TypeError, ValueError)):
            ds.transaction(journal=wrong)
    with pytest.raises(ps.NotFoundError, match="create the folder first"):
        ds.transaction(journal=place / "missing" / "journal")
    path.unlink()
    path.write_bytes(b"")  # As left by a process that ended at once.
    with ds.transaction(journal=path) as tx:
        tx.append({"n": [1]})
    assert len(ds) == 21


def test_an_exception_keeps_the_journal_and_abort_deletes_it(place):
    ds, path = ps.open(place / "set"), place / "journal"
    with pytest.raises(RuntimeError), ds.transaction(journal=path) as tx:
        tx.update({"n": [9]}, row_ids=[0])
        raise RuntimeError("a full GPU")
    with ds.transaction(journal=path) as tx:
        assert tx.restored == 1 and tx.take([0])["n"][0] == 9
        tx.abort()
    assert not path.exists() and ds["n"][0] == 0 and len(ds.log()) == 2
    assert not [file for file in pathlib.Path(place / "set" / "d").glob("*")] or ds.verify()["problems"] == []


def test_a_full_disk_is_reported(place):
    import resource

    ds, path = ps.open(place / "set"), place / "journal"
    tx = ds.transaction(journal=path)
    tx.append({"n": [1]})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, before[1]))
    try:
        with pytest.raises(ps.UnavailableError) as caught:
            tx.append({"t": ["x" * 5000]})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.code == "no-space"
    del caught  # Its traceback refers to the transaction.
    tx.append({"n": [2]})
    del tx
    with ds.transaction(journal=path) as tx:
        assert tx.restored == 2
    assert ds["n"][-2:].tolist() == [1, 2]


def test_a_copy_of_a_journal_does_not_commit_twice(place):
    ds, path = ps.open(place / "set"), place / "journal"
    tx = ds.transaction(journal=path)
    tx.append({"n": [100]})
    shutil.copy(path, place / "copy")
    tx.commit()
    with ds.transaction(journal=place / "copy") as tx:
        assert tx.restored == 0 and len(tx) == 21, "the log has the transaction already"
    tx = ds.transaction(journal=path)
    tx.append({"n": [200]})
    shutil.copy(path, place / "copy")
    other = ps.open(place / "set").transaction(journal=place / "copy")
    assert other.restored == 1
    tx.commit()
    with pytest.raises(ps.ConflictError, match="another process committed this transaction"):
        other.commit()
    assert (ps.open(place / "set")["n"][:] >= 100).sum() == 2


def test_a_journal_deletes_its_own_file_only(place, monkeypatch):
    ds = ps.open(place / "set")
    for folder in ("a", "b"):
        (place / folder).mkdir()
    monkeypatch.chdir(place / "a")
    one = ds.transaction(journal="train.journal")
    monkeypatch.chdir(place / "b")
    other = ds.transaction(journal="train.journal")
    other.append({"n": [2]})
    one.append({"n": [1]})
    one.commit()
    assert not (place / "a" / "train.journal").exists() and (place / "b" / "train.journal").exists()
    (place / "b" / "train.journal").rename(place / "b" / "moved")
    later = ps.open(place / "set").transaction(journal="train.journal")
    other.abort()
    assert (place / "b" / "train.journal").exists(), "another journal has the name now"
    later.abort()
    assert not (place / "b" / "train.journal").exists()


def test_other_files_are_not_overwritten(place):
    for content in (b"my key: 42", b"x", b"PNSTKJ2\n"):
        (place / "notes").write_bytes(content)
        with pytest.raises(ps.InvalidInputError, match="not a journal"):
            ps.open(place / "set").transaction(journal=place / "notes")
        assert (place / "notes").read_bytes() == content
    with pytest.raises(ps.InvalidInputError):
        ps.open(place / "set").transaction(journal=place)


def test_reads_take_memory_for_distinct_samples_only(place):
    ds, path = ps.open(place / "set"), place / "journal"
    for isolation, most in (("serializable", 300_000), ("snapshot", 1000)):
        with ds.transaction(journal=path, isolation=isolation) as tx:
            for _ in range(2000):
                tx.take(np.arange(20).repeat(20), columns=["n"])
            size = path.stat().st_size
            tx.update({"n": [1]}, row_ids=[0])
            assert path.stat().st_size - size < most * 8


@pytest.mark.parametrize("more", [False, True])
def test_of_a_journal_and_its_copy_one_commits(place, more):
    ds, path = ps.open(place / "set"), place / "journal"
    tx = ds.transaction(journal=path)
    tx.append({"n": [100]})
    shutil.copy(path, place / "copy")
    if more:
        tx.append({"n": [101]})
    copy = ps.open(place / "set").transaction(journal=place / "copy")
    copy.commit()
    with pytest.raises(ps.ConflictError, match="another process committed this transaction"):
        tx.commit()
    assert ps.open(place / "set")["n"][20:].tolist() == [100] and path.exists(), "what the copy lacks is still in the journal"


def test_bytes_of_sources_are_kept(tmp_path):
    """A source cannot be read again, so the journal has what was read."""
    ds, path, film = ps.create(tmp_path / "set", {"film": ps.Bytes()}), tmp_path / "journal", np.random.default_rng(0).bytes(3 << 20)

    def breaks():
        yield film
        raise ConnectionResetError("the other side hung up")

    (tmp_path / "file").write_bytes(film * 3)
    tx = ds.transaction(journal=path)
    [row_id] = tx.append({"film": [(film[at : at + 99_999] for at in range(0, len(film), 99_999))]})
    with pytest.raises(ConnectionResetError):
        tx.append({"film": [breaks()]})
    tx.update({"film": [io.BytesIO(film[:-1])]}, row_ids=[row_id])
    tx.append({"film": [None, tmp_path / "file"]})
    del tx
    (tmp_path / "file").unlink()
    tx = ps.open(tmp_path / "set", snapshot=ds.snapshot).transaction(journal=path)
    assert tx.restored == 3
    tx.commit()
    assert ds.refresh()["film"][:] == [film[:-1], None, film * 3]

"""What outsiders did to a cache: few file descriptors, deleted and damaged folders, stopped processes, files of others. Reads return the right bytes."""

import fcntl
import json
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import penstock as ps
import pytest
from typer.testing import CliRunner

SAMPLES, LENGTH = 100, 30_000


@pytest.fixture
def local(tmp_path, separate_files):
    """Return the place of a local dataset of 100 samples of 30 kB, and their bytes."""
    random = np.random.default_rng(7)
    blobs = [random.bytes(LENGTH) for _ in range(SAMPLES)]
    ds = ps.create(tmp_path / "set", {"blob": ps.Bytes()})
    ds.append({"blob": blobs})
    ps.configure(memory_bytes=16 << 20)
    yield tmp_path / "set", blobs
    ps.configure(memory_bytes=512 << 20)


def run(*arguments):
    from penstock.cli import app

    result = CliRunner().invoke(app, ["cache", *map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def counts(cache):
    return run("status", "--cache", cache)[0]


def check(ds, blobs, positions=range(SAMPLES)):
    assert ds.take(list(positions))["blob"] == [blobs[position] for position in positions]


def disk_bytes(cache):
    return sum(path.stat().st_blocks * 512 for path in (cache / "stores").rglob("*") if path.is_file())


def test_a_read_of_many_objects_needs_few_files(tmp_path, separate_files):
    ds = ps.create(tmp_path / "set", {"number": "int32", "blob": ps.Bytes()})
    for number in range(200):
        ds.append({"number": [number], "blob": [bytes([number]) * 5000]})
    program = """
import resource, sys, penstock as ps
resource.setrlimit(resource.RLIMIT_NOFILE, (220, 220))
for _ in range(2):
    ds = ps.open(sys.argv[1], cache=sys.argv[2])
    assert ds[:]["blob"] == [bytes([number]) * 5000 for number in range(200)]
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "set"), f"{tmp_path / 'cache'}:50MB"], check=True)
    found = counts(tmp_path / "cache")
    assert found["bypassed_bytes"] == 0 and found["cold_bytes"] >= 200 * 5000
    assert run("verify", "--cache", tmp_path / "cache")[0]["bytes"] == found["bytes"]


@pytest.mark.parametrize("whole", [True, False])
def test_a_deleted_folder_is_made_anew(local, tmp_path, whole):
    uri, blobs = local
    cache = tmp_path / "cache"
    ds = ps.open(uri, cache=f"{cache}:50MB")
    check(ds, blobs, range(50))
    if whole:
        shutil.rmtree(cache)
    else:
        for path in cache.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    check(ds, blobs)
    for _ in ds.loader(batch_size=10, shuffle=True):
        pass
    check(ps.open(uri, cache=f"{cache}:50MB"), blobs)
    assert counts(cache)["budget_bytes"] == 50_000_000


@pytest.mark.parametrize("damage", [b"", b"\xff" * 1024, None])
def test_damaged_counts_are_counted_again(local, tmp_path, damage):
    uri, blobs = local
    cache = tmp_path / "cache"
    check(ps.open(uri, cache=f"{cache}:2MB"), blobs)
    before = counts(cache)["bytes"]
    assert before > 1_000_000
    if damage is None:
        (cache / "usage").unlink()
    else:
        (cache / "usage").write_bytes(damage)
    check(ps.open(uri, cache=f"{cache}:2MB"), blobs)
    found = counts(cache)
    assert found["bytes"] <= found["budget_bytes"] == 2_000_000 and found["bytes"] > 1_000_000
    assert disk_bytes(cache) <= 2_000_000
    assert run("verify", "--cache", cache)[0]["bytes"] == counts(cache)["bytes"]


def test_a_stopped_process_does_not_stop_others(local, tmp_path):
    uri, blobs = local
    cache = tmp_path / "cache"
    ds = ps.open(uri, cache=f"{cache}:50MB")
    check(ds, blobs, range(10))
    # What a process holds that was stopped while it fetched: the locks of all pages.
    with (cache / "fetching").open("r+b") as file:
        lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, (1 << 62) - 1, 0)
        fcntl.fcntl(file, 37, lock)  # F_OFD_SETLK
        for begin in range(10, 60, 10):
            check(ds, blobs, range(begin, begin + 10))
    check(ds, blobs)
    # And the counts.
    with (cache / "usage").open("r+b") as file:
        fcntl.fcntl(file, 37, lock)
        check(ds, blobs)
        check(ps.open(uri, cache=str(cache)), blobs)
    check(ps.open(uri, cache=str(cache)), blobs)


def test_ctrl_c_ends_a_wait_for_another_process(local, tmp_path):
    uri, _ = local
    program = """
import fcntl, os, signal, struct, sys, threading, penstock as ps
ds = ps.open(sys.argv[1], cache=sys.argv[2])
ds[3]
file = open(sys.argv[2].split(":")[0] + "/fetching", "r+b")
fcntl.fcntl(file, 37, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, (1 << 62) - 1, 0))
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    ds[90]
    print("read")
except KeyboardInterrupt:
    print("interrupted")
"""
    found = subprocess.run([sys.executable, "-c", program, str(uri), f"{tmp_path / 'cache'}:50MB"], capture_output=True, text=True)
    assert found.stdout.split() == ["interrupted"], found.stderr


def test_files_of_others_do_not_stop_eviction(local, tmp_path):
    uri, blobs = local
    cache = tmp_path / "cache"
    check(ps.open(uri, cache=f"{cache}:2MB"), blobs)
    (store,) = (cache / "stores").iterdir()
    (store / ".DS_Store").write_text("x")
    (cache / "stores" / "README").write_text("x")
    before = counts(cache)["evicted_bytes"]
    # In other processes, no blocks of earlier reads hide the cache.
    program = (
        "import sys, penstock as ps; ds = ps.open(sys.argv[1], cache=sys.argv[2]); print(sum(len(ds[i]['blob']) for i in range(len(ds))))"
    )
    for _ in range(3):
        read = subprocess.run([sys.executable, "-c", program, str(uri), f"{cache}:2MB"], capture_output=True, text=True, check=True)
        assert read.stdout.split() == [str(sum(map(len, blobs)))]
    found = counts(cache)
    assert found["evicted_bytes"] > before and found["bytes"] > 1_000_000
    # To show a cache does not change its size. To open it with another one does.
    assert counts(f"{cache}:1MB") == found
    ps.open(uri, cache=f"{cache}:1MB")
    assert counts(cache)["bytes"] <= 1_000_000


def test_a_large_read_leaves_others_their_place(local, tmp_path):
    uri, blobs = local
    cache = f"{tmp_path / 'cache'}:4MB"
    small = ps.create(tmp_path / "small", {"blob": ps.Bytes()})
    small.append({"blob": blobs[:10]})
    check(ps.open(tmp_path / "small", cache=cache), blobs, range(10))
    check(ps.open(uri, cache=cache), blobs)
    stores = {pathlib.Path(store["store"]).name: store["bytes"] for store in counts(tmp_path / "cache")["stores"]}
    assert sum(stores.values()) <= 4_000_000 and stores["set"] > 2_000_000


def test_a_folder_is_used_once(local, tmp_path):
    uri, blobs = local
    (tmp_path / "one").mkdir()
    (tmp_path / "two").symlink_to(tmp_path / "one")
    with pytest.raises(ps.InvalidInputError, match="named twice"):
        ps.open(uri, cache=f"{tmp_path / 'one'}:1MB,{tmp_path / 'two'}:1MB")
    check(ps.open(uri, cache=f"{tmp_path / 'one'}:1MB,{tmp_path / 'three'}:3MB"), blobs)
    both = run("status", "--cache", f"{tmp_path / 'one'},{tmp_path / 'three'}")
    assert len(both) == 2 and sum(drive["bytes"] for drive in both) > 0


def test_threads_may_open_a_new_folder_at_once(local, tmp_path):
    uri, blobs = local
    for attempt in range(10):
        cache = f"{tmp_path / f'cache {attempt}'}:5MB"
        with warnings.catch_warnings(record=True) as seen, ThreadPoolExecutor(8) as pool:
            warnings.simplefilter("always")
            for ds in pool.map(lambda _, cache=cache: ps.open(uri, cache=cache), range(8)):
                check(ds, blobs, range(3))
        assert not seen, seen[0].message


def test_a_folder_with_a_line_break_is_cached(local, tmp_path):
    uri, blobs = local
    shutil.copytree(uri, tmp_path / "two\nlines")
    warmed = run("warm", tmp_path / "two\nlines", "--cache", f"{tmp_path / 'cache'}:50MB")
    assert counts(tmp_path / "cache")["bytes"] > SAMPLES * LENGTH and warmed["data_bytes"] >= SAMPLES * LENGTH
    check(ps.open(tmp_path / "two\nlines", cache=f"{tmp_path / 'cache'}"), blobs)
    [store] = counts(tmp_path / "cache")["stores"]
    assert "two lines" in store["store"]
    run("evict", tmp_path / "two\nlines", "--cache", tmp_path / "cache")
    assert counts(tmp_path / "cache")["bytes"] == 0


def test_what_is_deleted_is_not_kept(local, tmp_path):
    """A transaction reads what it has written, and is aborted."""
    ds = ps.open(local[0], cache=f"{tmp_path / 'cache'}:50MB")
    before = counts(tmp_path / "cache")["bytes"]
    with ds.transaction() as tx:
        ids = tx.append({"blob": [bytes(3_000_000)] * 3})
        assert len(tx.take(ids)["blob"]) == 3
        assert counts(tmp_path / "cache")["bytes"] > before + 9_000_000
        tx.abort()
    assert counts(tmp_path / "cache")["bytes"] == before


def test_children_keep_what_they_read_while_a_plan_of_their_parent_runs(local, tmp_path):
    uri, blobs = local
    ds = ps.open(uri, cache=f"{tmp_path / 'cache'}:1MB")
    loader = ds.loader(batch_size=4, shuffle=True, seed=1)
    next(iter(loader))
    other = ps.create(tmp_path / "other", {"blob": ps.Bytes()})
    other.append({"blob": blobs[:20]})
    child = os.fork()
    if child == 0:
        found = ps.open(tmp_path / "other", cache=f"{tmp_path / 'cache two'}:5MB").take(list(range(20)))["blob"] == blobs[:20]
        os._exit(0 if found else 1)
    assert os.waitpid(child, 0)[1] == 0
    loader.close()
    assert counts(tmp_path / "cache two")["bytes"] >= 20 * LENGTH

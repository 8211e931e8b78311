"""Test that `stats` and `verify` count objects that no snapshot refers to: those of a killed writer, and those of a running one."""

import json
import os
import pathlib
import random
import subprocess
import sys

import commands
import numpy as np
import penstock as ps
import pytest
from anything import SEEDS

pytestmark = pytest.mark.local

# Imports rows of 256 KiB and dies after 400 of them.
KILLED = """
import os, sys, numpy, penstock as ps
def rows():
    for number in range(400):
        yield {"v": numpy.full(32768, number), "word": f"word {number}"}
    os._exit(9)
ps.configure(memory_bytes=8 << 20)
ps.importers.import_data(rows(), sys.argv[1], types={"v": ps.Tensor((32768,), "int64"), "word": ps.Category()})
"""


def command(*arguments):
    found = commands.penstock(*arguments)
    assert found.returncode == 0, found.stderr
    return found.stdout


def objects(root):
    return {path: path.stat().st_size for folder in "dprwo" for path in (pathlib.Path(root) / folder).glob("*")}


def test_what_a_killed_import_leaves_is_counted_by_stats_and_verify(root):
    ds = ps.create(root, {"v": ps.Tensor((32768,), "int64"), "word": ps.Category()})
    ds.append({"v": np.zeros((2, 32768), np.int64), "word": ["a", "b"]})
    before = objects(root)
    assert ds.unreferenced() == {"objects": 0, "bytes": 0} and "writer" not in command("stats", root)
    assert subprocess.run([sys.executable, "-c", KILLED, root], check=False).returncode == 9
    left = {path: size for path, size in objects(root).items() if path not in before}
    assert sum(left.values()) > 5 << 20, "the import had written data files"
    found = {"objects": len(left), "bytes": sum(left.values())}
    assert ds.unreferenced() == found and ds.verify()["unreferenced_bytes"] == found["bytes"]
    for verb in ("stats", "verify"):
        text = " ".join(command(verb, root).split())
        assert "not referenced by any snapshot, perhaps from a running or interrupted writer" in text
        told = json.loads(command(verb, root, "--json"))
        assert {name: told[f"unreferenced_{name}"] for name in ("objects", "bytes")} == found
    [ds.append({"v": np.ones((1, 32768), np.int64), "word": ["c"]}) for _ in range(3)]
    assert ds.unreferenced() == found and len(ds) == 5


def test_objects_of_a_running_writer_are_counted_until_it_commits(root):
    ds = ps.create(root, {"v": ps.Tensor((1024,), "int64")})
    before = objects(root)
    tx = ds.transaction()
    ids = tx.append({"v": np.zeros((2000, 1024), np.int64)})
    tx.take(ids[:1])  # Writes the samples so far.
    stage = ds.stage({"v": np.ones((100, 1024), np.int64)})
    own = {path: size for path, size in objects(root).items() if path not in before}
    assert ds.unreferenced() == {"objects": len(own), "bytes": sum(own.values())} and own
    tx.add(stage)
    tx.commit()
    assert ds.unreferenced() == {"objects": 0, "bytes": 0}
    aborted = ds.transaction()
    aborted.append({"v": np.zeros((2000, 1024), np.int64)})
    aborted.abort()
    assert ds.unreferenced() == {"objects": 0, "bytes": 0}, "an aborted transaction deletes its files"


def test_everything_that_snapshots_refer_to_is_found(root):
    """Branches, merges, pages, overlays, sets of row ids, words and fill values; and snapshots of a branch that was deleted."""
    rng = np.random.default_rng(3)
    ds = ps.create(root, {"n": "int64", "word": ps.Category(), "blob": ps.Bytes(), "label": ps.Label(["x"])})
    handles = [ds]
    for step in range(150):
        handle = handles[step % len(handles)]
        with handle.transaction() as tx:
            count = int(rng.integers(1, 60))
            tx.append(
                {"n": range(count), "word": [f"{step} {k % 7}" for k in range(count)], "blob": [b"x" * 999] * count, "label": ["x"] * count}
            )
            if step % 5 == 0:
                ids = handle.take(range(len(handle)), columns=["_row_id"])["_row_id"]
                tx.update({"blob": [b"y" * 700] * len(ids[::2])}, row_ids=ids[::2])
                tx.delete(row_ids=ids[1::4])
            if step % 30 == 7:
                tx.add_column(f"c{step}", ps.Bytes(), fill=b"z" * 9000)
        if step in (20, 60):
            handles.append(ds.create_branch(f"b{step}"))
    side = ds.create_branch("side")
    side.append({"n": [1], "word": ["side"]})
    ds.append({"n": [2], "word": ["main"]})
    ds.merge("side")
    gone = handles.pop()
    ds.delete_branch("b60")
    found = objects(root)
    assert {path.parent.name for path in found} == set("dprwo"), "each kind of object occurs"
    assert ds.unreferenced() == {"objects": 0, "bytes": 0}
    assert len(ps.open(root, snapshot=gone.snapshot)) > 0
    for number, folder in enumerate("dprwo"):
        (pathlib.Path(root) / folder / f"{number:032x}").write_bytes(b"x" * (number + 1))
    assert ds.unreferenced() == {"objects": 5, "bytes": 15}
    (pathlib.Path(root) / "d" / "tmp-1").write_bytes(b"other names are ignored")
    assert ds.unreferenced()["objects"] == 5
    for path in found:
        if path.parent.name == "p":
            os.truncate(path, 20)
    assert ds.unreferenced() is None, "a damaged page may refer to anything"


def step(rng, ds, other, number):
    """Do one thing on a branch. Sets of rows have many gaps, so that they are objects, except for a few. Returns what was done."""
    ids = ds["_row_id"][:]
    scattered = lambda: ids[rng.randrange(3) :: rng.choice([2, 3, 5])]  # noqa: E731
    verb = rng.choice(["append", "one", "many", "alike", "delete", "all", "merge", "pick", "reset", "stage", "column", "keys", "abort"])
    if verb == "merge":
        ds.merge(other.snapshot, on_conflict=rng.choice(["ours", "theirs"]))
    elif verb == "pick":
        commits = list(other.log(4))
        ds.cherry_pick(rng.choice(commits[:-1] or commits).snapshot, on_conflict="theirs") if len(commits) > 1 else None
    elif verb == "reset":
        earlier = list(ds.log(3))[1:]
        ds.reset(rng.choice(earlier).snapshot) if earlier else None
    elif verb == "stage":
        stage = ds.stage({"n": range(500), "word": ["staged"] * 500})
        with ds.transaction() as tx:
            tx.add(stage)
    else:
        tx = ds.transaction(verb)
        if verb in ("append", "all", "abort"):
            new = tx.append({"n": range(200), "word": [f"{number} {k % 5}" for k in range(200)]})
            tx.update({"n": [1] * len(new[::2])}, row_ids=new[::2])
        if verb in ("one", "all", "abort"):
            tx.update({"n": [number] * len(rows := scattered())}, row_ids=rows)
        for _ in range({"many": rng.randint(5, 9), "all": 6}.get(verb, 0)):
            # Values that are written by each call make changes of their own.
            name = rng.choice(["n", "word", "tiled"])
            value = {"n": number, "word": f"new {number}", "tiled": np.full((4, 4), number, np.int16)}[name]
            tx.update({name: [value] * len(rows := scattered())}, row_ids=rows)
        for place in range(rng.randint(5, 9) if verb == "alike" else 0):
            tx.update({"tiled": [np.full((4, 4), place, np.int16)] * len(rows := ids[place::7])}, row_ids=rows)
            tx.take(ids[:1], columns=["tiled"])
        if verb == "keys" and len(np.unique(ds["n"][:])) == len(ids):
            tx.upsert({"n": range(0, 400, 3), "word": ["key"] * len(range(0, 400, 3))}, key="n")
        if verb in ("delete", "all"):
            tx.delete(row_ids=scattered()[: len(ids) // 3])
        if verb == "column":
            tx.add_column(f"c{ds.branch}{number}", ps.Bytes(), fill=b"z" * 9000)
        tx.abort() if verb == "abort" else tx.commit()
    return verb


def test_no_verb_leaves_an_object_that_nothing_refers_to():
    done = set()
    for seed in SEEDS:
        rng = random.Random(seed)
        ds = ps.create(
            f"memory://no-leftovers-{seed}", {"n": "int32", "word": ps.Category(), "tiled": ps.Tensor((4, 4), "int16", tile=(2, 3))}
        )
        ds.append({"n": range(300), "word": ["a"] * 300})
        sides = ds, ds.create_branch("side")
        steps, left = [], {"objects": 0, "bytes": 0}
        for number in range(8):
            place = rng.randrange(2)
            steps.append((step(rng, sides[place], sides[1 - place], number), place))
            found = ds.unreferenced()
            assert found == left, (seed, steps)
            left = found
        done |= {verb for verb, _ in steps}
        ds.delete_branch("side")
        assert ds.unreferenced() == left, (seed, steps)
    assert {"many", "alike", "merge", "pick", "reset"} <= done

"""Pins are durable names for snapshots, stored in the names log. A loader can pin the snapshot that it reads."""

from __future__ import annotations

import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import numpy as np
import penstock as ps
import pytest


@pytest.fixture
def ds(root):
    made = ps.create(root, {"number": "int64"})
    made.append({"number": range(10)})
    return made


def test_a_loader_pins_what_it_reads_and_what_its_state_read(ds):
    assert ds.pins() == {}
    ds.loader(batch_size=2)
    assert ds.pins() == {}
    first = ds.snapshot
    loader = ds.loader(batch_size=2, shuffle=True, pin=True)
    assert ds.pins() == {f"loader-{first}": first}
    state = loader.state_dict(step=2)
    ds.append({"number": range(10)})
    later = ds.loader(batch_size=2, shuffle=True, pin=True)
    ds.loader(batch_size=2, pin=True, rank=1, world_size=2)
    assert set(ds.pins().values()) == {first, ds.snapshot}
    ds.unpin(f"loader-{first}")
    later.load_state_dict(state)
    assert set(ps.open(ds.uri).pins().values()) == {first, ds.snapshot}
    assert next(iter(later))["number"].tolist() == loader.batch_at(2)["number"].tolist()
    for name in list(ds.pins()):
        ds.unpin(name)
    assert ds.pins() == {}
    with pytest.raises(ps.NotFoundError, match="has no pin"):
        ds.unpin("loader-x")


def test_what_is_pinned_already_writes_nothing(ds):
    ds.loader(batch_size=2, pin=True)
    before = ds.stats()
    loader = ds.loader(batch_size=2, pin=True)
    loader.set_epoch(3)
    loader.explain()
    loader.batch_at(1)
    assert {name: ds.stats()[name] - before[name] for name in ("puts", "creates")} == {"puts": 0, "creates": 0}
    assert len(ds.pins()) == 1


def pin_many(uri, worker, count):
    ds = ps.open(uri)
    for number in range(count):
        ds._snapshot.pin(f"{worker}-{number}")
        if number % 3 == 0:
            ds.unpin(f"{worker}-{number}")


@pytest.mark.local
def test_four_processes_pin_at_once_and_none_is_lost(ds):
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=pin_many, args=(ds.uri, worker, 15)) for worker in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert set(ds.pins()) == {f"{worker}-{number}" for worker in range(4) for number in range(15) if number % 3}
    records = sorted(path.name for path in (pathlib.Path(ds.uri) / "refs").iterdir() if path.name != "hint")
    assert [2**64 - 1 - int(name) for name in reversed(records)] == list(range(4 * 20)), "record numbers have no gaps"


@pytest.mark.local
def test_a_killed_writer_leaves_whole_records(tmp_path):
    ds = ps.create(tmp_path / "dataset", {"number": "int64"})
    ds.append({"number": [1]})
    script = textwrap.dedent("""
        import sys, penstock as ps
        ds = ps.open(sys.argv[1])
        for number in range(10**6):
            ds._snapshot.pin(f"{sys.argv[2]}-{number}")
            print(number, flush=True)
    """)
    told = 0
    for turn in range(3):
        process = subprocess.Popen([sys.executable, "-c", script, ds.uri, str(turn)], stdout=subprocess.PIPE, text=True)
        for _ in range(7 + 5 * turn):
            process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
        told += 7 + 5 * turn
        process.communicate()
        assert len(ds.pins()) >= told


@pytest.mark.local
def test_pins_through_lost_replies(proxy, bucket, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    ds = ps.create(bucket, {"number": "int64"})
    ds.append({"number": [1]})
    proxy.faults("lose=300&seed=3")
    try:
        for number in range(12):
            ds._snapshot.pin(f"pin-{number}")
    finally:
        proxy.faults("")
    assert ds.pins() == {f"pin-{number}": ds.snapshot for number in range(12)}


@pytest.mark.local
def test_where_nothing_can_be_written_pins_say_so_and_loaders_work(tmp_path):
    ds = ps.create(tmp_path / "dataset", {"number": "int64"})
    ds.append({"number": range(4)})
    (tmp_path / "dataset" / "refs").write_text("in the way")
    with pytest.raises(ps.Error, match="cannot pin snapshot"):
        ds.loader(batch_size=2, pin=True)
    assert len(list(ds.loader(batch_size=2))) == 2
    (tmp_path / "dataset" / "refs").unlink()
    ds.loader(batch_size=2, pin=True)
    [record] = [path for path in (tmp_path / "dataset" / "refs").iterdir() if path.name != "hint"]
    body = bytearray(record.read_bytes())
    body[20] ^= 1
    record.chmod(0o600)
    record.write_bytes(body)
    with pytest.raises(ps.CorruptError, match="refs/"):
        ps.open(tmp_path / "dataset").pins()
    with pytest.raises(ps.InvalidInputError, match="pin='yes'"):
        ds.loader(batch_size=2, pin="yes")
    np.save(tmp_path / "a.npy", np.ones(3))
    with pytest.raises(ps.UnsupportedError, match="they have no snapshots"):
        ps.files(tmp_path / "a.npy").loader(batch_size=1, pin=True)

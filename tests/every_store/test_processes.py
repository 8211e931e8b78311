"""Test pickle, fork (even while another thread is inside `take`), spawn, threads and DataLoader workers."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import types
import unittest.mock
import uuid

import numpy as np
import penstock as ps
import pytest
import torch
from numpy.random import default_rng  # This import is eager, so that no thread imports the module during a fork.
from torch.utils.data import DataLoader

COUNT = 2000


@pytest.fixture
def ds(root):
    ds = ps.create(root, {"n": "int64", "t": ps.Text(codec="lz4"), "v": ps.Tensor((300,), "float32"), "k": ps.Category()})
    for start in range(0, COUNT, 500):
        n = np.arange(start, start + 500)
        ds.append({"n": n, "t": [f"t{i}" for i in n], "v": np.repeat(n[:, None], 300, 1).astype("f4"), "k": [f"k{i % 9}" for i in n]})
    return ps.open(root)


def check(ds, seed):
    positions = default_rng(seed).integers(0, len(ds), 64)
    batch = ds.take(positions)
    assert (
        np.array_equal(batch["n"], positions) and batch["t"] == [f"t{i}" for i in positions] and np.array_equal(batch["v"][:, 7], positions)
    )
    assert np.array_equal(batch["k"], positions % 9)


def test_pickle_carries_place_snapshot_and_selection_only(ds, root):
    view = ds.select([5, 3])
    body = pickle.dumps(ds)
    assert len(body) < 400
    ps.open(root).append({"n": [7]})
    again, narrowed = pickle.loads(body), pickle.loads(pickle.dumps(view))
    assert type(again) is ps.Dataset and len(again) == COUNT and again.snapshot == ds.snapshot
    assert type(narrowed) is ps.View and narrowed[:]["n"].tolist() == [5, 3]
    memory = ps.create(f"memory://{uuid.uuid4()}", {"n": "int32"})
    with pytest.raises(ps.UnsupportedError, match="one process"):
        pickle.dumps(memory)
    error = pickle.loads(pickle.dumps(ps.CorruptError("m", code="block-checksum", hint="h", rows=[3])))
    assert (error.code, error.hint, error.rows) == ("block-checksum", "h", [3])


def in_child(work):
    """Run `work` in a forked child and check that it exits with 0. An alarm kills a child that hangs, so the test fails."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.alarm(30)
            work()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert status == 0


@pytest.mark.long
def test_fork_while_other_threads_are_inside_take(ds):
    stop = threading.Event()
    shared = [ds]

    def reader(seed):
        while not stop.is_set():
            ps.open(ds.uri) if seed % 2 else None
            check(shared[0], seed)

    threads = [threading.Thread(target=reader, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    try:
        for seed in range(40):
            shared[0] = ps.open(
                ds.uri, snapshot=ds.snapshot
            )  # The newest listing may be stale. The first take of a handle fills its caches, so the threads and the child do so concurrently.
            in_child(lambda seed=seed: check(shared[0], seed))
    finally:
        stop.set()
        for thread in threads:
            thread.join()


FORK_IN_FIRST_TAKE = """
import os, signal, sys, threading
import penstock as ps
from penstock.values import dtypes

ds, plain = ps.open(sys.argv[1]), dtypes.numpy_dtype
entered, forked = threading.Event(), threading.Event()

def slow(name):
    if threading.current_thread() is not threading.main_thread():
        entered.set()
        forked.wait(300)
    return plain(name)

dtypes.numpy_dtype = slow
thread = threading.Thread(target=ds.take, args=([1],))
thread.start()
assert entered.wait(300)
pid = os.fork()
if pid == 0:
    signal.alarm(30)
    os._exit(0 if ds.take([1, 2])["n"].tolist() == [1, 2] else 1)
forked.set()
assert os.waitpid(pid, 0)[1] == 0
thread.join()
"""


@pytest.mark.local
def test_fork_while_the_first_take_of_the_process_is_under_way(ds, root):
    subprocess.run([sys.executable, "-c", FORK_IN_FIRST_TAKE, str(root)], check=True, timeout=300)


WHEN_IMPORTED = """
import importlib.machinery, sys

def when_imported(wanted, act):
    class Finder:
        @staticmethod
        def find_spec(name, path, target=None):
            if name == wanted:
                spec = importlib.machinery.PathFinder.find_spec(name, path, target)
                run = spec.loader.exec_module
                spec.loader.exec_module = lambda module: (act(), run(module))
                return spec
    sys.meta_path.insert(0, Finder)
"""

FORK_IN_IMPORT = """
import importlib, os, signal, threading
import penstock as ps

entered, forking = threading.Event(), threading.Event()

def slowly():
    entered.set()
    forking.wait(300)

when_imported("penstock.frameworks.arrow", slowly)
os.register_at_fork(before=forking.set)  # Runs before the hook of penstock, which was registered earlier.

def imports():
    import penstock.frameworks.arrow
    ps.importers

thread = threading.Thread(target=imports)
thread.start()
assert entered.wait(300)
pid = os.fork()
if pid == 0:
    signal.alarm(30)
    import penstock.frameworks.arrow
    os._exit(0 if ps.importers.import_data else 1)
assert os.waitpid(pid, 0)[1] == 0
thread.join()
"""

FORK_WHEN_LOGGING_CAME_LATER = """
import os, signal, sys, threading
import penstock as ps
import logging

entered, forking = threading.Event(), threading.Event()

def slowly():
    entered.set()
    forking.wait(300)
    logging.getLogger("imported").setLevel(logging.INFO)  # Takes the lock that logging's own fork hook takes.

when_imported(sys.argv[1], slowly)
os.register_at_fork(before=forking.set)
thread = threading.Thread(target=lambda: __import__(sys.argv[1]))
thread.start()
assert entered.wait(300)
pid = os.fork()
if pid == 0:
    signal.alarm(30)
    __import__(sys.argv[1])
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
thread.join()
"""

FORK_BY_IMPORTED = """
import os, sys, threading
import penstock as ps

def fork():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    forked.append(pid)

def in_thread():
    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()

forked, where = [], {"here": fork, "thread": in_thread}[sys.argv[1]]
ps._IMPORT_SECONDS = 0.1 if sys.argv[1] == "thread" else 1000
when_imported("penstock.importers.run", where)
ps.importers
assert len(forked) == 1
"""


@pytest.mark.local
def test_fork_while_another_thread_imports_a_leaf_module():
    subprocess.run([sys.executable, "-c", WHEN_IMPORTED + FORK_IN_IMPORT], check=True, timeout=300)


@pytest.mark.local
@pytest.mark.parametrize("module", ["penstock.frameworks.arrow", "pandas"])
def test_fork_while_another_thread_imports_what_needs_the_lock_of_logging(module):
    subprocess.run([sys.executable, "-c", WHEN_IMPORTED + FORK_WHEN_LOGGING_CAME_LATER, module], check=True, timeout=300)


DAEMONS = """
import sys, threading, time
import penstock as ps

ds = ps.open(sys.argv[1], io=sys.argv[2])

def read():
    while True:
        ds.take(range(0, len(ds), 3))
        next(ds.scan(batch_size=50))

for _ in range(4):
    threading.Thread(target=read, daemon=True).start()
time.sleep(0.2)  # The threads are somewhere in their loops when the interpreter ends.
"""


@pytest.mark.long
@pytest.mark.local
@pytest.mark.parametrize("io", ["mapped", "buffered", "direct"])
def test_daemon_threads_do_not_disturb_the_end_of_the_interpreter(ds, root, io):
    for _ in range(6):
        subprocess.run([sys.executable, "-c", DAEMONS, str(root), io], check=True, timeout=300)


CALLBACKS = """
import contextlib, sys, threading, time
import penstock as ps

class Slow:
    shape, dtype = (1 << 20,), "float32"
    def __getitem__(self, key):
        time.sleep(0.01)  # Most of the time, a thread is in this callback.
        raise ValueError("no value")

ds = ps.open(sys.argv[1])
big = ps.create("memory://big", {"v": ps.Tensor((1 << 20,), "float32", tile=(1 << 10,))})

def verify():
    while True:
        ds.verify(progress=lambda files, size: time.sleep(0.01))  # As above.

def append():
    while True:
        with contextlib.suppress(ValueError):
            big.append({"v": [Slow()]})

for target in (verify, verify, append):
    threading.Thread(target=target, daemon=True).start()
time.sleep(0.2)  # The threads are in their callbacks when the interpreter ends.
"""


@pytest.mark.local
def test_callbacks_in_daemon_threads_do_not_disturb_the_end_of_the_interpreter(ds, root):
    for _ in range(6):
        subprocess.run([sys.executable, "-c", CALLBACKS, str(root)], check=True, timeout=300)


THREADS_AT_EXIT = """
import atexit, sys, threading

@atexit.register  # Runs after the exit handlers of penstock, which is imported later.
def last():
    thread = threading.Thread(target=lambda: print(ds.take([1])["n"].tolist()))
    thread.start()
    thread.join()

import penstock as ps
ds = ps.open(sys.argv[1])
"""


@pytest.mark.local
def test_a_thread_that_an_exit_handler_starts_can_read(ds, root):
    run = subprocess.run([sys.executable, "-c", THREADS_AT_EXIT, str(root)], check=True, timeout=300, capture_output=True, text=True)
    assert run.stdout == "[1]\n"


@pytest.mark.local
def test_a_fork_does_not_wait_for_a_mocked_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.mocked", types.SimpleNamespace(__spec__=unittest.mock.MagicMock()))
    assert not ps._imports_elsewhere()


JOINED_AT_EXIT = """
import atexit, sys, threading
import penstock as ps

stop = threading.Event()

@atexit.register  # Runs after the exit handler of penstock's core, which is imported later.
def last():
    stop.set()
    reader.join()
    print("joined")

ds = ps.open(sys.argv[1])

def read():
    while not stop.is_set():
        ds.take([1])
    for _ in range(100):
        ds.take([1])

reader = threading.Thread(target=read, daemon=True)
reader.start()
"""


@pytest.mark.local
def test_an_exit_handler_may_wait_for_a_daemon_thread(ds, root):
    run = subprocess.run([sys.executable, "-c", JOINED_AT_EXIT, str(root)], check=True, timeout=300, capture_output=True, text=True)
    assert run.stdout == "joined\n"


SCAN_AT_EXIT = """
import atexit, sys
import penstock as ps

ds = ps.open(sys.argv[1], io="buffered")

@atexit.register  # Runs after the exit handler that the first scan registers.
def last():
    global scan
    scan = ds.scan(batch_size=10)
    print(next(scan).num_rows)

next(ds.scan(batch_size=10))
"""


@pytest.mark.local
def test_a_scan_that_begins_in_an_exit_handler_ends(ds, root):
    run = subprocess.run([sys.executable, "-c", SCAN_AT_EXIT, str(root)], check=True, timeout=300, capture_output=True, text=True)
    assert run.stdout == "10\n"


@pytest.mark.local
@pytest.mark.parametrize("where", ["here", "thread"])
def test_an_import_that_forks_does_not_wait_for_itself(where):
    subprocess.run([sys.executable, "-c", WHEN_IMPORTED + FORK_BY_IMPORTED, where], check=True, timeout=300)


def test_fork_before_and_after_the_first_read_and_write_in_the_child(ds, root):
    fresh = ps.open(root)
    in_child(lambda: check(fresh, 1))
    check(fresh, 1)
    in_child(lambda: check(fresh, 2))
    in_child(lambda: ps.open(root).append({"n": [1]}))
    assert fresh.refresh()["n"][COUNT:].tolist() == [1]


@pytest.mark.local
def test_datasets_in_memory_and_files_in_place_live_on_in_a_forked_child(tmp_path):
    for n in range(4):
        np.save(tmp_path / f"{n}.npy", np.full(5, n))
    memory = ps.create("memory://forked", {"n": "int64"})
    memory.append({"n": np.arange(100)})
    files, stop = ps.files(tmp_path / "*.npy"), threading.Event()

    def work():
        while not stop.is_set():
            ps.open("memory://forked").take([3])
            memory.append({"n": [1]})

    def child():
        assert ps.open("memory://forked").take([99])["n"] == [99]
        with files.loader(batch_size=4, shuffle=False) as loader:
            (batch,) = loader
        assert sorted(batch["array"][:, 0].tolist()) == [0, 1, 2, 3]

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(20):
            in_child(child)
    finally:
        stop.set()
        thread.join()


def test_threads_share_a_handle_and_release_the_gil(ds):
    errors = []

    def work(seed):
        try:
            for number in range(30):
                check(ds, seed * 100 + number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def spawned(ds, queue):
    check(ds, 5)
    queue.put(len(ds))


@pytest.mark.long
def test_spawn(ds):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=spawned, args=(ds, queue))
    child.start()
    assert queue.get(timeout=300) == COUNT
    child.join()


@pytest.mark.long
@pytest.mark.parametrize(("workers", "context"), [(0, None), (2, "fork"), (2, "spawn")])
@pytest.mark.parametrize("collate", [ps.torch.collate, None])
def test_data_loader(ds, workers, context, collate):
    loader = DataLoader(
        ds.torch(["n", "v", "t"]), batch_size=128, shuffle=True, num_workers=workers, multiprocessing_context=context, collate_fn=collate
    )
    seen = []
    for batch in loader:
        assert batch["v"].shape[1:] == (300,) and batch["v"].dtype == torch.float32 and torch.equal(batch["v"][:, 0].long(), batch["n"])
        assert list(batch["t"]) == [f"t{i}" for i in batch["n"].tolist()]
        seen += batch["n"].tolist()
    assert sorted(seen) == list(range(COUNT))


def test_collate_of_every_kind(root):
    ds = ps.create(root, {
        "even": ps.Image(), "odd": ps.Image(), "boxes": ps.Boxes(of="even"), "label": ps.Label(["a"]), "time": "timestamp", "half": "bfloat16", "json": ps.Json(), "maybe": "int32",
    })  # fmt: skip
    ds.append({
        "even": [np.full((4, 6, 3), i, np.uint8) for i in range(3)], "odd": [np.zeros((4 + i, 6, 3), np.uint8) for i in range(3)],
        "boxes": [np.ones((i, 4), "f4") for i in range(3)], "label": ["a"] * 3, "time": np.arange(3), "half": [0.5] * 3, "json": [{}] * 3, "maybe": [1, None, 2],
    })  # fmt: skip
    whole = ds.torch(["even", "odd", "boxes", "label", "time", "half", "json"])
    for samples in (whole.__getitems__([0, 1, 2]), [whole[0], whole[1], whole[2]]):
        batch = ps.torch.collate(samples, ragged=["odd"])
        assert (
            batch["even"].shape == (3, 3, 4, 6)
            and batch["even"].is_contiguous(memory_format=torch.channels_last)
            and batch["even"][2].eq(2).all()
        )
        assert [image.shape for image in batch["odd"]] == [(3, 4, 6), (3, 5, 6), (3, 6, 6)] and [b.shape for b in batch["boxes"]] == [
            (0, 4),
            (1, 4),
            (2, 4),
        ]
        assert (
            batch["label"].dtype == torch.int64
            and batch["time"].tolist() == [0, 1, 2]
            and batch["half"].dtype == torch.bfloat16
            and batch["json"] == [{}, {}, {}]
        )
    with pytest.raises(ps.InvalidInputError, match="`maybe`"):
        ps.torch.collate(ds.torch(["maybe"]).__getitems__([0, 1]))
    with pytest.raises(ps.NotFoundError):
        ds.torch(["nope"])

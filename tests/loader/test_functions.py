"""Loaders with Python functions, and loader errors and statistics."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import sys
import threading
import time

import numpy as np
import penstock as ps
import pytest
from penstock import transforms as T
from waiting import until

PLACES = itertools.count()


@pytest.fixture
def ds(tmp_path):
    made = ps.create(tmp_path / "dataset", {"n": "int64", "x": ps.Tensor((8,), "float32")})
    made.append({"n": range(100), "x": np.ones((100, 8), np.float32)})
    return made


# Python workers need functions defined at module level.
def same(sample, rng):
    return sample


def slow(sample, rng):
    time.sleep(0.002)  # The statistics report the time spent in this slow function.
    return sample


def forks_and_exits(sample, rng):
    if os.fork() == 0:
        sys.exit(0)
    return sample


def forks_and_returns(sample, rng):
    os.fork()
    return sample


class IteratesWithWorkers:
    """Reads another loader, which has a worker of its own, for each sample."""

    def __init__(self, uri):
        self.uri = uri

    def __call__(self, sample):
        inner = ps.open(self.uri).loader(batch_size=1, columns=["n"], transform=[same], python_workers=1)
        return {"n": sample["n"] + next(iter(inner.stream(1)))["n"][0]}


def raises_end_of_file(sample, rng):
    raise EOFError("of the user")


def raises_reset(sample, rng):
    raise ConnectionResetError("of the user")


def stops(sample, rng):
    raise StopIteration("of the user")


@pytest.mark.parametrize("function", [forks_and_exits, forks_and_returns])
def test_children_that_a_function_forks_do_not_disturb_its_worker(ds, function):
    loader = ds.select(range(10)).loader(batch_size=5, shuffle=False, columns=["n"], transform=[function], python_workers=1)
    assert [batch["n"].tolist() for batch in loader.stream(1)] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_a_worker_may_have_workers(ds):
    loader = ds.select(range(4)).loader(batch_size=2, transform=[IteratesWithWorkers(ds.uri)], python_workers=1)
    assert [batch["n"].tolist() for batch in loader.stream(1)] == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("function", "kind"), [(raises_end_of_file, EOFError), (raises_reset, ConnectionResetError), (stops, RuntimeError)]
)
@pytest.mark.parametrize("workers", [0, 1])
def test_all_exceptions_of_functions_come_through(ds, function, kind, workers):
    with pytest.raises(kind) as caught:
        list(ds.loader(batch_size=5, transform=[function], python_workers=workers).stream(1))
    assert "for sample 0 in step 0" in str(caught.value) + "".join(getattr(caught.value, "__notes__", []))


def test_functions_of_batches_say_which_step(ds):
    def late(batch):
        if batch["n"][0] == 15:
            raise ValueError("fifteen")
        return batch

    with pytest.raises(ValueError, match="fifteen") as caught:
        list(ds.loader(batch_size=5, transform=[T.PerBatch(late)]))
    assert "for step 3" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_fork_does_not_take_its_parents_batches(ds, workers):
    loader = ds.loader(batch_size=5, columns=["n", "_step"], python_workers=workers, transform=[same])
    batches = iter(loader)
    next(batches)
    child = os.fork()
    if child == 0:
        try:
            next(batches)
        except ps.ClosedError as error:
            os._exit(7 if "fork" in str(error) else 8)
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert [int(next(batches)["_step"][0]) for _ in range(3)] == [1, 2, 3]
    loader.close()


class Interrupting:
    """A pipe whose next `recv` is interrupted, before or after the message was taken."""

    def __init__(self, pipe, taken):
        self.pipe, self.taken = pipe, taken

    def recv(self):
        if self.taken:
            self.pipe.recv()
        raise KeyboardInterrupt

    def __getattr__(self, name):
        return getattr(self.pipe, name)


@pytest.mark.parametrize("taken", [False, True])
def test_an_interrupt_while_a_batch_arrives_loses_no_batch(ds, taken):
    options = {"batch_size": 25, "shuffle": True, "columns": ["n", "_step"]}
    expected = [batch["n"].tolist() for batch in ds.loader(**options).stream(2)]
    with ds.loader(**options, transform=[T.PerBatch(dict)], python_workers=1) as loader:
        assert [batch["n"].tolist() for batch in loader] == expected[:4]
        process, pipe = loader._pool.workers[0]
        loader._pool.workers[0] = process, Interrupting(pipe, taken)
        with pytest.raises(KeyboardInterrupt):
            next(iter(loader))
        assert [batch["n"].tolist() for batch in loader] == expected[4:]


def taking_a_batch(loader):
    """Start a thread that takes one batch. Return it, and a list that will contain what it raised."""
    raised = []

    def take():
        try:
            next(iter(loader))
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=take)
    thread.start()
    return thread, raised


def with_bytes(batch):
    return {"bytes": [bytes(5_000_000)]}  # Unlike arrays, these are sent through the pipe, in many parts.


def test_close_in_another_thread_while_a_batch_arrives(tmp_path, ds):
    loader = ds.loader(batch_size=50, columns=["n"], transform=[T.PerBatch(with_bytes)], python_workers=1)
    loader._start(loader._position, 2)
    worker, pipe = loader._pool.workers[0]
    assert pipe.poll(60)
    os.kill(worker.pid, signal.SIGSTOP)  # Only a part of the batch is in the pipe.
    taking, raised = taking_a_batch(loader)
    until(lambda: not pipe.poll(0), "the consumer has read that part")
    closing = threading.Thread(target=loader.close)
    closing.start()
    until(lambda: loader._pool is None, "the loader is being closed")
    time.sleep(0.2)  # It waits 2 s for the worker. A descriptor that it closes too early is free now.
    tmp_path.joinpath("other").write_bytes(b"x" * 1_000_000)
    others = [os.open(tmp_path / "other", os.O_RDONLY) for _ in range(100)]
    os.kill(worker.pid, signal.SIGCONT)
    for thread in (taking, closing):
        thread.join(300)
    assert [os.lseek(other, 0, os.SEEK_CUR) for other in others] == [0] * 100
    for other in others:
        os.close(other)
    assert [type(error) for error in raised] == [ps.ClosedError]


@pytest.mark.parametrize("move", ["set_epoch", "load_state_dict", "close"])
def test_a_batch_that_another_thread_overtakes_is_not_counted(ds, move):
    making, moved = threading.Event(), threading.Event()

    def waits(batch):
        making.set()
        assert moved.wait(300)
        return batch

    options = {"batch_size": 10, "shuffle": True, "seed": 1, "columns": ["n"]}
    epochs = [batch["n"].tolist() for batch in ds.loader(**options).stream(4)]
    loader = ds.loader(**options, transform=[T.PerBatch(waits)])
    thread, raised = taking_a_batch(loader)
    assert making.wait(300)
    arguments = {"set_epoch": [3], "load_state_dict": [loader.state_dict(step=30)], "close": []}
    getattr(loader, move)(*arguments[move])
    moved.set()
    thread.join(300)
    assert [type(error) for error in raised] == [ps.ClosedError] and "was closed, or given another epoch" in str(raised[0])
    assert loader.state_dict()["draw"] == 0
    if move != "close":
        assert [batch["n"].tolist() for batch in loader] == epochs[30:]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iteration_that_begins_while_a_state_is_loaded_does_not_continue_from_the_old_one(ds, monkeypatch, workers):
    options = {"batch_size": 10, "shuffle": True, "seed": 1, "columns": ["n"]}
    epochs = [batch["n"].tolist() for batch in ds.loader(**options).stream(4)]
    loader, begun = ds.loader(**options, transform=[T.PerBatch(dict)], python_workers=workers), []
    close, state = loader.close, loader.state_dict(step=30)

    def closed():
        close()
        monkeypatch.undo()
        begun.append(iter(loader))  # As another thread may do while this one waits for workers to end.
        next(begun[0])

    monkeypatch.setattr(loader, "close", closed)
    loader.load_state_dict(state)
    assert loader.state_dict() == state
    with pytest.raises(ps.ClosedError, match="was closed, or given another epoch"):
        next(begun[0])
    assert [batch["n"].tolist() for batch in loader] == epochs[30:]
    loader.close()


def with_a_default_timeout(batch):
    socket.setdefaulttimeout(1)
    return {"n": batch["n"], "zeros": np.zeros(100_000)}


def test_a_default_timeout_of_sockets_does_not_matter(ds):
    socket.setdefaulttimeout(1)
    try:
        loader = ds.loader(batch_size=10, columns=["n"], shuffle=False, transform=[T.PerBatch(with_a_default_timeout)], python_workers=2)
        assert [batch["n"].tolist() for batch in loader.stream(2)] == [list(range(n, n + 10)) for n in range(0, 100, 10)] * 2
    finally:
        socket.setdefaulttimeout(None)


def test_close_while_workers_start_stops_them(ds, monkeypatch):
    from penstock.loader import workers

    started = []

    class Closed(workers.Pool):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            started.extend(process for process, _ in self.workers)
            thread = threading.Thread(target=loader.close)
            thread.start()
            thread.join(300)

    monkeypatch.setattr(workers, "Pool", Closed)
    loader = ds.loader(batch_size=50, columns=["n"], transform=[T.PerBatch(dict)], python_workers=2)
    with pytest.raises(ps.ClosedError, match="was closed"):
        next(iter(loader))
    assert [process.is_alive() for process in started] == [False, False]


def sleeps(batch):
    time.sleep(600)  # Only a kill ends this worker in time.


def test_workers_that_do_not_end_are_killed_together(ds, monkeypatch):
    waited = []
    loader = ds.loader(batch_size=10, columns=["n"], transform=[T.PerBatch(sleeps)], python_workers=4)
    loader._start(loader._position, 10)
    for process, _ in loader._pool.workers:
        monkeypatch.setattr(process, "join", lambda seconds=None, join=process.join: (waited.append(seconds or 0), join(seconds)))
    loader.close()
    assert len([seconds for seconds in waited if seconds > 0]) == 1 and sum(waited) <= 2


def with_an_empty_array(batch):
    return {"filled": np.zeros(100_000), "empty": np.zeros(0)}


def test_a_mapped_batch_may_end_with_an_empty_array(ds):
    loader = ds.loader(batch_size=50, columns=["n"], transform=[T.PerBatch(with_an_empty_array)], python_workers=1)
    assert [(batch["filled"].shape, batch["empty"].shape) for batch in loader.stream(1)] == [((100_000,), (0,))] * 2


def test_masks_of_a_functions_arrays_are_kept(ds):
    def masked(sample, rng):
        return {"v": np.ma.MaskedArray([1, -999], [False, sample["n"] % 2 == 1])}

    options = {"batch_size": 4, "shuffle": False, "transform": [masked]}
    batch = ds.loader(**options).batch_at(0)
    assert batch["v"].mask.tolist() == [[False, False], [False, True]] * 2
    for output in ("torch", "jax"):
        with pytest.raises(ps.InvalidInputError, match=r"cannot make a tensor of `v`.*masked"):
            next(iter(ds.loader(**options, output=output)))
    even = ds.select(range(0, 100, 2)).loader(**options, output="torch").batch_at(0)
    assert even["v"].tolist() == [[1, -999]] * 4, "nothing is masked"


def test_masks_of_ragged_arrays_are_kept(tmp_path):
    ds = ps.create(tmp_path / "ragged", {"r": ps.Tensor((None,), "int64")})
    ds.append({"r": [np.arange(2), np.arange(3)]})

    def masked(sample, rng):
        return {"r": np.ma.MaskedArray(sample["r"], sample["r"] == 1)}

    options = {"batch_size": 2, "shuffle": False, "transform": [masked]}
    batch = ds.loader(**options).batch_at(0)
    assert [values.mask.tolist() for values in batch["r"]] == [[False, True], [False, True, False]]
    with pytest.raises(ps.InvalidInputError, match="masked values"):
        ds.loader(**options, output="torch").batch_at(0)


def unpickles_as_text(sample, rng):
    class Odd(Exception):
        def __reduce__(self):
            return str, ("only text",)

    raise Odd("odd")


def test_an_exception_that_unpickles_as_something_else_is_reported(ds):
    with pytest.raises(ps.InvalidInputError, match=r"(?s)cannot be pickled.*Odd: odd"):
        list(ds.loader(batch_size=50, transform=[unpickles_as_text], python_workers=1).stream(1))


def test_ctrl_c_while_workers_start_does_not_end_them(ds):
    """A terminal sends SIGINT to the workers too. Here only they get it, as early as possible."""
    with ds.loader(batch_size=50, columns=["n"], transform=[T.PerBatch(dict)], python_workers=2) as loader:
        loader._start(loader._position, 2)
        for process, _ in loader._pool.workers:
            os.kill(process.pid, signal.SIGINT)
        assert len(list(loader.stream(1))) == 2


def test_an_interrupt_while_workers_start_leaves_ctrl_c_working(ds, monkeypatch):
    mask = signal.pthread_sigmask

    def interrupted(how, signals):
        before = mask(how, signals)
        if signals and how == signal.SIG_BLOCK:
            raise KeyboardInterrupt  # Python handles a pending signal in this call, after it has blocked the signal.
        return before

    monkeypatch.setattr(signal, "pthread_sigmask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(iter(ds.loader(batch_size=50, columns=["n"], transform=[T.PerBatch(dict)], python_workers=1)))
    assert signal.SIGINT not in mask(signal.SIG_BLOCK, ())


def test_stats_include_workers(tmp_path, ds):
    there = ps.open(ds.uri, io="buffered")
    loader = there.loader(batch_size=5, python_workers=2, transform=[slow])
    list(loader.stream(1))
    stats = loader.stats(step_seconds=1e-9)
    assert stats["function_seconds"] > 0 and stats["stages"]["gather"] > 0 and stats["peak_bytes"] > 0
    assert stats["read"]["range_bytes"] >= 100 * 40
    assert stats["accelerator_utilisation"] < 1 == loader.stats(step_seconds=1e9)["accelerator_utilisation"]
    again = loader.stats()
    loader.set_epoch(0)
    assert loader.stats()["stages"] == again["stages"], "counts from closed workers are kept"


def test_utilisation_counts_what_was_waited_for(proxy, bucket, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    made = ps.create(bucket, {"body": ps.Bytes()})
    made.append({"body": [bytes(100_000)] * 200})
    proxy.faults("delay_ms=50")
    try:
        loader = ps.open(bucket).loader(batch_size=2, columns=["body"], memory_bytes=1 << 20)
        for _ in loader.stream(1):
            pass
        stats = loader.stats(step_seconds=1e-9)
    finally:
        proxy.faults("")
    assert stats["stall"] > 0.5 and stats["accelerator_utilisation"] < 0.5


def test_columns_may_be_an_iterator(ds):
    assert list(next(iter(ds.loader(batch_size=4, columns=(name for name in ["n"]))))) == ["n"]


def test_windows_in_mixtures_are_explained_as_they_are(ds):
    there = ps.open(ds.uri, io="buffered")
    alone = there.loader(global_batch_size=4, shuffle=ps.Window(bytes=4000), rank=0, world_size=2).explain()
    mixed = ps.mix({"a": there.select(range(50)), "b": there.select(range(50, 100))})
    both = mixed.loader(global_batch_size=4, shuffle=ps.Window(bytes=4000), rank=0, world_size=2).explain()
    whole, half = (next(line for line in text.splitlines() if line.startswith("bytes")) for text in (both, alone))
    assert whole.split("about ")[1].split(" per epoch")[0] == whole.split("up to ")[1].split(" per rank")[0]
    assert half.split("about ")[1].split(" per epoch")[0] != half.split("up to ")[1].split(" per rank")[0]


def test_the_bytes_of_a_mixture_are_those_of_its_draws(tmp_path):
    small, large = (ps.create(tmp_path / name, {"x": ps.Tensor((None,), "uint8")}) for name in "ab")
    small.append({"x": [np.zeros(1024, np.uint8)] * 400})
    large.append({"x": [np.zeros(3072, np.uint8)] * 400})
    told = ps.mix({"a": (small, 3.0), "b": (large, 1.0)}, epoch_samples=400).loader(batch_size=4).explain()
    assert next(line for line in told.splitlines() if line.startswith("bytes")).split("about ")[1].startswith("600 KiB per epoch")


def test_a_crop_that_cannot_fit_is_refused_at_once():
    made = ps.create(f"memory://functions-{next(PLACES)}", {"x": ps.Tensor((4, 4, 3), "uint8")})
    made.append({"x": np.zeros((2, 4, 4, 3), np.uint8)})
    with pytest.raises(ps.InvalidInputError, match="fewer than 9 elements in dimension 0; see pad_if_needed"):
        made.loader(batch_size=2, transform=[T.RandomCrop((9, 9), on="x")])
    for crop in (T.RandomCrop((9, 9), pad_if_needed=True, on="x"), T.RandomCrop((6, 6), padding=1, on="x"), T.CenterCrop((9, 9), on="x")):
        assert next(iter(made.loader(batch_size=2, transform=[crop])))["x"].shape[0] == 2


def test_values_of_several_kinds_are_refused(ds):
    for function in (lambda s, r: {"a": int(s["n"]) if s["n"] < 3 else "x"}, lambda s, r: {"a": s["n"] if s["n"] < 3 else None}):
        with pytest.raises(ps.InvalidInputError, match=r"`a` of sample 3 is \w+ after your functions"):
            next(iter(ds.loader(batch_size=5, columns=["n"], transform=[function])))
    # Otherwise, batches of whole numbers only would be int64, and others float64.
    with pytest.raises(ps.InvalidInputError, match="`a` of sample 3 is float64 after your functions, but that of sample 0 is int64"):
        next(iter(ds.loader(batch_size=5, columns=["n"], transform=[lambda s, r: {"a": 1 if s["n"] < 3 else 2.5}])))


def test_ragged_values_refuse_what_they_cannot_hold():
    import torch  # Not at the top: Python workers import this module, and torch takes two seconds.

    with pytest.raises(ps.InvalidInputError, match="empty list"):
        ps.Ragged.from_arrays([])
    whole = ps.Ragged.from_arrays([np.array([1, 2], np.uint8), np.array([3], np.uint8)])
    for value in (float("nan"), -1.5, -1, 256, "x", None, float("inf")):
        with pytest.raises(ps.InvalidInputError, match="cannot be"):
            whole.to_padded(value)
    assert whole.to_padded(255.0).values.tolist() == [[1, 2], [3, 255]]
    tensors = ps.Ragged(torch.tensor([1, 2, 3], dtype=torch.uint8), whole.offsets, whole.shapes, None, whole.form)
    for value in (300, -1, 0.5):
        with pytest.raises(ps.InvalidInputError, match="cannot be"):
            tensors.to_padded(value)
    floats = ps.Ragged.from_arrays([np.array([1.0]), np.array([])])
    assert np.isnan(floats.to_padded(float("nan")).values[1, 0])
    made = ps.create(f"memory://functions-{next(PLACES)}", {"x": ps.Tensor((None,), "int32")})
    made.append({"x": [[1, 2], None]})
    for output in ("numpy", "torch"):
        batch = next(iter(made.loader(batch_size=2, output=output, nulls={"x": "mask"})))
        with pytest.raises(ps.InvalidInputError, match="cannot contain nulls"):
            batch["x"].to_nested()
        with pytest.raises(ps.InvalidInputError, match="cannot be"):
            batch["x"].to_padded(0.5)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_loader_stays_at_its_snapshot_while_its_dataset_moves_on(ds, mixed):
    def made(view):
        return (ps.mix({"all": view}) if mixed else view).loader(batch_size=7, shuffle=True, columns=["n"])

    loader, still = made(ds), made(ps.open(ds.uri))
    first = ds.snapshot
    ds.append({"n": range(100, 150), "x": np.ones((50, 8), np.float32)})
    for each in (loader, still):
        each.set_epoch(2)
    assert [batch["n"].tolist() for batch in loader] == [batch["n"].tolist() for batch in still]
    assert loader.batch_at(3)["n"].tolist() == still.batch_at(3)["n"].tolist()
    assert loader.state_dict() == still.state_dict() and loader.state_dict()["sources"][0]["snapshot"] == first
    assert loader.explain() == still.explain()
    assert sum(len(batch["n"]) for batch in made(ds)) == 150


def test_the_manifest_is_walked_once_at_most_and_not_where_files_are_mapped(ds, monkeypatch):
    walks = []
    plain = ps.View._column_bytes
    monkeypatch.setattr(ps.View, "_column_bytes", lambda view, columns: walks.append(columns) or plain(view, columns))
    for io, expected in (("auto", 0), ("buffered", 1)):
        loader = ps.open(ds.uri, io=io).loader(batch_size=5, shuffle=True, columns=["n"])
        loader.set_epoch(2)
        loader.batch_at(1)
        loader.load_state_dict(loader.state_dict(step=3))
        next(iter(loader))
        loader.close()
        assert len(walks) == expected
        walks.clear()


def test_torchvision_moves_keypoints_with_visibility_and_leaves_boxes_of_missing_images():
    """Keypoints of COCO have a third value. A null image has no boxes and keypoints."""
    import torch
    from torchvision.transforms import v2

    ds = ps.create("memory://coco-points", {"image": ps.Image(), "points": ps.Keypoints(1, 3, of="image"), "boxes": ps.Boxes(of="image")})
    ds.append({"image": [np.zeros((10, 10, 3), np.uint8), None], "points": [[[[1, 1, 2]]]] * 2, "boxes": [[[0, 0, 2, 2]]] * 2})
    options = {"nulls": {name: "mask" for name in ("image", "points", "boxes")}}
    [ours] = ds.loader(batch_size=2, transform=[T.RandomHorizontalFlip(1.0, on=("image", "points", "boxes"))], **options)
    before = torch.random.get_rng_state()
    [theirs] = ds.loader(batch_size=2, transform=[v2.RandomHorizontalFlip(1.0)], **options)
    assert torch.equal(before, torch.random.get_rng_state())
    for batch in (ours, theirs):
        assert np.asarray(batch["points"][0]).tolist() == [[[8, 1, 2]]] and np.asarray(batch["boxes"][0]).tolist() == [[8, 0, 10, 2]]
        assert len(batch["boxes"][1]) == 0 == len(batch["points"][1]), "of a missing image, none are left"
        assert batch["boxes_valid"].tolist() == [True, True] == batch["points_valid"].tolist()

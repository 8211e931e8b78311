"""The loader on every store in the test suite: order, batches, state, budgets, mixtures, nulls, and damage."""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time

import measured
import numpy as np
import penstock as ps
import psutil
import pytest
from penstock import transforms as T
from waiting import lines, until

SAMPLES = 1003


@pytest.fixture
def ds(root):
    made = ps.create(
        root,
        {
            "number": "int64", "x": ps.Tensor((6, 5, 3), "uint8"), "label": ps.Label(["a", "b"]), "text": ps.Text(),
            "ragged": ps.Tensor((None, 2), "float32"), "maybe": "float32",
        },
    )  # fmt: skip
    for begin in (0, 400):  # Two commits make two fragments.
        rows = range(begin, 400 if begin == 0 else SAMPLES)
        made.append(
            {
                "number": rows, "x": [np.full((6, 5, 3), row % 251, np.uint8) for row in rows], "label": [row % 2 for row in rows],
                "text": [f"row {row}" for row in rows], "ragged": [np.full((row % 4, 2), row, np.float32) for row in rows],
                "maybe": [None if row % 10 == 3 else float(row) for row in rows],
            }
        )  # fmt: skip
    return made


def numbers(batches):
    return [batch["number"].tolist() for batch in batches]


def flat(batches):
    return list(itertools.chain.from_iterable(numbers(batches)))


def test_an_epoch_visits_every_sample_once_and_columns_belong_together(ds):
    loader = ds.loader(
        batch_size=64, shuffle=True, seed=3, columns=["number", "x", "label", "text", "ragged", "_position", "_row_id"], threads=2
    )
    seen = []
    row_ids = ds.take(range(SAMPLES), columns=["_row_id"])["_row_id"]
    for batch in loader:
        for index, number in enumerate(batch["number"]):
            assert (batch["x"][index] == number % 251).all() and batch["x"][index].shape == (6, 5, 3)
            assert batch["label"][index] == number % 2 and batch["text"][index] == f"row {number}"
            assert batch["ragged"][index].shape == (number % 4, 2) and (batch["ragged"][index] == number).all()
            assert batch["_position"][index] == number and batch["_row_id"][index] == row_ids[number]
        assert batch["x"].flags.writeable and batch["x"].flags.c_contiguous and batch["number"].flags.writeable
        seen += batch["number"].tolist()
    assert len(loader) == 16 and sorted(seen) == list(range(SAMPLES)) and seen != sorted(seen)


def test_epochs_differ_and_repeat_by_seed(ds):
    loader = ds.loader(batch_size=100, shuffle=True, seed=5, columns=["number"])
    first, second = flat(loader), flat(loader)
    assert first != second and sorted(first) == sorted(second)
    loader.set_epoch(0)
    assert flat(loader) == first
    assert flat(ds.loader(batch_size=100, shuffle=True, seed=6, columns=["number"])) != first
    streamed = flat(ds.loader(batch_size=100, shuffle=True, seed=5, columns=["number"]).stream(2))
    assert streamed == first + second


def test_leaving_an_epoch_early_continues_with_the_next(ds):
    loader = ds.loader(batch_size=100, shuffle=True, columns=["number"])
    whole = [flat(loader), flat(loader)]
    loader.set_epoch(0)
    for index, _ in enumerate(loader):
        if index == 2:
            break
    assert loader.state_dict()["draw"] == 300
    assert flat(loader) == whole[1]


@pytest.mark.parametrize("last", ["short", "drop", "pad"])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_the_same_samples_make_a_step_for_any_world_size(ds, world, last):
    whole = numbers(ds.loader(global_batch_size=240, shuffle=True, seed=1, columns=["number"], last_batch="short", rank=0, world_size=1))
    ranks = [
        list(
            ds.loader(
                global_batch_size=240,
                shuffle=True,
                seed=1,
                columns=["number", "_valid", "_step"],
                last_batch=last,
                rank=rank,
                world_size=world,
            )
        )
        for rank in range(world)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    for step, batches in enumerate(zip(*ranks, strict=True)):
        assert len({len(batch["number"]) for batch in batches}) == 1
        valid = list(itertools.chain.from_iterable(batch["number"][batch["_valid"]].tolist() for batch in batches))
        assert valid == whole[step]
        assert all((batch["_step"] == step).all() for batch in batches)
    assert len(ranks[0]) == (4 if last == "drop" else 5)
    if last == "pad":
        assert len(ranks[0][-1]["number"]) == 240 // world


def hashed(batches):
    digest = hashlib.sha256()
    for batch in batches:
        for name in sorted(batch):
            digest.update(np.ascontiguousarray(batch[name]).tobytes())
    return digest.hexdigest()


AUGMENT = [T.RandomCrop((4, 4), padding=1, on="x"), T.RandomHorizontalFlip(on="x"), T.Normalize([0.4], [0.2], on="x")]


def test_pixels_do_not_depend_on_threads_budgets_or_newer_commits(ds):
    def epoch(of=ds, **options):
        return hashed(of.loader(global_batch_size=240, shuffle=True, seed=2, columns=["number", "x"], transform=AUGMENT, **options))

    expected = epoch(threads=1)
    for threads in (2, 4):
        assert epoch(threads=threads) == expected
    assert epoch(memory_bytes=64 << 20) == expected == epoch(memory_bytes=1 << 30)
    state = ds.loader(global_batch_size=240, shuffle=True, seed=2, columns=["number", "x"], transform=AUGMENT).state_dict()
    ds.append({"number": [7]})
    later = ds.loader(global_batch_size=240, shuffle=False, seed=9, columns=["number", "x"], transform=AUGMENT)
    later.load_state_dict(state)
    assert hashed(later) == expected


def test_states_are_small_json_and_resume_anywhere(ds):
    loader = ds.loader(batch_size=50, shuffle=True, seed=4, columns=["number"])
    whole = numbers(loader.stream(3))
    rng = np.random.default_rng(0)
    for step in rng.integers(0, 63, 20):
        state = json.loads(json.dumps(loader.state_dict(step=int(step))))
        assert len(json.dumps(state)) < 4096
        other = ds.loader(batch_size=50, shuffle=False, columns=["number"])
        other.load_state_dict(state)
        end = (step // 21 + 1) * 21
        assert numbers(other) == whole[step:end]
        assert numbers(other) == whole[end : end + 21] or end == 63


def test_the_state_follows_what_was_given_not_what_was_made_ahead(ds):
    loader = ds.loader(batch_size=10, shuffle=True, columns=["number"])
    batches = iter(loader)
    given = [next(batches) for _ in range(7)]
    state = loader.state_dict()
    assert state == loader.state_dict(step=7) and state["draw"] == 70
    rest = numbers(batches)
    other = ds.loader(batch_size=10, shuffle=True, columns=["number"])
    other.load_state_dict(state)
    assert numbers(other) == rest and len(given) + len(rest) == 101


def test_another_batch_size_cuts_the_same_sequence(ds):
    loader = ds.loader(batch_size=50, shuffle=True, seed=4, columns=["number"])
    sequence = flat(loader.stream(2))
    other = ds.loader(batch_size=33, shuffle=True, columns=["number"])
    other.load_state_dict(loader.state_dict(step=3))
    assert flat(other) == sequence[150:SAMPLES]
    assert other.state_dict()["epoch"] == 1 and other.state_dict()["draw"] == 0
    assert flat(other) == sequence[SAMPLES:]


def test_foreign_states_are_refused_and_change_nothing(ds, tmp_path):
    loader = ds.loader(batch_size=50, shuffle=True, columns=["number"])
    other = ps.create("memory://foreign", {"number": "int64"})
    other.append({"number": range(10)})
    expected = numbers(ds.loader(batch_size=50, shuffle=True, columns=["number"]).stream(1))
    batches = iter(loader)
    given = [next(batches)["number"].tolist() for _ in range(3)]
    before = loader.state_dict()
    with pytest.raises(ps.InvalidInputError, match="its dataset is"):
        loader.load_state_dict(other.loader(batch_size=5).state_dict())
    with pytest.raises(ps.InvalidInputError, match="its selection is"):
        loader.load_state_dict(ds.select([1, 2]).loader(batch_size=5, columns=["number"]).state_dict())
    some = ds.select([5, 1, 3]).loader(batch_size=2, columns=["number"])
    for others in ([1, 3, 5], [5, 1, 1, 3], [5, 1]):  # A draw is an index into the selection, so order and duplicates matter.
        with pytest.raises(ps.InvalidInputError, match="its selection is"):
            some.load_state_dict(ds.select(others).loader(batch_size=2, columns=["number"]).state_dict())
    with pytest.raises(ps.InvalidInputError, match="not a loader state"):
        loader.load_state_dict({"format": 1})
    with pytest.raises(ps.InvalidInputError, match="format 7"):
        loader.load_state_dict({**before, "format": 7})
    gone = json.loads(json.dumps(before))
    gone["sources"][0]["snapshot"] = "0-9-" + "0" * 32
    with pytest.raises(ps.NotFoundError, match="no longer exists") as caught:
        loader.load_state_dict(gone)
    assert "pin=True" in str(caught.value)
    with pytest.raises(ps.InvalidInputError, match="draw 1000000 is beyond"):
        loader.load_state_dict({**before, "draw": 10**6})
    assert loader.state_dict() == before and before["draw"] == 150 and given + numbers(batches) == expected


def test_an_interrupt_while_a_state_is_loaded_leaves_the_loader_at_the_old_or_the_new_one(ds, monkeypatch):
    loader = ds.loader(batch_size=50, shuffle=True, seed=1, columns=["number"])
    other = ds.loader(batch_size=50, shuffle=True, seed=2, columns=["number"])
    close = loader.close

    def interrupted():
        close()
        raise KeyboardInterrupt

    monkeypatch.setattr(loader, "close", interrupted)  # Loading stops the threads of the loader, which takes the most time.
    with pytest.raises(KeyboardInterrupt):
        loader.load_state_dict(other.state_dict(step=5))
    monkeypatch.undo()
    state = loader.state_dict()
    fresh = ds.loader(batch_size=50, columns=["number"])
    fresh.load_state_dict(state)
    assert state["seed"] == 1 and numbers(loader) == numbers(fresh)


def test_a_batch_can_be_looked_at_again(ds):
    loader = ds.loader(batch_size=50, shuffle=True, seed=4, columns=["number", "x"], transform=AUGMENT)
    batches = list(loader.stream(2))
    for step in (0, 7, 20, 21, 33):
        again = loader.batch_at(step)
        assert (again["number"] == batches[step]["number"]).all() and (again["x"] == batches[step]["x"]).all()


def test_windows_and_replacement(ds):
    order = flat(ds.loader(batch_size=40, shuffle=ps.Window(bytes=20_000), seed=1, columns=["number"]))
    assert sorted(order) == list(range(SAMPLES)) and order != sorted(order)
    weights = np.zeros(SAMPLES)
    weights[[5, 700]] = [1, 3]
    drawn = flat(ds.loader(batch_size=100, shuffle=ps.Replacement(samples=2000, weights=weights), columns=["number"]))
    assert set(drawn) == {5, 700} and 350 < drawn.count(5) < 650
    even = flat(ds.loader(batch_size=100, shuffle=ps.Replacement(samples=500), columns=["number"]))
    assert len(even) == 500 and len(set(even)) < 500


def test_a_mixture_has_exact_shares_and_resumes(ds):
    low, high = ds.select(range(400)), ds.select(range(400, SAMPLES))
    mixed = ps.mix({"low": (low, 1), "high": (high, 3)}, epoch_samples=960)
    loader = mixed.loader(batch_size=48, shuffle=True, seed=2, columns=["number", "_source"])
    batches = list(loader.stream(3))
    for batch in batches:
        assert (batch["_source"] == 0).sum() == 12
        assert ((batch["number"] < 400) == (batch["_source"] == 0)).all()
    of_high = [number for batch in batches for number in batch["number"][batch["_source"] == 1].tolist()]
    times = np.bincount(of_high, minlength=SAMPLES)[400:]
    assert len(set(of_high[: 16 * 36])) == 16 * 36 and times.min() == 3 and times.max() == 4
    again = mixed.loader(batch_size=48, shuffle=True, columns=["number"])
    again.load_state_dict(loader.state_dict(step=23))
    assert numbers(again) == [batch["number"].tolist() for batch in batches[23:40]]
    with pytest.raises(ps.InvalidInputError, match="which has only 400"):
        ps.mix({"low": (low, 1), "high": (high, 1)}, epoch_samples=900, exhausted="raise").loader(batch_size=10)
    stopped = ps.mix({"low": (low, 1), "high": (high, 1)}, epoch_samples=10_000, exhausted="stop").loader(batch_size=10, columns=["number"])
    assert 800 <= len(flat(stopped)) <= 801


def test_nulls_raise_or_become_what_is_said(ds):
    with pytest.raises(ps.InvalidInputError, match=r"`maybe` has .* nulls"):
        list(ds.loader(batch_size=100, columns=["maybe"]))
    filled = next(iter(ds.loader(batch_size=100, columns=["number", "maybe"], nulls={"maybe": -1})))
    expected = [-1.0 if number % 10 == 3 else float(number) for number in filled["number"]]
    assert filled["maybe"].tolist() == expected
    masked = next(iter(ds.loader(batch_size=100, columns=["number", "maybe"], nulls={"maybe": "mask"})))
    assert masked["maybe_valid"].tolist() == [number % 10 != 3 for number in masked["number"]]
    with pytest.raises(ps.InvalidInputError, match="which the loader does not return"):
        ds.loader(batch_size=2, nulls={"nothing": 0})


def test_functions_get_a_sample_and_numbers_of_its_own(ds):
    def jitter(sample, rng):
        return {"number": sample["number"], "noise": rng.normal(size=3)}

    def doubled(batch):
        return {**batch, "twice": batch["number"] * 2}

    def run(**options):
        return list(
            ds.loader(global_batch_size=60, shuffle=True, seed=1, columns=["number"], transform=[jitter, T.PerBatch(doubled)], **options)
        )

    one, four = run(threads=1), run(threads=4)
    assert all((a["noise"] == b["noise"]).all() for a, b in zip(one, four, strict=True))
    assert one[0]["noise"].shape == (60, 3) and (one[0]["twice"] == 2 * one[0]["number"]).all()
    assert len(np.unique(np.concatenate([batch["noise"] for batch in one]))) == 3 * SAMPLES
    halves = [run(rank=rank, world_size=2) for rank in range(2)]
    assert (np.concatenate([halves[0][3]["noise"], halves[1][3]["noise"]]) == one[3]["noise"]).all()


def test_a_function_that_fails_names_its_sample(ds):
    def fails(sample, rng):
        if sample["number"] == 77:
            raise KeyError("nothing here")
        return sample

    with pytest.raises(KeyError) as caught:
        list(ds.loader(batch_size=50, columns=["number"], transform=[fails]))
    assert "for sample 77 in step 1" in "".join(caught.value.__notes__)

    def uneven(sample, rng):
        return {"a": np.zeros(3 if sample["number"] == 30 else 2)}

    with pytest.raises(ps.InvalidInputError, match=r"sample 30 is \(3,\)"):
        list(ds.loader(batch_size=50, columns=["number"], transform=[uneven]))
    with pytest.raises(ps.InvalidInputError, match="expected a dict"):
        list(ds.loader(batch_size=50, columns=["number"], transform=[lambda sample, rng: 3]))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "batch_size"),
        ({"batch_size": 3, "global_batch_size": 3}, "expected either batch_size"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": True}, "batch_size=True"),
        ({"global_batch_size": 10, "rank": 0, "world_size": 3}, "nearest multiple is 9"),
        ({"batch_size": 2, "rank": 2, "world_size": 2}, "expected a rank from 0 to 1"),
        ({"batch_size": 2, "rank": 0}, "or neither"),
        ({"batch_size": 2, "shuffle": "yes"}, "shuffle='yes'"),
        ({"batch_size": 2, "columns": ["nothing"]}, "nothing"),
        ({"batch_size": 2, "columns": "number"}, "columns="),
        ({"batch_size": 2, "output": "tf"}, "output='tf'"),
        ({"batch_size": 2, "last_batch": "keep"}, "last_batch"),
        ({"batch_size": 2, "on_corrupt": "skip"}, "on_corrupt"),
        ({"batch_size": 2, "seed": -1}, "seed=-1"),
        (
            {"batch_size": 500, "columns": ["x"], "memory_bytes": 1000},
            "needs 45000 bytes and the previous batch holds the same amount, but memory_bytes is 1000",
        ),
        ({"batch_size": 2, "transform": [T.Resize(3, on="number")]}, "does not fit `number`"),
        ({"batch_size": 2, "transform": [T.RandomCrop(3, on="y")]}, "applies to `y`, which"),
        ({"batch_size": 2, "transform": [T.RandomCrop(3)]}, "needs on="),
        ({"batch_size": 2, "transform": [T.Normalize([1, 2], [1, 1], on="x")]}, "2 means"),
        ({"batch_size": 2, "transform": [T.Normalize([0.5], [0], on="x")]}, "std"),
        ({"batch_size": 2, "transform": [T.Normalize([0.5], [1], on="x"), T.CenterCrop(2, on="x")]}, "before ToDtype and Normalize"),
        ({"batch_size": 2, "transform": [T.RandomHorizontalFlip(2, on="x")]}, "p=2"),
        ({"batch_size": 2, "transform": [T.CenterCrop(0, on="x")]}, "size=0"),
        ({"batch_size": 2, "transform": [lambda s, rng: s, T.CenterCrop(2, on="x")]}, "comes after a function"),
        ({"batch_size": 2, "transform": T.CenterCrop(2, on="x")}, "expected a list"),
        ({"batch_size": 2, "transform": [T.CenterCrop]}, "is a class"),
        ({"batch_size": 2, "transform": [3]}, "is not a transform"),
        ({"batch_size": 2, "shuffle": ps.Window(bytes=0)}, "Window bytes=0"),
        ({"batch_size": 2, "shuffle": ps.Replacement(weights=[1.0])}, "1 weights for 1003"),
        ({"batch_size": 4, "shuffle": ps.Window(bytes=9999, lanes=3)}, "3 lanes do not divide"),
    ],
)
def test_invalid_options_are_refused_before_anything_is_read(ds, options, text):
    with pytest.raises((ps.InvalidInputError, ps.NotFoundError), match=None) as caught:
        ds.loader(**options)
    assert text in str(caught.value)


def test_an_empty_dataset_and_an_empty_selection_have_no_batches(ds):
    assert list(ds.select([]).loader(batch_size=3)) == [] and len(ds.select([]).loader(batch_size=3, shuffle=True)) == 0
    assert len(ds.select(range(5)).loader(batch_size=8, last_batch="drop")) == 0


def test_a_crop_that_does_not_fit_its_sample_says_which(root):
    ds = ps.create(root, {"x": ps.Tensor((None, None), "float32")})
    ds.append({"x": [np.ones((12, 9)), np.ones((4, 12)), np.ones((9, 9))]})
    with pytest.raises(ps.InvalidInputError, match=r"cannot load `x` of sample 1 .*RandomCrop of 9"):
        list(ds.loader(batch_size=3, transform=[T.RandomCrop(9, on="x")]))


def test_kept_batches_stay_right(ds):
    kept = list(ds.loader(batch_size=1, shuffle=True, columns=["number", "x"], memory_bytes=1 << 16).stream(1))
    assert len(kept) == SAMPLES
    assert all((batch["x"] == batch["number"][0] % 251).all() for batch in kept)
    kept[0]["x"][:] = 0  # Each batch owns its memory.
    assert all((batch["x"] == batch["number"][0] % 251).all() for batch in kept[1:])


def test_two_iterations_of_one_loader_do_not_mix(ds):
    loader = ds.loader(batch_size=10, shuffle=True, columns=["number"])
    first = iter(loader)
    next(first)
    second = iter(loader)
    next(second)
    with pytest.raises(ps.ClosedError, match="another iteration"):
        next(first)
    assert len(list(second)) == 100


def test_closing_is_prompt_idempotent_and_iterating_continues_after(ds):
    loader = ds.loader(batch_size=10, shuffle=True, columns=["number"], threads=2)
    batches = iter(loader)
    next(batches)
    threads = psutil.Process().num_threads()
    loader.close()
    loader.close()
    assert psutil.Process().num_threads() <= threads - 2
    with pytest.raises(ps.ClosedError):
        next(batches)
    assert sorted(flat(loader)) == list(range(SAMPLES))
    with ds.loader(batch_size=10, columns=["number"]) as other:
        next(iter(other))


STARTS = """
import gc, json, sys
import psutil
import penstock as ps

ds = ps.open(sys.argv[1])
process = psutil.Process()

def cycles(count):
    for _ in range(count):
        next(iter(ds.loader(batch_size=10, shuffle=True, columns=["number", "x"], threads=2)))
    gc.collect()
    return process.num_threads(), process.num_fds(), process.memory_full_info().uss

print(json.dumps([cycles(20), cycles(300)]))
"""


def test_starting_and_stopping_leaks_nothing(ds):
    (threads, files, memory), (threads_after, files_after, memory_after) = json.loads(measured.run(STARTS, ds.uri))
    assert threads_after <= threads and files_after <= files
    assert memory_after - memory < 8 << 20


def slow(sample, rng):
    time.sleep(0.01)  # This delay makes the epoch last until `close` is called.
    return sample


@pytest.mark.parametrize("workers", [0, 2])
def test_closing_from_another_thread_ends_a_wait(ds, workers):
    loader = ds.loader(batch_size=10, columns=["number"], transform=[slow], python_workers=workers)
    ended = []

    def consume():
        try:
            ended.append(len(list(loader)))
        except ps.ClosedError:
            ended.append("closed")

    consumer = threading.Thread(target=consume)
    consumer.start()
    until(lambda: loader.stats()["batches"], "the first batch")
    loader.close()
    consumer.join(300)
    assert ended == ["closed"]


@pytest.mark.local
def test_a_fork_says_so_and_begins_anew(ds):
    loader = ds.loader(batch_size=10, shuffle=True, columns=["number"])
    batches = iter(loader)
    first = next(batches)["number"].tolist()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            try:
                next(batches)
                answer = b"went on"
            except ps.ClosedError:
                loader.set_epoch(0)
                answer = json.dumps(next(iter(loader))["number"].tolist()).encode()
        except BaseException as error:
            answer = repr(error).encode()
        os.write(write, answer)
        os._exit(0)
    os.waitpid(child, 0)
    assert json.loads(os.read(read, 10_000)) == first
    assert len(list(batches)) == 100


SCRIPT = """
import json, sys
import penstock as ps
from penstock import transforms as T
ds = ps.open(sys.argv[1])
loader = ds.loader(batch_size=10, shuffle=True, seed=8, columns=["number", "x"], transform=[T.RandomCrop((4, 4), on="x")])
if len(sys.argv) > 2:
    loader.load_state_dict(json.loads(sys.argv[2]))
for batch in loader:
    print(json.dumps([loader.state_dict(), batch["number"].tolist(), int(batch["x"].sum())]), flush=True)
    {extra}
"""


@pytest.mark.local
def test_kill_9_and_resume_in_another_process(ds):
    def start(*arguments, extra="pass"):
        code = textwrap.dedent(SCRIPT).format(extra=extra)
        return subprocess.Popen([sys.executable, "-c", code, ds.uri, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    whole = [json.loads(line) for line in start().communicate()[0].splitlines()]
    assert len(whole) == 101
    for stop in np.random.default_rng(1).integers(1, 90, 4):
        process = start(extra="import sys; sys.stdin.readline()")
        seen = [json.loads(line) for line in lines(process, stop)]
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        rest = [json.loads(line) for line in start(json.dumps(seen[-1][0])).communicate()[0].splitlines()]
        assert [line[1:] for line in seen + rest] == [line[1:] for line in whole]


@pytest.mark.local
def test_ctrl_c_ends_an_iteration_and_the_process(ds):
    extra = "import collections; collections.deque(loader.stream(), 0)"
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT).format(extra=extra), ds.uri],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=300)
    assert "KeyboardInterrupt" in error and process.returncode in (1, 130, -signal.SIGINT)


def test_stats_and_explain_report_what_happens(ds):
    loader = ds.loader(batch_size=100, shuffle=True, columns=["number", "x"], transform=AUGMENT)
    list(loader)
    stats = loader.stats(step_seconds=0.1)
    assert stats["samples"] == SAMPLES and stats["batches"] == 11 and 0 <= stats["stall"] <= 1
    assert stats["stages"]["transform"] > 0 and 0.5 < stats["accelerator_utilisation"] <= 1
    assert stats["kept_bytes"] == 0 and stats["peak_bytes"] > 0
    text = loader.explain()
    assert "1003 samples in 11 steps" in text and "100%" in text
    near = ds.loader(batch_size=40, shuffle=ps.Window(bytes=2000), columns=["number", "x"]).explain()
    assert "window" in near and "100%" not in near
    ceiling = list(itertools.islice(loader.ceiling(), 3))
    assert all(batch is ceiling[0] for batch in ceiling)


def _growth_of_a_long_order(kind):
    """Return the memory growth, in bytes, when loaders with 10^9 draws follow loaders with 10^5. Run this in a fresh process."""
    ds = ps.create(f"memory://huge-order-{kind}", {"number": "int8"})
    ds.append({"number": [1] * 1000})

    def made(samples):
        if kind == "draws":
            return ds.loader(batch_size=256, shuffle=ps.Replacement(samples=samples))
        return ps.mix({"a": (ds, 3), "b": (ds.select(range(100)), 1)}, epoch_samples=samples).loader(batch_size=256, shuffle=True)

    def resumed(samples, step):
        loader = made(samples)
        loader.load_state_dict(made(samples).state_dict(step=step))
        assert loader.state_dict()["draw"] == 256 * step
        assert loader.batch_at(step + 1)["number"].tolist() == [1] * 256
        assert next(iter(loader))["number"].tolist() == [1] * 256
        loader.close()
        return loader

    few = [resumed(10**5, 100) for _ in range(5)]
    gc.collect()
    before = psutil.Process().memory_full_info().uss
    many = [resumed(10**9, 10**6) for _ in range(5)]
    gc.collect()
    growth = psutil.Process().memory_full_info().uss - before
    assert len(few[0]) == 391 and len(many[0]) == 3906250
    return growth


@pytest.mark.parametrize("kind", ["draws", "mixture"])
def test_order_and_plan_of_a_thousand_million_take_less_than_a_megabyte(kind):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_growth_of_a_long_order, [kind]) < 1 << 20


def test_views_of_a_loader_pickle_for_spawned_processes(ds):
    if not ds.uri.startswith("memory"):
        view = pickle.loads(pickle.dumps(ds))
        assert numbers(view.loader(batch_size=300, shuffle=True, columns=["number"])) == numbers(
            ds.loader(batch_size=300, shuffle=True, columns=["number"])
        )


ORDER = """
import sys
import penstock as ps

ds = ps.open(sys.argv[1])
if len(sys.argv) > 2:
    ds.take(range(int(sys.argv[2]), len(ds)))
loader = ds.loader(batch_size=7, shuffle=ps.Window(bytes=300_000), columns=["text", "_position"], seed=5)
print([int(position) for batch in loader.stream(1) for position in batch["_position"]])
"""


@pytest.mark.local
def test_a_window_order_does_not_depend_on_what_was_read_before(root):
    """To size windows, the loader samples a few files, and must always choose the same files.

    The column's share of a file's bytes varies widely from file to file.
    """
    ds = ps.create(root, {"text": ps.Text(), "other": ps.Bytes()})
    for commit in range(40):
        ds.append({"text": ["x" * (100 + 1000 * commit)] * 10, "other": [bytes(10_000)] * 10})
    told = [
        subprocess.run([sys.executable, "-c", ORDER, root, *begin], check=True, capture_output=True, text=True).stdout
        for begin in ([], ["390"], ["200"], ["0"])
    ]
    assert len(set(told)) == 1 and sorted(json.loads(told[0])) == list(range(400))


@pytest.mark.local
def test_loaders_close_at_any_moment(tmp_path):
    """Closing also wakes threads that are about to wait, so rapid starts and stops never hang."""
    ds = ps.create(tmp_path / "set", {"n": "int64"})
    ds.append({"n": range(64)})
    program = f"""
import itertools, random, time
import penstock as ps
ds = ps.open({str(tmp_path / "set")!r}, io="buffered")
loader = ds.loader(batch_size=2, shuffle=True, threads=8)
for turn in range(1500):
    for batch in itertools.islice(loader, random.Random(turn).randrange(4)):
        pass
    loader.close()
print("done")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert ended.stdout == "done\n", ended.stderr


@pytest.mark.long
@pytest.mark.parametrize("samples", [3, 4, 5, 6])
def test_a_view_within_one_window_comes_in_every_order(samples):
    """Every order is also possible with automatic lanes, because small selections are not split across many lanes."""
    ds = ps.create(f"memory://within-{samples}", {"x": "int32"})
    ds.append({"x": range(1000)})
    view, seen = ds.select(range(samples)), set()
    for seed in range(25 * math.factorial(samples) // (3 if samples == 6 else 1)):
        loader = view.loader(batch_size=samples, shuffle=ps.Window(bytes=10**6), seed=seed, columns=["x"])
        seen.add(tuple(next(iter(loader))["x"].tolist()))
    assert len(seen) >= 0.99 * math.factorial(samples)

"""Resuming at any draw, with any `last_batch`, and streaming any number of epochs, equals the uninterrupted run."""

from __future__ import annotations

import os
import random
import warnings

import numpy as np
import penstock as ps
import pytest

pytestmark = pytest.mark.local
SEED = int(os.environ.get("PENSTOCK_ROTATION", "0")) if os.environ.get("PENSTOCK_ROTATION", "0").isdigit() else 0
EPOCHS = 12


class Run:
    """An uninterrupted run, from a model in a few lines: the sequence of each epoch, cut into batches."""

    def __init__(self, sequences, batch_size, last_batch):
        self.sequences, self.size, self.last = sequences, batch_size, last_batch

    def epoch(self, number, draw=0):
        """Return the batches of an epoch from a draw on, each as (numbers, which are valid)."""
        left = self.sequences[number][draw:]
        batches = [left[begin : begin + self.size] for begin in range(0, len(left), self.size)]
        if self.last == "drop":
            return [(batch, [True] * self.size) for batch in batches if len(batch) == self.size]
        if self.last == "short":
            return [(batch, [True] * len(batch)) for batch in batches]
        padded = [(batch + [batch[at % len(batch)] for at in range(self.size - len(batch))], len(batch)) for batch in batches]
        return [(batch, [at < valid for at in range(self.size)]) for batch, valid in padded]

    def after(self, epoch, draw, epochs):
        """Return the batches of so many epochs after a state. What is left of the state's epoch counts as one."""
        return [batch for number in range(epochs) for batch in self.epoch(epoch + number, 0 if number else draw)]


def batches_of(iterator):
    return [(batch["n"].tolist(), batch["_valid"].tolist()) for batch in iterator]


def shuffles(rng):
    return rng.choice([True, True, False, ps.Window(bytes=80, lanes=1), ps.Replacement(rng.randint(1, 30))])


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    made = {}
    for samples in (1, 2, 7, 16, 23):
        made[samples] = ps.create(tmp_path_factory.mktemp("resumes") / str(samples), {"n": "int64"})
        made[samples].append({"n": np.arange(samples)})
    return made


def check(seed, datasets):
    rng = random.Random(f"resumes {SEED} {seed}")
    ds, last_batch = datasets[rng.choice(list(datasets))], rng.choice(["short", "drop", "pad"])
    first, second = rng.randint(1, 9), rng.randint(1, 9)
    second = first if rng.random() < 0.4 else second
    # The order of a mixture or a window depends on the block, which the state fixes.
    options = {"shuffle": shuffles(rng), "seed": seed, "last_batch": last_batch, "columns": ["n", "_valid"], "order_block_samples": 4}
    one = ds.loader(batch_size=1, **{**options, "last_batch": "short"})
    sequences = [[int(batch["n"][0]) for batch in one] for _ in range(EPOCHS)]
    length = len(sequences[0])
    before = ds.loader(batch_size=first, **options)
    epoch = rng.randint(0, 1)
    # A state at any draw: by its own batches, or by those of a loader of another size.
    state = {**before.state_dict(), "epoch": epoch, "draw": rng.randint(0, length)}
    if rng.random() < 0.5:
        stepped = ds.loader(batch_size=first, **options)
        taken, stream = rng.randint(0, 6), stepped.stream()
        if len(stepped):
            for _ in range(taken):
                next(stream)
        state = stepped.state_dict()
        stepped.close()
    run, resumed = Run(sequences, second, last_batch), ds.loader(batch_size=second, **options)
    resumed.load_state_dict(state)
    epoch, draw, epochs = state["epoch"], state["draw"], rng.randint(0, 3)
    where = (seed, len(ds), options, first, second, epoch, draw, epochs)
    nothing_left = bool(draw) and not run.epoch(epoch, draw)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        if not run.epoch(0) and not nothing_left:
            assert batches_of(resumed.stream(epochs)) == [], where
            return
        if rng.random() < 0.5 and epoch + epochs < EPOCHS:
            assert batches_of(resumed.stream(epochs)) == run.after(epoch, draw, epochs), where
            if epochs:
                assert resumed.state_dict()["epoch"] == epoch + epochs or not run.epoch(0), where
        else:
            # Epoch by epoch, as `for batch in loader` gives them, with a state in the middle of the second one.
            assert batches_of(resumed) == run.epoch(epoch, draw), where
            following = run.epoch(epoch + 1)
            cut = rng.randint(0, len(following))
            state = resumed.state_dict()
            again = ds.loader(batch_size=second, **options)
            again.load_state_dict(state)
            stream, got = again.stream(2), []
            for _ in range(cut):
                got += batches_of([next(stream)])
            third = ds.loader(batch_size=second, **options)
            third.load_state_dict(again.state_dict())
            again.close()
            # After the last batch of an epoch, the state is at the beginning of the next one.
            rest = batches_of(third.stream(2 if cut < len(following) else 1))
            assert got + rest == run.after(epoch + 1, 0, 2), where
            third.close()
    resumed.close()


@pytest.mark.parametrize("part", range(4))
def test_a_resume_at_any_draw_streams_what_the_uninterrupted_run_has(datasets, part):
    for seed in range(part, 120, 4):
        check(seed, datasets)


@pytest.mark.soak
def test_many_resumes_stream_what_the_uninterrupted_run_has(datasets):
    for seed in range(1000, 11_000):
        check(seed, datasets)


@pytest.mark.parametrize("last_batch", ["short", "drop", "pad"])
@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_a_stream_after_every_resume_has_its_epochs(datasets, last_batch, epochs):
    """Every draw of an epoch of 23 samples, in batches of 3."""
    ds, options = datasets[23], {"batch_size": 3, "shuffle": True, "seed": 1, "last_batch": last_batch, "columns": ["n", "_valid"]}
    one = ds.loader(**{**options, "batch_size": 1, "last_batch": "short"}, order_block_samples=3)
    run = Run([[int(batch["n"][0]) for batch in one] for _ in range(epochs + 1)], 3, last_batch)
    loader = ds.loader(**options)
    state = loader.state_dict()
    for draw in range(24):
        loader.load_state_dict({**state, "draw": draw})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            assert batches_of(loader.stream(epochs)) == run.after(0, draw, epochs), draw


@pytest.mark.parametrize("last_batch", ["short", "drop", "pad"])
def test_a_loop_after_a_break_and_a_resume_is_the_next_epoch(datasets, last_batch):
    ds, options = datasets[23], {"batch_size": 3, "shuffle": True, "seed": 1, "last_batch": last_batch, "columns": ["n", "_valid"]}
    one = ds.loader(**{**options, "batch_size": 1, "last_batch": "short"}, order_block_samples=3)
    run = Run([[int(batch["n"][0]) for batch in one] for _ in range(3)], 3, last_batch)
    state = ds.loader(**options).state_dict()
    for draw in range(20):
        for taken in range(1, len(run.epoch(0, draw)) + 1):
            loader = ds.loader(**options)
            loader.load_state_dict({**state, "draw": draw})
            batches = iter(loader)
            for _ in range(taken):
                next(batches)
            batches.close()
            assert batches_of(loader) == run.epoch(1), (draw, taken)
            assert batches_of(loader) == run.epoch(2), (draw, taken)
            loader.close()

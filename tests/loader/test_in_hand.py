"""States that leave out the batch in hand: what an interrupted step was training on comes again after a resume."""

from __future__ import annotations

import signal

import penstock as ps
import pytest
from penstock import transforms as T

pytestmark = pytest.mark.local


@pytest.fixture
def ds(tmp_path):
    made = ps.create(tmp_path / "dataset", {"n": "int64"})
    made.append({"n": range(20)})
    return made


OPTIONS = {"batch_size": 3, "shuffle": True, "seed": 4}


def numbers(batches):
    return [batch["n"].tolist() for batch in batches]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("interrupted", [0, 1, 6, 7, 9])
def test_a_step_that_was_interrupted_comes_again(ds, interrupted, workers):
    """An epoch has seven batches, so these are in the first epoch, at its end, and in the second one."""
    options = {**OPTIONS, "transform": [T.PerBatch(dict)], "python_workers": workers}
    expected, trained = numbers(ds.loader(**OPTIONS).stream(2)), []
    loader = ds.loader(**options)
    with pytest.raises(KeyboardInterrupt):
        for step, batch in enumerate(loader.stream(2)):
            if step == interrupted:
                signal.raise_signal(signal.SIGINT)
            trained.append(batch["n"].tolist())
    counted, kept = loader.state_dict(), loader.state_dict(delivered=False)
    loader.close()
    resumed = ds.loader(**OPTIONS)
    resumed.load_state_dict(kept)
    assert trained + numbers(resumed.stream(2 - interrupted // 7)) == expected
    resumed.load_state_dict(counted)
    assert next(iter(resumed.stream()))["n"].tolist() == expected[interrupted + 1], "a state counts the batch in hand by default"


def test_a_batch_is_in_hand_until_the_next_is_asked_for(ds):
    loader = ds.loader(**OPTIONS)
    assert loader.state_dict(delivered=False) == loader.state_dict(), "nothing is in hand"
    batches = iter(loader)
    for step in range(7):
        next(batches)
        assert loader.state_dict(delivered=False) == loader.state_dict(step=step)
        assert loader.state_dict() == loader.state_dict(step=step + 1)
    assert next(batches, None) is None
    assert loader.state_dict(delivered=False) == loader.state_dict() == loader.state_dict(step=7), "the loop asked for more"


def test_a_break_leaves_its_batch_in_hand(ds):
    loader = ds.loader(**OPTIONS)
    for _ in zip(range(3), loader, strict=False):
        pass
    for _ in loader:
        break
    assert loader.state_dict(delivered=False) == loader.state_dict(step=7)
    assert loader.state_dict() == loader.state_dict(step=8)


@pytest.mark.parametrize("move", ["load", "set_epoch"])
def test_another_place_has_nothing_in_hand(ds, move):
    loader = ds.loader(**OPTIONS)
    next(iter(loader))
    if move == "load":
        loader.load_state_dict(loader.state_dict(step=4))
    else:
        loader.set_epoch(3)
    assert loader.state_dict(delivered=False) == loader.state_dict()


def test_an_interrupt_on_the_way_to_the_next_batch_leaves_nothing_in_hand(ds):
    loader = ds.loader(**OPTIONS)
    batches = iter(loader)
    next(batches)
    with pytest.raises(KeyboardInterrupt):
        batches.throw(KeyboardInterrupt())  # Where Python handles a signal that arrives as the iterator is resumed.
    assert loader.state_dict(delivered=False) == loader.state_dict() == loader.state_dict(step=1)


def test_a_step_and_the_batch_in_hand_are_not_asked_for_at_once(ds):
    with pytest.raises(ps.InvalidInputError, match="step=3 with delivered=False"):
        ds.loader(**OPTIONS).state_dict(step=3, delivered=False)

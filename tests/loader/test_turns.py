"""Two threads use one loader at once. Hooks hold one thread at a call while the other one runs, so nothing depends on luck."""

import threading
import types

import numpy as np
import penstock as ps
import pytest
from penstock.loader.position import Turns

pytestmark = pytest.mark.local
BATCHES = 5


@pytest.fixture
def ds(tmp_path):
    ds = ps.create(tmp_path / "ds", {"n": "int64"})
    ds.append({"n": np.arange(4 * BATCHES)})
    return ds


def a_loader(ds, seed=0):
    return ds.loader(batch_size=4, columns=["n"], shuffle=True, seed=seed)


class During:
    """A loader's engine that calls `then` once, after a method has returned but before its caller continues."""

    def __init__(self, loader, method, then):
        self._core, self._method, self._then = loader._core, method, [then]
        loader._position.core = self

    def __getattr__(self, name):
        found = getattr(self._core, name)
        if name != self._method:
            return found

        def called(*arguments):
            result = found(*arguments)
            while self._then:
                self._then.pop()()
            return result

        return called


def test_a_thread_that_begins_beside_another_is_told_and_takes_no_batch(ds, monkeypatch):
    loader, told = a_loader(ds), []
    check_alone = Turns.check_alone

    def second():
        with pytest.raises(ps.ClosedError, match="two threads"):
            next(iter(loader))
        told.append(True)

    beside = [threading.Thread(target=second)]

    def check(turns, me):
        check_alone(turns, me)
        while beside:  # The first thread has seen nobody. Now the second one begins.
            thread = beside.pop()
            thread.start()
            thread.join(300)

    monkeypatch.setattr(Turns, "check_alone", check)
    found = [batch["n"].tolist() for batch in loader]
    assert told == [True]
    assert found == [batch["n"].tolist() for batch in a_loader(ds)]


def test_a_thread_that_is_waiting_for_a_batch_stops_with_one_that_begins(ds):
    loader = a_loader(ds)
    batches = iter(loader)
    next(batches)
    raised = []

    def iterate():
        with pytest.raises(ps.ClosedError):
            next(iter(loader))
        raised.append(True)

    def begin():
        thread = threading.Thread(target=iterate)
        thread.start()
        thread.join(300)

    During(loader, "next", begin)
    with pytest.raises(ps.ClosedError, match="two threads"):
        next(batches)
    assert raised == [True]
    assert loader.state_dict()["draw"] == 4, "the batch that reached nobody is not counted"


@pytest.mark.parametrize("move", ["set_epoch", "load_state_dict"])
def test_an_iteration_that_begins_during_a_move_ends(ds, move):
    loader, other = a_loader(ds), a_loader(ds)
    other.set_epoch(7)
    next(iter(loader))
    During(loader, "end_of_epoch", lambda: loader.set_epoch(7) if move == "set_epoch" else loader.load_state_dict(other.state_dict()))
    with pytest.raises(ps.ClosedError, match="another epoch or state"):
        list(loader)
    assert loader.state_dict()["epoch"] == 7
    assert [batch["n"].tolist() for batch in loader] == [batch["n"].tolist() for batch in other]


def test_a_state_is_never_half_of_another(ds):
    loader, other = a_loader(ds, seed=1), a_loader(ds, seed=2)
    other.set_epoch(9)
    before, after = loader.state_dict(), other.state_dict()
    During(loader, "begin_of", lambda: loader.load_state_dict(after))
    assert loader.state_dict() == before
    assert loader.state_dict() == after


def test_an_iteration_that_another_one_overtakes_before_its_first_batch_says_so(ds, monkeypatch):
    loader, overtaking = a_loader(ds), [lambda: list(loader)]

    def perf_counter():
        while overtaking:
            thread = threading.Thread(target=overtaking.pop())
            thread.start()
            thread.join(300)
        return 0.0

    monkeypatch.setattr("penstock.loader.iteration.time", types.SimpleNamespace(perf_counter=perf_counter))
    with pytest.raises(ps.ClosedError, match="another iteration"):
        list(loader)

"""A commit contains each call of a transaction whole or not at all: after Ctrl-C, and while another thread is in a call."""

import contextlib
import itertools
import pathlib
import sys
import threading

import numpy as np
import penstock as ps
import pytest
from penstock.changes import inputs
from penstock.frameworks import arrow

FILES = {str(pathlib.Path(ps.__file__).parent / name) for name in ("transaction.py", "changes/call.py")}
VERBS = {
    "append": lambda tx: tx.append({"n": range(10, 16)}),
    "update": lambda tx: tx.update({"n": range(10, 16)}, row_ids=range(6)),
    "upsert": lambda tx: tx.upsert({"n": range(3, 9)}, key="n"),
    "overwrite": lambda tx: tx.overwrite({"n": range(20, 26)}),
    "delete": lambda tx: tx.delete(row_ids=[0, 1]),
    "add_column": lambda tx: tx.add_column("m", "int8", fill=1),
}


class Late(Exception):
    """What a handler of SIGALRM may raise."""


@contextlib.contextmanager
def interrupted(places, error):
    """Raise `error` before these lines of the transaction's code, counted from the beginning of the block."""
    count = itertools.count()

    def trace(frame, event, _):
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line" and next(count) in places:
            raise error
        return trace

    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(None)


@pytest.mark.parametrize("error", [KeyboardInterrupt, Late])
@pytest.mark.parametrize("burst", [1, 2, 3])
@pytest.mark.parametrize("verb", VERBS)
def test_an_interrupted_call_is_committed_whole_or_not_at_all(monkeypatch, verb, burst, error):
    monkeypatch.setattr(inputs, "parts", lambda schema, found, samples: [(row, min(row + 2, samples)) for row in range(0, samples, 2)])
    seen, place = set(), 0
    while True:
        ds = ps.create(f"memory://interrupted-{verb}-{burst}-{error.__name__}-{place}", {"n": "int64"})
        ds.append({"n": range(6)})
        before, tx = content(ds), ds.transaction()
        with contextlib.suppress(error), interrupted(range(place, place + burst), error) as count:
            VERBS[verb](tx)
            break  # Every line was tried.
        with contextlib.suppress(ps.ClosedError):
            tx.commit()
        seen.add(str(content(ds)))
        place += 1
    tx.commit()
    assert next(count) <= place + 1 and place > 8 and seen <= {str(before), str(content(ds))} and str(before) in seen


def content(ds):
    return {name: ds[name][:].tolist() for name in ds.columns}


def test_a_commit_that_was_refused_does_not_open_one_that_was_not(monkeypatch):
    """One thread is about to commit when another begins to append, and a third one tries to commit."""
    ds = ps.create("memory://commits-race", {"n": "int64"})
    tx, calls = ds.transaction(), []

    def began(call):
        tx._calls.under_way.add(call)

    tx._calls.close()  # The first thread goes this far.
    late = tx._calls.begin()
    began(late)
    with pytest.raises(ps.ClosedError, match="is in progress"):
        tx.commit()
    tx._calls.under_way.discard(late)
    with pytest.raises(ps.ClosedError, match="already been committed"):
        calls.append(tx.append({"n": [1]}))
    assert not calls


def test_an_abort_that_is_refused_does_not_cancel_the_commit():
    ds = ps.create("memory://abort-refused", {"v": ps.Tensor((4,), "float32", tile=(2,))})

    class Pulled:
        shape, dtype = (4,), np.dtype("float32")

        def __getitem__(self, key):
            with pytest.raises(ps.ClosedError):
                tx.abort()
            return np.zeros(4, np.float32)[key]

    with ds.transaction() as tx:
        tx.append({"v": [Pulled()]})
    assert len(ds) == 1 and tx.receipt.row_ids.tolist() == [0]


def test_a_refused_call_leaves_the_transaction_usable():
    ds = ps.create("memory://refused-call", {"n": "int64", "t": ps.Text()})
    tx = ds.transaction()
    for wrong in ({"n": ["x"]}, {"t": [1]}, {"m": [1]}):
        with pytest.raises(ps.Error):
            tx.append(wrong)
    tx.append({"n": [1]})
    tx.commit()
    assert ds["n"][:].tolist() == [1]


class Waiting:
    """A value that runs `work` when it is read."""

    def __init__(self, work):
        self.work = work

    def __array__(self, dtype=None, copy=None):
        self.work()
        return np.zeros(2, np.float32)


@pytest.mark.parametrize("verb", ["append", "update", "overwrite"])
def test_a_transaction_is_not_committed_while_a_thread_is_in_a_call(verb):
    ds = ps.create(f"memory://call-{verb}", {"v": ps.Tensor((2,), "float32")})
    ds.append({"v": np.ones((2, 2))})
    tx, reached, goes_on = ds.transaction(), threading.Event(), threading.Event()
    refused = []

    def work():
        with pytest.raises(ps.ClosedError, match="is in progress") as caught:
            tx.commit()  # In the same thread.
        refused.append(caught.value)
        reached.set()
        assert goes_on.wait(300)

    values = {"v": [Waiting(work), [3, 4]]}
    calls = {
        "append": lambda: tx.append(values),
        "update": lambda: tx.update(values, row_ids=[0, 1]),
        "overwrite": lambda: tx.overwrite(values),
    }
    thread = threading.Thread(target=calls[verb])
    thread.start()
    assert reached.wait(300)
    with pytest.raises(ps.ClosedError, match="commit after the call returns"):
        tx.commit()
    goes_on.set()
    thread.join()
    tx.commit()
    assert refused and ds["v"][:].tolist() == ([[1, 1], [1, 1]] if verb == "append" else []) + [[0, 0], [3, 4]]
    with pytest.raises(ps.ClosedError):
        tx.append({"v": [[1, 1]]})


def test_what_ends_a_scan_of_a_condition_is_raised_unchanged(monkeypatch):
    ds = ps.create("memory://condition-interrupted", {"n": "int64"})
    ds.append({"n": range(10)})
    original = arrow.reader
    for error in (KeyboardInterrupt(), ps.CorruptError("cannot decode block 1", code="block-checksum")):

        def broken(*arguments, error=error, **options):
            stream = original(*arguments, **options)

            def batches():
                yield from stream
                raise error

            return type(stream).from_batches(stream.schema, batches())

        monkeypatch.setattr(arrow, "reader", broken)
        with pytest.raises(type(error)) as caught, ds.transaction() as tx:
            tx.delete(where="n > 3")
        assert caught.value is error and len(ds) == 10

"""Transactions that fail, or continue after a refused append."""

import contextlib
import os
import signal
import threading

import numpy as np
import penstock as ps
import pytest


class Failing:
    """A large array that cannot be read."""

    dtype, shape, ndim = np.dtype("uint8"), (3000, 4000), 2

    def __getitem__(self, key):
        raise OSError("it is gone")


@pytest.mark.local
def test_a_transaction_that_fails_after_many_files_leaves_none(tmp_path, separate_files):
    ds = ps.create(tmp_path / "set", {"v": ps.Tensor((None, None), "uint8"), "n": "int64"})
    ds.append({"v": [np.ones((2, 2), np.uint8)], "n": [1]})
    before = sorted((tmp_path / "set" / "d").iterdir())
    with pytest.raises(OSError, match="it is gone"), ds.transaction() as tx:
        large = np.ones((3000, 4000), np.uint8)
        tx.append({"v": [large] * 25, "n": range(25)})  # These values do not fit in one fragment.
        tx.append({"v": [Failing()], "n": [1]})
    assert sorted((tmp_path / "set" / "d").iterdir()) == before and len(before) == len(ds.refresh()) == 1


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit, GeneratorExit, RuntimeError])
def test_a_transaction_that_raises_commits_nothing(root, raised):
    ds = ps.create(root, {"n": "int32"})
    with pytest.raises(raised), ds.transaction("half") as tx:
        tx.append({"n": [1, 2]})
        if raised is KeyboardInterrupt:
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1_000_000):
                pass
        raise raised
    assert len(ps.open(root)) == 0 and [commit.message for commit in ds.log()] == ["create"]


def test_a_refused_append_forgets_its_own_words_only(root):
    """If a transaction's first append is refused because of a later column, the snapshot's words must keep their codes."""
    good = (np.zeros((2, 2, 3), np.uint8), np.ones((2, 2, 3), np.uint8), np.ones((2, 2, 3), np.uint8))
    ds = ps.create(root, {"word": ps.Category(), "image": ps.Image()})
    ds.append({"word": ["a", "b", "c"], "image": good})
    with ds.transaction() as tx:
        with pytest.raises(ps.Error, match="image"):
            tx.append({"word": ["d", "e"], "image": [b"nothing that is an image", b"nor this"]})
        tx.append({"word": ["e", "b", "d"], "image": good})
    back = ps.open(root)
    words = np.array(back.vocabulary("word"))
    assert words[back[:]["word"]].tolist() == ["a", "b", "c", "e", "b", "d"] and sorted(words.tolist()) == ["a", "b", "c", "d", "e"]


def test_an_interrupted_append_is_not_committed_in_part(root, monkeypatch):
    """Ctrl-C interrupts an append between two slices, and the `with` block suppresses it. The first slice must not be committed."""
    ds = ps.create(root, {"x": ps.Tensor((1 << 20,), "uint8")})
    slices = []

    def interrupted(self, ready, start, end, validate, first_row=0):
        slices.append(start)
        if start > 0:
            raise KeyboardInterrupt
        return append_slice(self, ready, start, end, validate)

    append_slice = ps.dataset.Transaction.append_slice
    monkeypatch.setattr(ps.dataset.Transaction, "append_slice", interrupted)
    with pytest.raises(ps.ClosedError, match="an earlier change failed"), ds.transaction() as tx, contextlib.suppress(KeyboardInterrupt):
        tx.append({"x": np.zeros((40, 1 << 20), np.uint8)})
    assert len(slices) == 2 and len(ps.open(root)) == 0


class Calling:
    """A large array that calls a function when it is read."""

    dtype, shape, ndim = np.dtype("float32"), (2500, 1500), 2

    def __init__(self, call):
        self.call = call

    def __getitem__(self, key):
        self.call()
        return np.zeros(self.shape, np.float32)[key]


@pytest.mark.parametrize("middle", ["append", "transaction"])
def test_a_value_cannot_use_the_transaction_that_reads_it_through_another_value(tmp_path, middle):
    ds, refused = ps.create(tmp_path / "set", {"x": ps.Tensor((None, None), "float32"), "y": "int32"}), []

    def innermost():
        with pytest.raises(ps.ClosedError, match="while it is reading a value"):
            outer.append({"y": [3]})
        refused.append(True)

    def between():
        if not refused:
            inner = ds.transaction()
            (ds.append if middle == "append" else inner.append)({"x": [Calling(innermost)]})

    outer = ds.transaction()
    outer.append({"x": [Calling(between)]})
    outer.commit()
    assert refused and len(ds) == (2 if middle == "append" else 1)


@pytest.mark.local
def test_an_append_that_was_interrupted_before_its_commit_adds_nothing(tmp_path):
    """The core looks for signals once all files are written."""
    handler = signal.signal(signal.SIGUSR1, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))

    try:
        # Encoding takes about 20 times as long.
        reader = threading.Timer(0.1, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1))
        pictures = [np.random.default_rng(0).integers(0, 255, (700, 700, 3), np.uint8)] * 120
        images = ps.create(tmp_path / "images", {"image": ps.Image()})
        with pytest.raises(KeyboardInterrupt):
            reader.start()
            images.append({"image": pictures})
        reader.join()
    finally:
        signal.signal(signal.SIGUSR1, handler)
    assert len(images.refresh()) == 0 and not list((tmp_path / "images").glob("d/*"))

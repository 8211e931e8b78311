"""Transactions that fail, or continue after a refused append."""

import contextlib
import os
import signal

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

    def interrupted(self, ready, start, end, validate):
        slices.append(start)
        if start > 0:
            raise KeyboardInterrupt
        return append_slice(self, ready, start, end, validate)

    append_slice = ps.dataset.Transaction.append_slice
    monkeypatch.setattr(ps.dataset.Transaction, "append_slice", interrupted)
    with pytest.raises(ps.ClosedError, match="an earlier change failed"), ds.transaction() as tx, contextlib.suppress(KeyboardInterrupt):
        tx.append({"x": np.zeros((40, 1 << 20), np.uint8)})
    assert len(slices) == 2 and len(ps.open(root)) == 0

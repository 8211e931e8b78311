"""Threads of one process that commit at the same time share records."""

import os
import signal
import threading

import numpy as np
import penstock as ps
import pytest
from handles import newest

pytestmark = pytest.mark.processes


def together(calls):
    """Run each call in a thread, all at once, and return their results or Penstock errors."""
    barrier, results = threading.Barrier(len(calls)), [None] * len(calls)

    def run(index, call):
        barrier.wait()
        try:
            results[index] = call()
        except ps.Error as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    return results


def test_every_member_gets_its_own_receipt(root):
    ds = ps.create(root, {"n": "int64", "t": ps.Text()})

    def appends(name):
        return [
            (number, ds.append({"n": [number] * 3, "t": [f"{name}"] * 3}, message=f"{number}"))
            for number in range(100 * name, 100 * name + 12)
        ]

    receipts = [pair for of_one in together([lambda name=name: appends(name) for name in range(8)]) for pair in of_one]
    found = newest(ps.open(root), 288)
    assert len(found) == 288 and found.verify()["problems"] == []
    for number, receipt in receipts:
        rows = found.take(row_ids=receipt.row_ids)
        assert rows["n"].tolist() == [number] * 3 and rows["t"] == [str(number // 100)] * 3
        assert found.resolve(receipt.snapshot) and ps.open(root, snapshot=receipt.snapshot).take(row_ids=receipt.row_ids)["n"][0] == number
    ids = np.concatenate([receipt.row_ids for _, receipt in receipts])
    assert sorted(ids.tolist()) == sorted(found.take(range(288), columns=["_row_id"])["_row_id"].tolist())
    log = list(found.log())
    parts = [part for commit in log for part in commit.transactions]
    assert sorted(part.message for part in parts) == sorted(["create", *(str(number) for number, _ in receipts)])
    shared = [commit for commit in log if len(commit.transactions) > 1]
    assert shared and len(log) < 97
    assert shared[0].samples_added == 3 * len(shared[0].transactions) and "; " in shared[0].message
    assert shared[0].snapshot in {receipt.snapshot for _, receipt in receipts}


def test_one_of_several_changes_of_a_sample_wins(root):
    ds = ps.create(root, {"n": "int64", "m": "int64"})
    ds.append({"n": range(8), "m": range(8)})
    newest(ds, 8)

    def begun(row, value, column):
        """Return the commit of a transaction that has begun now. The commits are then made at once."""
        tx = ds.transaction(isolation="snapshot")
        tx.update({column: [value]}, row_ids=[row])
        return tx.commit

    for turn in range(1, 11):
        same = [begun(0, value, "n") for value in (1, 2, 3)]
        apart = [begun(row, 10 * turn + row, "n") for row in (1, 2)] + [begun(0, 10 * turn, "m")]
        results = together([*same, *apart])
        found = ps.open(root, snapshot=ds.snapshot)
        [won] = [value for value, result in zip((1, 2, 3), results, strict=False) if isinstance(result, ps.Receipt)]
        assert found["n"][:3].tolist() == [won, 10 * turn + 1, 10 * turn + 2] and found["m"][0] == 10 * turn
        assert all(isinstance(result, ps.ConflictError) for result in results[:3] if not isinstance(result, ps.Receipt))
        assert not [result for result in results[3:] if isinstance(result, ps.Error)]


def test_a_refused_member_does_not_hold_up_the_others(root):
    ds = ps.create(root, {"n": "int64"})
    ds.append({"n": range(4)})
    newest(ds, 4)
    for turn in range(5):
        late = ds.transaction()
        late.update({"n": [-1]}, row_ids=[0])
        with ds.transaction() as tx:
            tx.update({"n": [turn]}, row_ids=[0])
        results = together([late.commit, *([lambda: ds.append({"n": [9]})] * 6)])
        assert isinstance(results[0], ps.ConflictError) and not [result for result in results[1:] if isinstance(result, ps.Error)]
    found = newest(ps.open(root), 34)
    assert found["n"][0] == 4 and len(found) == 34 and found.verify()["problems"] == []


def test_commits_of_every_kind_take_turns(root):
    ds = ps.create(root, {"n": "int64", "k": ps.Category(), "t": ps.Text()})
    ds.append({"n": [0], "k": ["a"], "t": ["x"]})
    newest(ds, 1)

    def upsert(key):
        for _ in range(20):
            try:
                with ds.transaction(f"upsert {key}") as tx:
                    tx.upsert({"n": [key], "t": ["new"]}, key="n")
                return
            except ps.ConflictError:
                ds.refresh()

    calls = [lambda key=key: upsert(key) for key in (100, 101)]
    calls += [lambda word=word: ds.append({"n": [5], "k": [word]}) for word in "bcd"]
    calls += [lambda: ds.append({"n": [6], "t": ["y" * 5000]}), lambda: ds.append({"n": [7]}), lambda: ds.create_branch("other")]
    results = together(calls)
    assert not [result for result in results if isinstance(result, ps.Error)], results
    found = newest(ps.open(root), 8)
    assert sorted(found["n"][:].tolist()) == [0, 5, 5, 5, 6, 7, 100, 101] and found.verify()["problems"] == []
    words = found.vocabulary("k")
    assert sorted(words) == ["a", "b", "c", "d"]


def test_branches_and_datasets_do_not_mix(root):
    ds = ps.create(root, {"n": "int64"})
    other = ps.create(root.with_name("other"), {"n": "int64"})
    branch = ds.create_branch("b")
    together([lambda one=one: [one.append({"n": [number]}) for number in range(20)] for one in (ds, other, branch) for _ in range(2)])
    for one in (ds, other, branch):
        found = newest(ps.open(one.uri, branch=one.branch), 40)
        assert sorted(found["n"][:].tolist()) == sorted([*range(20)] * 2)


@pytest.mark.local
def test_a_child_forked_during_shared_commits_commits(root):
    ds = ps.create(root, {"n": "int64"})
    stop, failed = threading.Event(), []

    def appends():
        while not stop.is_set():
            ds.append({"n": [1]})

    threads = [threading.Thread(target=appends) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                signal.alarm(30)
                for _ in range(3):
                    ps.open(root).append({"n": [2]})
                status = 0
            finally:
                os._exit(status)
        failed.append(os.waitpid(pid, 0)[1])
    stop.set()
    for thread in threads:
        thread.join(300)
    values = ps.open(root)["n"][:].tolist()
    assert failed == [0] * 10 and values.count(2) == 30 and ps.open(root).verify()["problems"] == []
    assert sum(len(commit.transactions) for commit in ps.open(root).log()) == len(values) + 1

"""Backfills: the missing values of a column are computed in steps, beside other writers, and resumed after a crash."""

import signal

import numpy as np
import penstock as ps
import pytest
import waiting
from handles import newest

pytestmark = pytest.mark.processes


def squares(batch):
    return batch["n"] ** 2


def test_a_backfill_computes_what_is_missing(root):
    ds = ps.create(root, {"n": "int64", "square": "int64", "t": ps.Text()})
    ds.append({"n": range(10)})
    ds.append({"n": range(10, 15), "square": [-1, None, -3, None, -5]})
    with ds.transaction() as tx:
        tx.delete(row_ids=[3])
        tx.update({"square": [None]}, row_ids=[4])  # An explicit null is a value.
    seen = []
    compute = lambda batch: seen.extend(batch["n"].tolist()) or squares(batch)  # noqa: E731
    calls = []
    assert ds.backfill("square", compute, columns=["n"], batch_size=3, commit_samples=4, progress=lambda *at: calls.append(at)) == 10
    assert sorted(seen) == [0, 1, 2, 5, 6, 7, 8, 9, 11, 13] and calls[-1][0] == 10
    expected = [0, 1, 4, None, 25, 36, 49, 64, 81, -1, 121, -3, 169, -5]
    assert newest(ps.open(root), 14)["square"][:].tolist() == expected
    commits = len(ds.log())
    assert ds.backfill("square", compute, columns=["n"]) == 0 and len(ds.log()) == commits and len(seen) == 10
    # Values that are null in the end are not computed again.
    assert ds.backfill("t", lambda batch: [None] * len(batch["n"]), columns=["n"]) == 14
    assert ds.backfill("t", lambda batch: ["x"] * len(batch["n"]), columns=["n"]) == 0 and ds["t"][:] == [None] * 14
    for number in range(70):  # Enough commits for roots, pages and joined overlays.
        ds.append({"n": [number]})
    assert ds.backfill("square", squares, columns=["n"]) == 70 and ds["square"][-1] == 69**2 and not ds.verify()["problems"]


@pytest.mark.parametrize("kind", ["text", "ragged", "vector", "label", "category", "fill"])
def test_every_kind_of_value_is_found_missing(root, kind):
    kinds = {
        "text": (ps.Text(), "a"), "ragged": (ps.Tensor((None,), "int16"), np.ones(2, np.int16)), "vector": (ps.Tensor((2,), "float32"), np.ones(2)),
        "label": (ps.Label(["a", "b"]), "b"), "category": (ps.Category(), "new"), "fill": ("int32", 7),
    }  # fmt: skip
    column, value = kinds[kind]
    ds = ps.create(root, {"n": "int64", "c": column})
    ds.append({"n": [0, 1, 2], "c": [value, None, value]})
    ds.append({"n": [3]})
    name = "c"
    if kind == "fill":
        with ds.transaction() as tx:
            tx.add_column("filled", "int32", fill=-1)
        ds.append({"n": [4], "filled": [5]})
        name = "filled"
    seen = []
    ds.backfill(name, lambda batch: seen.extend(batch["n"].tolist()) or [value] * len(batch["n"]), columns=["n"])
    assert sorted(seen) == ([0, 1, 2, 3] if kind == "fill" else [1, 3])
    shown = [str(sample[name]) for sample in ds]
    assert len(set(shown[:4])) == 1


def test_an_interrupted_backfill_continues(root):
    ds = ps.create(root, {"n": "int64", "square": "int64"})
    ds.append({"n": range(40)})
    other, calls = ps.open(root), []

    def failing(batch):
        calls.append(batch["n"].tolist())
        if len(calls) == 4:
            raise RuntimeError("no memory")
        if len(calls) == 2:
            newest(other, 40).append({"n": [100, 101]})
        return squares(batch)

    with pytest.raises(RuntimeError, match="no memory"):
        ds.backfill("square", failing, columns=["n"], batch_size=5, commit_samples=10)
    done = [number for call in calls[:2] for number in call]
    again = []
    fresh = newest(ps.open(root), 42)
    count = fresh.backfill(
        "square", lambda batch: again.extend(batch["n"].tolist()) or squares(batch), columns=["n"], batch_size=5, commit_samples=10
    )
    assert count == 32 and sorted(done + again) == [*range(40), 100, 101], "finished steps are not repeated, the failed one is"
    assert fresh["square"][:].tolist() == [n * n for n in fresh["n"][:].tolist()]


def test_changed_inputs_repeat_a_step_and_deleted_samples_are_left_out(root):
    ds = ps.create(root, {"n": "int64", "square": "int64"})
    ids = ds.append({"n": range(20)}).row_ids
    other, calls = ps.open(root), []

    def compute(batch):
        calls.append(len(batch["n"]))
        if len(calls) < 3:
            newest(other, 20)
            with other.transaction("meanwhile") as tx:
                tx.update({"n": [50 + len(calls)]}, row_ids=ids[7:8])
                if len(calls) == 2:
                    tx.delete(row_ids=ids[2:3])
        return squares(batch)

    assert ds.backfill("square", compute, columns=["n"], batch_size=20) == 19
    assert calls == [20, 20, 19] and ds["n"][6] == 52 and ds["square"][:].tolist() == [n * n for n in ds["n"][:].tolist()]


def part(uri, call, go, answers):
    go.wait()
    try:
        answers.put(ps.open(uri).backfill("square", squares, columns=["n"], batch_size=10, commit_samples=20))
    except ps.Error as error:
        answers.put(error)


def test_several_processes_share_a_backfill(root):
    ds = ps.create(root, {"n": "int64", "square": "int64"})
    ds.append({"n": range(400)})
    done = list(waiting.at_once(part, ds.uri, range(3)))
    assert sum(done) == 400, done
    assert newest(ps.open(root), 400)["square"][:].tolist() == [n * n for n in range(400)]


def killed(uri, call, go, answers):
    go.wait()
    ps.open(uri).backfill(
        "square", lambda batch: answers.put(batch["n"].tolist()) or squares(batch), columns=["n"], batch_size=5, commit_samples=10
    )


@pytest.mark.local
def test_a_backfill_survives_kill(tmp_path):
    import multiprocessing

    ds = ps.create(tmp_path / "set", {"n": "int64", "square": "int64"})
    ds.append({"n": range(200)})
    context = multiprocessing.get_context("fork")
    for kills in range(4):
        go, answers = context.Event(), context.Queue()
        worker = context.Process(target=killed, args=(ds.uri, 0, go, answers))
        worker.start()
        go.set()
        for _ in range(3 + kills):
            answers.get(timeout=300)
        worker.kill()
        worker.join()
        assert worker.exitcode == -signal.SIGKILL
        ds.refresh()
        values = ds["square"][:]
        assert all(value is None or value == n * n for n, value in enumerate(values.tolist()))
    left = int(np.ma.getmaskarray(ds["square"][:]).sum())
    assert 0 < left < 200 and ds.backfill("square", squares, columns=["n"]) == left
    assert ds["square"][:].tolist() == [n * n for n in range(200)]


@pytest.mark.local
def test_wrong_arguments_and_results_are_refused(tmp_path):
    ds = ps.create(tmp_path / "set", {"n": "int64", "square": "int64"})
    ds.append({"n": range(5)})
    with pytest.raises(ps.NotFoundError, match="no such column"):
        ds.backfill("cube", squares, columns=["n"])
    with pytest.raises(ps.InvalidInputError, match="from itself"):
        ds.backfill("square", squares, columns=["square"])
    for wrong in (lambda batch: [1], lambda batch: 7, lambda batch: None):
        with pytest.raises(ps.InvalidInputError, match="for 5 samples"):
            ds.backfill("square", wrong, columns=["n"])
    with pytest.raises(ps.InvalidInputError, match="column `square`"):
        ds.backfill("square", lambda batch: ["x"] * 5, columns=["n"])
    for size in (0, -1, 1.5, "2"):
        with pytest.raises(ps.InvalidInputError, match="batch_size"):
            ds.backfill("square", squares, columns=["n"], batch_size=size)
    assert len(ds.log()) == 2 and ds["square"][:].tolist() == [None] * 5


@pytest.mark.local
def test_errors_of_the_function_are_raised_and_endless_conflicts_end(tmp_path):
    ds = ps.create(tmp_path / "set", {"n": "int64", "square": "int64"})
    ids = ds.append({"n": range(5)}).row_ids
    calls = []

    def refused(batch):
        calls.append(1)
        raise ps.ConflictError("from elsewhere", code="conflict")

    with pytest.raises(ps.ConflictError, match="from elsewhere"):
        ds.backfill("square", refused, columns=["n"])
    other = ps.open(tmp_path / "set")

    def always_late(batch):
        calls.append(1)
        with other.transaction() as tx:
            tx.update({"n": [len(calls)]}, row_ids=ids[:1])
        return squares(batch)

    with pytest.raises(ps.ConflictError, match="column `n`"):
        ds.backfill("square", always_late, columns=["n"])
    assert len(calls) < 100
    for columns in ("n", [], None, 5):
        with pytest.raises(ps.InvalidInputError, match="expected a list of column names"):
            ds.backfill("square", squares, columns=columns)


def test_an_exception_of_the_function_names_it_and_the_samples(root):
    ds = ps.create(root, {"n": "int64", "square": "int64"})
    ds.append({"n": range(5)})

    def broken(batch):
        raise ValueError("no such thing")

    with pytest.raises(ValueError, match="no such thing") as caught:
        ds.backfill("square", broken, columns=["n"])
    assert any("broken" in note and "5 samples" in note and "[0, 1, 2]" in note for note in caught.value.__notes__)

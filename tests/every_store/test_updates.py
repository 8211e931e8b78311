"""Test updates and deletions on every store: what readers see, conflicts, writers that race, and kill -9."""

import gc
import multiprocessing
import random

import numpy as np
import penstock as ps
import pytest
from handles import newest


def numbers(root, count=100):
    ds = ps.create(root, {"n": "int64", "t": ps.Text(), "label": ps.Label(["cat", "dog"])})
    receipt = ds.append({"n": range(count), "t": [f"text {number}" for number in range(count)], "label": ["cat"] * count})
    return ds, receipt.row_ids


def test_updates_and_deletions_are_seen_by_later_snapshots_only(root):
    ds, ids = numbers(root)
    before = ds.snapshot
    with ds.transaction("change") as tx:
        new = tx.append({"n": [1000, 1001], "t": ["a", "b"]})
        tx.update({"n": [-1, -2, -3], "label": ["dog", None, "dog"]}, row_ids=[ids[7], ids[0], new[1]])
        tx.update({"t": ["first", "second"]}, row_ids=[ids[7], ids[7]])
        tx.delete(row_ids=[ids[3], ids[99], new[0]])
    assert len(ds) == 99 and tx.receipt.row_ids.tolist() == [100, 101]
    for handle in (ds, newest(ps.open(root), 99)):
        assert handle[6] == {"n": -1, "t": "second", "label": 1} and handle[0]["n"] == -2 and handle[0]["label"] is None
        assert handle["n"][:].tolist() == [-2, 1, 2, 4, 5, 6, -1, *range(8, 99), -3]
        assert handle.take(row_ids=[101, ids[7], ids[98]], columns=["n", "_position"])["_position"].tolist() == [98, 6, 97]
        assert [value for batch in handle.scan(["t"]) for value in batch.column("t").to_pylist()][6:8] == ["second", "text 8"]
        with pytest.raises(ps.NotFoundError, match="row id 3: its sample was deleted in snapshot"):
            handle.take(row_ids=[ids[1], ids[3]])
        assert not handle.verify()["problems"]
    commit = ds.log()[0]
    assert (commit.samples, commit.samples_added) == (99, 2)
    then = ps.open(root, snapshot=before)
    assert len(then) == 100 and then[7] == {"n": 7, "t": "text 7", "label": 0} and then[3]["n"] == 3


def test_a_stale_handle_rebases_over_other_samples_and_columns(root):
    ds, ids = numbers(root)
    one, two = ps.open(root), ps.open(root)
    with one.transaction() as tx:
        tx.update({"n": [70]}, row_ids=[ids[7]])
        tx.delete(row_ids=ids[50:60])
    with two.transaction() as tx:
        tx.update({"t": ["other column"]}, row_ids=[ids[7]])
        tx.update({"n": [80]}, row_ids=[ids[8]])
        tx.delete(row_ids=ids[60:70])
        tx.append({"n": [5]})
    last = newest(ds, 81)
    assert last[7] == {"n": 70, "t": "other column", "label": 0} and last[8]["n"] == 80 and last[80]["n"] == 5
    assert not last.verify()["problems"]


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize(
    ("first", "second"), [("update", "update"), ("update", "delete"), ("delete", "update"), ("delete", "delete"), ("update", "text")]
)
def test_a_conflict_names_column_samples_and_commit(root, first, second, scattered):
    """With scattered samples, the row ids are in objects, and the conflict depends on their content."""
    ds, ids = numbers(root)
    stale = ps.open(root)
    every = ids[::2] if scattered else ids[10:20]

    def change(handle, what, chosen):
        with handle.transaction() as tx:
            if what == "delete":
                tx.delete(row_ids=chosen)
            else:
                tx.update({"n": range(len(chosen))} if what == "update" else {"t": ["x"] * len(chosen)}, row_ids=chosen)
        return tx.receipt

    theirs = change(ds, first, every)
    disjoint = ids[1::2] if scattered else ids[20:30]
    change(ps.open(root, snapshot=stale.snapshot), second, disjoint)
    before = len(newest(ps.open(root), len(ds)))
    if second == "text":
        change(stale, second, every)
        return
    with pytest.raises(ps.ConflictError) as caught:
        change(stale, second, ids[12:14])
    error = caught.value
    assert theirs.snapshot in str(error) and f"row id {ids[12]}" in str(error).replace("row ids [", "row id ") and error.hint
    assert error.row_ids == ([ids[12]] if scattered else [ids[12], ids[13]])
    assert ("`n`" in str(error)) == (first == "update") and f"{len(every)} samples" in str(error)
    assert len(newest(ps.open(root), before)) == before and len(stale) == 100


def test_a_loader_state_is_not_disturbed_by_later_changes(root):
    ds, ids = numbers(root)
    with ds.transaction() as tx:
        tx.update({"n": -ids[::3]}, row_ids=ids[::3])
        tx.delete(row_ids=ids[1::10])
    options = {"batch_size": 16, "shuffle": True, "seed": 3, "columns": ["n", "t", "_row_id"]}
    loader = ds.loader(**options)
    batches = [{name: np.asarray(values).tolist() for name, values in batch.items()} for batch in loader]
    seen = {row: (n, t) for batch in batches for row, n, t in zip(batch["_row_id"], batch["n"], batch["t"], strict=True)}
    assert seen == {row: (-row if row % 3 == 0 else row, f"text {row}") for row in ids.tolist() if row % 10 != 1}
    state = loader.state_dict(step=2)
    with ds.transaction() as tx:
        tx.update({"n": [0] * 20}, row_ids=ids[:40:2])
        tx.delete(row_ids=ids[42::2][:20])
    later = ps.open(root).loader(**options)
    later.load_state_dict(state)
    assert [{name: np.asarray(values).tolist() for name, values in batch.items()} for batch in later] == batches[2:]


def test_many_small_changes_are_joined_in_roots(root):
    """After hundreds of commits, the deletions are one set, and an open still costs the same number of requests."""
    ds, ids = numbers(root, 400)
    for number in range(150):
        with ds.transaction() as tx:
            tx.delete(row_ids=ids[2 * number : 2 * number + 1])
            if number % 10 == 0:
                tx.update({"n": [-number]}, row_ids=[ids[2 * number + 1]])
    expected = [-(number - 1) // 2 if number < 300 and number % 20 == 1 else number for number in range(400) if number >= 300 or number % 2]
    last = newest(ps.open(root), 250)
    assert last["n"][:].tolist() == expected and not last.verify()["problems"]


def change_many(uri, worker, count, answers):
    """Change random samples of one column, delete some, and append some. Retry each change until no other commit is in its way."""
    ds, rng, done = ps.open(uri), random.Random(worker), []
    for number in range(count):
        ds.refresh()
        ids = ds.take(range(len(ds)), columns=["_row_id"])["_row_id"].tolist()
        what, chosen = rng.choice(["update", "delete", "append"]), rng.sample(ids, 5)
        try:
            with ds.transaction() as tx:
                if what == "update":
                    tx.update({"n": [worker * 1000 + number] * 5}, row_ids=chosen)
                elif what == "delete":
                    tx.delete(row_ids=chosen[:1])
                else:
                    tx.append({"n": [worker * 1000 + number]})
        except ps.ConflictError:
            continue
        except ps.NotFoundError as error:
            assert "was deleted" in str(error), error
            continue
        done.append((tx.receipt.snapshot, what, chosen, worker * 1000 + number, tx.receipt.row_ids.tolist()))
    answers.put(done)


def test_racing_changes_are_serialisable(root):
    """Several processes change the same samples. Replaying the acknowledged commits in log order gives the newest snapshot."""
    numbers(root, 60)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    workers = [context.Process(target=change_many, args=(str(root), worker, 25, answers)) for worker in range(1, 4)]
    for worker in workers:
        worker.start()
    done = [entry for _ in workers for entry in answers.get(timeout=300)]
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    ds = ps.open(root)
    for _ in range(20):
        ds.refresh()  # A store may return a stale listing.
    by_snapshot = {snapshot: rest for snapshot, *rest in done}
    log = ds.log()
    assert {commit.snapshot for commit in log[:-2]} == set(by_snapshot) and len(by_snapshot) == len(done)
    cells = {row: row for row in range(60)}
    for commit in log[-3::-1]:
        what, chosen, value, new = by_snapshot[commit.snapshot]
        if what == "append":
            cells[new[0]] = value
        for row in chosen if what == "update" else chosen[:1] if what == "delete" else []:
            assert row in cells, "a change of a deleted sample was committed"
            if what == "update":
                cells[row] = value
            else:
                del cells[row]
    found = ds.take(range(len(ds)), columns=["_row_id", "n"])
    assert dict(zip(found["_row_id"].tolist(), found["n"].tolist(), strict=True)) == cells and not ds.verify()["problems"]


def test_new_samples_that_were_changed_are_read_as_they_are_after_a_spill(root):
    """Values of new samples are in memory, those of updates in files once there are many: the newer ones count."""
    before = ps.configure()["memory_bytes"]
    ps.configure(memory_bytes=16 << 20)
    try:
        ds = ps.create(root, {"n": "int64", "wide": ps.Tensor((600,), "float32")})
        ids = ds.append({"n": range(2000)}).row_ids
        with ds.transaction() as tx:
            new = tx.append({"n": [1, 1, 1]})
            tx.update({"n": [2, 2]}, row_ids=new[:2])
            tx.update({"wide": np.ones((2000, 600), np.float32)}, row_ids=ids)
            later = tx.append({"n": [7]})
            assert tx.take([*new, *later], columns=["n"])["n"].tolist() == [2, 2, 1, 7]
            assert tx.upsert({"n": [2000]}, key="n")[0] < 0 and tx.delete(where="n = 2 and _row_id < 0") == 2
            tx.update({"n": tx.take(new[2:], columns=["n"])["n"] + 10}, row_ids=new[2:])
    finally:
        ps.configure(memory_bytes=before)
    assert newest(ps.open(root), 2003)["n"][2000:].tolist() == [11, 7, 2000]


@pytest.mark.parametrize("count", [3, 60])
def test_the_last_value_of_a_repeated_row_id_counts_in_reads_inside_and_after(root, count):
    schema = {"n": "int64", "b": "bool", "v": ps.Tensor((3,), "float32"), "t": "timestamp", "label": ps.Label(["cat", "dog"])}
    ds, rng = ps.create(root, schema), np.random.default_rng(count)
    rows = {"n": np.arange(8), "b": np.zeros(8, bool), "v": np.zeros((8, 3), np.float32), "t": np.zeros(8, "M8[us]"), "label": ["cat"] * 8}
    ids = ds.append(rows).row_ids
    model = {name: list(values) for name, values in rows.items() if name != "label"}
    with ds.transaction() as tx:
        for turn in range(6):
            which = rng.integers(0, 8, count)
            given = {"n": rng.integers(-5, 5, count), "b": rng.random(count) < 0.5, "v": rng.random((count, 3), dtype=np.float32)}
            given["t"] = rng.integers(0, 9, count).astype("M8[us]")
            names = list(given) if turn % 3 == 0 else ["n", "v"] if turn % 3 == 1 else ["b", "t"]
            tx.update({name: given[name] for name in names}, row_ids=ids[which])
            for place, row in enumerate(which):
                for name in names:
                    model[name][row] = given[name][place]
            found = tx.take(ids[::-1])
            for name, values in model.items():
                np.testing.assert_array_equal(found[name], values[::-1], err_msg=f"{turn} {name}")
        # A value that another one replaces is checked all the same, and errors count all rows.
        with pytest.raises(ps.InvalidInputError, match="contains code 7, which is not a label"):
            tx.update({"n": np.zeros(8, np.int64), "label": np.array([7] * 7 + [1])}, row_ids=[ids[0]] * 8)
        for values in (np.arange(8), list(range(8))):
            with pytest.raises(ps.NotFoundError, match="row id 99") as caught:
                tx.update({"n": values}, row_ids=[*ids[:1].repeat(7), 99])
            assert (caught.value.rows, caught.value.row_ids) == ([7], [99])
    for name, values in model.items():
        np.testing.assert_array_equal(ds.take(np.arange(8))[name], values, err_msg=name)


def test_a_refused_overwrite_deletes_nothing(root):
    ds, ids = numbers(root, 5)
    with ds.transaction() as tx:
        tx.update({"n": [70]}, row_ids=[ids[0]])
        with pytest.raises(ps.InvalidInputError, match="row 1 is 'x'"):
            tx.overwrite({"n": [1, "x"]})
        assert len(tx) == 5
    assert newest(ps.open(root), 5)["n"][:].tolist() == [70, 1, 2, 3, 4]
    with ds.transaction() as tx:
        new = tx.overwrite({"n": [8, 9]})
        tx.update({"n": [90]}, row_ids=new[1:])
    assert newest(ps.open(root), 2)["n"][:].tolist() == [8, 90]


@pytest.mark.local
def test_an_interrupted_overwrite_is_not_committed(tmp_path):
    """Ctrl-C may come between the new samples and the deletions."""
    ds, _ = numbers(tmp_path / "set", 5)
    tx = ds.transaction()

    class Interrupted:
        def __getattr__(self, name):
            if name == "delete":
                raise KeyboardInterrupt
            return getattr(core, name)

    core, tx._core = tx._core, Interrupted()
    with pytest.raises(KeyboardInterrupt):
        tx.overwrite({"n": [8, 9]})
    with pytest.raises(ps.ClosedError, match="an earlier change failed"):
        tx.commit()
    assert len(ds.refresh()) == 5


def test_provisional_row_ids_belong_to_one_transaction(root):
    ds, _ = numbers(root, 2)
    one, other = ds.transaction(), ds.transaction()
    ours, theirs = (tx.append({"n": [number]}) for tx, number in ((one, 100), (other, 200)))
    assert ours[0] < 0 and theirs[0] < 0
    for refused in (lambda: other.update({"n": [1]}, row_ids=ours), lambda: other.delete(row_ids=ours), lambda: other.take(ours)):
        with pytest.raises(ps.NotFoundError, match="provisional row id of another transaction"):
            refused()
    with pytest.raises(ps.NotFoundError, match="cannot find row id -5"):
        other.update({"n": [1]}, row_ids=[-5])
    assert other.append({"n": []}).tolist() == [] and len(other) == 3
    gone = other.append({"n": [7, 8]})
    assert other.delete(where=f"_row_id = {gone[1]}") == 1 and other.delete(where="n = 7") == 1
    with pytest.raises(ps.NotFoundError, match=f"row id {gone[0]}: its sample was deleted") as caught:
        other.take(gone)
    assert caught.value.row_ids == gone[:1].tolist()
    taken = other.take([0, *theirs], columns=["_row_id", "n"])
    scanned = [row_id for batch in other.scan(["n", "_row_id", "_row_id"]) for row_id in batch.column(2).to_pylist()]
    assert taken["_row_id"].tolist() == [0, theirs[0]] and taken["n"].tolist() == [0, 200] and scanned == [0, 1, theirs[0]]
    keys = other.upsert({"n": [200, 300]}, key="n")
    other.update({"t": ["seen", "new"]}, row_ids=keys)
    assert keys[0] == theirs[0] and other.commit().row_ids.tolist() == [2, 3, 4, 5]
    assert newest(ps.open(root), 4)["t"][2:] == ["seen", "new"]


@pytest.mark.local
def test_provisional_row_ids_of_a_journal_are_the_same_after_a_crash(tmp_path):
    ds = ps.create(tmp_path / "set", {"n": "int64"})
    one, other = (ds.transaction(journal=tmp_path / name) for name in ("a", "b"))
    ours, theirs = one.append({"n": [1]}), other.append({"n": [2]})
    with pytest.raises(ps.NotFoundError, match="of another transaction"):
        one.delete(row_ids=theirs)
    del one  # As a crash would.
    gc.collect()  # The error above refers to it.
    with ds.transaction(journal=tmp_path / "a") as tx:
        tx.update({"n": [10]}, row_ids=ours)
    assert ds["n"][:].tolist() == [10]
    with ds.transaction(journal=tmp_path / "a") as tx:  # Another transaction with a journal of this name.
        tx.append({"n": [11]})
        with pytest.raises(ps.NotFoundError, match="of another transaction"):
            tx.update({"n": [12]}, row_ids=ours)
    assert ds["n"][:].tolist() == [10, 11]


def test_only_row_ids_are_marked_in_errors():
    """The key is equal to a row id as the core knows it."""
    ds = ps.create("memory://marked-errors", {"n": "int64"})
    with ds.transaction() as tx:
        ids = tx.append({"n": [-(2**63), -(2**63)]})
        with pytest.raises(ps.InvalidInputError, match="two samples have -9223372036854775808") as caught:
            tx.upsert({"n": [-(2**63)]}, key="n")
        assert caught.value.row_ids == ids.tolist()


def test_a_conflict_names_the_commit_the_column_and_the_samples(root):
    ds, ids = numbers(root, 6)
    stage = ds.stage({"n": [500]})
    cases = [
        (lambda tx: tx.update({"n": [1]}, row_ids=ids[:1]), lambda tx: tx.update({"n": [2]}, row_ids=ids[:1]), "n", [0]),
        (lambda tx: tx.delete(where="n = 9"), lambda tx: tx.update({"n": [9]}, row_ids=ids[3:4]), "n", [3]),
        (lambda tx: tx.delete(where="n = 77"), lambda tx: tx.append({"n": [78]}), None, [6]),
        (lambda tx: tx.upsert({"n": [79]}, key="n"), lambda tx: tx.append({"n": [79]}), "n", [7]),
        (lambda tx: tx.drop_column("t", force=True), lambda tx: tx.update({"t": ["z"]}, row_ids=ids[4:5]), "t", [4]),
        (lambda tx: tx.add(stage), lambda tx: tx.add(stage), None, []),
    ]
    for ours, theirs, column, row_ids in cases:
        late = newest(ps.open(root), len(ds.refresh())).transaction()
        ours(late)
        with ds.transaction() as tx:
            theirs(tx)
        with pytest.raises(ps.ConflictError) as caught:
            late.commit()
        error = caught.value
        assert (error.column, error.row_ids, error.commit) == (column, row_ids, tx.receipt.snapshot), error
        assert tx.receipt.snapshot in error.message and "ds.refresh()" in error.hint

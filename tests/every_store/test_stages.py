"""Stages: samples that many processes write, and one transaction adds, once."""

import multiprocessing
import pickle

import numpy as np
import penstock as ps
import pytest
import waiting
from handles import newest, spent

pytestmark = pytest.mark.processes

SCHEMA = {
    "n": "int64", "word": ps.Category(), "text": ps.Text(), "vector": ps.Tensor((3,), "float32"), "cloud": ps.Tensor((None, 2), "int16"),
    "volume": ps.Tensor((None, None), "uint8", tile=(64, 64)),
}  # fmt: skip


def rows(first, count):
    numbers = range(first, first + count)
    return {
        "n": list(numbers), "word": [f"w{number % 7}" for number in numbers], "text": [None if number % 5 == 0 else str(number) for number in numbers],
        "vector": np.arange(3 * count, dtype=np.float32).reshape(count, 3) + first, "cloud": [np.full((number % 3, 2), number, np.int16) for number in numbers],
        "volume": [np.full((100, 70), number % 251, np.uint8) for number in numbers],
    }  # fmt: skip


def check(ds, numbers):
    """Check that the samples are those with these numbers, in order."""
    assert ds["n"][:].tolist() == list(numbers)
    words = ds.vocabulary("word")
    for place, number in enumerate(numbers):
        sample = ds[place]
        assert words[int(sample["word"])] == f"w{number % 7}" and sample["text"] == (None if number % 5 == 0 else str(number))
        assert sample["cloud"].tolist() == [[number, number]] * (number % 3) and (sample["volume"] == number % 251).all()
        assert sample["volume"].shape == (100, 70)


def write(uri, call, go, answers):
    go.wait()
    ds = ps.open(uri)
    answers.put((call, pickle.dumps(ds.stage(rows(100 * call, 5 + call)))))


def test_stages_of_many_processes_are_one_commit(root):
    ds = ps.create(root, SCHEMA)
    ds.append(rows(0, 3))
    stages = dict(waiting.at_once(write, ds.uri, range(1, 4)))
    assert len(ds.refresh()) == 3 and len(ds.log()) == 2, "a stage is not a commit"
    stages = [pickle.loads(stages[call]) for call in range(1, 4)]
    assert [len(stage) for stage in stages] == [6, 7, 8] and len(pickle.dumps(stages[0])) < 2000
    with ds.transaction("all of them") as tx:
        before = tx.append(rows(1000, 2))
        added = tx.add(stages)
        after = tx.append(rows(2000, 2))
        assert len({*before, *added, *after}) == 25 and all(row_id < 0 for row_id in added)
        assert tx.take(added[[0, 6, 13]])["n"].tolist() == [100, 200, 300] and len(tx) == 28
        tx.update({"text": ["changed"]}, row_ids=added[7:8])
        tx.delete(row_ids=added[:1])
    numbers = [0, 1, 2, 1000, 1001, *range(101, 106), *range(200, 207), *range(300, 308), 2000, 2001]
    fresh = newest(ps.open(root), 27)
    assert fresh["text"][11] == "changed" and len(fresh.log()) == 3 and not fresh.verify()["problems"]
    with fresh.transaction() as tx:
        tx.update({"text": ["201"]}, row_ids=fresh.take([11], columns=["_row_id"])["_row_id"])
    check(fresh, numbers)


def test_a_stage_is_added_once(root):
    ds = ps.create(root, SCHEMA)
    one, two = ds.stage(rows(0, 4)), ds.stage(rows(10, 2))
    with ds.transaction("first") as tx:
        ids = tx.add([one, one])
        assert ids[:4].tolist() == ids[4:].tolist() and len(tx) == 4
        assert tx.add(one).tolist() == ids[:4].tolist() and len(tx) == 4
    first = tx.receipt.row_ids
    for number in range(70):  # Enough commits for roots and pages.
        ds.append(rows(100 + number, 1))
    # A driver that does not know whether it succeeded runs the same code again.
    again = newest(ps.open(root), 74)
    with again.transaction("again") as tx:
        found = tx.add([one, two])
        assert found[:4].tolist() == first.tolist() and all(row_id < 0 for row_id in found[4:])
    assert len(again) == 76
    check(again, [*range(4), *range(100, 170), 10, 11])
    with again.transaction("nothing new") as tx:
        assert tx.add([two, one]).tolist() == [*again.take([74, 75], columns=["_row_id"])["_row_id"].tolist(), *first.tolist()]
        tx.delete(row_ids=first)
    with again.transaction("deleted samples stay deleted") as tx:
        assert tx.add(one).tolist() == first.tolist()
    assert len(again) == 72


@pytest.mark.parametrize("between", [0, 70])
def test_only_one_of_two_drivers_adds_a_stage(root, between):
    ds = ps.create(root, SCHEMA)
    stages = [ds.stage(rows(0, 3)), ds.stage(rows(10, 3))]
    other = ps.open(root)
    slow = other.transaction("slow")
    slow.append(rows(50, 1))
    slow.add(stages)
    with ds.transaction("fast") as tx:
        tx.add(stages[1:])
    for number in range(between):
        ds.append(rows(100 + number, 1))
    with pytest.raises(ps.ConflictError, match="added the stage"):
        slow.commit()
    newest(other, 3 + between)
    with other.transaction("once more") as tx:
        tx.append(rows(50, 1))
        tx.add(stages)
    check(other, [10, 11, 12, *range(100, 100 + between), 50, 0, 1, 2])
    # Other commits do not matter.
    with ds.refresh().transaction() as tx:
        tx.add(ds.stage(rows(20, 1)))
        other.append(rows(60, 1))
    assert newest(other, between + 9)["n"][-2:].tolist() == [60, 20]


def test_stages_follow_schema_changes_and_branches(root):
    ds = ps.create(root, SCHEMA)
    ds.append(rows(0, 2))
    stage, dropped, later = ds.stage({"n": [5, 6], "word": ["new", None]}), ds.stage({"n": [1], "text": ["x"]}), ds.stage({"n": [7]})
    branch = ds.create_branch("exp")
    with branch.transaction() as tx:
        tx.add([later])
        tx.add_column("score", "float32", fill=0.5)
        tx.widen_column("vector", "float64")
        tx.drop_column("text", force=True)
        tx.append({"n": [8], "score": [2.0]})
        tx.add(stage)
    assert branch["n"][:].tolist() == [0, 1, 7, 8, 5, 6] and branch["score"][:].tolist() == [0.5, 0.5, 0.5, 2.0, 0.5, 0.5]
    assert (branch.vocabulary("word")[int(branch[4]["word"])] == "new" and branch["word"][5] is None) or branch["word"][5].mask
    with pytest.raises(ps.InvalidInputError, match="which this snapshot lacks"), branch.transaction() as tx:
        tx.add(dropped)
    wide = branch.stage({"n": [9], "vector": np.ones((1, 3))})
    with pytest.raises(ps.InvalidInputError, match="here it is float32"), ds.transaction() as tx:
        tx.add(wide)
    # After a reset, the dataset does not have the stage, so it can be added again.
    before = ds.snapshot
    with ds.transaction() as tx:
        tx.add(stage)
    ds.reset(before)
    with ds.transaction() as tx:
        tx.add(stage)
    assert ds["n"][:].tolist() == [0, 1, 5, 6] and not ds.verify()["problems"]


def test_what_is_not_a_stage_of_this_dataset_is_refused(root):
    ds = ps.create(root, {"n": "int64", "c": ps.Category()})
    stage = ds.stage({"n": [1, 2], "c": ["a", "b"]})
    other = ps.create(f"memory://stages-{id(ds)}", {"n": "int64", "c": ps.Category()})
    with pytest.raises(ps.InvalidInputError, match="another dataset"), other.transaction() as tx:
        tx.add(stage)
    for broken in (b"", stage._data[:-1], stage._data[:-5] + b"\0" + stage._data[-4:], stage._data + b"x"):
        with pytest.raises(ps.CorruptError), ds.transaction() as tx:
            tx.add(ps.Stage(2, broken))
    for wrong in (stage._data, 7, [stage, None]):
        with pytest.raises((ps.InvalidInputError, TypeError)), ds.transaction() as tx:
            tx.add(wrong)
    with pytest.raises(ps.InvalidInputError, match="differ in length"):
        ds.stage({"n": [1], "c": ["a", "b"]})
    empty = ds.stage({"n": []})
    with ds.transaction() as tx:
        assert tx.add([empty, empty]).tolist() == [] and len(empty) == 0 and bool(empty)
    assert len(ds) == 0
    with ds.transaction() as tx:
        tx.add(stage)
        tx.abort()
    # The aborted transaction has left the files of the stage.
    with ds.transaction() as tx:
        tx.add(stage)
    assert ds["n"][:].tolist() == [1, 2] and not ds.verify()["problems"]


@pytest.mark.local
def test_samples_without_any_value_are_not_staged(root):
    """Nulls of a tiled column of fixed shape have no file, by which the stage would be known."""
    ds = ps.create(root, {"n": "int64", "volume": ps.Tensor((2, 3), "uint8", tile=(1, 2))})
    with pytest.raises(ps.InvalidInputError, match="cannot stage: a run of samples has only nulls"):
        ds.stage({"volume": [None, None]})
    with ds.transaction() as tx:
        tx.add([ds.stage({"n": [None, None]}), ds.stage({"volume": []}), ds.stage({"volume": [None], "n": [1]})])
    assert newest(ps.open(root), 3)["n"][:].tolist() == [None, None, 1]


@pytest.mark.parametrize("own", [False, True], ids=["", "own commits"])
def test_a_stage_whose_samples_were_deleted_is_not_added_again_after_merges(root, own):
    ds = ps.create(root, {"n": "int64"})
    stage, exp = ds.stage({"n": [1, 2]}), ds.create_branch("exp")
    with ds.transaction() as tx:
        tx.add(stage)
    with ds.transaction() as tx:
        ids = tx.add(stage)
        tx.delete(row_ids=ids)
    if own:
        exp.append({"n": [3]})
    exp.merge(ds)
    ds.merge(exp)
    for side in (exp, ds):
        with side.transaction() as tx:
            assert tx.add(stage).tolist() == ids.tolist()
        assert side["n"][:].tolist() == [3] * own and not side.verify()["problems"]


def test_a_stage_whose_files_are_gone_is_refused(tmp_path):
    ds = ps.create(tmp_path / "set", {"n": "int64"})
    stage = ds.stage({"n": range(100)})
    [file] = (tmp_path / "set" / "d").iterdir()
    file.rename(tmp_path / "away")
    with pytest.raises(ps.NotFoundError, match="cannot add a stage") as caught, ds.transaction() as tx:
        tx.add(stage)
    assert caught.value.code == "object-not-found" and len(ds) == 0
    (tmp_path / "away").rename(file)
    with ds.transaction() as tx:
        cost = spent(ds, lambda: tx.add(stage))
    assert cost.get("puts", 0) == 0 and len(ds) == 100


@pytest.mark.local
def test_a_thousand_stages_are_one_commit(tmp_path):
    ds = ps.create(tmp_path / "set", {"n": "int64"})
    stages = [ds.stage({"n": [number]}) for number in range(1000)]
    with ds.transaction() as tx:
        ids = tx.add(stages)
    assert len(set(ids)) == 1000 and ds["n"][:].tolist() == list(range(1000)) and len(ds.log()) == 2
    # Only the last stage is unknown: `add` reads the manifest and one file.
    with ps.open(tmp_path / "set").transaction() as tx:
        assert (
            tx.add([*stages, ds.stage({"n": [1000]})])[:1000].tolist()
            == tx._dataset.take(range(1000), columns=["_row_id"])["_row_id"].tolist()
        )


@pytest.mark.local
def test_stages_are_made_in_forked_and_spawned_processes(tmp_path):
    ds = ps.create(tmp_path / "set", {"n": "int64"})
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            stages = pool.starmap(ds.__class__.stage, [(ds, {"n": [number]}) for number in range(4)])
        with ds.transaction(method) as tx:
            tx.add(stages)
    assert ds["n"][:].tolist() == [0, 1, 2, 3] * 2


def test_a_merge_does_not_double_a_stage(root):
    ds = ps.create(root, SCHEMA)
    ds.append(rows(0, 2))
    branch, stage = ds.create_branch("exp"), ds.stage(rows(10, 3))
    branch.append(rows(20, 1))
    with branch.transaction() as tx:
        tx.add(stage)
    late = newest(ps.open(root), 2).transaction()
    late.add(stage)
    with ds.transaction() as tx:
        own = tx.add(stage)
    with pytest.raises(ps.ConflictError, match="both sides added the same stage") as caught:
        ds.merge("exp")
    assert len(ds.refresh()) == 5 and len(caught.value.row_ids) == 3
    with ds.transaction("keep the branch's samples") as tx:
        tx.delete(row_ids=tx._dataset.take(range(2, 5), columns=["_row_id"])["_row_id"])
    ds.merge("exp")
    assert sorted(ds["n"][:].tolist()) == [0, 1, 10, 11, 12, 20] and len(own) == 3 and not ds.verify()["problems"]
    with pytest.raises(ps.ConflictError, match="added the stage"):
        late.commit()


def test_a_merge_that_races_with_an_added_stage_does_not_double_it(root):
    ds = ps.create(root, SCHEMA)
    ds.append(rows(0, 2))
    branch, stage = ds.create_branch("exp"), ds.stage(rows(10, 3))
    with branch.transaction() as tx:
        tx.add(stage)
    for turn in range(4):
        ds.append(rows(30 + turn, 1))
    calls = list(waiting.at_once(race, ds.uri, [None, pickle.dumps(stage)]))
    found = newest(ps.open(root), 9)["n"][:].tolist()
    assert sorted(found) == [0, 1, 10, 11, 12, 30, 31, 32, 33] and calls.count("done") >= 1, calls


def race(uri, call, go, answers):
    ds = ps.open(uri)
    go.wait()
    try:
        if call is None:
            ds.merge("exp")
        else:
            with ds.transaction() as tx:
                tx.add(pickle.loads(call))
        answers.put("done")
    except ps.ConflictError:
        answers.put("conflict")


def test_adding_nothing_new_hides_nothing(root):
    ds = ps.create(root, {"n": "int64"})
    known, empty = ds.stage({"n": [7]}), ds.stage({"n": []})
    with ds.transaction() as tx:
        tx.add(known)
    with ds.transaction() as tx:
        new = tx.append({"n": [1, 2, 3]})
        for stages in ([], [empty], [known]):
            assert tx.take(new)["n"].tolist() == [1, 2, 3]
            tx.add(stages)
            assert tx.take(new)["n"].tolist() == [1, 2, 3] and tx.delete(where="n is null") == 0
            new = np.concatenate([new[:2], tx.append({"n": [3]})])
        assert tx.upsert({"n": [1]}, key="n")[0] == new[0]
    assert newest(ps.open(root), 7)["n"][:].tolist() == [7, 1, 2, 3, 3, 3, 3]


def test_a_merge_does_not_revive_samples_that_the_branch_has_under_other_ids(root):
    ds = ps.create(root, {"n": "int64", "m": "int64"})
    ds.append({"n": [0], "m": [0]})
    stage, branch = ds.stage({"n": [10, 11], "m": [0, 0]}), ds.create_branch("b")
    with branch.transaction() as tx:
        tx.add(stage)
    with ds.transaction() as tx:
        own = tx.add(stage)
    own = tx.receipt.row_ids
    other = ds.create_branch("c")
    with other.transaction() as tx:
        tx.update({"m": [1, 1]}, row_ids=own)
    with ds.transaction() as tx:
        tx.delete(row_ids=own)
    ds.merge("b")
    with pytest.raises(ps.ConflictError, match="both sides added the same stage"):
        ds.merge("c", on_conflict="theirs")
    assert newest(ps.open(root), 3)["n"][:].tolist() == [0, 10, 11]


@pytest.mark.parametrize("dead", ["own", "linked"])
def test_a_stage_that_is_there_twice_has_the_row_ids_of_its_live_samples(root, dead):
    ds = ps.create(root, SCHEMA)
    ds.append(rows(0, 2))
    branch, stage = ds.create_branch("exp"), ds.stage(rows(10, 3))
    for handle in (branch, ds):
        with handle.transaction() as tx:
            tx.add(stage)
    # One branch deletes its samples, and merges those of the other.
    handle, other = (ds, "exp") if dead == "own" else (branch, "main")
    with handle.transaction() as tx:
        tx.delete(row_ids=handle.take(range(2, 5), columns=["_row_id"])["_row_id"])
    handle.merge(other)
    if dead == "linked":  # The third branch has the dead copy last.
        ds.merge("exp", on_conflict="theirs")
        handle = ds
    live = handle.take(range(2, len(handle)), columns=["_row_id"])["_row_id"].tolist()
    with handle.transaction() as tx:
        assert sorted(tx.add(stage).tolist()) == sorted(live) and len(live) == 3
    assert sorted(newest(ps.open(handle.uri, branch="main" if handle is ds else "exp"), 5)["n"][:].tolist()) == [0, 1, 10, 11, 12]


def test_a_stage_with_a_wider_dtype_is_refused_until_the_column_is_widened(root):
    ds = ps.create(root, {"a": "int32"})
    ds.append({"a": [1]})
    wide = ds.create_branch("wide")
    with wide.transaction() as tx:
        tx.widen_column("a", "int64")
    stage = wide.stage({"a": [2**40]})
    with pytest.raises(ps.InvalidInputError, match="it has column `a` as int64, but here it is int32") as caught, ds.transaction() as tx:
        tx.add(stage)
    assert caught.value.column == "a" and "widen column `a` to int64" in caught.value.hint
    with ds.transaction() as tx:
        tx.widen_column("a", "int64")
        tx.add(stage)
    assert newest(ps.open(root), 2)["a"][:].tolist() == [1, 2**40]

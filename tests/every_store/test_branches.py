"""Test branches on every store: merges with real conflicts, branches made at once, merges beside writers, and what opening one costs."""

import datetime
import pathlib
import shutil
import subprocess
import sys
import threading

import numpy as np
import penstock as ps
import pytest
import waiting
from handles import newest, spent

pytestmark = pytest.mark.processes


def branch_of(root, name, samples):
    """Open a branch. A stale listing may lack its name or its newest snapshot."""
    for _ in range(50):
        try:
            return newest(ps.open(root, branch=name), samples)
        except ps.NotFoundError:
            continue
    return newest(ps.open(root, branch=name), samples)


def test_a_branch_begins_at_a_snapshot_and_keeps_apart(root):
    ds = ps.create(root, {"n": "int32", "word": ps.Category()})
    first = ds.append({"n": [1, 2], "word": ["a", "b"]})
    ds.create_tag("v1")
    ds.append({"n": [3]})
    exp = ds.create_branch("exp", "v1")
    assert (exp.branch, ds.branch, len(exp), len(ds)) == ("exp", "main", 2, 3)
    receipt = exp.append({"n": [10], "word": ["c"]})
    assert receipt.row_ids[0] >> 40 > 0, "branches have lineages of their own, so that their row ids never meet"
    assert exp["n"][:].tolist() == [1, 2, 10] and ds["n"][:].tolist() == [1, 2, 3]
    assert exp.vocabulary("word") == ["a", "b", "c"] and ds.vocabulary("word") == ["a", "b"]
    assert [commit.kind for commit in exp.log()] == ["data", "branch", "data", "create"]
    assert exp.log()[1].parents == (first.snapshot,)
    other = branch_of(root, "exp", 3)
    assert other.snapshot == exp.snapshot and len(ps.open(root, snapshot=receipt.snapshot)) == 3
    seen = [ds.branches() for _ in range(1 if str(root).startswith("/") else 50)]  # A listing may be stale.
    assert {"exp": exp.snapshot, "main": ds.snapshot} in seen
    for name, code in (
        ("exp", "name-exists"),
        ("v1", "name-exists"),
        ("main", "name-exists"),
        ("", "invalid-argument"),
        ("a\nb", "invalid-argument"),
    ):
        with pytest.raises(ps.Error) as caught:
            ds.create_branch(name)
        assert caught.value.code == code and caught.value.hint
    with pytest.raises(ps.AlreadyExistsError, match="a branch with this name already exists"):
        ds.create_tag("exp")
    with pytest.raises(ps.NotFoundError, match="no branch or tag `nothing`"):
        ds.create_branch("other", "nothing")
    with pytest.raises(ps.InvalidInputError, match="a branch or one of"):
        ps.open(root, branch="exp", tag="v1")
    assert not exp.verify()["problems"] and not ds.verify()["problems"]


def test_a_deleted_branch_takes_no_commits(root):
    ds = ps.create(root, {"n": "int32"})
    exp, stale = ds.create_branch("exp"), None
    exp.append({"n": [1]})
    stale = ps.open(root, branch="exp")
    with pytest.raises(ps.NotFoundError, match="was deleted"), stale.transaction() as tx:
        tx.append({"n": [2]})
        ds.delete_branch("exp")
    for use in (
        lambda: exp.append({"n": [3]}),
        exp.refresh,
        lambda: ps.open(root, branch="exp"),
        lambda: exp.merge("main"),
        lambda: ds.delete_branch("exp"),
        lambda: exp.reset(ds.snapshot),
    ):
        with pytest.raises(ps.NotFoundError) as caught:
            use()
        assert caught.value.code == "branch-not-found" and caught.value.hint
    assert exp.branch is None and len(exp) == 1 and ds.branches() == {"main": ds.snapshot}
    with pytest.raises(ps.InvalidInputError, match="cannot delete branch `main`"):
        ds.delete_branch("main")
    again = ds.create_branch("exp", exp)
    assert (
        again["n"][:].tolist() == [1] and again.append({"n": [4]}).row_ids[0] >> 40 > exp.take([0], columns=["_row_id"])["_row_id"][0] >> 40
    )
    ds.merge("exp")
    assert ds["n"][:].tolist() == [1, 4] and not ds.verify()["problems"]


SCHEMA = {
    "n": "int64", "label": ps.Label(["a", "b", "c"]), "word": ps.Category(), "text": ps.Text(), "cloud": ps.Tensor((None, 2), "float32"),
    "image": ps.Image(), "volume": ps.Tensor((None, None), "int16", tile=(4, 4)),
}  # fmt: skip


def samples(begin, count):
    rows = range(begin, begin + count)
    return {
        "n": list(rows), "label": ["abc"[row % 3] for row in rows], "word": [f"word {row % 7}" for row in rows],
        "text": [None if row % 5 == 0 else "x" * row for row in rows], "cloud": [np.full((row % 4, 2), row, np.float32) for row in rows],
        "image": [np.full((3, 4, 3), row, np.uint8) for row in rows], "volume": [np.full((row % 9, 6), row, np.int16) for row in rows],
    }  # fmt: skip


def cells(ds):
    """Return all samples by row id, as comparable values."""
    found = {}
    for sample, row in zip(ds, ds.take(range(len(ds)), columns=["_row_id"])["_row_id"].tolist(), strict=True):
        words = {name: ds.vocabulary(name)[sample[name]] for name in ("label", "word") if sample[name] is not None}
        plain = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in {**sample, **words}.items()}
        found[row] = plain
    return found


def test_a_merge_takes_what_each_side_changed(root):
    ds = ps.create(root, SCHEMA)
    ids = ds.append(samples(0, 20)).row_ids
    exp = ds.create_branch("exp")
    new = samples(40, 6)
    with exp.transaction("theirs") as tx:
        kept = tx.append(new)
        tx.update({name: values for name, values in samples(60, 4).items() if name != "n"}, row_ids=ids[:4])
        tx.delete(row_ids=[ids[10], kept[1]])
    with ds.transaction("ours") as tx:
        tx.append(samples(80, 2))
        tx.update({"n": [100, 101]}, row_ids=ids[:2])
        tx.update({"image": samples(60, 1)["image"], "word": ["of ours"]}, row_ids=ids[5:6])
        tx.delete(row_ids=ids[12:14])
    ours, theirs = cells(ds), cells(exp)
    expected = {row: ours[row] for row in ours if row != ids[10]}
    for row in ids[:4].tolist():
        expected[row] = {**theirs[row], "n": ours[row]["n"]}
    expected |= {row: theirs[row] for row in theirs if row >> 40}
    receipt = ds.merge("exp", author="ada", properties={"why": 1})
    assert (
        cells(ds) == expected
        and list(cells(ds)) == list(expected)
        and set(receipt.row_ids.tolist()) == {row for row in theirs if row >> 40}
    )
    commit = ds.log()[0]
    assert (commit.kind, commit.message, commit.author, commit.properties) == ("merge", "merge exp", "ada", {"why": 1})
    assert len(commit.parents) == 2 and commit.parents[1] == exp.snapshot and (commit.samples_added, commit.samples_deleted) == (5, 1)
    fresh = newest(ps.open(root), len(expected))
    assert cells(fresh) == expected and not fresh.verify()["problems"]
    assert ds.merge("exp").snapshot == commit.snapshot, "nothing remains to be merged"
    exp.merge("main")
    assert exp.log()[0].kind == "merge" and cells(exp) == expected and not exp.verify()["problems"]
    assert not list(ds.diff(ds, exp))


def test_conflicts_name_columns_and_samples_and_policies_decide(root):
    ds = ps.create(root, {"n": "int32", "text": ps.Text()})
    ids = ds.append({"n": range(6), "text": ["x"] * 6}).row_ids
    exp = ds.create_branch("exp")
    with exp.transaction() as tx:
        tx.update({"n": [10, 11, 12], "text": ["theirs"] * 3}, row_ids=ids[:3])
        tx.delete(row_ids=ids[4:5])
        tx.update({"n": [50]}, row_ids=ids[5:])
    with ds.transaction() as tx:
        tx.update({"n": [10, 21], "text": ["ours"] * 2}, row_ids=ids[:2])
        tx.update({"n": [40]}, row_ids=ids[4:5])
        tx.delete(row_ids=ids[5:])
    before = ds.snapshot
    with pytest.raises(ps.ConflictError) as caught:
        ds.merge("exp")
    text = str(caught.value)
    assert "1 sample (row ids 1) in column `n`, which both sides changed" in text, "10 and 10 are the same value"
    assert "2 samples (row ids 0, 1) in column `text`" in text and "one side deleted and the other one changed in column `n`" in text
    assert caught.value.code == "conflict" and caught.value.row_ids == [0, 1, 4, 5] and caught.value.hint and ds.snapshot == before
    with pytest.raises(ps.ConflictError, match="column `text`"):
        ds.merge("exp", on_conflict={"n": "ours"})
    for wrong in ("mine", {"n": "mine"}, {"n": 3}, 7):
        with pytest.raises(ps.InvalidInputError, match="on_conflict"):
            ds.merge("exp", on_conflict=wrong)
    with pytest.raises(ps.NotFoundError, match="no such column"):
        ds.merge("exp", on_conflict={"nothing": "ours"})
    outcomes = {}
    for policy in ("ours", "theirs"):
        side = ds.create_branch(policy)
        side.merge("exp", on_conflict=policy)
        outcomes[policy] = dict(
            zip(
                side.take(range(len(side)), columns=["_row_id"])["_row_id"].tolist(),
                zip(side["n"][:].tolist(), side["text"][:], strict=True),
                strict=True,
            )
        )
        assert not side.verify()["problems"]
    assert outcomes["ours"] == {0: (10, "ours"), 1: (21, "ours"), 2: (12, "theirs"), 3: (3, "x"), 4: (40, "x")}
    assert outcomes["theirs"] == {0: (10, "theirs"), 1: (11, "theirs"), 2: (12, "theirs"), 3: (3, "x"), 5: (50, "x")}
    ds.merge("exp", on_conflict={"n": "theirs", "text": "ours"})
    assert ds["n"][:].tolist() == [10, 11, 12, 3, 50] and ds["text"][:] == ["ours", "ours", "theirs", "x", "x"]


def test_a_reset_is_a_commit_and_conflicts_with_all_that_began_before(root):
    ds = ps.create(root, {"n": "int32", "word": ps.Category()})
    good = ds.append({"n": [1, 2], "word": ["a", "b"]})
    stale = ps.open(root)
    bad = ds.append({"n": [3], "word": ["wrong"]})
    with ds.create_branch("exp").transaction() as other:
        other.append({"n": [9], "word": ["exp"]})
    with pytest.raises(ps.ConflictError, match="was made in the meantime"):
        stale.reset("exp")
    with pytest.raises(ps.ConflictError, match="replaced the whole state"), ds.transaction() as tx:
        tx.append({"n": [4], "word": ["wrong"]})
        ps.open(root).reset(good.snapshot, message="back")
    ds.refresh()
    assert ds["n"][:].tolist() == [1, 2] and ds.vocabulary("word") == ["a", "b"] and ds.log()[0].message == "back"
    assert {commit.snapshot for commit in ds.log()} >= {bad.snapshot, good.snapshot}
    assert ds.append({"n": [5], "word": ["c"]}).row_ids.tolist() == [3], "row ids are never used twice"
    assert ds.vocabulary("word") == ["a", "b", "c"] and not ds.verify()["problems"]
    with pytest.raises(ps.InvalidInputError, match="it is the current one"):
        ds.reset(ds.snapshot)
    ds.reset(branch_of(root, "exp", 4))
    assert ds["n"][:].tolist() == [1, 2, 3, 9] and not newest(ps.open(root), 4).verify()["problems"]


def test_a_merge_of_a_reset_branch_conflicts_with_appends_that_use_lost_words(root):
    ds = ps.create(root, {"word": ps.Category()})
    early = ds.append({"word": ["a"]})
    ds.append({"word": ["b"]})
    exp = ds.create_branch("exp")
    exp.reset(early.snapshot)
    with pytest.raises(ps.ConflictError, match="replaced the whole state"), newest(ps.open(root), 2).transaction() as tx:
        tx.append({"word": ["b"]})
        ds.merge(exp)
    assert newest(ds, 1).vocabulary("word") == ["a"] and ds.append({"word": ["b", "a"]}).row_ids.tolist() == [2, 3]
    assert ds["word"][:].tolist() == [0, 1, 0] and not ds.verify()["problems"]


def test_a_commit_is_copied_once(root):
    ds = ps.create(root, {"n": "int32", "word": ps.Category()})
    ids = ds.append({"n": range(4), "word": ["a"] * 4}).row_ids
    exp = ds.create_branch("exp")
    exp.append({"n": [7], "word": ["unwanted"]})
    with exp.transaction("wanted") as tx:
        tx.append({"n": [8], "word": ["wanted"]})
        tx.update({"n": [-1]}, row_ids=ids[:1])
        tx.delete(row_ids=ids[3:])
    wanted = exp.snapshot
    exp.append({"n": [9]})
    receipt = ds.cherry_pick(wanted)
    assert ds["n"][:].tolist() == [-1, 1, 2, 8] and len(receipt.row_ids) == 1 and ds.log()[0].message == f"copy of {wanted}"
    assert ds.cherry_pick(wanted).snapshot == receipt.snapshot, "the branch has these changes already"
    ds.merge("exp")
    assert sorted(ds["n"][:].tolist()) == [-1, 1, 2, 7, 8, 9] and not ds.verify()["problems"]
    with pytest.raises(ps.InvalidInputError, match="it created the dataset"):
        ds.cherry_pick(ds.log()[-1].snapshot)


def test_other_datasets_are_not_merged(root, tmp_path):
    ds, other = ps.create(root, {"n": "int32"}), ps.create(tmp_path / "other", {"n": "int32"})
    for use in (ds.merge, ds.cherry_pick, ds.reset, lambda view: list(ds.diff(view)), lambda view: ds.create_branch("x", view)):
        with pytest.raises(ps.InvalidInputError, match="is another dataset than"):
            use(other)
    for snapshot in (other.snapshot, "1-0-" + "0" * 32):
        with pytest.raises(ps.NotFoundError, match="no such commit"):
            ds.merge(snapshot)


def make_branch(uri, name, go, answers):
    ds = ps.open(uri)
    go.wait()
    try:
        branch = ds.create_branch(name)
        answers.put((name, branch.append({"n": [1]}).row_ids.tolist(), branch.snapshot))
    except ps.AlreadyExistsError as error:
        answers.put((name, None, error.code))


def test_branches_made_at_once_have_lineages_of_their_own(root):
    ds = ps.create(root, {"n": "int32"})
    names, ids = [f"own {worker}" for worker in range(3)] + ["shared"] * 3, []
    for name, rows, snapshot in waiting.at_once(make_branch, root, names):
        if rows is not None:
            ids += rows
            assert branch_of(root, name, 1).snapshot == snapshot
    assert len(ids) == len(set(ids)) == 4 and len({row >> 40 for row in ids}) == 4
    assert sorted(newest(ds, 0).branches()) == ["main", "own 0", "own 1", "own 2", "shared"]


def test_merges_beside_writers_lose_nothing(root):
    """One thread appends to main and one to a branch, which a third one merges again and again."""
    ds = ps.create(root, {"n": "int32", "word": ps.Category()})
    exp = ds.create_branch("exp")
    errors = []

    def append(handle, sign):
        try:
            for number in range(1, 21):
                with handle.transaction() as tx:
                    tx.append({"n": [sign * number], "word": [f"{sign} {number}"]})
        except ps.Error as error:
            errors.append(error)

    threads = [threading.Thread(target=append, args=(ps.open(root), 1)), threading.Thread(target=append, args=(exp, -1))]
    for thread in threads:
        thread.start()
    merged = ps.open(root)
    for _ in range(6):
        merged.merge("exp")
    for thread in threads:
        thread.join()
    assert not errors
    merged.merge(exp)
    newest(merged, 40)
    words = np.array(merged.vocabulary("word"))
    assert sorted(merged["n"][:].tolist()) == [*range(-20, 0), *range(1, 21)]
    assert [f"{(number > 0) * 2 - 1} {abs(number)}" for number in merged["n"][:].tolist()] == words[merged["word"][:]].tolist()
    assert not merged.verify()["problems"]


def merge_at_once(uri, what, go, answers):
    ds = ps.open(uri)
    go.wait()
    try:
        answers.put(ds.cherry_pick(what).snapshot if "-" in what else ds.merge(what).snapshot)
    except ps.Error as error:
        answers.put(f"{error.code}: {error}")


@pytest.mark.long
@pytest.mark.parametrize("what", ["exp", "pick", "two"])
def test_merges_made_at_once_add_samples_once(root, what):
    """Processes merge the same branch, or two branches of which one contains the other, or copy the same commit."""
    ds = ps.create(root, {"n": "int32"})
    ds.append({"n": [1]})
    exp = ds.create_branch("exp")
    exp.append({"n": [2, 3]})
    two = exp.create_branch("two")
    two.append({"n": [4]})
    ds.append({"n": [5]})
    calls = {"exp": ["exp"] * 3, "pick": [exp.snapshot, exp.snapshot, "exp"], "two": ["exp", "two", "exp"]}[what]
    found = list(waiting.at_once(merge_at_once, root, calls))
    assert not [answer for answer in found if " " in answer], found
    newest(ds, 5 if what == "two" else 4)
    assert sorted(ds["n"][:].tolist()) == ([1, 2, 3, 4, 5] if what == "two" else [1, 2, 3, 5])
    assert not ds.verify()["problems"]


def test_each_side_merged_an_older_commit_of_the_other(root):
    """Two common ancestors disagree about what changed since. Nothing is lost: it is a conflict, which a policy decides. A sample that one side
    has seen and deleted, and that the other one left alone, does not conflict."""
    ds = ps.create(root, {"x": "int32"})
    ids = ds.append({"x": [0, 0]}).row_ids
    exp = ds.create_branch("exp")
    with ds.transaction() as tx:
        tx.update({"x": [1]}, row_ids=ids[:1])
        tx.append({"x": [77]})
    exp.append({"x": [5]})
    ours, theirs = ds.snapshot, exp.snapshot
    ds.merge(theirs)
    exp.merge(ours)
    assert sorted(ds["x"][:].tolist()) == sorted(exp["x"][:].tolist()) == [0, 1, 5, 77]
    same = ds.create_branch("same")
    assert same.merge("exp").snapshot != ds.snapshot and sorted(same["x"][:].tolist()) == [0, 1, 5, 77], "both sides are equal"
    gone = exp.take([int(np.flatnonzero(exp["x"][:] == 77)[0])], columns=["_row_id"])["_row_id"]
    with exp.transaction() as tx:
        tx.update({"x": [0]}, row_ids=ids[:1])
        tx.delete(row_ids=gone)
    with pytest.raises(ps.ConflictError) as caught:
        ds.merge("exp")
    assert set(caught.value.row_ids) == {int(ids[0])}
    for policy, expected in (("ours", [0, 1, 5]), ("theirs", [0, 0, 5])):
        side = ds.create_branch(policy)
        side.merge("exp", on_conflict=policy)
        assert sorted(side["x"][:].tolist()) == expected and not side.verify()["problems"]


@pytest.mark.local
def test_a_merge_reads_each_older_merge_once(tmp_path):
    ds = ps.create(tmp_path / "set", {"n": "int32"})
    for number in range(40):
        ds.create_branch(f"b{number}").append({"n": [number]})
        ds.merge(f"b{number}")
        ds.delete_branch(f"b{number}")
    last = ds.create_branch("last")
    last.append({"n": [99]})
    ds.append({"n": [100]})
    assert spent(ds, lambda: ds.merge("last"))["reads"] < 5 * 40 and len(ds) == 42


def test_logs_and_names_that_are_unusual(root):
    ds = ps.create(root, {"n": "int32"})
    for number in range(11):
        ds.append({"n": [number]}, message=str(number))
    messages = [commit.message for commit in ds.log()]
    for key in (slice(5, 2, -1), slice(None, 3, -1), slice(8, 0, -2), slice(-3, None), slice(2, 5), slice(None), slice(3, 50, 4)):
        assert [commit.message for commit in ds.log()[key]] == messages[key], key
    assert repr(ds.log(0)) == "no commits" and repr(ds.log(2)).count("\n") == 1 and repr(ds.log()).endswith("…") and len(ds.log(5)) == 5
    with pytest.raises(IndexError):
        ds.log(3)[3]
    for use in (ds.merge, ds.cherry_pick, ds.reset, lambda view: ds.create_branch("x", view)):
        with pytest.raises(ps.InvalidInputError, match="a selection of samples"):
            use(ds.select([0]))
    for name, code in (("main", "name-exists"), (ds.snapshot, "invalid-argument")):
        for create in (ds.create_tag, ds.create_branch):
            with pytest.raises(ps.Error) as caught:
                create(name)
            assert caught.value.code == code


@pytest.mark.local
def test_a_copy_without_names_or_logs_is_refused(tmp_path):
    ds = ps.create(tmp_path / "set", {"n": "int32"})
    exp = ds.create_branch("exp")
    exp.append({"n": [1]})
    ds.merge("exp")
    shutil.copytree(tmp_path / "set", tmp_path / "nameless", ignore=shutil.ignore_patterns("refs"))
    with pytest.raises(ps.CorruptError, match="`refs` has fewer records") as caught:
        ps.open(tmp_path / "nameless").create_branch("other")
    assert caught.value.code == "log-incomplete"
    shutil.copytree(tmp_path / "set", tmp_path / "logless", ignore=shutil.ignore_patterns("0000000000000001"))
    copied = ps.open(tmp_path / "logless")
    for use in (lambda: ps.open(tmp_path / "logless", branch="exp"), lambda: copied.merge("exp")):
        with pytest.raises(ps.CorruptError) as caught:
            use()
        assert caught.value.code == "log-incomplete"
    assert copied.verify()["problems"]


@pytest.mark.local
def test_a_merge_of_large_values_stays_within_the_budget(tmp_path):
    """Both sides change 60 MB of values, with a budget of 16 MiB."""
    code = f"""
import numpy as np, penstock as ps, sys
sys.path.insert(0, {str(pathlib.Path(__file__).parent.parent)!r})
from measured import Grown
ps.configure(memory_bytes=16 << 20)
ds = ps.create({str(tmp_path / "set")!r}, {{"b": ps.Bytes(), "n": "int32"}})
ids = np.concatenate([ds.append({{"b": [np.random.bytes(1 << 20) for _ in range(6)], "n": [0] * 6}}).row_ids for _ in range(10)])
exp = ds.create_branch("exp")
for handle in (exp, ds):
    for begin in range(0, 60, 6):
        with handle.transaction() as tx:
            tx.update({{"b": [np.random.bytes(1 << 20) for _ in range(6)]}}, row_ids=ids[begin : begin + 6])
with Grown() as grown:
    ds.merge("exp", on_conflict="theirs")
    assert not list(ds.diff("exp"))
print(grown.peak)
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    assert int(answer.stdout) < 24 << 20


def test_the_past_of_a_branch_includes_that_of_its_origin(root):
    ds = ps.create(root, {"n": "int32"})
    receipts = [ds.append({"n": [number]}) for number in range(3)]
    exp = ds.create_branch("exp", receipts[1].snapshot)
    later = exp.append({"n": [9]})
    times = {commit.snapshot: commit.time for commit in [*exp.log(), *ds.log()]}
    at = lambda time, branch: ps.open(root, as_of=time, branch=branch).snapshot  # noqa: E731
    assert at(times[later.snapshot], "exp") == later.snapshot
    assert at(times[later.snapshot] - datetime.timedelta(microseconds=1), "exp") == exp.log()[1].snapshot
    assert at(times[receipts[2].snapshot], "exp") == receipts[1].snapshot, "main went on after the branch began"
    assert at(times[receipts[0].snapshot], "exp") == receipts[0].snapshot == at(times[receipts[0].snapshot], "main")
    with pytest.raises(ps.NotFoundError, match="created later"):
        at("1999-12-31", "exp")


@pytest.mark.local
def test_opening_a_branch_costs_little_after_many_operations(tmp_path):
    ds = ps.create(tmp_path / "set", {"n": "int32"})
    ds.create_branch("exp").append({"n": [1]})
    for number in range(1500):
        ds.create_tag(f"tag number {number}, which has a long name {'x' * 40}")
    opened = ps.open(tmp_path / "set", branch="exp")
    assert len(opened) == 1 and opened.stats()["reads"] <= 5, "two hints, a names record, a commit record and a root"
    exp = opened.create_branch("other")
    assert spent(ds, lambda: ds.create_branch("third"))["reads"] <= 12 and len(exp) == 1


def test_a_merge_reads_what_differs_and_not_what_exists(root):
    """Two branches of a large dataset differ in a few samples. A merge reads neither their fragments nor their values."""
    ds = ps.create(root, {"n": "int64", "blob": ps.Bytes()})
    ids = np.concatenate([ds.append({"n": range(50), "blob": [bytes(1000)] * 50}).row_ids for _ in range(40)])
    exp = ds.create_branch("exp")
    with exp.transaction() as tx:
        tx.update({"n": [1, 2, 3]}, row_ids=ids[[5, 700, 1900]])
    with ds.transaction() as tx:
        tx.update({"n": [4, 5]}, row_ids=ids[[6, 701]])
    handle = newest(ps.open(root), 2000)
    used = spent(handle, lambda: handle.merge(exp))
    read = sum(used.get(name, 0) for name in ("read_bytes", "range_bytes", "mapped_bytes"))
    assert read < 60_000, f"{read} bytes; the dataset has {ds.structure()['data_bytes']}"
    assert handle["n"][[5, 6, 700, 701, 1900]].tolist() == [1, 4, 2, 5, 3]


def test_a_merge_does_not_bring_back_values_that_a_shared_overlay_replaced(root):
    """One side's root has joined overlays that the other side has one by one. They must not be put on top of later ones."""
    main = ps.create(root, {"k": "int32", "x": "int64"})
    row_ids, number = {}, iter(range(1, 1000))

    def append(handle, keys):
        row_ids.update(zip(keys, handle.append({"k": keys, "x": [0] * len(keys)}).row_ids.tolist(), strict=True))

    def update(handle, key):
        with handle.transaction() as tx:
            tx.update({"x": [next(number)]}, row_ids=[row_ids[key]])

    append(main, [0, 2])
    append(main, [3])
    update(main, 0)
    append(main, [4, 5, 6])
    for key in (5, 2):
        update(main, key)
    append(main, [15])
    update(main, 4)
    branch = main.create_branch("b")
    for key in (15, 6):
        update(main, key)
    append(main, [34, 35])
    for key in (34, 3, 2):
        update(main, key)
    branch.reset(main.snapshot)
    update(branch, 6)
    with main.transaction() as tx:
        tx.delete(row_ids=[row_ids[35]])
    branch.create_branch("c")
    main.merge("c")
    append(branch, [60])
    expected = main.take(row_ids=[row_ids[6]])["x"][0]
    branch.merge("main")
    assert branch.take(row_ids=[row_ids[6]])["x"][0] == expected == 10 and not branch.verify()["problems"]


@pytest.mark.parametrize("also", ["nothing", "renamed", "replaced"])
@pytest.mark.parametrize("dropper", ["ours", "theirs"])
def test_the_policy_of_a_dropped_column_can_be_given_by_its_name(root, dropper, also):
    ds = ps.create(root, {"n": "int32", "t": ps.Text()})
    ids = ds.append({"n": [1, 2], "t": ["a", "b"]}).row_ids
    branch = ds.create_branch("exp")
    one, other = (ds, branch) if dropper == "ours" else (branch, ds)
    with one.transaction() as tx:
        tx.drop_column("t", force=True)
        if also == "replaced":
            tx.add_column("t", "int8")
    with other.transaction() as tx:
        tx.update({"t": ["x"]}, row_ids=ids[:1])
        if also == "renamed":
            tx.rename_column("t", "text")
    with pytest.raises(ps.ConflictError, match="dropped column `t`") as caught:
        ds.merge(branch.snapshot)
    assert f'on_conflict="{dropper}"' in caught.value.hint
    with pytest.raises(ps.NotFoundError, match="no such column"):
        ds.merge(branch.snapshot, on_conflict={"gone": "ours"})
    with pytest.raises(ps.ConflictError, match="dropped column `t`"):
        ds.merge(branch.snapshot, on_conflict={"*": dropper, "t": "fail"})
    ds.merge(branch.snapshot, on_conflict={"t": dropper})
    assert list(newest(ps.open(root), 2).schema) == (["n", "t"] if also == "replaced" else ["n"])

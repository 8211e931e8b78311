"""Test tags and time travel on every store: names made at once, thousands of operations, and what opening by a name costs."""

import datetime

import penstock as ps
import pytest
import waiting
from conftest import newest


def test_a_tag_names_one_snapshot_until_it_is_deleted(root):
    ds = ps.create(root, {"n": "int32"})
    ds.create_tag("empty")
    receipts = [ds.append({"n": [number]}) for number in range(3)]
    ds.create_tag("first", receipts[0].snapshot)
    ds.create_tag("größe / ✓")
    assert ds.tags() == {"empty": ds.log()[-1].snapshot, "first": receipts[0].snapshot, "größe / ✓": receipts[2].snapshot}
    assert [len(ps.open(root, tag=name)) for name in ("empty", "first", "größe / ✓")] == [0, 1, 3]
    assert ps.open(root, tag="first").snapshot == receipts[0].snapshot
    for again in (None, receipts[0].snapshot):
        with pytest.raises(
            ps.AlreadyExistsError, match=f"there is a tag of this name already, for snapshot {receipts[0].snapshot}"
        ) as caught:
            ds.create_tag("first", again)
        assert caught.value.code == "name-exists" and caught.value.hint
    ds.delete_tag("first")
    for use in (lambda: ps.open(root, tag="first"), lambda: ds.delete_tag("first")):
        with pytest.raises(ps.NotFoundError, match="has no tag `first`") as caught:
            use()
        assert caught.value.code == "name-not-found"
    ds.create_tag("first", receipts[1].snapshot)
    assert len(ps.open(root, tag="first")) == 2 and not ds.verify()["problems"]
    old = ps.open(root, tag="empty")
    with old.transaction() as tx:
        tx.append({"n": [9]})
    assert len(old) == 4, "a handle opened by a tag commits to the branch"


def test_names_and_times_that_are_refused(root):
    ds = ps.create(root, {"n": "int32"})
    for name in ("", "x" * 256, "two\nlines", "\0"):
        with pytest.raises(ps.InvalidInputError, match="is not a name"):
            ds.create_tag(name)
    with pytest.raises(ps.InvalidInputError):
        ds.create_tag(3)
    for snapshot in ("0-7-" + "0" * 32, "nonsense"):
        with pytest.raises((ps.NotFoundError, ps.InvalidInputError)):
            ds.create_tag("later", snapshot)
    assert ds.tags() == {}
    with pytest.raises(ps.InvalidInputError, match="only one of"):
        ps.open(root, tag="a", snapshot=ds.snapshot)
    for time in ("yesterday", 3, datetime.datetime(2026, 1, 1)):
        with pytest.raises(ps.InvalidInputError, match="as of"):
            ps.open(root, as_of=time)
    with pytest.raises(ps.NotFoundError, match="created later") as caught:
        ps.open(root, as_of="1999-12-31")
    assert caught.value.code == "snapshot-not-found" and caught.value.hint


def test_a_dataset_as_of_a_time(root):
    ds = ps.create(root, {"n": "int32"})
    for number in range(20):
        ds.append({"n": [number]})
    log = ds.log()
    moment = datetime.timedelta(microseconds=1)
    for commit in log:
        assert ps.open(root, as_of=commit.time).snapshot == commit.snapshot
        assert ps.open(root, as_of=(commit.time + moment).isoformat()).snapshot == commit.snapshot or commit is log[0]
    assert ps.open(root, as_of=log[0].time + datetime.timedelta(days=900)).snapshot == newest(ds, 20).snapshot
    assert ps.open(root, as_of=log[5].time - moment).snapshot == log[6].snapshot


def make_tag(uri, name, go, answers):
    ds = ps.open(uri)
    go.wait()
    try:
        ds.create_tag(name)
        answers.put((name, None))
    except ps.AlreadyExistsError as error:
        answers.put((name, error.code))


def test_two_names_made_at_once(root):
    """Each process makes a tag of its own and all try the same one. One process gets that one, and no tag is lost."""
    ds = ps.create(root, {"n": "int32"})
    for turn in range(3):
        ds.append({"n": [turn]})
        names = [f"own {turn} {worker}" for worker in range(3)] + [f"shared {turn}"] * 3
        found = list(waiting.at_once(make_tag, root, names))
        assert sorted(name for name, code in found if code is None)[:3] == names[:3]
        assert [code for name, code in found if name == names[3]].count(None) == 1, "a tag has one maker, so it can be used as a lock"
    assert len(ds.tags()) == 3 * 4 and not ds.verify()["problems"]


@pytest.mark.local
def test_opening_by_a_tag_costs_little_after_many_operations(tmp_path):
    ds = ps.create(tmp_path / "set", {"n": "int32"})
    for number in range(1500):
        ds.create_tag(f"tag number {number}, which has a long name {'x' * 40}")
        if number % 2:
            ds.delete_tag(f"tag number {number}, which has a long name {'x' * 40}")
    assert len(ds.tags()) == 750 and len(list((tmp_path / "set" / "n").iterdir())) > 1
    sizes = [path.stat().st_size for path in (tmp_path / "set" / "refs").iterdir()]
    assert max(sizes) <= 64 << 10
    opened = ps.open(tmp_path / "set", tag=f"tag number 748, which has a long name {'x' * 40}")
    assert opened.stats()["reads"] <= 6, "the hints of both logs, a names record, its object, a commit record and a root"

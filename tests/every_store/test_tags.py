"""Test tags and time travel on every store: names made at once, thousands of operations, and what opening by a name costs."""

import datetime
import random
import shutil
import warnings

import penstock as ps
import pytest
import spec_reader
import waiting
from google_crc32c import value as crc32c
from handles import newest


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
            ps.AlreadyExistsError, match=f"a tag with this name already exists, for snapshot {receipts[0].snapshot}"
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
        with pytest.raises(ps.InvalidInputError, match="is not a valid name"):
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


def test_a_name_is_not_the_beginning_of_a_snapshot_id(root):
    ds = ps.create(root, {"n": "int32"})
    ds.append({"n": [1]})
    branch = ds.create_branch("exp")
    log = branch.snapshot.split("-")[0]
    for name in ("0-1", "0-7", f"{log}-0", "0-1-", "0-1-abc", ds.snapshot):
        for create in (ds.create_tag, ds.create_branch):
            with pytest.raises(ps.InvalidInputError, match="snapshot id") as caught:
                create(name)
            assert caught.value.hint and caught.value.code == "invalid-argument"
    for name in ("2026-11-28", "2026-01", "00-1", "0-01", "0-1-z", "0", "v0-1", "a-b"):
        ds.create_tag(name)
        assert ps.open(root, tag=name).snapshot == ds.snapshot
    assert not ds.verify()["problems"]


@pytest.mark.local
def test_a_name_without_its_snapshot_is_reported(tmp_path):
    ds = ps.create(tmp_path / "set", {"n": "int32"})
    lost = ds.append({"n": [1]}).snapshot
    ds.create_tag("v1")
    ds.create_branch("exp").delete_branch("exp")
    shutil.copytree(tmp_path / "set", tmp_path / "copy")
    newest_record = (tmp_path / "copy" / "log" / f"{0:016x}") / f"{(1 << 64) - 2:020d}"
    newest_record.unlink()
    (tmp_path / "copy" / "log" / f"{0:016x}" / "hint").unlink()
    [problem] = ps.open(tmp_path / "copy").verify()["problems"]
    assert "tag `v1`" in str(problem) and lost in str(problem)
    assert not ds.verify()["problems"]


@pytest.mark.local
@pytest.mark.parametrize("again", ["branch", "tag", "delete"])
def test_a_deletion_that_ended_after_its_first_half_is_completed(tmp_path, again):
    ds = ps.create(tmp_path / "set", {"n": "int32"})
    exp = ds.create_branch("exp")
    exp.append({"n": [1]})
    before = {path: path.read_bytes() for path in (tmp_path / "set" / "refs").iterdir()}
    ds.delete_branch("exp")
    for path in (tmp_path / "set" / "refs").iterdir():
        path.unlink()
    for path, body in before.items():
        path.write_bytes(body)  # The log has ended, but the name is still there.
    ds = ps.open(tmp_path / "set")
    assert ds.branches() == {"main": ds.snapshot} and not ds.verify()["problems"]
    with pytest.raises(ps.NotFoundError, match="was deleted"):
        ps.open(tmp_path / "set", branch="exp")
    if again == "delete":
        ds.delete_branch("exp")
    elif again == "tag":
        ds.create_tag("exp")
        assert ds.tags() == {"exp": ds.snapshot}
    else:
        assert ds.create_branch("exp", exp.snapshot)["n"][:].tolist() == [1]
    assert ("exp" in ds.branches()) == (again == "branch") and not ds.verify()["problems"]


@pytest.mark.local
def test_a_clock_that_was_ahead_is_reported(tmp_path):
    ds = ps.create(tmp_path / "set", {"n": "int32"})
    first = ds.append({"n": [1]})
    moment = datetime.datetime.now(datetime.UTC)
    ds.append({"n": [2]})
    path = tmp_path / "set" / "log" / f"{0:016x}" / f"{(1 << 64) - 3:020d}"
    body, time = path.read_bytes(), ds.log()[0].time
    made = (time - datetime.datetime.fromtimestamp(0, datetime.UTC)) // datetime.timedelta(microseconds=1)
    ahead = made + 3650 * 86_400 * 10**6
    assert body.count(made.to_bytes(8, "little")) == 1
    body = body.replace(made.to_bytes(8, "little"), ahead.to_bytes(8, "little"))[:-4]
    path.write_bytes(body + crc32c(body).to_bytes(4, "little"))
    ps.open(tmp_path / "set").append({"n": [3]})
    for time in (moment, datetime.datetime.now(datetime.UTC)):
        with pytest.warns(RuntimeWarning, match="later commits have times up to 36[45]. days ahead of this machine's clock") as caught:
            opened = ps.open(tmp_path / "set", as_of=time)
        assert opened.snapshot == first.snapshot and first.snapshot in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(ps.open(tmp_path / "set", as_of=moment + datetime.timedelta(days=4000))) == 3
        assert len(ps.open(tmp_path / "set")) == 3


def make_tag(uri, name, go, answers):
    ds = ps.open(uri)
    go.wait()
    try:
        ds.create_tag(name)
        answers.put((name, None))
    except ps.AlreadyExistsError as error:
        answers.put((name, error.code))


@pytest.mark.long
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


def stored(root):
    """Return the bytes of all names records, and those of their objects."""
    return [sum(path.stat().st_size for path in (root / folder).glob("*")) for folder in ("refs", "n")]


@pytest.mark.local
def test_opening_by_a_tag_costs_little_after_many_operations(tmp_path):
    ds = ps.create(tmp_path / "set", {"n": "int32"})
    for number in range(1500):
        ds.create_tag(f"tag number {number}, which has a long name {'x' * 40}")
        if number % 2:
            ds.delete_tag(f"tag number {number}, which has a long name {'x' * 40}")
    assert len(ds.tags()) == 750 and len(list((tmp_path / "set" / "n").iterdir())) > 1
    sizes = [path.stat().st_size for path in (tmp_path / "set" / "refs").iterdir()]
    assert max(sizes) <= 4096
    opened = ps.open(tmp_path / "set", tag=f"tag number 748, which has a long name {'x' * 40}")
    assert opened.stats()["reads"] <= 5 + 4, "the hints of both logs, a names record, its objects, a commit record and a root"


@pytest.mark.local
def test_the_thousandth_name_costs_as_few_bytes_as_the_first_ones(tmp_path):
    ds = ps.create(tmp_path / "set", {"n": "int32"})
    costs = []
    for hundred in range(12):
        before = sum(stored(tmp_path / "set"))
        for number in range(100):
            ds.create_tag(f"tag-{hundred:03}-{number:03}")
        costs.append((sum(stored(tmp_path / "set")) - before) / 100)
    assert max(costs) < 4096 and sum(costs[6:]) < 1.25 * sum(costs[:6]), costs
    assert len(ds.tags()) == len(ps.open(tmp_path / "set").tags()) == 1200


@pytest.mark.local
def test_objects_of_earlier_names_may_be_removed_by_a_collector(tmp_path):
    """Only the objects of the newest record are needed. A reader that knew an older record, and one that begins to read it, find the names."""
    root = tmp_path / "set"
    ds = ps.create(root, {"n": "int32"})
    for number in range(100):
        ds.create_tag(f"tag-{number}")
    late = ps.open(root)
    assert len(late.tags()) == 100
    objects = set((root / "n").iterdir())
    for number in range(100, 900):
        ds.create_tag(f"tag-{number}")
    gone = [path for path in (root / "n").iterdir() if path.name not in named(root, 899)]
    assert objects & set(gone), "the first objects were replaced"
    for path in gone:
        path.unlink()
    for handle in (ds, late, ps.open(root)):
        assert sorted(handle.tags()) == sorted(f"tag-{number}" for number in range(900))
    assert not ds.verify()["problems"] and ps.open(root, tag="tag-0").snapshot == ds.snapshot
    ds.create_tag("last")
    next(path for path in (root / "n").iterdir() if path.name in named(root, 900)).unlink()
    with pytest.raises(ps.NotFoundError, match="n/"):
        ps.open(root).tags()
    assert [name for name, _ in ps.open(root).verify()["problems"]] == ["refs"]


def named(root, number):
    """Return the ids of the objects of a names record."""
    reader = spec_reader.Cursor((root / "refs" / f"{(1 << 64) - 1 - number:020d}").read_bytes()[8:-4], "names")
    return {word.id for word in reader.read("names").before}


@pytest.mark.local
def test_names_set_and_removed_by_two_writers_are_those_of_a_model(tmp_path):
    """Two handles take turns, so each reads the other one's records and objects. A third one reads everything now and then."""
    root, rng = tmp_path / "set", random.Random(5)
    ds = ps.create(root, {"n": "int32"})
    writers, model = [ds, ps.open(root)], {}
    names = [f"{number}-{'ä' * (number % 120)}" for number in range(60)]
    for turn in range(1500):
        writer, name = rng.choice(writers), rng.choice(names)
        if name in model and rng.random() < 0.7:
            writer.delete_tag(name)
            del model[name]
        elif name not in model:
            writer.create_tag(name)
            model[name] = ds.snapshot
        if turn % 250 == 249:
            assert [handle.tags() for handle in (*writers, ps.open(root))] == [model] * 3
            assert {name for _, name in spec_reader.Dataset(root).names()} == set(model)

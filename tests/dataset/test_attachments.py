"""Attachments survive all commits, cover exactly what still has the values that they were made of, and go with their columns."""

import json
import random
import threading

import numpy as np
import penstock as ps
import pytest
from anything import SEEDS
from penstock import _core
from spec_reader import Dataset

pytestmark = pytest.mark.local
GIVEN = ("attach", "test", "{}")


def attach(ds, columns, content=b"index", rows=None, replaces=(), parameters="{}", kind="index"):
    rows = None if rows is None else np.asarray(rows, np.int64)
    ds._move(_core.attach(ds._snapshot, kind, content, columns, rows, parameters, list(replaces), GIVEN))
    return _core.attachments(ds._snapshot)[-1]


def covered(ds, place=0):
    return set(_core.attachments(ds._snapshot)[place]["rows"].tolist())


def cells(ds, columns):
    """Return the values in these columns of all samples, by row id."""
    batch = ds.take(range(len(ds)), columns=["_row_id", *columns])
    return {row: tuple(int(batch[name][place]) for name in columns) for place, row in enumerate(batch["_row_id"].tolist())}


class Followed:
    """An attachment, the values that it was made of, and the samples that were given others at any time, also in commits that were reset."""

    def __init__(self, ds, columns):
        self.columns, self.made_of = columns, cells(ds, columns)
        self.rows, self.touched = set(self.made_of), set()
        self.content = json.dumps(sorted(self.rows)).encode()
        self.object = attach(ds, columns, self.content)["object"]

    def check(self, ds):
        [found] = [one for one in _core.attachments(ds._snapshot) if one["object"] == self.object]
        rows = set(found["rows"].tolist())
        assert found["content"] == self.content and rows <= self.rows
        now = cells(ds, self.columns)
        assert all(now[row] == self.made_of[row] for row in rows & set(now)), "it covers samples that have other values"
        assert self.rows - self.touched <= rows, "it no longer covers samples that nobody changed"


def commit(rng, ds, followed):
    """Make a commit of some kind."""
    ids = ds.take(range(len(ds)), columns=["_row_id"])["_row_id"].tolist() if len(ds) else []
    verb = rng.choice(["append"] * 4 + ["update"] * 6 + ["delete", "compact", "merge", "pick", "reset", "schema"])

    def update(handle):
        known = handle.take(range(len(handle)), columns=["_row_id"])["_row_id"].tolist() if len(handle) else []
        chosen = rng.sample(known, min(len(known), rng.randint(1, 3)))
        names = rng.sample(["a", "b", "c"], rng.randint(1, 2))
        for one in followed:
            one.touched |= set(chosen) if set(names) & set(one.columns) else set()
        if chosen:
            handle.update({name: [rng.randrange(1 << 20) for _ in chosen] for name in names}, row_ids=chosen)

    if verb == "append":
        ds.append({name: [rng.randrange(9)] for name in "abc"})
    elif verb == "update":
        update(ds)
    elif verb == "delete" and len(ids) > 30:
        with ds.transaction() as tx:
            tx.delete(row_ids=rng.sample(ids, 2))
    elif verb == "compact":
        ds.compact()
    elif verb in ("merge", "pick"):
        branch = ds.create_branch(f"b{rng.random()}")
        assert len(_core.attachments(branch._snapshot)) == len(followed)
        for _ in range(rng.randint(1, 3)):
            update(branch)
        if rng.random() < 0.3:
            branch.compact()
        if rng.random() < 0.6:
            update(ds)
        if verb == "merge":
            ds.merge(branch, on_conflict=rng.choice(["ours", "theirs"]))
        elif len(branch.log()) > len(ds.log()):
            ds.cherry_pick(branch.snapshot, on_conflict="theirs")
    elif verb == "reset":
        ds.reset(ds.log()[1].snapshot)
    elif verb == "schema":
        with ds.transaction() as tx:
            if "extra" in ds.schema:
                tx.drop_column("extra", force=True)
            else:
                tx.add_column("extra", "int32", fill=1)


def random_commits(seed, path, count):
    rng = random.Random(seed)
    ds = ps.create(path, {name: "int64" for name in "abc"})
    ds.append({name: range(100) for name in "abc"})
    followed = [Followed(ds, ["a"]), Followed(ds, ["b", "c"]), Followed(ds, [])]
    # A reset must not return to a time before the attachments.
    ds.append({name: [1] for name in "abc"})
    for step in range(count):
        if rng.random() < 0.9 or len(ds.log()) < 3:
            commit(rng, ds, followed)
        if step % 10 == 0:
            [one.check(ds) for one in followed]
    again = ps.open(path)
    [one.check(again) for one in followed]
    report = again.verify()
    assert not report["problems"] and not report["unreferenced_objects"]
    second = Dataset(path)
    assert {one.object: one.content for one in followed} == {one.object.id: one.content for one in second.attachments}
    ours = {one["object"]: set(one["rows"].tolist()) for one in _core.attachments(again._snapshot)}
    assert ours == {one.object.id: one.covered for one in second.attachments}
    return ds, followed


@pytest.mark.parametrize("seed", SEEDS[:6])
def test_attachments_follow_commits(seed, tmp_path):
    random_commits(seed, tmp_path / "set", 40)


@pytest.mark.long
def test_attachments_survive_a_thousand_commits(tmp_path):
    ds, followed = random_commits(1, tmp_path / "set", 1000)
    assert len(ds.log()) >= 900
    with ds.transaction() as tx:
        tx.drop_column("c", force=True)
    assert [one["object"] for one in _core.attachments(ds._snapshot)] == [followed[0].object, followed[2].object]
    assert not ds.verify()["problems"]


def test_what_changed_while_it_was_made_is_not_covered(tmp_path):
    ds = ps.create(tmp_path / "set", {"a": "int64", "b": "int64"})
    ds.append({"a": range(100), "b": range(100)})
    # Many row ids are in an object, few in the record.
    for chosen in ([3], list(range(0, 100, 2))):
        other = ps.open(tmp_path / "set")
        other.update({"a": [-1] * len(chosen)}, row_ids=chosen)
        other.update({"b": [-1]}, row_ids=[51])
        other.append({"a": [5]})
        made = attach(ds, ["a"])
        assert set(made["rows"].tolist()) & set(range(100)) == set(range(100)) - set(chosen)
        ds.refresh()
    assert not ds.verify()["problems"] and len(Dataset(tmp_path / "set").attachments) == 2


def test_attachments_of_many_writers_are_all_there(tmp_path):
    ds = ps.create(tmp_path / "set", {"a": "int64"})
    ds.append({"a": range(100)})
    failed = []

    def work(writer):
        try:
            handle = ps.open(tmp_path / "set")
            for n in range(8):
                handle.update({"a": [n]}, row_ids=[writer * 10 + n])
                attach(handle, ["a"], f"{writer} {n}".encode(), rows=[writer * 10 + n, 99])
                handle.refresh()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(writer,)) for writer in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not failed
    found = _core.attachments(ps.open(tmp_path / "set")._snapshot)
    assert sorted(one["content"].decode() for one in found) == sorted(f"{writer} {n}" for writer in range(4) for n in range(8))
    assert all(set(one["rows"].tolist()) == {int(writer) * 10 + int(n), 99} for one in found for writer, n in [one["content"].split()])


def test_one_takes_the_place_of_others_or_is_removed(tmp_path):
    ds = ps.create(tmp_path / "set", {"a": "int64"})
    ds.append({"a": range(9)})
    one = attach(ds, ["a"], b"one")["object"]
    stale = ps.open(tmp_path / "set")
    two = attach(ds, ["a"], b"two", replaces=[one])["object"]
    assert [found["content"] for found in _core.attachments(ds._snapshot)] == [b"two"]
    # Somebody else has removed it.
    with pytest.raises(ps.ConflictError, match="added or removed attachments"):
        attach(stale, ["a"], b"three", replaces=[one])
    with pytest.raises(ps.NotFoundError, match="does not have it"):
        attach(ds, ["a"], b"three", replaces=[one])
    earlier = ds.snapshot
    ds._move(_core.detach(ds._snapshot, [two], GIVEN))
    assert not _core.attachments(ds._snapshot) and len(_core.attachments(ps.open(ds.uri, snapshot=earlier)._snapshot)) == 1
    assert not ds.verify()["problems"]


def test_bad_attachments_are_refused(tmp_path):
    ds = ps.create(tmp_path / "set", {"a": "int64"})
    ids = ds.append({"a": range(9)}).row_ids
    with ds.transaction() as tx:
        tx.delete(row_ids=ids[:1])
    files = sum(1 for _ in (tmp_path / "set").rglob("*"))
    for message, error, given in [
        ("`none`", ps.NotFoundError, {"columns": ["none"]}),
        ("belong to no sample, such as 0", ps.NotFoundError, {"rows": [0, 1]}),
        ("belong to no sample, such as 12345", ps.NotFoundError, {"rows": [12345]}),
        ("expected a JSON object", ps.InvalidInputError, {"parameters": "[1]"}),
        ("expected a JSON object of at most 1024 bytes", ps.InvalidInputError, {"parameters": json.dumps({"text": "x" * 1024})}),
        ("a kind that is 0 bytes long", ps.InvalidInputError, {"kind": ""}),
        ("not the id of an object", ps.InvalidInputError, {"replaces": ["none"]}),
    ]:
        with pytest.raises(error, match=message):
            attach(ds, **{"columns": ["a"], **given})
    assert sum(1 for _ in (tmp_path / "set").rglob("*")) == files and not _core.attachments(ds._snapshot)


def test_a_dropped_column_takes_its_attachments_along(tmp_path):
    ds = ps.create(tmp_path / "set", {"a": "int64", "b": "int64"})
    ds.append({"a": range(9), "b": range(9)})
    attach(ds, ["a", "b"], b"both")
    attach(ds, ["b"], b"b")
    stale = ps.open(tmp_path / "set")
    with ds.transaction() as tx:
        tx.rename_column("b", "c")
    assert [one["columns"] for one in _core.attachments(ds._snapshot)] == [["a", "c"], ["c"]]
    with ds.transaction() as tx:
        tx.drop_column("a", force=True)
    assert [one["content"] for one in _core.attachments(ds._snapshot)] == [b"b"]
    with pytest.raises(ps.ConflictError, match="changed the schema"):
        attach(stale, ["a"], b"late")
    assert not ds.verify()["problems"]


def test_a_damaged_attachment_is_found(tmp_path):
    ds = ps.create(tmp_path / "set", {"a": "int64"})
    ds.append({"a": range(9)})
    made = attach(ds, ["a"], b"x" * 100)
    path = tmp_path / "set" / "a" / made["object"]
    body = bytearray(path.read_bytes())
    body[40] ^= 1
    path.write_bytes(body)
    with pytest.raises(ps.CorruptError, match=f"a/{made['object']}"):
        _core.attachments(ps.open(tmp_path / "set")._snapshot)
    [(name, error)] = ps.open(tmp_path / "set").verify()["problems"]
    assert name == f"a/{made['object']}" and "crc32c" in str(error)


@pytest.mark.parametrize("when", ["before", "beside"])
def test_a_sample_that_a_merge_brings_back_is_not_covered(when, tmp_path):
    """A layout dropped it, so the merge writes it again, with the values of the other side."""
    ds = ps.create(tmp_path / "set", {"a": "int64", "b": "int64"})
    ds.append({"a": [1, 2, 3], "b": [0, 0, 0]})
    branch = ds.create_branch("b")
    branch.update({"b": [7]}, row_ids=[0])
    ds.update({"a": [9]}, row_ids=[0])
    of = ps.open(tmp_path / "set")
    if when == "before":
        of._move(_core.attach(of._snapshot, "index", b"i", ["a"], None, "{}", [], ("", "", "{}")))
    ds.refresh()
    with ds.transaction() as tx:
        tx.delete(row_ids=[0])
    ds.compact()
    ds.merge("b", on_conflict="theirs")
    if when == "beside":
        of._move(_core.attach(of._snapshot, "index", b"i", ["a"], None, "{}", [], ("", "", "{}")))
    ds.refresh()
    [one] = _core.attachments(ds._snapshot)
    assert one["rows"].tolist() == [1, 2] and ds.take(row_ids=[0])["a"].tolist() == [1] and not ds.verify()["problems"]

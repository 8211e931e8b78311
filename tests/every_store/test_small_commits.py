"""Small commits store their data in the commit record, so that one put makes them durable."""

import numpy as np
import penstock as ps
import pytest
from handles import newest, spent

SCHEMA = {"n": "int64", "v": ps.Tensor((4,), "float32"), "t": ps.Text(), "k": ps.Category()}


def row(number):
    return {"n": [number], "v": [[number] * 4], "t": ["é" * (number % 50)]}


def folders(root):
    return {path.parent.name for path in root.rglob("*") if path.is_file()}


def test_a_small_append_is_one_put(root, store):
    ds = ps.create(root, SCHEMA)
    ds.append(row(0))
    costs = [spent(ds, lambda number=number: ds.append(row(number))) for number in range(1, 70)]
    assert store == "proxy" or all(cost["creates"] == 1 for cost in costs)
    # A commit whose record would be too large first writes a root, a page and its statistics.
    with_root = [cost for cost in costs if cost.get("puts")]
    assert 1 <= len(with_root) <= 4 and all(cost["puts"] == 3 for cost in with_root)
    assert "d" not in folders(root)
    fresh = newest(ps.open(root), 70)
    cost = spent(fresh, lambda: fresh[:])
    assert fresh["n"][:].tolist() == list(range(70)) and fresh["t"][:] == ["é" * (number % 50) for number in range(70)]
    records = ps.open(root).stats()
    # One request per page, and one per record since the root.
    assert cost.get("ranges", 0) + cost.get("reads", 0) <= 5 + 64 and records.get("puts", 0) == 0
    assert [int(value) for batch in fresh.scan(columns=["n"]) for value in batch["n"].to_pylist()] == list(range(70))
    loaded = [value for batch in fresh.loader(batch_size=16, shuffle=True, seed=1, columns=["n", "v"]) for value in batch["n"].tolist()]
    assert sorted(loaded) == list(range(70)) and fresh.verify()["problems"] == []


@pytest.mark.local
def test_pages_have_the_data_of_records(root):
    ds = ps.create(root, {"n": "int64"})
    while not (root / "p").exists():
        ds.append({"n": [len(ds)]})
    reader = ps.open(root)
    cost = spent(reader, lambda: reader[:])
    assert cost["reads"] <= 1 + len(list((root / "p").iterdir())) and "maps" not in cost
    assert all(path.stat().st_size <= 4096 for path in (root / "log" / "0000000000000000").iterdir())


def test_changes_are_one_put(root):
    ds = ps.create(root, SCHEMA)
    ds.append(row(0))
    for number in range(1, 6):
        ds.append(row(number))

    def change(number):
        with ds.transaction() as tx:
            tx.update({"n": [100 + number], "t": ["new"]}, row_ids=[number])
            tx.delete(row_ids=[number + 1])
            tx.append(row(200 + number))

    assert [spent(ds, lambda number=number: change(number)).get("puts", 0) for number in (0, 2)] == [0, 0]
    found = newest(ps.open(root), 6)
    assert sorted(found["n"][:].tolist()) == [4, 5, 100, 102, 200, 202] and found.verify()["problems"] == []
    with ds.transaction() as tx:
        tx.upsert({"n": [4, 7], "t": ["four", "seven"]}, key="n")
        assert sorted(value for batch in tx.scan(["n"]) for value in batch["n"].to_pylist()) == [4, 5, 7, 100, 102, 200, 202]
    assert sorted(zip(ds["n"][:].tolist(), ds["t"][:], strict=True))[0] == (4, "four")


@pytest.mark.parametrize("characters", [1500, 1800, 2048, 3000])
def test_larger_commits_have_data_files(root, store, characters):
    ds = ps.create(root, {"t": ps.Text()})
    ds.append({"t": ["x"]})
    cost = spent(ds, lambda: ds.append({"t": ["y" * characters]}))
    assert cost.get("puts", 0) == (characters > 2000)
    cost = spent(ds, lambda: [ds.append({"t": ["z" * characters]}) for _ in range(10)])
    assert cost["creates"] == 10 or store == "proxy"
    assert newest(ps.open(root), 12)["t"][:] == ["x", "y" * characters, *["z" * characters] * 10]


def test_together_they_must_be_small(root):
    ds = ps.create(root, {"a": ps.Text(), "n": "int64"})
    ds.append({"a": ["", ""], "n": [0, 1]})

    def change():
        with ds.transaction() as tx:
            tx.append({"a": ["x" * 1200]})
            tx.update({"a": ["y" * 1200]}, row_ids=[1])

    assert spent(ds, change)["puts"] == 2
    assert newest(ps.open(root), 3)["a"][:] == ["", "y" * 1200, "x" * 1200]


def test_an_abandoned_transaction_leaves_nothing(root):
    ds = ps.create(root, {"n": "int64"})
    before = sorted(path for path in root.rglob("*") if path.is_file())
    with pytest.raises(ZeroDivisionError), ds.transaction() as tx:
        tx.update({"n": [2]}, row_ids=tx.append({"n": [1]}))
        raise ZeroDivisionError
    assert sorted(path for path in root.rglob("*") if path.is_file() and not path.name.startswith("hint")) == [
        path for path in before if not path.name.startswith("hint")
    ]


@pytest.mark.processes  # A merge by name must see the newest commit of another handle.
def test_branches_and_merges_of_small_commits(root):
    ds = ps.create(root, SCHEMA)
    for number in range(4):
        ds.append(row(number))
    branch = ds.create_branch("b")
    for number in range(4, 9):
        branch.append(row(number))
    with branch.transaction() as tx:
        tx.update({"t": ["changed"]}, row_ids=[1])
    ds.append(row(9))
    ds.merge("b")
    ds.delete_branch("b")
    found = newest(ps.open(root), 10)
    assert sorted(found["n"][:].tolist()) == list(range(10)) and found["t"][1] == "changed" and found.verify()["problems"] == []


@pytest.mark.local
def test_other_settings(root):
    ds = ps.create(root, {"n": "int64"})
    ps.configure(inline_bytes=0)
    try:
        assert spent(ds, lambda: ds.append({"n": [1]}))["puts"] == 1
    finally:
        ps.configure(inline_bytes=2048)
    assert spent(ds, lambda: ds.append({"n": [2]})).get("puts", 0) == 0
    for wrong in (-1, 2049, True, "1"):
        with pytest.raises(ps.InvalidInputError, match="from 0 to 2048"):
            ps.configure(inline_bytes=wrong)


@pytest.mark.local
@pytest.mark.parametrize("io", ["mapped", "buffered", "direct"])
def test_damage_is_found_and_named(root, io):
    ds = ps.create(root, {"n": "int64"})
    for number in range(5):
        ds.append({"n": np.full(20, number)})
    record = sorted((root / "log" / "0000000000000000").glob("1844*"))[2]  # The record of commit 3.
    body = bytearray(record.read_bytes())
    body[75 + 24 + 16] ^= 1  # A value. The checksum of the record is wrong then, too.
    record.chmod(0o600)
    record.write_bytes(body)
    damaged = ps.open(root, io=io)
    with pytest.raises(ps.CorruptError) as caught:
        damaged[:]
    assert record.name in str(caught.value)
    assert damaged.take(range(40))["n"].tolist() == [0] * 20 + [1] * 20
    kept = damaged.take(range(100), on_corrupt="null")["n"]
    assert kept.tolist() == [0] * 20 + [1] * 20 + [None] * 20 + [3] * 20 + [4] * 20
    assert any(record.name in str(problem) for problem in damaged.verify()["problems"])
    # A root that another process writes later does not hide the damage.
    other = ps.open(root, io=io)
    for number in range(80):
        other.append({"n": [number]})
    again = ps.open(root, io=io)
    assert again.take(range(100), on_corrupt="null")["n"].tolist() == kept.tolist() and len(again.verify()["problems"]) >= 1

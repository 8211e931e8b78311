"""Test updates of the samples that have given keys, on every store: what is changed, what is reported, and what conflicts."""

import numpy as np
import penstock as ps
import pyarrow as pa
import pytest
from handles import newest

SCHEMA = {"source": ps.Text(), "year": "int32", "kind": ps.Category(), "vector": ps.Tensor((3,), "float32"), "image": ps.Image()}
TILED = ps.Tensor((4, 4), "uint8", tile=(2, 2))


def sources(root, count=20):
    ds = ps.create(root, SCHEMA)
    receipt = ds.append({"source": [f"{number}.png" for number in range(count)], "year": range(count), "kind": ["old"] * count})
    return ds, receipt.row_ids


def test_only_samples_with_a_given_key_change(root):
    ds, ids = sources(root)
    with ds.transaction() as tx:
        new = tx.append({"source": ["new.png"], "year": [50]})
        missing = tx.update({"source": ["7.png", "gone.png", "new.png", "3.png"], "year": [107, 1, 150, 103]}, on="source")
        assert missing == ["gone.png"] and tx.take([ids[7], ids[3], *new], columns=["year"])["year"].tolist() == [107, 103, 150]
        # The last values of a repeated key count, and a sample that the transaction deleted is not found.
        tx.delete(row_ids=[ids[5]])
        given = {"source": ["7.png", "5.png", "7.png"], "kind": ["a", "b", "c"], "image": [None, None, None]}
        assert tx.update(given, on="source") == ["5.png"]
        assert tx.update({"source": ["nobody", "nobody"], "year": [1, 2]}, on="source") == ["nobody", "nobody"]
        assert len(tx) == 20
    ds = newest(ps.open(root), 20)
    rows = {sample["source"]: sample["year"] for sample in ds}
    assert len(rows) == 20 and rows == {**{f"{n}.png": n for n in range(20) if n != 5}, "7.png": 107, "3.png": 103, "new.png": 150}
    words = ds.vocabulary("kind")
    assert sorted(words) == ["a", "c", "old"], "the word of a sample that was not found is not added"
    assert words[ds[6]["kind"]] == "c" and not ds.verify()["problems"]


def test_one_call_of_the_dataset_is_one_commit(root):
    ds, ids = sources(root)
    receipt = ds.update({"source": ["3.png", "x.png"], "vector": np.ones((2, 3))}, on="source", message="vectors")
    assert (
        receipt.not_found == ["x.png"]
        and receipt.snapshot == ds.snapshot
        and ds.log()[0].message == "vectors"
        and len(receipt.row_ids) == 0
    )
    assert ds[3]["vector"].tolist() == [1, 1, 1] and ds[4]["vector"] is None
    assert ds.update({"year": [33]}, row_ids=ids[3:4]).not_found == [] and ds[3]["year"] == 33
    for wrong in ({}, {"on": "source", "row_ids": ids[:1]}):
        with pytest.raises(ps.InvalidInputError, match="expected either row_ids or on"):
            ds.update({"source": ["3.png"], "year": [1]}, **wrong)
        with pytest.raises(ps.InvalidInputError, match="expected either row_ids or on"), ds.transaction() as tx:
            tx.update({"source": ["3.png"], "year": [1]}, **wrong)
    assert len(newest(ps.open(root), 20)) == 20


@pytest.mark.parametrize(
    ("kind", "keys", "other"),
    [
        ("int64", [5, -7, 1 << 60], 6), ("uint8", [0, 255], 3), ("bool", [True], False), ("timestamp", [0, 10**15], 1),
        (ps.Text(), ["", "é", "x" * 90_000], "e"), (ps.Bytes(), [b"", b"\0", b"\0\0"], b"\1"), (ps.Label(["cat", "dog", "fox"]), ["dog", "cat"], "fox"),
        (ps.Category(), ["one", "two"], "never seen"),
    ],
    ids=str,
)  # fmt: skip
def test_keys_of_every_kind_are_found(root, kind, keys, other):
    ds = ps.create(root, {"key": kind, "n": "int32", "big": TILED})
    ds.append({"key": keys, "n": range(len(keys))})
    with ds.transaction() as tx:
        big = [np.full((4, 4), place, np.uint8) for place in range(len(keys) + 1)]
        missing = tx.update({"key": [other, *keys], "n": range(100, 101 + len(keys)), "big": big}, on="key")
        assert missing == [other]
    assert ds["n"][:].tolist() == list(range(101, 101 + len(keys))) and ds["big"][:][:, 0, 0].tolist() == list(range(1, 1 + len(keys)))
    if isinstance(kind, ps.Category):
        assert ds.vocabulary("key") == keys, "a key that was looked for is not a word"
    for given in (np.array([other, *keys]) if isinstance(other, int) else pa.array([other, *keys]), (value for value in [other, *keys])):
        if (isinstance(kind, str) and kind in ("bool", "timestamp")) or isinstance(kind, ps.Bytes):
            continue
        with ds.transaction() as tx:
            assert tx.update({"key": given, "n": [0] * (1 + len(keys))}, on="key") == [other]
    assert not ds.verify()["problems"] and len(newest(ps.open(root), len(keys))) == len(keys)


def test_what_cannot_be_done_is_refused_and_changes_nothing(root):
    ds, _ = sources(root, 5)
    ds.append({"source": ["0.png", None], "year": [10, 11]})
    before = ds.snapshot
    tx = ds.transaction()
    for columns, key, error, text, rows in [
        ({"source": ["0.png"], "year": [1]}, "source", ps.InvalidInputError, '`source` is not a key: two samples have "0.png"', []),
        ({"source": ["1.png", None], "year": [1, 2]}, "source", ps.InvalidInputError, "row 1 is null, but a key must not be null", [1]),
        ({"year": [1]}, "source", ps.InvalidInputError, "the key column `source` is not given", []),
        ({"source": ["1.png"]}, "source", ps.InvalidInputError, "no column besides the key is given", []),
        ({"vector": [[1, 2, 3]], "year": [1]}, "vector", ps.InvalidInputError, "column `vector` cannot be a key", []),
        ({"nothing": [1], "year": [1]}, "nothing", ps.NotFoundError, "cannot update column `nothing`", []),
        ({"source": ["x", "1.png", "y", "2.png"], "image": [None, None, None, b"no image"]}, "source", ps.Error, "row 3", [3]),
        ({"source": ["x", "1.png"], "kind": [0, 77]}, "source", ps.InvalidInputError, "row 1 contains code 77", [1]),
        ({"source": ["1.png"], "year": [1, 2]}, "source", ps.InvalidInputError, "columns differ in length", []),
    ]:
        with pytest.raises(error, match=text) as caught:
            tx.update(columns, on=key)
        assert caught.value.rows == rows, text
    assert tx.update({"source": ["4.png"], "year": [9]}, on="source") == []
    tx.commit()
    assert ds["year"][:].tolist() == [0, 1, 2, 3, 9, 10, 11] and ds.snapshot != before
    assert len(newest(ps.open(root), 7)) == 7


@pytest.mark.parametrize("isolation", ["serializable", "snapshot"])
def test_keys_that_were_found_or_not_are_reads(root, isolation):
    ds, ids = sources(root)
    given = {"source": ["7.png", "gone.png"], "year": [107, 1]}
    changes = {
        "adds the missing key": (lambda tx: tx.append({"source": ["gone.png"]}), True),
        "gives the missing key to a sample": (lambda tx: tx.update({"source": ["gone.png"]}, row_ids=[ids[9]]), True),
        "gives the missing key late": (lambda tx: tx.update({"source": ["gone.png"]}, row_ids=tx.append({"year": [1]})), True),
        "doubles the key": (lambda tx: tx.append({"source": ["7.png"]}), True),
        "changes the key": (lambda tx: tx.update({"source": ["renamed"]}, row_ids=[ids[7]]), True),
        "adds another key": (lambda tx: tx.append({"source": ["other.png"], "year": [1]}), False),
        "changes another key": (lambda tx: tx.update({"source": ["renamed"]}, row_ids=[ids[8]]), False),
        "changes another column": (lambda tx: tx.update({"kind": ["x"]}, row_ids=[ids[7]]), False),
        "deletes another sample": (lambda tx: tx.delete(row_ids=[ids[8]]), False),
    }
    for name, (change, depends) in changes.items():
        branch = ds.create_branch(name)
        tx = ps.open(branch.uri, branch=name).transaction(isolation=isolation)
        assert tx.update(given, on="source") == ["gone.png"]
        with branch.transaction() as other:
            change(other)
        if depends and isolation == "serializable":
            with pytest.raises(ps.ConflictError):
                tx.commit()
        else:
            tx.commit()
    # The value of a sample is written, whatever the isolation.
    for change in (lambda tx: tx.update({"year": [5]}, row_ids=[ids[7]]), lambda tx: tx.delete(row_ids=[ids[7]])):
        branch = ds.create_branch(f"written {len(ds.branches())}")
        tx = ps.open(branch.uri, branch=branch.branch).transaction(isolation=isolation)
        tx.update(given, on="source")
        with branch.transaction() as other:
            change(other)
        with pytest.raises(ps.ConflictError):
            tx.commit()


def test_many_keys_are_updated_in_parts(root):
    ds = ps.create(root, {"key": "int64", "v": ps.Tensor((1 << 18,), "uint8")})
    ds.append({"key": range(60)})
    keys = np.arange(-2, 60)
    before = ps.configure()["memory_bytes"]
    ps.configure(memory_bytes=16 << 20)
    try:
        receipt = ds.update({"key": keys, "v": np.repeat(keys.astype(np.uint8)[:, None], 1 << 18, axis=1)}, on="key")
    finally:
        ps.configure(memory_bytes=before)
    assert receipt.not_found == [-2, -1] and [int(ds[row]["v"][-1]) for row in range(60)] == list(range(60))

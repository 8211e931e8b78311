"""Transactions that do not depend on each other commit in either order, and those that do conflict in both."""

import itertools

import numpy as np
import penstock as ps
import pytest

pytestmark = pytest.mark.local

# What reads no values, or nothing. Many columns are listed as all columns in a change set.
READS = {
    "nothing": lambda tx: None,
    "the number of samples": len,
    "row ids": lambda tx: tx.take([0, 1], columns=["_row_id"]),
    "all row ids": lambda tx: list(tx.scan(["_row_id"])),
    "a condition on row ids": lambda tx: tx.delete(where="_row_id > 100"),
    "a constant condition": lambda tx: tx.delete(where="false"),
}
MANY = {f"c{number}": "int8" for number in range(70)}
SCHEMA = {"n": "int16", "unused": "int8", **MANY}
CHANGES = {
    "add": lambda tx: tx.add_column("x", "int8"),
    "add with a fill value": lambda tx: tx.add_column("x", ps.Category(), fill="w"),
    "rename": lambda tx: tx.rename_column("n", "m"),
    "widen": lambda tx: tx.widen_column("n", "int32"),
    "drop": lambda tx: tx.drop_column("unused"),
    "values of a column": lambda tx: tx.update({"n": [5]}, row_ids=[0]),
    "values of many columns": lambda tx: tx.update({name: [5] for name in MANY}, row_ids=[0]),
}
OTHERS = {
    "nothing": lambda tx: None,
    "an append": lambda tx: tx.append({"n": [1]}),
    "an append of many columns": lambda tx: tx.append({name: [1] for name in MANY}),
    "values of many columns": lambda tx: tx.update({name: [5] for name in MANY}, row_ids=[1]),
    "a deletion": lambda tx: tx.delete(row_ids=[1]),
}


NUMBERS = itertools.count()


@pytest.fixture
def uri():
    ds = ps.create(f"memory://spurious-{next(NUMBERS)}", SCHEMA)
    ds.append({"n": [1, 2, 3], **{name: [1, 2, 3] for name in MANY}})
    return ds.uri


def in_turn(uri, first, second):
    """Commit two transactions that begin at the same snapshot."""
    one, other = ps.open(uri).transaction("first"), ps.open(uri).transaction("second")
    first(one)
    second(other)
    one.commit()
    other.commit()
    ds = ps.open(uri)
    assert [commit.message for commit in ds.log()[:2]] == ["second", "first"] and not ds.verify()["problems"]
    return ds


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("reads_first", [False, True])
def test_a_read_of_no_values_does_not_conflict_with_changes_of_values_or_of_the_schema(uri, read, change, reads_first):
    pair = (READS[read], CHANGES[change])
    assert len(in_turn(uri, *(pair if reads_first else pair[::-1]))) == 3


@pytest.mark.parametrize("change", ["add", "add with a fill value", "rename", "widen"])
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("alters_first", [False, True])
def test_what_drops_no_column_does_not_conflict_with_changes_of_samples(uri, other, change, alters_first):
    pair = (CHANGES[change], OTHERS[other])
    ds = in_turn(uri, *(pair if alters_first else pair[::-1]))
    assert len(ds) == {"an append": 4, "an append of many columns": 4, "a deletion": 2}.get(other, 3)


@pytest.mark.parametrize("drops_first", [False, True])
@pytest.mark.parametrize("column", ["c0", "unused"])
@pytest.mark.parametrize("what", ["append", "update"])
def test_a_dropped_column_conflicts_with_values_of_it_only(uri, drops_first, column, what):
    drop = lambda tx: tx.drop_column(column, force=True)  # noqa: E731
    other = {"append": lambda tx: tx.append({"c0": [1]}), "update": lambda tx: tx.update({"c0": [1]}, row_ids=[1])}[what]
    pair = (drop, other) if drops_first else (other, drop)
    if column == "c0":
        with pytest.raises(ps.ConflictError):
            in_turn(uri, *pair)
    else:
        in_turn(uri, *pair)


@pytest.mark.parametrize("read", READS)
def test_a_read_of_no_values_still_sees_appends_and_deletions(uri, read):
    """Those that counted samples, or looked at all of them, would have found others."""
    for change, found in (
        (lambda tx: tx.append({"n": [9]}), read not in ("nothing", "row ids")),
        (lambda tx: tx.delete(row_ids=[1]), read != "nothing"),
    ):
        one, other = ps.open(uri).transaction(), ps.open(uri).transaction()
        READS[read](one)
        change(other)
        other.commit()
        if found:
            with pytest.raises(ps.ConflictError):
                one.commit()
        else:
            one.commit()


def refused(tx, call, error, code):
    with pytest.raises(error) as caught:
        call(tx)
    assert caught.value.code == code


UPSERT = lambda tx: tx.upsert({"k": [7]}, key="k")  # noqa: E731
UPDATE = lambda tx: tx.update({"k": [7], "n": [0]}, on="k")  # noqa: E731
# A call that is refused because of samples, and changes of other commits after which it would not be refused, or not with this error.
REFUSED = {
    "two samples have the key: upsert": (UPSERT, ps.InvalidInputError, "key-not-unique", [0, 1]),
    "two samples have the key: update": (UPDATE, ps.InvalidInputError, "key-not-unique", [0, 1]),
    "no such sample: update": (lambda tx: tx.update({"n": [1]}, row_ids=[3]), ps.NotFoundError, "row-id-not-found", [3]),
    "no such sample: delete": (lambda tx: tx.delete(row_ids=[0, 3]), ps.NotFoundError, "row-id-not-found", [3]),
    "no such sample: take": (lambda tx: tx.take([3]), ps.NotFoundError, "row-id-not-found", [3]),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("isolation", ["serializable", "snapshot"])
@pytest.mark.parametrize("journal", [False, True])
def test_a_refusal_that_was_caught_is_a_read(tmp_path, what, isolation, journal):
    """What a program does after it has caught the error depends on the samples that led to it."""
    call, error, code, rows = REFUSED[what]
    ds = ps.create(tmp_path / "set", {"k": "int64", "n": "int64"})
    ds.append({"k": [7, 7, 8], "n": [0, 0, 0]})
    place = tmp_path / "journal" if journal else None
    changes = {
        "key": lambda tx: tx.update({"k": [9]}, row_ids=[1]), "gone": lambda tx: tx.delete(row_ids=[0]),
        "another column": lambda tx: tx.update({"n": [9]}, row_ids=[1]), "another sample": lambda tx: tx.delete(row_ids=[2]),
        "appended": lambda tx: tx.append({"k": [10]}),
    }  # fmt: skip
    for name in changes:
        branch = ds.create_branch(name)
        tx = ps.open(ds.uri, branch=name).transaction(isolation=isolation, journal=place)
        refused(tx, call, error, code)
        tx.append({"k": [11]})
        if journal:
            tx._core.abort(True)
            tx = ps.open(ds.uri, branch=name).transaction(isolation=isolation, journal=place)
            assert tx.restored == 1
        with branch.transaction() as other:
            changes[name](other)
        # Row ids of a branch are not those of `main`, so nothing there becomes sample 3.
        depends = isolation == "serializable" and rows == [0, 1] and name in ("key", "gone")
        if depends:
            with pytest.raises(ps.ConflictError):
                tx.commit()
            (tmp_path / "journal").unlink(missing_ok=True)
        else:
            tx.commit()
    if rows == [3] and isolation == "serializable":
        tx = ps.open(ds.uri).transaction()
        refused(tx, call, error, code)
        tx.append({"k": [11]})
        assert ds.append({"k": [12]}).row_ids.tolist() == [3]
        with pytest.raises(ps.ConflictError) as caught:
            tx.commit()
        assert caught.value.row_ids == [3]


@pytest.mark.parametrize(
    ("narrow", "ours", "theirs", "common"),
    [
        ("uint8", "int16", "uint16", "int32"), ("uint8", "uint32", "int32", "int64"), ("int8", "float16", "int32", "float64"),
        ("int8", "int16", "float16", "float32"), ("int16", "int32", "float32", "float64"), ("uint8", "float16", "bfloat16", "float32"),
        ("int16", "int64", "float64", None), ("uint8", "uint64", "int64", None),
    ],
)  # fmt: skip
def test_dtypes_that_do_not_fit_name_the_one_that_has_both(tmp_path, narrow, ours, theirs, common):
    ds = ps.create(tmp_path / "set", {"n": narrow})
    ds.append({"n": [1, 2]})
    branch = ds.create_branch("b")
    for handle, dtype in ((ds, ours), (branch, theirs)):
        with handle.transaction() as tx:
            tx.widen_column("n", dtype)
            tx.append({"n": [3]})
    with pytest.raises(ps.ConflictError, match=f"column `n` is {ours} in one snapshot and {theirs} in another") as caught:
        ds.merge("b")
    assert caught.value.column == "n"
    if common is None:
        assert "no dtype can hold the values of both" in caught.value.hint and "rename or drop the column on one side" in caught.value.hint
        return
    assert f"widen it to {common} on both sides" in caught.value.hint and "no dtype" not in str(caught.value)
    for handle in (ds, branch):
        with handle.transaction() as tx:
            tx.widen_column("n", common)
    ds.merge("b")
    assert ds["n"][:].tolist() == [1, 2, 3, 3] and ds["n"][:].dtype == np.dtype(common) and not ds.verify()["problems"]


def test_a_stage_with_another_dtype_names_a_remedy_that_works(tmp_path):
    ds = ps.create(tmp_path / "set", {"n": "uint8"})
    branch = ds.create_branch("b")
    for dtype, here, hint in (("uint16", None, "widen column `n` to uint16 first"), ("uint16", "int16", "stage the samples again")):
        ds = ps.create(tmp_path / f"set {here}", {"n": "uint8"})
        branch = ds.create_branch("b")
        with branch.transaction() as tx:
            tx.widen_column("n", dtype)
        stage = branch.stage({"n": [500]})
        if here:
            with ds.transaction() as tx:
                tx.widen_column("n", here)
        with pytest.raises(ps.InvalidInputError, match="has column `n` as uint16") as caught, ds.transaction() as tx:
            tx.add(stage)
        assert hint in caught.value.hint and ("widen" in caught.value.hint) == (here is None)
        if here is None:
            with ds.transaction() as tx:
                tx.widen_column("n", "uint16")
                tx.add(stage)
            assert ds["n"][:].tolist() == [500]

"""The change set of a commit lists each column in which its new samples got a value, by any way. Later verdicts depend on it."""

import numpy as np
import penstock as ps
import pytest
import spec_reader

pytestmark = pytest.mark.local

TILED = ps.Tensor((4, 4), "uint8", tile=(2, 2))
ONE = np.ones((4, 4), np.uint8)


@pytest.fixture
def ds(tmp_path):
    ds = ps.create(tmp_path / "set", {"n": "int64", "k": "int64", "big": TILED})
    ds.append({"n": [0], "k": [0], "big": [ONE]})
    return ds


# Each way gives one new sample the key 5, and a value in `big`.
WAYS = {
    "append": lambda ds, tx: tx.append({"n": [1], "k": [5], "big": [ONE]}),
    "update": lambda ds, tx: tx.update({"k": [5], "big": [ONE]}, row_ids=tx.append({"n": [1]})),
    "two updates": lambda ds, tx: [tx.update(new, row_ids=ids) for ids in [tx.append({"n": [1]})] for new in ({"k": [5]}, {"big": [ONE]})],
    "update by key": lambda ds, tx: (tx.append({"n": [1]}), tx.update({"n": [1], "k": [5], "big": [ONE]}, on="n")),
    "upsert of the sample": lambda ds, tx: (tx.append({"n": [1]}), tx.upsert({"n": [1], "k": [5], "big": [ONE]}, key="n")),
    "upsert, then update": lambda ds, tx: tx.update({"k": [5], "big": [ONE]}, row_ids=tx.upsert({"n": [1]}, key="n")),
    "stage, then update": lambda ds, tx: tx.update({"k": [5], "big": [ONE]}, row_ids=tx.add(ds.stage({"n": [1]}))),
    "stage": lambda ds, tx: tx.add(ds.stage({"n": [1], "k": [5], "big": [ONE]})),
    "overwrite, then update": lambda ds, tx: tx.update({"k": [5], "big": [ONE]}, row_ids=tx.overwrite({"n": [1]})),
    "beside a new column": lambda ds, tx: [
        (tx.add_column("late", "int8", fill=3), tx.update({"k": [5], "big": [ONE]}, row_ids=ids)) for ids in [tx.append({"n": [1]})]
    ],
    "beside values of others": lambda ds, tx: tx.update({"k": [7, 5], "big": [ONE, ONE]}, row_ids=[0, *tx.append({"n": [1]})]),
}


def committed(ds, way):
    with ps.open(ds.uri).transaction(way, isolation="snapshot") as tx:
        WAYS[way](ds, tx)
    return tx.receipt


@pytest.mark.parametrize("way", WAYS)
def test_the_append_lists_the_columns_that_its_samples_got_late(ds, way):
    ids = {name: at for at, name in enumerate(ds.schema, 1)}
    receipt = committed(ds, way)
    [append] = (change for change in spec_reader.Dataset(ds.uri).record.changes if change.kind == 0)
    assert {ids[name] for name in ("n", "k", "big")} <= set(append.columns)
    assert [(run.first, run.count) for run in append.rows] == [(receipt.row_ids[0], 1)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("isolation", ["serializable", "snapshot"])
def test_a_key_that_another_commit_gave_late_is_found(ds, way, isolation):
    with pytest.raises(ps.ConflictError), ps.open(ds.uri).transaction(isolation=isolation) as tx:
        tx.upsert({"k": [5]}, key="k")
        committed(ds, way)
    assert ds.refresh()["k"][:].tolist().count(5) == 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("drops_first", [False, True])
def test_a_column_with_late_values_is_not_dropped_beside_them(ds, way, drops_first):
    column = "big" if drops_first else "k"
    if drops_first:
        with pytest.raises(ps.ConflictError), ps.open(ds.uri).transaction(isolation="snapshot") as tx:
            WAYS[way](ds, tx)
            with ps.open(ds.uri).transaction() as other:
                other.drop_column(column, force=True)
        assert column not in ds.refresh().schema and len(ds) == 1
        return
    with pytest.raises(ps.ConflictError), ps.open(ds.uri).transaction() as tx:
        tx.drop_column(column, force=True)
        committed(ds, way)
    [row] = np.flatnonzero(ds.refresh()["k"][:] == 5)
    assert np.array_equal(ds["big"][int(row)], ONE)


@pytest.mark.parametrize("way", [*WAYS, "a later commit"])
def test_a_merge_does_not_drop_late_values(ds, way):
    """One side drops the column, and the other one gave new samples a value there."""
    branch = ds.create_branch("b")
    if way == "a later commit":
        new = branch.append({"n": [1]}).row_ids
        with branch.transaction() as tx:
            tx.update({"k": [5], "big": [ONE]}, row_ids=new)
    else:
        with branch.transaction(isolation="snapshot") as tx:
            WAYS[way](branch, tx)
    with ds.transaction() as tx:
        tx.drop_column("k", force=True)
    for ours, theirs in ((ds, "b"), (branch, "main")):
        before = ours.snapshot
        with pytest.raises(ps.ConflictError, match="dropped column `k`") as caught:
            ours.merge(theirs, on_conflict="fail")
        assert ours.refresh().snapshot == before and branch.take([-1], columns=["_row_id"])["_row_id"][0] in caught.value.row_ids


KEYS = {
    "int64": (4, 9), "bool": (True, False), "timestamp": (4, 9), ps.Text(): ("x", "y"), ps.Category(): ("x", "y"), ps.Bytes(): (b"x", b"y"),
    ps.Label(["w", "y", "x"]): ("x", "y"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KEYS, ids=str)
@pytest.mark.parametrize("which", ["fill", "other", "both", "no fill"])
def test_a_key_in_a_new_column_meets_the_fill_value_of_other_commits(ds, kind, which):
    """Samples that another commit appends meanwhile have the fill value, and so its key."""
    fill, other = KEYS[kind]
    keys = {"fill": [fill], "other": [other], "both": [other, fill], "no fill": [fill]}[which]
    tx = ps.open(ds.uri).transaction(isolation="snapshot")
    tx.add_column("new", kind, fill=None if which == "no fill" else fill)
    tx.delete(row_ids=[0])  # It would be the one with this key.
    tx.upsert({"new": keys, "n": range(10, 10 + len(keys))}, key="new")
    [appended] = ds.append({"n": [2]}).row_ids
    if which in ("fill", "both"):
        with pytest.raises(ps.ConflictError, match="added the key") as caught:
            tx.commit()
        assert caught.value.column == "new" and caught.value.row_ids == [appended]
        return
    tx.commit()
    ds.refresh()
    words = ds.vocabulary("new") if isinstance(kind, ps.Category | ps.Label) else None
    found = {sample["n"]: words[sample["new"]] if words and sample["new"] is not None else sample["new"] for sample in ds}
    values = [None if which == "no fill" else fill, keys[0]]
    assert [found[2], found[10]] == [np.datetime64(value, "us") if kind == "timestamp" and value is not None else value for value in values]
    assert not ds.verify()["problems"]

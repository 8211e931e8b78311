"""Test schema changes on every store: columns with fill values, dropped and renamed columns, conflicts, and merges of both sides' columns."""

import pathlib
import subprocess
import sys

import numpy as np
import penstock as ps
import pytest
from handles import newest

pytestmark = pytest.mark.processes

FILLS = {
    "score": ("float32", 0.5), "text": (ps.Text(), "hi"), "word": (ps.Category(), "filled"), "label": (ps.Label(["x", "y"]), "y"),
    "vector": (ps.Tensor((3,), "int16"), np.arange(3, dtype=np.int16)), "cloud": (ps.Tensor((None, 2), "int16"), np.ones((3, 2), np.int16)),
    "volume": (ps.Tensor((None, None), "uint8", tile=(64, 64)), np.full((200, 300), 7, np.uint8)), "meta": (ps.Json(), {"a": 1}),
    "image": (ps.Image(), np.full((4, 5, 3), 9, np.uint8)), "packed": (ps.Tensor((4,), "int64", codec="zstd"), np.arange(4)), "nothing": ("int8", None),
}  # fmt: skip


def plain(ds, sample):
    words = {name: ds.vocabulary(name)[code] for name, code in sample.items() if name in ("word", "label") and code is not None}
    return {name: value.tolist() if isinstance(value, np.ndarray | np.generic) else value for name, value in {**sample, **words}.items()}


def test_a_new_column_has_its_fill_value_everywhere(root):
    ds = ps.create(root, {"n": "int64"})
    ids = ds.append({"n": range(5)}).row_ids
    stale = newest(ps.open(root), 5)
    with ds.transaction("new columns") as tx:
        for name, (kind, fill) in FILLS.items():
            tx.add_column(name, kind, fill=fill)
        tx.update({"score": [2.0, None], "word": ["other", None], "text": [None, "text"]}, row_ids=ids[:2])
        new = tx.append({"n": [10, 11], "score": [3.0, None], "cloud": [None, np.zeros((0, 2), np.int16)]})
        tx.append({"n": [12]})
        inside = [
            plain(ps.views.view.View(*tx._core.view()), sample)
            for sample in [
                dict(zip(tx.take([row]), map(lambda values: ps.views.sample.unwrap(values, 0), tx.take([row]).values()), strict=True))
                for row in (*ids, *new)
            ]
        ]
    filled = {name: fill.tolist() if isinstance(fill, np.ndarray) else fill for name, (_, fill) in FILLS.items()}
    expected = [{"n": number, **filled} for number in (0, 1, 2, 3, 4, 10, 11, 12)]
    expected[0] |= {"score": 2.0, "word": "other", "text": None}
    expected[1] |= {"score": None, "word": None, "text": "text"}
    expected[5] |= {"score": 3.0, "cloud": None}
    expected[6] |= {"score": None, "cloud": []}
    assert inside == expected[:7]
    fresh = newest(ps.open(root), 8)
    for handle in (ds, fresh):
        assert [plain(handle, sample) for sample in handle] == expected
    assert fresh["volume"][3, 10:12, 5:7].tolist() == [[7, 7], [7, 7]] and fresh["score"][[4, 0, 4]].tolist() == [0.5, 2.0, 0.5]
    table = next(iter(fresh.scan(["word", "label", "score"], batch_size=100)))
    assert table.column("word").to_pylist() == ["other", None, *["filled"] * 6] and table.column("score").null_count == 2
    batch = next(iter(fresh.loader(batch_size=8, columns=["vector", "label", "image"], shuffle=True, seed=1)))
    assert batch["vector"].tolist() == [[0, 1, 2]] * 8 and batch["label"].tolist() == [1] * 8 and batch["image"].shape == (8, 4, 5, 3)
    receipt = stale.append({"n": [13]})
    assert plain(stale, stale[8]) == {"n": 13, **filled}, "an append that began before the column existed has its fill value"
    assert receipt.row_ids.tolist() == [8] and not stale.verify()["problems"]
    for number in range(70):  # Enough commits for roots and pages.
        stale.append({"n": [number]})
    assert [plain(stale, sample) for sample in stale][:8] == expected and stale["text"][-1] == "hi" and not stale.verify()["problems"]


def test_columns_are_dropped_and_renamed(root):
    ds = ps.create(root, {"n": "int32", "word": ps.Category(), "image": ps.Image(), "boxes": ps.Boxes(of="image")})
    before = ds.append({"n": [1, 2], "word": ["a", "b"], "image": [np.zeros((3, 4, 3), np.uint8)] * 2, "boxes": [np.ones((1, 4))] * 2})
    with ds.transaction("other names") as tx:
        tx.rename_column("n", "number")
        tx.rename_column("image", "photo")
        tx.append({"number": [3]})
        tx.drop_column("word", force=True)
        assert tx.take(tx.append({"number": [4]}), columns=["number"])["number"].tolist() == [4]
    assert list(ds.schema) == ["number", "photo", "boxes"] and ds.schema["boxes"].of == "photo" and ds["number"][:].tolist() == [1, 2, 3, 4]
    assert ds.log()[0].kind == "schema"
    then = ps.open(root, snapshot=before.snapshot)
    assert then.vocabulary("word") == ["a", "b"] and then["n"][:].tolist() == [1, 2] and then["word"][:].tolist() == [0, 1]
    found = {(entry.kind, entry.column) for entry in ds.diff(before.snapshot)}
    assert found == {("column dropped", "word"), ("column renamed", "number"), ("column renamed", "photo"), ("added", None)}
    with ds.transaction("the name is free again") as tx:
        tx.add_column("word", "int8", fill=5)
    assert newest(ps.open(root), 4)["word"][:].tolist() == [5] * 4 and not ds.verify()["problems"]
    ds.reset(before.snapshot)
    assert ds.vocabulary("word") == ["a", "b"] and list(ds.schema) == ["n", "word", "image", "boxes"] and not ds.verify()["problems"]


def test_schema_changes_that_are_refused(root):
    ds = ps.create(root, {"n": "int32", "empty": "int8", "image": ps.Image(), "boxes": ps.Boxes(of="image")})
    ds.append({"n": [1]})
    before = sorted(path for path in root.rglob("*") if path.is_file())
    refused = [
        (lambda tx: tx.drop_column("n"), "invalid-argument"),
        (lambda tx: tx.drop_column("image", force=True), "invalid-schema"),
        (lambda tx: tx.drop_column("nothing"), "column-not-found"),
        (lambda tx: tx.rename_column("n", "boxes"), "invalid-schema"),
        (lambda tx: tx.rename_column("n", "_n"), "invalid-schema"),
        (lambda tx: tx.rename_column("nothing", "m"), "column-not-found"),
        (lambda tx: tx.add_column("n", "int8"), "invalid-schema"),
        (lambda tx: tx.add_column("m", "int33"), "invalid-schema"),
        (lambda tx: tx.add_column("m", "int8", fill=300), "invalid-value"),
        (lambda tx: tx.add_column("m", "int8", fill="x"), "invalid-value"),
        (lambda tx: tx.add_column("m", ps.Tensor((3,), "int8"), fill=[1, 2]), "invalid-value"),
        (lambda tx: tx.add_column("m", ps.Image(), fill=b"no image"), "media-undecodable"),
        (lambda tx: tx.add_column("m", ps.Label(["a"]), fill="b"), "invalid-value"),
        (lambda tx: tx.add_column("m", ps.Boxes(of="n")), "invalid-schema"),
    ]
    for change, code in refused:
        with pytest.raises(ps.Error) as caught, ds.transaction() as tx:
            change(tx)
        assert caught.value.code == code, caught.value
    with pytest.raises(ZeroDivisionError), ds.transaction() as tx:
        tx.add_column("m", ps.Text(), fill="x" * 100_000)
        raise ZeroDivisionError
    assert sorted(path for path in root.rglob("*") if path.is_file()) == before and len(ds.log()) == 2
    with ds.transaction() as tx:
        tx.add_column("kept", "int8", fill=1)
        for change, _ in refused:
            with pytest.raises(ps.Error):
                change(tx)
    assert list(ds.schema) == ["n", "empty", "image", "boxes", "kept"] and ds["kept"][:].tolist() == [1], (
        "errors of calls do not undo others"
    )
    with ds.transaction() as tx:
        tx.drop_column("kept", force=True)
        tx.drop_column("empty")
        with pytest.raises(ps.NotFoundError):
            tx.append({"empty": [1]})
    assert list(ds.schema) == ["n", "image", "boxes"]


def test_schema_changes_conflict_with_each_other_and_with_dropped_values(root):
    ds = ps.create(root, {"n": "int32", "t": ps.Text()})
    ids = ds.append({"n": [1, 2], "t": ["a", "b"]}).row_ids
    one, other, third = (newest(ps.open(root), 2) for _ in range(3))
    with pytest.raises(ps.ConflictError, match="it changed the schema"), one.transaction() as tx:
        tx.add_column("x", "int8")
        with other.transaction() as first:
            first.add_column("y", "int8")
    with third.transaction() as tx:  # Values of other columns rebase over a new column.
        tx.update({"n": [10]}, row_ids=ids[:1])
    one.refresh()
    with pytest.raises(ps.ConflictError, match="column `t`"), one.transaction() as tx:
        tx.update({"t": ["late"]}, row_ids=ids[:1])
        with newest(other, 2).transaction() as first:
            first.drop_column("t", force=True)
    with pytest.raises(ps.ConflictError, match="it changed values of 1 samples"), newest(other, 2).transaction() as tx:
        tx.drop_column("n", force=True)
        newest(third, 2)
        with third.transaction() as first:
            first.update({"n": [11]}, row_ids=ids[:1])
    assert list(newest(ds, 2).schema) == ["n", "y"] and ds["n"][:].tolist() == [11, 2] and not ds.verify()["problems"]


def test_a_merge_brings_columns_of_both_sides(root):
    ds = ps.create(root, {"n": "int32", "old": "int8", "t": ps.Text(), "image": ps.Image(), "boxes": ps.Boxes(of="image")})
    ids = ds.append({"n": [1, 2], "old": [1, 1], "t": ["a", "b"]}).row_ids
    exp = ds.create_branch("exp")
    with exp.transaction() as tx:
        tx.add_column("theirs", ps.Category(), fill="fill")
        tx.rename_column("t", "text")
        tx.update({"theirs": ["given"]}, row_ids=ids[:1])
        tx.append({"n": [3], "theirs": ["new"]})
    with ds.transaction() as tx:
        tx.add_column("ours", "int32", fill=7)
        tx.drop_column("old", force=True)
        tx.rename_column("image", "photo")
        tx.append({"n": [4], "ours": [8]})
    ds.merge("exp")
    assert list(ds.schema) == ["n", "text", "photo", "boxes", "ours", "theirs"] and ds.schema["boxes"].of == "photo"
    words = ds.vocabulary("theirs")
    assert [words[code] for code in ds["theirs"][:]] == ["given", "fill", "fill", "new"] and ds["ours"][:].tolist() == [7, 7, 8, 7]
    assert ds["n"][:].tolist() == [1, 2, 4, 3] and ds["text"][:] == ["a", "b", None, None] and not ds.verify()["problems"]
    exp.merge("main")
    assert list(exp.schema) == list(ds.schema) and not list(exp.diff(ds)) and not exp.verify()["problems"]
    with exp.transaction() as tx:
        tx.rename_column("text", "one")
        tx.drop_column("ours", force=True)
    with ds.transaction() as tx:
        tx.update({"ours": [70]}, row_ids=ids[:1])
    with pytest.raises(ps.ConflictError, match="one side dropped column `ours`, and the other one changed or added 1 values") as caught:
        ds.merge("exp")
    assert caught.value.column == "ours" and caught.value.row_ids == [ids[0]]
    other = ds.create_branch("other")
    other.merge("exp", on_conflict={"ours": "theirs"})
    assert list(other.schema) == ["n", "one", "photo", "boxes", "theirs"]
    with ds.transaction() as tx:
        tx.rename_column("text", "two")
    with pytest.raises(ps.ConflictError, match="both sides changed column `two`"):
        ds.merge("exp", on_conflict="theirs")


def test_values_of_new_and_dropped_columns_are_not_lost_by_merges(root):
    ds = ps.create(root, {"n": "int32", "t": ps.Text()})
    ids = ds.append({"n": [0, 1], "t": ["a", "b"]}).row_ids
    exp = ds.create_branch("exp")
    with exp.transaction() as tx:
        tx.add_column("p", "int32", fill=1)
        tx.update({"p": [42]}, row_ids=ids[:1])
    with ds.transaction() as tx:
        tx.delete(row_ids=ids[:1])
    for handle, other in ((ds, "exp"), (exp, "main")):
        with pytest.raises(ps.ConflictError, match="one side deleted and the other one changed in column `p`"):
            handle.merge(other)
    exp.merge("main", on_conflict="ours")
    assert exp["p"][:].tolist() == [42, 1] and exp["n"][:].tolist() == [0, 1]
    gone = ds.create_branch("gone")
    with gone.transaction() as tx:
        tx.drop_column("t", force=True)
    ds.append({"n": [2], "t": ["new value"]})
    for handle, other, policy in ((ds, "gone", "theirs"), (gone, "main", "ours")):
        with pytest.raises(ps.ConflictError, match="one side dropped column `t`, and the other one changed or added 1 values"):
            handle.merge(other)
        handle.create_branch(policy).merge(other, on_conflict=policy)
        assert "t" not in ps.open(root, branch=policy).schema
    with gone.transaction() as tx:
        tx.append({"n": [3]})
    assert not gone.verify()["problems"]


def test_a_key_that_a_fill_value_adds_is_a_conflict(root):
    ds = ps.create(root, {"n": "int32"})
    with ds.transaction() as tx:
        tx.add_column("key", ps.Category(), fill="z")
    stale = newest(ps.open(root), 0)
    with pytest.raises(ps.ConflictError, match="added the key"), stale.transaction() as tx:
        tx.upsert({"n": [100], "key": ["z"]}, key="key")
        ds.append({"n": [1]})
    with newest(stale, 1).transaction() as tx:
        tx.upsert({"n": [100], "key": ["z"]}, key="key")
    assert stale["n"][:].tolist() == [100]


@pytest.mark.local
def test_a_scan_of_large_fill_values_stays_within_the_budget(tmp_path):
    code = f"""
import penstock as ps, sys
sys.path.insert(0, {str(pathlib.Path(__file__).parent.parent)!r})
from measured import Grown
ps.configure(memory_bytes=16 << 20)
ds = ps.create({str(tmp_path / "set")!r}, {{"n": "int32"}})
ds.append({{"n": range(200)}})
with ds.transaction() as tx:
    tx.add_column("text", ps.Text(), fill="x" * (1 << 20))
for io in ("mapped", "buffered"):
    with Grown() as grown:
        assert sum(len(batch) for batch in ps.open(ds.uri, io=io).scan(["text"], batch_size=65536)) == 200
    print(grown.peak)
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    assert max(map(int, answer.stdout.split())) < 64 << 20, answer.stdout


def test_an_overwrite_replaces_all_samples(root):
    ds = ps.create(root, {"n": "int32", "t": ps.Text()})
    before = ds.append({"n": [1, 2, 3], "t": ["a", "b", "c"]})
    with ds.transaction("again") as tx:
        tx.append({"n": [4]})
        ids = tx.overwrite({"n": [7, 8]})
        assert tx.take(ids)["n"].tolist() == [7, 8] and len(tx) == 2
    assert ds["n"][:].tolist() == [7, 8] and tx.receipt.row_ids.tolist() == [3, 4, 5] and len(ps.open(root, snapshot=before.snapshot)) == 3
    with pytest.raises(ps.InvalidInputError), ds.transaction() as tx:
        tx.overwrite({"n": ["x"]})
    with pytest.raises(ps.ConflictError), ds.transaction() as tx:
        tx.overwrite({"n": [9]})
        newest(ps.open(root), 2).append({"n": [5]})
    assert newest(ds, 3)["n"][:].tolist() == [7, 8, 5] and not ds.verify()["problems"]

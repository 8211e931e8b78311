"""Test upserts, conditions and reads inside transactions on every store, and that concurrent transactions are serialisable."""

import multiprocessing
import pickle

import numpy as np
import penstock as ps
import pytest
from handles import newest


def sources(root, count=50):
    ds = ps.create(root, {"source": ps.Text(), "year": "int32", "kind": ps.Category(), "vector": ps.Tensor((3,), "float32")})
    receipt = ds.append({"source": [f"{number}.png" for number in range(count)], "year": range(count), "kind": ["old"] * count})
    return ds, receipt.row_ids


def test_an_upsert_updates_known_keys_and_appends_the_others(root):
    ds, ids = sources(root)
    with ds.transaction() as tx:
        first = tx.upsert({"source": ["7.png", "new.png", "3.png"], "year": [107, 200, 103]}, key="source")
        assert first[[0, 2]].tolist() == ids[[7, 3]].tolist() and first[1] < 0
        again = tx.upsert({"source": ["new.png", "7.png", "last.png", "last.png"], "kind": ["a", "b", "c", "d"]}, key="source")
        assert again[:2].tolist() == [first[1], ids[7]] and again[2] == again[3] < 0
        assert tx.take(again, columns=["source"])["source"] == ["new.png", "7.png", "last.png", "last.png"] and len(tx) == 52
        tx.delete(row_ids=[ids[3]])
        third = tx.upsert({"source": ["3.png"], "year": [303]}, key="source")
        assert third[0] < 0, "the sample with this key was deleted, so it is appended again"
    ds = newest(ps.open(root), 52)
    rows = {sample["source"]: (sample["year"], sample["kind"]) for sample in ds}
    words = ds.vocabulary("kind")
    assert len(ds) == 52 and len(rows) == 52 and not ds.verify()["problems"]
    assert rows["7.png"] == (107, words.index("b")) and rows["new.png"] == (200, words.index("a")) and rows["3.png"] == (303, None)
    assert rows["last.png"] == (None, words.index("d")) and rows["8.png"] == (8, words.index("old"))


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("int64", [5, -7, 1 << 60]), ("uint8", [0, 255]), ("bool", [True, False]), ("timestamp", [0, 10**15]), (ps.Text(), ["", "é", "x" * 90_000]),
        (ps.Bytes(), [b"", b"\0", b"\0\0"]), (ps.Label(["cat", "dog"]), ["dog", "cat"]), (ps.Category(), ["one", "two", "three"]),
        (ps.Text(codec="zstd"), ["a", "b"]),
    ],
)  # fmt: skip
def test_keys_of_every_kind(root, kind, keys):
    ds = ps.create(root, {"key": kind, "n": "int32"})
    for turn in range(3):
        with ds.transaction() as tx:
            ids = tx.upsert({"key": keys, "n": range(turn, turn + len(keys))}, key="key")
        assert (ids < 0).all() == (turn == 0)
    ds = newest(ps.open(root), len(keys))
    assert len(ds) == len(keys) and ds["n"][:].tolist() == list(range(2, 2 + len(keys))) and not ds.verify()["problems"]


def test_what_is_not_a_key_is_refused(root):
    ds, ids = sources(root, 5)
    ds.append({"source": ["0.png", None], "year": [0, 1]})
    with ds.transaction() as tx:
        for columns, key, error, text in [
            ({"source": ["0.png"]}, "source", ps.InvalidInputError, '`source` is not a key: two samples have "0.png"'),
            ({"source": ["a", None]}, "source", ps.InvalidInputError, "row 1 is null, but a key must not be null"),
            ({"year": [1]}, "source", ps.InvalidInputError, "the key column `source` is not given"),
            ({"vector": [[1, 2, 3]]}, "vector", ps.InvalidInputError, "column `vector` cannot be a key"),
            ({"nothing": [1]}, "nothing", ps.NotFoundError, "cannot upsert column `nothing`"),
            ({"source": ["a"], "year": ["x"]}, "source", ps.InvalidInputError, "cannot upsert column `year`"),
        ]:
            with pytest.raises(error, match=text) as caught:
                tx.upsert(columns, key=key)
            assert caught.value.hint or "year" in text or "null" in text, text
        with pytest.raises(ps.InvalidInputError) as caught:
            tx.upsert({"source": ["0.png"]}, key="source")
        assert caught.value.code == "key-not-unique" and caught.value.row_ids == [ids[0], 5]
        assert tx.upsert({"source": ["4.png"], "year": [9]}, key="source").tolist() == [ids[4]]
    assert ds["year"][:].tolist() == [0, 1, 2, 3, 9, 0, 1]


def test_two_upserts_of_one_new_key_conflict(root):
    ds, ids = sources(root)
    stale, other = ps.open(root), ps.open(root)
    with ds.transaction() as tx:
        tx.upsert({"source": ["x", "1.png"], "year": [1, 2]}, key="source")
    with other.transaction() as tx:
        tx.upsert({"source": ["y", "2.png"], "year": [3, 4]}, key="source")
    with pytest.raises(ps.ConflictError, match='added the key "x"') as caught, stale.transaction(isolation="snapshot") as tx:
        tx.upsert({"source": ["z", "x"]}, key="source")
    assert caught.value.row_ids == [50] and caught.value.hint
    with pytest.raises(ps.ConflictError), stale.transaction() as tx:
        tx.upsert({"source": ["1.png"], "year": [5]}, key="source")
    with pytest.raises(ps.ConflictError, match="added the key"), stale.transaction() as tx:
        tx.upsert({"source": ["w"]}, key="source")
        with ps.open(root).transaction() as third:
            third.update({"source": ["w"]}, row_ids=[ids[9]])
    assert len(newest(ps.open(root), 52)) == 52


def test_conditions_see_the_transaction(root):
    ds, ids = sources(root)
    with ds.transaction() as tx:
        tx.update({"year": [1000, 1001], "kind": ["new", None]}, row_ids=ids[:2])
        new = tx.append({"source": ["p", "q"], "year": [7, 1002], "kind": ["fresh", "old"]})
        assert tx.delete(where="YEAR >= 1000 and kind is not null and kind != 'fresh'") == 2
        assert tx.delete(where="_row_id < 0") == 1, "one of the appended samples is left"
        assert tx.delete(where="false") == 0 and tx.delete(where="source like '4%' -- a comment") == 11
        assert len(tx) == 50 + 2 - 14 and new[0] < 0
        assert sum(batch.num_rows for batch in tx.scan(["year"], batch_size=7)) == len(tx)
        for where, error, text in [
            ("year <", ps.InvalidInputError, "cannot delete: syntax error"),
            ("nothing = 1", ps.NotFoundError, "the dataset has no column `nothing`"),
            ('source = "old"', ps.NotFoundError, "the dataset has no column `old`"),
            ("year in (select 1)", ps.InvalidInputError, "not a condition on single samples"),
            ("true) union all select (1", ps.InvalidInputError, "not a condition on single samples"),
            ("true); drop table samples; select (1", ps.InvalidInputError, "cannot delete"),
            ("count(*) > 1", ps.InvalidInputError, "cannot delete"),
            ("true) limit (1", ps.InvalidInputError, "not a condition on single samples"),
            ("true) order by (year) limit (1", ps.InvalidInputError, "not a condition on single samples"),
            ("true) group by (_row_id", ps.InvalidInputError, "not a condition on single samples"),
            ("true) qualify (row_number() over () = 1", ps.InvalidInputError, "not a condition on single samples"),
            ("columns(*) is null", ps.InvalidInputError, "star is not allowed"),
            ("#1 = 1", ps.InvalidInputError, "positional reference is not allowed"),
            ("row_number() over () = 1", ps.InvalidInputError, "window is not allowed"),
            ("samples.year = 1", ps.NotFoundError, "no column `samples.year`"),
            ("nosuch(year)", ps.InvalidInputError, "cannot delete"),
            ("source < 3", ps.InvalidInputError, "cannot delete"),
            (3, ps.InvalidInputError, "expected SQL as str"),
            ("", ps.InvalidInputError, "cannot delete"),
            ("year", ps.InvalidInputError, "is not a condition: it is of type integer"),
            ("1999", ps.InvalidInputError, "is not a condition: it is of type integer"),
            ("source", ps.InvalidInputError, "is not a condition: it is of type varchar"),
            ("year) or (true", ps.InvalidInputError, "cannot delete"),
            ("true) or (true", ps.InvalidInputError, "cannot delete"),
        ]:
            with pytest.raises(error, match=text):
                tx.delete(where=where)
        with pytest.raises(ps.InvalidInputError, match="either row_ids or where"):
            tx.delete()
    assert len(newest(ds, 38)) == 38 and not ds.verify()["problems"]


def test_columns_that_differ_in_case_are_told_apart_or_refused(root):
    ds = ps.create(root, {"Year": "int64", "year": "int64"})
    ds.append({"Year": [1, 1, 2, 2], "year": [1, 2, 1, 2]})
    with ds.transaction() as tx:
        with pytest.raises(ps.InvalidInputError, match="does not distinguish the columns `Year` and `year`"):
            tx.delete(where="Year = 1 and year = 2")
        with pytest.raises(ps.NotFoundError, match="no column `YEAR`"):
            tx.delete(where="YEAR = 1")
        assert tx.delete(where="year = 2") == 2 and tx.delete(where='"Year" = 2') == 1
    assert newest(ds, 1)[0] == {"Year": 1, "year": 1}


def test_what_is_missing_or_counted_was_read_as_well(root):
    """A transaction that counted samples, listed words, or looked for a sample in vain conflicts with a commit that adds one."""
    ds = ps.create(root, {"c": ps.Category()})

    def look_in_vain(tx):
        with pytest.raises(ps.NotFoundError):
            tx.take([len(ds)])

    for look in (len, lambda tx: tx.vocabulary("c"), look_in_vain):
        stale = ps.open(root).refresh()
        with pytest.raises(ps.ConflictError), stale.transaction() as tx:
            look(tx)
            tx.append({"c": ["w"]})
            newest(ds, len(stale)).append({"c": ["w"]})
        with stale.transaction(isolation="snapshot") as tx:
            look(tx)
            tx.append({"c": ["w"]})
            newest(ds, len(stale)).append({"c": ["w"]})
        newest(ds, 3)
    with pytest.raises(ps.InvalidInputError, match="cannot pickle a transaction"), ds.transaction() as tx:
        pickle.dumps(tx)


@pytest.mark.parametrize("columns", [{"source": ["7.png"]}, {"source": ["7.png"], "year": [5]}])
@pytest.mark.parametrize("how", ["renamed", "deleted"])
def test_an_upsert_keeps_its_keys_whatever_the_isolation(root, how, columns):
    ds, ids = sources(root)
    with pytest.raises(ps.ConflictError), ds.transaction(isolation="snapshot") as tx:
        tx.upsert(columns, key="source")
        with ps.open(root).transaction() as other:
            if how == "renamed":
                other.update({"source": ["renamed"]}, row_ids=[ids[7]])
            else:
                other.delete(row_ids=[ids[7]])
    assert "7.png" not in newest(ps.open(root), 49)["source"][:]


@pytest.mark.parametrize("isolation", ["serializable", "snapshot"])
@pytest.mark.parametrize("read", ["take", "scan", "where"])
def test_write_skew_is_a_conflict_if_reads_count(root, read, isolation):
    """Two transactions read what the other one writes. In any serial order, the second one would have read the first one's value."""
    _, ids = sources(root)
    handles = [ps.open(root), ps.open(root)]
    transactions = [handle.transaction(isolation=isolation) for handle in handles]
    for place, tx in enumerate(transactions):
        if read == "take":
            tx.take(ids[:2], columns=["year"])
        elif read == "scan":
            list(tx.scan(["year"]))
        else:
            tx.delete(where="year > 1000")
        tx.update({"year": [500]}, row_ids=[ids[place]])
    transactions[0].commit()
    if isolation == "snapshot":
        transactions[1].commit()
    else:
        with pytest.raises(ps.ConflictError, match="`year`"):
            transactions[1].commit()
    assert newest(ps.open(root), 50)["year"][:2].tolist() == [500, 500 if isolation == "snapshot" else 1]


def test_a_condition_conflicts_with_appended_samples(root):
    ds, ids = sources(root)
    stale = ps.open(root)
    ds.append({"year": [5]})
    with pytest.raises(ps.ConflictError, match="it appended 1 more"), stale.transaction() as tx:
        tx.delete(where="year = 5")
    with stale.refresh().transaction() as tx:
        tx.update({"kind": ["x"]}, row_ids=[ids[0]])
        tx.take(ids[:3], columns=["year"])
        ds.append({"year": [6]})
    assert len(newest(ps.open(root), 52)) == 52, "reads of single samples do not conflict with appends"


def add_one(uri, worker, count, done):
    """Increment a counter that all workers share, and upsert a key per step. Retry after each conflict."""
    ds, conflicts = ps.open(uri), 0
    for number in range(count):
        while True:
            ds.refresh()
            try:
                with ds.transaction() as tx:
                    value = int(tx.take([0], columns=["n"])["n"][0])
                    tx.update({"n": [value + 1]}, row_ids=[0])
                    tx.upsert({"key": [f"step {value}", f"shared {number}"], "n": [worker, worker]}, key="key")
                break
            except ps.ConflictError:
                conflicts += 1
    done.put(conflicts)


def test_a_shared_counter_loses_no_increment(root):
    ds = ps.create(root, {"n": "int64", "key": ps.Text()})
    ds.append({"n": [0], "key": ["counter"]})
    context = multiprocessing.get_context("spawn")
    done = context.Queue()
    workers = [context.Process(target=add_one, args=(str(root), worker, 12, done)) for worker in range(3)]
    for worker in workers:
        worker.start()
    conflicts = sum(done.get(timeout=300) for _ in workers)
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    ds = newest(ps.open(root), 1 + 36 + 12)
    keys = ds["key"][:]
    assert ds.take(row_ids=[0])["n"][0] == 36 and len(keys) == len(set(keys)) == 1 + 36 + 12 and conflicts >= 0
    assert np.isin([f"step {value}" for value in range(36)], keys).all() and not ds.verify()["problems"]


def test_conditions_convert_types(root):
    ds = ps.create(root, {"text": ps.Text(), "half": "float16", "flag": "bool", "time": "timestamp", "label": ps.Label(["a", "b"])})
    times = np.array(["2019-06-01", "2020-06-01", "2021-06-01"], "M8[us]")
    ds.append({"text": ["1", "20", "300"], "half": [0.5, None, 2], "flag": [True, False, None], "time": times, "label": ["a", "b", None]})
    for where, count in [
        ("text::int < 100", 2), ("cast(text as bigint) = 300", 1), ("half > 1", 1), ("half is null", 1), ("flag", 1), ("flag is true", 1),
        ("flag is not true", 2), ("time > TIMESTAMP '2020-01-01'", 2), ("time < DATE '2020-01-01'", 1), ("label::text = 'a'", 1),
        ("text = ') or (true'", 0), ("try_cast(text as int) between 2 and 30", 1),
    ]:  # fmt: skip
        tx = ds.transaction()
        assert tx.delete(where=where) == count, where
        tx.abort()

"""`ds.compact()`: fragments are written again, and nothing that anybody sees changes."""

import random
import threading

import measured
import numpy as np
import penstock as ps
import pytest
from penstock import _core
from spec_reader import Dataset

pytestmark = pytest.mark.local
MB = 1 << 20


def seen(ds):
    """Return the row ids and the values of all samples, by position."""
    batch = ds.take(range(len(ds)), columns=[*ds.schema, "_row_id"])
    return {name: values.tolist() if isinstance(values, np.ndarray) else list(values) for name, values in batch.items()}


def worn(path, appends=60):
    """Return a dataset with many small fragments, overlays and deleted samples."""
    ds = ps.create(path, {"n": "int32", "text": ps.Text(), "word": ps.Category()})
    ids = ds.append({"n": range(200), "text": [f"t{n}" for n in range(200)], "word": [f"w{n % 7}" for n in range(200)]}).row_ids.tolist()
    rng = random.Random(0)
    for n in range(appends):
        ids += ds.append({"n": [n], "text": [None if n % 5 else "s"], "word": [f"v{n % 3}"]}).row_ids.tolist()
        ds.update({"n": [None if n % 9 == 0 else -n]}, row_ids=[rng.choice(ids)])
    with ds.transaction() as tx:
        tx.delete(row_ids=rng.sample(ids, len(ids) // 3))
    return ds


def test_what_is_there_stays_and_what_it_takes_shrinks(tmp_path):
    ds = worn(tmp_path / "set")
    old, before, was = ps.open(tmp_path / "set"), seen(ds), ds.structure()
    done = ds.compact()
    now = ds.structure()
    assert seen(ds) == seen(old) == before and ds.log()[0].kind == "layout"
    assert (done.fragments, done.new_fragments, done.dropped_samples) == (was["fragments"], 1, was["deleted_samples"])
    assert (now["fragments"], now["deleted_samples"], now["data_files"]) == (1, 0, 1) and now["data_bytes"] < was["data_bytes"] / 2
    assert not ds.verify()["problems"] and not old.verify()["problems"]
    # Nothing is left to do.
    assert ds.compact().snapshot == done.snapshot
    second = Dataset(tmp_path / "set")
    assert second.row_ids() == before["_row_id"] and [None if n is None else int(n) for n in second.column("n")] == before["n"]


def test_an_older_handle_commits_after_it(tmp_path):
    ds = worn(tmp_path / "set")
    old = ps.open(tmp_path / "set")
    before = seen(ds)
    gone = set(range(260)) - set(before["_row_id"])
    ds.compact()
    kept = before["_row_id"][3]
    old.update({"n": [77]}, row_ids=[kept])
    with pytest.raises(ps.NotFoundError, match="was deleted"):
        old.update({"n": [1]}, row_ids=[min(gone)])
    old.append({"n": [5]})
    assert old["n"][3] == 77 and len(old) == len(before["n"]) + 1
    ds.refresh()
    assert seen(ds) == seen(old)


def test_writers_go_on_beside_it(tmp_path):
    ds = ps.create(tmp_path / "set", {"n": "int64", "m": "int64"})
    model, locks = {}, threading.Lock()
    stop = threading.Event()

    def write(number):
        own, rng, mine = ps.open(tmp_path / "set"), random.Random(number), {}
        for step in range(40):
            what = rng.choice(["append", "update", "delete"]) if len(mine) > 2 else "append"
            if what == "append":
                ids = own.append({"n": [step] * 2, "m": [number] * 2}).row_ids.tolist()
                mine |= {row: [step, number] for row in ids}
            elif what == "update":
                rows = rng.sample(list(mine), 2)
                own.update({"n": [step] * 2}, row_ids=rows)
                for row in rows:
                    mine[row][0] = step
            else:
                row = rng.choice(list(mine))
                with own.transaction() as tx:
                    tx.delete(row_ids=[row])
                del mine[row]
        with locks:
            model.update(mine)

    def compact():
        own, done = ps.open(tmp_path / "set"), 0
        while not stop.is_set():
            done += own.compact().fragments
        assert done

    errors = []

    def guarded(call, *arguments):
        try:
            call(*arguments)
        except BaseException as error:
            errors.append(error)

    writers = [threading.Thread(target=guarded, args=(write, number)) for number in range(3)]
    compacting = threading.Thread(target=guarded, args=(compact,))
    [thread.start() for thread in (*writers, compacting)]
    [thread.join() for thread in writers]
    stop.set()
    compacting.join()
    assert not errors, errors
    ds.refresh()
    ds.compact()
    found = seen(ds)
    assert dict(zip(found["_row_id"], map(list, zip(found["n"], found["m"], strict=True)), strict=True)) == model
    assert not ds.verify()["problems"] and {commit.kind for commit in ds.log()} == {"create", "data", "layout"}


def test_a_stage_is_added_once_although_its_fragment_is_gone(tmp_path):
    ds = ps.create(tmp_path / "set", {"n": "int32"})
    stage = ds.stage({"n": [1, 2, 3]})
    with ds.transaction() as tx:
        first = tx.add([stage]).tolist()
    first = tx.receipt.row_ids.tolist()
    ds.append({"n": [4]})
    with ds.transaction() as tx:
        tx.delete(row_ids=first[:1])
    branch = ds.create_branch("other")
    ds.compact()
    ds.append({"n": [5]})
    ds.compact()
    for handle in (ds, ps.open(tmp_path / "set")):
        with handle.transaction() as tx:
            assert tx.add([stage]).tolist() == first
        assert sorted(handle["n"][:].tolist()) == [2, 3, 4, 5]
    # The other branch knows it as well, before a merge and after it.
    for _ in range(2):
        with branch.transaction() as tx:
            assert tx.add([stage]).tolist() == first
        branch.merge("main")
    assert sorted(branch["n"][:].tolist()) == [2, 3, 4, 5]


@pytest.mark.parametrize("where", ["one side", "both sides"])
def test_both_sides_of_a_merge_may_have_compacted_a_stage(where, tmp_path):
    ds = ps.create(tmp_path / "set", {"n": "int32"})
    stage = ds.stage({"n": [1, 2]})
    with ds.transaction() as tx:
        tx.add([stage])
    ds.append({"n": [3]})
    branch = ds.create_branch("b")
    branch.compact()
    ds.append({"n": [4]})
    if where == "both sides":
        ds.compact()
        ds.append({"n": [5]})
    ds.merge("b")
    with ds.transaction() as tx:
        tx.add([ds.stage({"n": [6]})])
    ds.append({"n": [7]})
    ds.compact()
    assert not ds.verify()["problems"] and sorted(ds["n"][:].tolist()) == [n for n in range(1, 8) if n != 5 or where == "both sides"]
    with ds.transaction() as tx:
        assert tx.add([stage]).tolist() == [0, 1]
    branch.append({"n": [8]})
    ds.merge("b")
    branch.merge("main")
    assert sorted(branch["n"][:].tolist()) == sorted(ds["n"][:].tolist()) and not branch.verify()["problems"]


def test_a_none_that_was_given_is_not_computed_again(tmp_path):
    ds = ps.create(tmp_path / "set", {"n": "int32"})
    ds.append({"n": range(10)})
    ds.append({"n": range(10, 13)})
    with ds.transaction() as tx:
        tx.add_column("odd", "int32")
        tx.add_column("seven", "int32", fill=7)
    assert ds.backfill("odd", lambda batch: [n if n % 2 else None for n in batch["n"].tolist()], columns=["n"]) == 13
    ds.append({"n": [13]})
    ds.compact()
    assert ds["odd"][:].tolist() == [None, 1, None, 3, None, 5, None, 7, None, 9, None, 11, None, None]
    assert ds["seven"][:].tolist() == [7] * 14
    assert ds.backfill("odd", lambda batch: batch["n"], columns=["n"]) == 1, "only the last sample lacks a value"
    assert ds["odd"][-1] == 13


def test_files_of_columns_that_stay_the_same_are_kept(tmp_path):
    ds = ps.create(tmp_path / "set", {"blob": ps.Bytes(), "label": "int32"})
    rng = np.random.default_rng(0)
    bodies = [rng.bytes(MB) for _ in range(40)]
    ids = ds.append({"blob": bodies, "label": [0] * 40}).row_ids
    [file] = [file.id for file in Dataset(tmp_path / "set").fragments[0].files if file.columns == [1]]
    ds.update({"label": [5]}, row_ids=ids[3:4])
    done = ds.compact()
    assert done.written_bytes < 10_000 and done.overlays == 1
    assert file in [file.id for file in Dataset(tmp_path / "set").fragments[0].files]
    assert ds["label"][:].tolist() == [0, 0, 0, 5, *[0] * 36] and list(ds.take(range(40), columns=["blob"], decode=False)["blob"]) == bodies
    # A few deleted samples are not worth a copy, and many are.
    with ds.transaction() as tx:
        tx.delete(row_ids=ids[:2])
    assert ds.compact().fragments == 0
    with ds.transaction() as tx:
        tx.delete(row_ids=ids[2:20])
    assert ds.compact().dropped_samples == 20 and len(ds) == 20 and not ds.verify()["problems"]


def test_fragments_of_many_runs_are_written_once(tmp_path):
    """A fragment has at most 16,384 runs of row ids, so two that have more together stay two."""
    ds = ps.create(tmp_path / "set", {"n": "int32"})
    ds.append({"n": range(100_000)})
    with ds.transaction() as tx:
        tx.delete(row_ids=random.Random(0).sample(range(100_000), 50_000))
    assert ds.compact().new_fragments == 2 and ds.compact().new_fragments == 0
    ds.append({"n": [1]})
    ds.append({"n": [2]})
    done = ds.compact()
    assert done.new_fragments == 1 and ds.structure()["fragments"] <= 3 and ds.compact().new_fragments == 0


def test_fragments_of_many_words_are_written_once(tmp_path):
    """A writer begins another fragment when the words of a category fill a tail."""
    ds = ps.create(tmp_path / "set", {"word": ps.Category()})
    for first in range(0, 200_000, 50_000):
        ds.append({"word": [f"word number {n}" for n in range(first, first + 50_000)]})
    ds.append({"word": ["a"]})
    ds.compact()
    assert ds.compact().new_fragments == 0 and not ds.verify()["problems"]


def test_a_damaged_fragment_stays_as_it_is(tmp_path):
    ds = worn(tmp_path / "set", appends=5)
    before, was = seen(ds), ds.structure()
    name = max((tmp_path / "set" / "d").iterdir(), key=lambda path: path.stat().st_size)
    good = name.read_bytes()
    name.write_bytes(good[:100] + bytes([good[100] ^ 1]) + good[101:])
    other = ps.open(tmp_path / "set")
    done = other.compact()
    assert done.damaged_fragments > 0 and other.structure()["samples"] == was["samples"]
    name.write_bytes(good)
    assert seen(ps.open(tmp_path / "set")) == before


@pytest.mark.parametrize("way", ["into the compacted one", "out of it"])
def test_branches_merge_after_it(tmp_path, way):
    ds = ps.create(tmp_path / "set", {"n": "int32", "m": "int32"})
    ids = [ds.append({"n": [n], "m": [0]}).row_ids[0] for n in range(8)]
    other = ds.create_branch("other")
    with ds.transaction() as tx:
        tx.delete(row_ids=ids[:2])
        tx.update({"n": [100]}, row_ids=ids[5:6])
    ds.append({"n": [9], "m": [1]})
    ds.compact()
    with other.transaction() as tx:
        tx.delete(row_ids=ids[2:3])
        tx.update({"m": [7]}, row_ids=ids[5:6])
    other.append({"n": [10], "m": [2]})
    one, two = (ds, other) if way == "into the compacted one" else (other, ds)
    one.merge("other" if two is other else "main")
    found = seen(one)
    values = {row: (n, m) for row, n, m in zip(found["_row_id"], found["n"], found["m"], strict=True)}
    expected = {ids[3]: (3, 0), ids[4]: (4, 0), ids[5]: (100, 7), ids[6]: (6, 0), ids[7]: (7, 0)}
    assert {row: values[row] for row in expected} == expected and sorted(values.values())[-3:] == [(9, 1), (10, 2), (100, 7)]
    assert len(values) == 7 and not one.verify()["problems"]


def test_a_merge_of_compacted_samples_brings_their_words(tmp_path):
    ds = ps.create(tmp_path / "set", {"n": "int32", "word": ps.Category()})
    ds.append({"n": [0, 1], "word": ["old", "old"]})
    branch = ds.create_branch("other")
    for n in (2, 3):
        branch.append({"n": [n], "word": [f"new {n}"]})
    branch.compact()
    ds.append({"n": [4], "word": ["mine"]})
    ds.merge(branch)
    batch = ds.take(range(len(ds)))
    words = {int(n): ds.vocabulary("word")[int(code)] for n, code in zip(batch["n"], batch["word"], strict=True)}
    assert words == {0: "old", 1: "old", 2: "new 2", 3: "new 3", 4: "mine"}
    assert not ds.verify()["problems"]


def test_it_lands_beside_a_writer(tmp_path):
    """The values are written once, and only the record is tried again if others commit: compaction doesn't starve beside five commits a second."""
    ds = worn(tmp_path / "set", appends=200)
    ended = threading.Event()

    def write():
        own = ps.open(tmp_path / "set")
        while not ended.wait(0.2):
            own.append({"n": [1]})

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(5):
            rows = ds.append({"n": range(20_000), "text": ["t" * 100] * 20_000}).row_ids.tolist()
            with ds.transaction() as tx:
                tx.delete(row_ids=rows[::3])
            before = ds.stats()["creates"]
            assert ds.compact().fragments and ds.stats()["creates"] - before <= 10
    finally:
        ended.set()
        writer.join()


COSTS = """
import random, sys, penstock as ps
rng = random.Random(1)
ds = ps.open(sys.argv[1], io="buffered")
before = ds.stats()
if sys.argv[2] == "takes":
    [ds.take([rng.randrange(len(ds)) for _ in range(32)]) for _ in range(50)]
elif sys.argv[2] == "scan":
    assert sum(len(table) for table in ds.scan()) == len(ds)
else:
    loader = ds.loader(batch_size=64, shuffle=True, seed=1, columns=list(ds.schema))
    assert sum(len(part["n"]) for part in loader) == len(ds)
used = {name: count - before[name] for name, count in ds.stats().items()}
assert not used["direct_bytes"] + used["mapped_bytes"]
print(used["read_bytes"] + used["range_bytes"], used["reads"] + used["ranges"])
"""


def costs(place):
    """Return the bytes and the number of reads of takes, a scan and an epoch, each in a process of its own."""
    return [tuple(map(int, measured.run(COSTS, place, what).split())) for what in ("takes", "scan", "loader")]


@pytest.mark.parametrize("changes", [150, pytest.param(1000, marks=pytest.mark.soak)])
def test_reads_cost_what_those_of_a_fresh_copy_cost(changes, tmp_path):
    """After many small commits and deletions, a take reads up to many times as much. Compacted, it reads what it reads from a copy."""
    rng, picks = np.random.default_rng(0), random.Random(0)

    def batch(count):
        return {
            "n": rng.integers(0, 1 << 40, count),
            "text": [f"caption {n}" * n for n in rng.integers(1, 9, count).tolist()],
            "blob": [rng.bytes(n) for n in rng.integers(200, 3000, count).tolist()],
        }

    ds = ps.create(tmp_path / "set", {"n": "int64", "text": ps.Text(), "blob": ps.Bytes()})
    ids = ds.append(batch(20_000)).row_ids.tolist()
    for _ in range(changes):
        ids += ds.append(batch(1)).row_ids.tolist()
        name = picks.choice(list(ds.schema))
        ds.update({name: batch(1)[name]}, row_ids=[picks.choice(ids)])
    with ds.transaction() as tx:
        tx.delete(row_ids=picks.sample(ids, len(ids) * 3 // 10))
    worn = costs(tmp_path / "set")
    done = ds.compact()
    assert done.damaged_fragments == 0 and ds.structure()["fragments"] == 1
    copy = ps.create(tmp_path / "copy", dict(ds.schema))
    copy.append(ds.take(range(len(ds))))
    assert ds.structure()["data_bytes"] <= 1.01 * copy.structure()["data_bytes"]
    for found in zip(costs(tmp_path / "set"), costs(tmp_path / "copy"), worn, strict=True):
        (size, reads), (size_of_copy, reads_of_copy), (size_before, reads_before) = found
        # The copy has its only fragment in the record. The root and the page are two reads more, and the page has the runs of row ids.
        assert size <= 1.01 * size_of_copy and reads <= 1.01 * reads_of_copy + 2, found
        assert size < size_before and reads < reads_before, found


@pytest.mark.parametrize("direction", ["into the compacted branch", "out of it"])
def test_a_stage_that_both_sides_added_is_found_after_its_fragment_is_replaced(tmp_path, direction):
    ds = ps.create(tmp_path / "set", {"n": "int32"})
    branch, stage = ds.create_branch("b"), ds.stage({"n": [1, 2, 3]})
    with ds.transaction() as tx:
        tx.add(stage)
    ds.update({"n": [7]}, row_ids=tx.receipt.row_ids[:1])
    assert ds.compact().fragments == 1
    with branch.transaction() as tx:
        tx.add(stage)
    one, other = (ds, branch) if direction == "into the compacted branch" else (branch, ds)
    with pytest.raises(ps.ConflictError, match="both sides added the same stage, and 3 of its samples would appear twice"):
        one.merge(other.branch)
    with branch.transaction() as tx:
        tx.delete(row_ids=branch.take(range(3), columns=["_row_id"])["_row_id"])
    branch.merge("main")
    assert branch["n"][:].tolist() == [7, 2, 3] and not branch.verify()["problems"]


@pytest.mark.parametrize("how", ["compact", "merge"])
def test_long_texts_that_are_copied_in_pieces_have_bounds(tmp_path, how):
    texts = ["y" * (8 << 20), None, "x" * (9 << 20), "z"]
    ds = ps.create(tmp_path / "set", {"t": ps.Text(), "n": "int32"})
    ids = ds.append({"t": texts[:3], "n": [1, 2, 3]}).row_ids
    if how == "compact":
        ds.append({"t": ["z"], "n": [4]})
        assert ds.compact().new_fragments == 1
    else:
        branch = ds.create_branch("b")
        branch.update({"t": ["z" + texts[0]], "n": [5]}, row_ids=ids[:1])
        ds.update({"n": [7]}, row_ids=ids[:1])
        ds.merge("b", on_conflict="ours")
        texts = ["z" + texts[0], *texts[1:3]]
    assert ds["t"][:] == texts and not ds.verify()["problems"]
    for probe in ("y" * 20, "x", "z", texts[0], texts[2]):
        runs = _core.may_have(ds._snapshot, "t", probe.encode(), probe.encode())
        assert all(any(first <= at < end for first, end in runs) for at, text in enumerate(texts) if text == probe)


@pytest.mark.parametrize("change", [None, "another column", "another sample", "a deletion"])
def test_a_none_that_was_given_and_compacted_is_merged(tmp_path, change):
    ds = ps.create(tmp_path / "set", {"k": "int32", "n": "int32"})
    ds.append({"k": [1, 2, 3]})
    branch = ds.create_branch("b")
    ds.update({"n": [None]}, row_ids=[0])
    ds.append({"k": [4]})
    ds.compact()
    if change == "another column":
        branch.update({"k": [7]}, row_ids=[1])
    elif change == "another sample":
        branch.update({"n": [7]}, row_ids=[1])
    elif change == "a deletion":
        with branch.transaction() as tx:
            tx.delete(row_ids=[1])
    branch.merge("main")
    branch.backfill("n", lambda batch: batch["k"] * 100, columns=["k"])
    second = {None: [200], "another column": [700], "another sample": [7], "a deletion": []}[change]
    assert branch["n"][:].tolist() == [None, *second, 300, 400]

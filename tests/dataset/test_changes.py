"""Test updates and deletions on a local disk: values of every kind, refused input, costs, damage, and large changes."""

import concurrent.futures

import numpy as np
import penstock as ps
import pytest
import spec_reader
from anything import SCHEMA, values
from handles import spent
from measured import peak_growth

pytestmark = [pytest.mark.local, pytest.mark.usefixtures("separate_files")]


def files(root):
    return {str(path.relative_to(root)): path.stat().st_size for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", SCHEMA)
def test_values_of_every_kind_are_replaced(tmp_path, name):
    rng = np.random.default_rng(5)
    kind = SCHEMA[name]
    ds = ps.create(tmp_path / "set", {name: kind, "beside": "int32"})
    ids = ds.append({name: values(rng, name, kind, 40), "beside": range(40)}).row_ids
    old = [ds.take([row], decode=False)[name] for row in range(40)]
    other = ps.create(tmp_path / "other", {name: kind})
    new = [value for value in values(rng, name, kind, 80) if value is not None][:12] + [None]
    chosen = rng.choice(40, len(new), replace=False)
    other.append({name: new})
    with ds.transaction() as tx:
        tx.update({name: new[::-1]}, row_ids=ids[chosen])
        tx.update({name: new}, row_ids=ids[chosen])
    for access in ("mapped", "buffered", "direct"):
        found = ps.open(tmp_path / "set", io=access)
        assert found["beside"][:].tolist() == list(range(40))
        for row in range(40):
            place = np.flatnonzero(chosen == row)
            expected = other.take([int(place[0])], decode=False)[name] if len(place) else old[row]
            ours = found.take([row], decode=False)[name]
            if isinstance(kind, ps.Category) and not np.ma.is_masked(ours):  # Codes differ between datasets; words do not.
                words = other.vocabulary(name) if len(place) else ds.vocabulary(name)
                assert found.vocabulary(name)[int(ours[0])] == words[int(expected[0])]
            else:
                assert repr(ours) == repr(expected), (access, row)
    assert not ds.verify()["problems"]


def test_slices_and_tiles_of_new_values(tmp_path):
    ds = ps.create(tmp_path / "set", {"tiled": ps.Tensor((None, None), "int16", tile=(5, 7)), "plain": ps.Tensor((30, 40), "float32")})
    ids = ds.append({"tiled": [np.full((30, 40), row, np.int16) for row in range(6)], "plain": np.zeros((6, 30, 40), np.float32)}).row_ids
    new = np.arange(33 * 44, dtype=np.int16).reshape(33, 44)
    source = np.lib.format.open_memmap(tmp_path / "large.npy", "w+", np.float32, (2, 30, 40))
    source[:] = np.arange(2 * 30 * 40).reshape(2, 30, 40)
    with ds.transaction() as tx:
        tx.update({"tiled": [new]}, row_ids=[ids[2]])
        tx.update({"plain": source}, row_ids=ids[[4, 1]])
    for access in ("mapped", "buffered", "direct"):
        found = ps.open(tmp_path / "set", io=access)
        assert np.array_equal(found["tiled"][2, 3:31, 6:42], new[3:31, 6:42]) and found["tiled"][3, 0:2, 0:2].tolist() == [[3, 3]] * 2
        assert np.array_equal(found["plain"][[4, 1, 0]][:, 29], [*source[:, 29], np.zeros(40)])


def test_what_is_refused_changes_nothing(tmp_path):
    ds = ps.create(tmp_path / "set", {"n": "int32", "fixed": ps.Tensor((2,), "float32"), "image": ps.Image(), "word": ps.Category()})
    ids = ds.append({"n": range(5), "word": ["a"] * 5}).row_ids
    with ds.transaction() as tx:
        tx.delete(row_ids=[ids[4]])
    before, kept = ds.snapshot, files(tmp_path / "set")
    refused = [
        ("update", {"n": [1]}, [99], ps.NotFoundError, "row id 99: no such sample exists in snapshot"),
        ("update", {"n": [1]}, [ids[4]], ps.NotFoundError, "row id 4: its sample was deleted in snapshot"),
        ("update", {"n": [1]}, [-1], ps.NotFoundError, "no such sample was appended in this transaction"),
        ("update", {"n": [1]}, [-(1 << 63)], ps.NotFoundError, "provisional row id of another transaction"),
        ("update", {"n": [1]}, [1 << 63], ps.NotFoundError, "does not fit int64"),
        ("update", {"n": [1, 2]}, [1], ps.InvalidInputError, "1 row ids for 2 values"),
        ("update", {}, [1], ps.InvalidInputError, "at least one column"),
        ("update", {"n": [1], "fixed": [[1, 2], [3, 4]]}, [1], ps.InvalidInputError, "columns differ in length"),
        ("update", {"n": [1]}, [[1]], ps.InvalidInputError, "expected whole numbers"),
        ("update", {"n": [1]}, [True], ps.InvalidInputError, "bools"),
        ("update", {"n": [1]}, ["0"], ps.InvalidInputError, "expected whole numbers"),
        ("update", {"m": [1]}, [1], ps.NotFoundError, "cannot update column `m`: the dataset has no such column"),
        ("update", {"n": [1 << 40]}, [1], ps.InvalidInputError, "cannot update column `n`"),
        ("update", {"fixed": [[1, 2, 3]]}, [1], ps.InvalidInputError, "cannot update column `fixed`"),
        ("update", {"image": [b"no image"]}, [1], ps.CorruptError, "cannot update column `image`"),
        ("update", {"word": ["new", 5]}, [1, 2], ps.InvalidInputError, "cannot update column `word`"),
        ("delete", None, [99], ps.NotFoundError, "row id 99: no such sample"),
        ("delete", None, [ids[4]], ps.NotFoundError, "its sample was deleted in snapshot"),
        ("delete", None, [1.5], ps.InvalidInputError, "expected whole numbers"),
    ]
    with ds.transaction() as tx:
        tx.delete(row_ids=[ids[0], ids[0]])
        for what, columns, row_ids, error, text in [
            *refused,
            ("update", {"n": [1]}, [ids[0]], ps.NotFoundError, "its sample was deleted in this transaction"),
            ("delete", None, [ids[0]], ps.NotFoundError, "its sample was deleted in this transaction"),
        ]:
            with pytest.raises(error, match=text) as caught:
                tx.update(columns, row_ids=row_ids) if what == "update" else tx.delete(row_ids=row_ids)
            assert caught.value.hint or "bools" not in text, text
        tx.update({"n": []}, row_ids=[])
        tx.delete(row_ids=[])
        tx.abort()
    assert ds.snapshot == before and files(tmp_path / "set") == kept
    with ds.transaction() as tx:
        tx.update({"n": [7], "word": ["b"]}, row_ids=[ids[1]])
    assert ds["n"][:].tolist() == [0, 7, 2, 3] and ds.vocabulary("word") == ["a", "b"]
    with pytest.raises(ps.ClosedError):
        tx.update({"n": [7]}, row_ids=[ids[1]])
    with pytest.raises(ps.ClosedError):
        tx.delete(row_ids=[ids[1]])


def test_an_aborted_change_leaves_no_file(tmp_path):
    ds = ps.create(tmp_path / "set", {"n": ps.Tensor((1000,), "float32")})
    ids = ds.append({"n": np.zeros((5000, 1000), np.float32)}).row_ids
    kept = files(tmp_path / "set")
    ps.configure(memory_bytes=16 << 20)
    try:
        with pytest.raises(ZeroDivisionError), ds.transaction() as tx:
            tx.update({"n": np.ones((2500, 1000), np.float32)}, row_ids=ids[::2])
            tx.delete(row_ids=ids[1::2])
            assert len(files(tmp_path / "set")) > len(kept), "an update that exceeds its share of memory is written at once"
            raise ZeroDivisionError
    finally:
        ps.configure(memory_bytes=512 << 20)
    assert files(tmp_path / "set") == kept


def test_an_update_writes_little_more_than_its_values(tmp_path):
    """Updating 1 % of the samples writes at most 2 × (value + 4 bytes) a sample, in addition to 64 KiB, and no media."""
    ds = ps.create(tmp_path / "set", {"label": "int64", "vector": ps.Tensor((128,), "float32"), "image": ps.Bytes()})
    for _ in range(20):
        ds.append({"label": range(2000), "vector": np.zeros((2000, 128), np.float32), "image": [b"x" * 500] * 2000})
    ids = np.random.default_rng(0).choice(40_000, 400, replace=False)
    before = files(tmp_path / "set")
    with ds.transaction() as tx:
        tx.update({"label": range(400), "vector": np.ones((400, 128), np.float32)}, row_ids=ids)
    after = files(tmp_path / "set")
    written = sum(size for name, size in after.items() if name not in before or name.endswith("hint"))
    assert written <= 2 * 400 * (8 + 512 + 4) + (64 << 10) and {name: after[name] for name in before if "hint" not in name} == {
        name: size for name, size in before.items() if "hint" not in name
    }
    before = after
    with ds.transaction() as tx:
        tx.delete(row_ids=np.setdiff1d(np.arange(40_000), ids)[::3])
    written = sum(size for name, size in files(tmp_path / "set").items() if name not in before)
    assert written <= 13_200 * 2 + 8192
    order = np.argsort(ids)
    gone = set(np.setdiff1d(np.arange(40_000), ids)[::3].tolist())
    expected = dict.fromkeys((row for row in range(40_000) if row not in gone), 0) | {int(ids[row]): 1 for row in order}
    found = ps.open(tmp_path / "set")
    batch = found.take(range(len(found)), columns=["_row_id", "vector"])
    assert dict(zip(batch["_row_id"].tolist(), batch["vector"][:, 64].tolist(), strict=True)) == expected


def test_the_row_ids_of_changes_are_read_once(tmp_path):
    ds = ps.create(tmp_path / "set", {"n": "int64", "t": ps.Text()})
    ids = ds.append({"n": range(5000), "t": ["x"] * 5000}).row_ids
    for number in range(3):
        with ds.transaction() as tx:
            tx.update({"n": [-number] * 1000}, row_ids=ids[number::5][:1000])
            tx.delete(row_ids=ids[3 + 20 * number :: 100])
    found = ps.open(tmp_path / "set", io="buffered")
    first = spent(found, lambda: found.take([1, 2, 3], columns=["n"]))
    assert first["ranges"] == 6 + 3, "six sets of row ids, and three small files as a whole"
    again = spent(found, lambda: found.take([1, 2, 3], columns=["n"]))
    other = spent(found, lambda: found.take([5, 9], columns=["t"]))
    assert again == {} and other == {}, "sets are kept; a column without new values needs none"


def test_the_last_value_counts_across_flushes(tmp_path):
    """With a small budget, one transaction writes several overlays of the same samples."""
    ds = ps.create(tmp_path / "set", {"v": ps.Tensor((200,), "float32"), "n": "int32"})
    ids = ds.append({"n": range(6000)}).row_ids
    ps.configure(memory_bytes=16 << 20)
    rng, expected = np.random.default_rng(1), np.full(6000, -1.0)
    try:
        with ds.transaction() as tx:
            for number in range(12):
                chosen = rng.integers(0, 6000, 2000)
                tx.update({"v": np.full((2000, 200), number, np.float32)}, row_ids=ids[chosen])
                expected[chosen] = number
    finally:
        ps.configure(memory_bytes=512 << 20)
    read = spec_reader.Dataset(tmp_path / "set")
    assert len(read.overlays) > 3
    found = ds.take(range(6000), columns=["v"])["v"]
    assert np.ma.filled(found[:, 0], -1).tolist() == expected.tolist() and not ds.verify()["problems"]


def test_memory_of_a_large_update_is_bounded(tmp_path):
    program = """
ds = ps.create(sys.argv[1], {"v": ps.Tensor((1024,), "float32")})
ids = ds.append({"v": np.zeros((1, 1024), np.float32).repeat(100, 0)}).row_ids
for _ in range(99):
    ds.append({"v": np.zeros((100, 1024), np.float32)})
before = peak()
with ds.transaction() as tx:
    for first in range(0, 10_000, 500):
        tx.update({"v": np.ones((500, 1024), np.float32)}, row_ids=range(first, first + 500))
print(peak() - before)
"""
    assert peak_growth(program, tmp_path / "set") < 40 << 20
    assert ps.open(tmp_path / "set")["v"][[0, 9999]][:, 5].tolist() == [1, 1]


@pytest.mark.parametrize("access", ["mapped", "buffered"])
def test_a_damaged_overlay_is_an_error_or_null(tmp_path, access):
    ds = ps.create(tmp_path / "set", {"n": "int64", "t": ps.Text()})
    ids = ds.append({"n": range(100), "t": ["x"] * 100}).row_ids
    before = files(tmp_path / "set")
    with ds.transaction() as tx:
        tx.update({"n": range(-50, 0)}, row_ids=ids[::2])
    [data] = [name for name in files(tmp_path / "set") if name.startswith("d/") and name not in before]
    [row_ids] = [name for name in files(tmp_path / "set") if name.startswith("o/")]
    for damaged, nulls in ((data, range(0, 100, 2)), (row_ids, range(100))):
        body = (tmp_path / "set" / damaged).read_bytes()
        place = body.index((-50 & (1 << 64) - 1).to_bytes(8, "little")) if damaged == data else len(body) // 2
        (tmp_path / "set" / damaged).write_bytes(body[:place] + bytes([body[place] ^ 1]) + body[place + 1 :])
        found = ps.open(tmp_path / "set", io=access)
        with pytest.raises(ps.CorruptError) as caught:
            found.take(range(100))
        assert caught.value.column == "n" and (damaged in str(caught.value) or caught.value.object == damaged)
        batch = found.take(range(100), on_corrupt="null")
        assert np.flatnonzero(np.ma.getmaskarray(batch["n"])).tolist() == list(nulls) and batch["t"] == ["x"] * 100
        assert found.take(range(100), columns=["t"])["t"] == ["x"] * 100 and found.verify()["problems"]
        (tmp_path / "set" / damaged).write_bytes(body)
    assert not ps.open(tmp_path / "set").verify()["problems"]


@pytest.mark.parametrize("access", ["mapped", "buffered"])
def test_a_damaged_deletion_is_an_error(tmp_path, access):
    ds = ps.create(tmp_path / "set", {"n": "int64"})
    ids = ds.append({"n": range(100)}).row_ids
    with ds.transaction() as tx:
        tx.delete(row_ids=ids[::2])
    [row_ids] = (tmp_path / "set" / "o").iterdir()
    body = row_ids.read_bytes()
    row_ids.write_bytes(body[:30] + bytes([body[30] ^ 1]) + body[31:])
    found = ps.open(tmp_path / "set", io=access)
    assert len(found) == 50
    with pytest.raises(ps.CorruptError, match=row_ids.name):
        found[0]
    assert any(row_ids.name in str(error) for _, error in found.verify()["problems"])
    row_ids.unlink()
    with pytest.raises(ps.Error, match=row_ids.name):
        ps.open(tmp_path / "set")[0]


def test_many_small_updates_are_joined(tmp_path):
    """The number of overlays stays small after hundreds of commits, and each cell has its last value."""
    rng = np.random.default_rng(7)
    kinds = {
        name: SCHEMA[name] for name in ("number", "flag", "fixed", "text", "label", "word", "cloud", "tiled", "image", "packed", "blob")
    }
    ds = ps.create(tmp_path / "set", kinds)
    model = ps.create(tmp_path / "model", kinds)
    ids = ds.append({name: values(rng, name, kind, 60) for name, kind in kinds.items()}).row_ids
    stored = ds.take(range(60), decode=False)
    cells = {name: [None if np.ma.is_masked(value) else value for value in stored[name]] for name in kinds}
    for name, words in (("word", ds.vocabulary("word")), ("label", ds.vocabulary("label"))):
        cells[name] = [None if code is None else words[int(code)] for code in cells[name]]
    deleted = set()
    for number in range(300):
        chosen = [row for row in rng.choice(60, 4, replace=False).tolist() if row not in deleted]
        names = [str(name) for name in rng.choice(list(kinds), int(rng.integers(1, 4)), replace=False)]
        new = {name: [None] * len(chosen) if number % 17 == 0 else values(rng, name, kinds[name], len(chosen)) for name in names}
        with ds.transaction() as tx:
            tx.update(new, row_ids=ids[chosen])
            if number % 20 == 19:
                tx.delete(row_ids=ids[chosen[:1]])
                deleted |= set(chosen[:1])
        for name in names:
            for row, value in zip(chosen, new[name], strict=True):
                cells[name][row] = value
    live = [row for row in range(60) if row not in deleted]
    model.append({name: [cells[name][row] for row in live] for name in kinds})
    read = spec_reader.Dataset(tmp_path / "set")
    assert len([overlay for overlay in read.root.overlays if overlay.columns]) <= 3 * len(kinds) and not ds.verify()["problems"]
    for access in ("mapped", "buffered"):
        found, expected = ps.open(tmp_path / "set", io=access), model.take(range(len(live)), decode=False)
        ours = found.take(range(len(live)), decode=False)
        for name in kinds:
            if name in ("word", "label"):
                words = [dataset.vocabulary(name) for dataset in (found, model)]
                one, two = (
                    [None if np.ma.is_masked(code) else of[int(code)] for code in values_]
                    for of, values_ in zip(words, (ours[name], expected[name]), strict=True)
                )
                assert one == two, name
            else:
                assert repr(list(ours[name])) == repr(list(expected[name])), name


def test_a_damaged_overlay_does_not_stop_later_commits(tmp_path):
    ds = ps.create(tmp_path / "set", {"n": "int64", "m": "int64"})
    ids = ds.append({"n": range(100), "m": range(100)}).row_ids
    before = files(tmp_path / "set")
    with ds.transaction() as tx:
        tx.update({"n": [-1]}, row_ids=ids[:1])
    [data] = [name for name in files(tmp_path / "set") if name.startswith("d/") and name not in before]
    body = (tmp_path / "set" / data).read_bytes()
    (tmp_path / "set" / data).write_bytes(bytes(len(body)))
    ds = ps.open(tmp_path / "set")
    for number in range(60):
        with ds.transaction() as tx:
            tx.update({"m": [-number]}, row_ids=ids[number : number + 1])
    assert ps.open(tmp_path / "set")["m"][:60].tolist() == [-number for number in range(60)]
    with pytest.raises(ps.CorruptError):
        ps.open(tmp_path / "set")["n"][0]
    assert ps.open(tmp_path / "set")["n"][1:].tolist() == list(range(1, 100))


def test_overlays_that_decode_to_much_are_not_joined(tmp_path):
    """Compressed values of 8 MiB are stored in a few KB. Joining them would take more than the memory budget."""
    program = """
ds = ps.create(sys.argv[1], {"t": ps.Text(codec="zstd"), "n": "int32"})
ids = ds.append({"n": range(100)}).row_ids
text = "x" * (8 << 20)
def change(number):
    with ds.transaction() as tx:
        tx.update({"t": [text]}, row_ids=ids[number : number + 1])
change(0)
before = peak()
for number in range(1, 80):
    change(number)
print(peak() - before)
"""
    assert peak_growth(program, tmp_path / "set") < 64 << 20
    found = ps.open(tmp_path / "set")
    assert len(found["t"][79]) == 8 << 20 and found["t"][80] is None and not found.verify()["problems"]


def test_threads_that_share_a_transaction_get_their_own_row_ids(tmp_path):
    ds = ps.create(tmp_path / "set", {"t": ps.Text(), "who": "int32"})
    ps.configure(memory_bytes=16 << 20)
    try:
        with ds.transaction() as tx:

            def work(who):
                return [tx.append({"t": ["x" * 50_000] * 100, "who": [who] * 100}) for _ in range(4)]

            with concurrent.futures.ThreadPoolExecutor(3) as pool:
                parts = [(who, ids) for who, found in enumerate(pool.map(work, range(3))) for ids in found]
            assert len(np.unique(np.concatenate([ids for _, ids in parts]))) == 1200
            for who, ids in parts:
                assert set(tx.take(ids, columns=["who"])["who"].tolist()) == {who}
    finally:
        ps.configure(memory_bytes=512 << 20)


def test_lost_races_leave_no_roots_behind(tmp_path):
    """Each commit writes a root if its record is full. After a lost race, the root and the overlays that were joined for it are deleted."""
    ds = ps.create(tmp_path / "set", {"n": "int64"})
    ids = ds.append({"n": range(400)}).row_ids

    def work(worker):
        own = ps.open(tmp_path / "set")
        for number in range(100):
            with own.transaction() as tx:
                tx.update({"n": [-1]}, row_ids=[ids[4 * number + worker]])

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    ds.refresh()
    assert (ds["n"][:] == -1).all() and not ds.verify()["problems"]
    log = ds.log()
    roots = {spec_reader.Dataset(tmp_path / "set", commit.snapshot).record.root.id for commit in log}
    assert {path.name for path in (tmp_path / "set" / "r").iterdir()} == roots


def test_columns_changed_by_many_calls_share_files(tmp_path):
    """The row ids of 60 columns would not fit into a record. Columns that change for the same samples need them only once."""
    ds = ps.create(tmp_path / "set", {f"c{number}": "int64" for number in range(60)})
    ids = ds.append({"c0": range(400)}).row_ids[::2]
    with ds.transaction() as tx:
        for number in range(60):
            tx.update({f"c{number}": np.full(200, number)}, row_ids=ids)
    assert [ds[2][f"c{number}"] for number in range(60)] == list(range(60)) and ds[1]["c0"] == 1
    read = spec_reader.Dataset(tmp_path / "set")
    assert len(read.overlays) == 1 and len(read.overlays[0].columns) == 60 and not ds.verify()["problems"]


def test_small_appends_and_upserts_share_a_file(tmp_path):
    """Reads between small appends do not close a data file each."""
    kinds = {"key": ps.Text(), "n": "int32", "word": ps.Category(), "cloud": ps.Tensor((None, 3), "int16")}
    ds = ps.create(tmp_path / "set", kinds)
    with ds.transaction() as tx:
        for number in range(100):
            [one] = tx.append({"n": [number], "word": [f"w{number % 7}"], "cloud": [np.full((3, 3), number, np.int16)]})
            [two] = tx.upsert({"key": [f"key {number // 2}"], "n": [number]}, key="key")
            found = tx.take([one, two])
            assert found["n"].tolist() == [number, number] and found["key"] == [None, f"key {number // 2}"]
            assert tx.vocabulary("word")[found["word"][0]] == f"w{number % 7}" and found["cloud"][0][2, 2] == number
            if number % 10 == 9:
                tx.delete(row_ids=[one])
            assert len(tx) == number + 1 - (number + 1) // 10 + number // 2 + 1
    read = spec_reader.Dataset(tmp_path / "set")
    assert len(read.fragments) <= 2 and len(ds) == 140 and not ds.verify()["problems"]
    by_key = {sample["key"]: sample["n"] for sample in ds if sample["key"]}
    assert by_key == {f"key {number}": 2 * number + 1 for number in range(50)}

"""Columns of numbers get a wider dtype. Files keep theirs, and every kind of read returns the wider values."""

import math

import ml_dtypes
import numpy as np
import penstock as ps
import pyarrow as pa
import pytest
from handles import newest

pytestmark = pytest.mark.processes

# Each dtype with those that represent all its values.
WIDER = {
    "int8": ["int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"], "int16": ["int32", "int64", "float32", "float64"],
    "int32": ["int64", "float64"], "int64": [], "uint8": ["uint16", "uint32", "uint64", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"],
    "uint16": ["uint32", "uint64", "int32", "int64", "float32", "float64"], "uint32": ["uint64", "int64", "float64"], "uint64": [],
    "float16": ["float32", "float64"], "bfloat16": ["float32", "float64"], "float32": ["float64"], "float64": [], "complex64": ["complex128"],
    "complex128": [], "bool": [], "timestamp": [],
}  # fmt: skip
NUMPY = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "timestamp": np.dtype("M8[us]")}


def extremes(dtype):
    kind = np.dtype(NUMPY.get(dtype, dtype))
    if kind.kind in "iu":
        return np.array([np.iinfo(kind).min, np.iinfo(kind).max, 0, 1], kind)
    if kind.kind == "c":
        return np.array([1 - 2j, 1e30, 0, 1j], kind)
    info = ml_dtypes.finfo(kind)
    return np.array([info.min, info.max, info.smallest_subnormal, -0.0], kind)


@pytest.mark.local
@pytest.mark.parametrize("dtype", list(WIDER))
def test_every_value_stays_the_same(tmp_path, dtype):
    for wider in WIDER:
        ds = ps.create(tmp_path / wider, {"n": dtype, "v": ps.Tensor((2,), dtype), "r": ps.Tensor((None,), dtype)})
        if wider not in WIDER[dtype]:
            with pytest.raises(ps.InvalidInputError, match="cannot widen column"), ds.transaction() as tx:
                tx.widen_column("n", wider)
            continue
        values = extremes(dtype)
        ds.append({"n": values, "v": values.reshape(2, 2).repeat(2, axis=0), "r": [values, values[:0], values[1:], values[:1]]})
        with ds.transaction() as tx:
            for name in ds.schema:
                tx.widen_column(name, wider)
        kind = np.dtype(NUMPY.get(wider, wider))
        assert ds["n"][:].dtype == ds["v"][:].dtype == ds["r"][0].dtype == kind
        for found, expected in ((ds["n"][:], values), (ds["r"][0], values), (ds["v"][1], values[:2]), (ds["r"][2], values[1:])):
            back = np.asarray(found).astype(values.dtype)
            assert back.tobytes() == expected.tobytes(), wider
        assert not ds.verify()["problems"]


KINDS = {
    "n": "int16", "v": ps.Tensor((3,), "float16"), "packed": ps.Tensor((4,), "uint8", codec="zstd"), "r": ps.Tensor((None, 2), "int8"),
    "big": ps.Tensor((None, None), "int16", tile=(16, 16)), "fixed": ps.Tensor((40, 50), "uint16", tile=(16, 16)), "wide": ps.Tensor((20_000,), "int16"),
}  # fmt: skip
AFTER = {"n": "int64", "v": "float64", "packed": "int32", "r": "float32", "big": "int32", "fixed": "float32", "wide": "int32"}


def values(rng, count):
    def of(name, row):
        if rng.random() < 0.2:
            return None
        return {
            "n": lambda: int(rng.integers(-30000, 30000)), "v": lambda: rng.random(3).astype("float16"), "packed": lambda: rng.integers(0, 255, 4, np.uint8),
            "r": lambda: rng.integers(-99, 99, (row % 3, 2), np.int8), "big": lambda: rng.integers(-999, 999, (30, 20 + row), np.int16),
            "fixed": lambda: rng.integers(0, 999, (40, 50), np.uint16), "wide": lambda: rng.integers(-999, 999, 20_000, np.int16),
        }[name]()  # fmt: skip

    return {name: [of(name, row) for row in range(count)] for name in KINDS}


def same(found, expected):
    if found is None or expected is None:
        return found is expected
    found, expected = np.asarray(found), np.asarray(expected)
    return found.shape == expected.shape and (found == expected.astype(found.dtype)).all()


def check(ds, expected):
    assert len(ds) == len(expected["n"])
    for place in range(len(ds)):
        for name, value in ds[place].items():
            assert same(value, expected[name][place]), (place, name)
    order = np.random.default_rng(0).permutation(len(ds))
    taken = ds.take(order)
    for name, column in taken.items():
        nulls = (
            np.ma.getmaskarray(column).reshape(len(order), -1).any(axis=1)
            if isinstance(column, np.ma.MaskedArray)
            else [False] * len(order)
        )
        for at, place in enumerate(order):
            assert same(None if nulls[at] else column[at], expected[name][place]), (place, name)
    for name in ("big", "fixed"):
        for place, value in enumerate(expected[name]):
            if value is not None:
                assert same(ds[name][place, 3:20, 5:18], value[3:20, 5:18]), (name, place)
    table = pa.Table.from_batches(ds.scan(["n", "packed"], batch_size=7))
    assert table["n"].to_pylist() == expected["n"] and str(table.schema.field("n").type) == AFTER["n"]
    batches = list(ds.loader(batch_size=4, columns=["n", "wide"], nulls={"n": 7, "wide": 0}, last_batch="short"))
    assert np.concatenate([batch["n"] for batch in batches]).tolist() == [7 if n is None else n for n in expected["n"]]
    assert batches[0]["wide"].dtype == AFTER["wide"] and not ds.verify()["problems"]


def test_old_and_new_values_are_read_together(root):
    rng = np.random.default_rng(1)
    ds = ps.create(root, KINDS)
    expected = values(rng, 6)
    ids = ds.append(expected).row_ids
    stale, early = newest(ps.open(root), 6), newest(ps.open(root), 6).transaction("began before")
    late = values(rng, 2)
    early.append(late)
    early.update({"n": [123]}, row_ids=ids[5:])
    narrow = values(rng, 2)
    with ds.transaction("widen") as tx:
        tx.update({name: column[:1] for name, column in narrow.items()}, row_ids=ids[:1])
        for name, dtype in AFTER.items():
            tx.widen_column(name, dtype)
        tx.update({"n": [1 << 40], "v": [[0.1, 0.2, 0.3]]}, row_ids=ids[1:2])
        more = values(rng, 3)
        more["n"][0] = 1 << 50
        tx.append(more)
        assert tx.take(ids[:2], columns=["n"])["n"][1] == 1 << 40
    for name, column in expected.items():
        column[0] = narrow[name][0]
    expected["n"][1], expected["v"][1] = 1 << 40, np.array([0.1, 0.2, 0.3])
    expected = {name: [*column, *more[name]] for name, column in expected.items()}
    assert {name: kind.dtype for name, kind in ds.schema.items()} == AFTER
    check(ds, expected)
    # A transaction that began before writes the old dtype, and is committed after it.
    early.commit()
    expected = {name: [*column, *late[name]] for name, column in expected.items()}
    expected["n"][5] = 123
    check(newest(ps.open(root), 11), expected)
    assert stale["n"][:].dtype == np.int16 and len(stale) == 6, "an open snapshot keeps its dtype"
    before = ds.log()[1].snapshot
    ds.refresh()
    for number in range(70):  # Enough commits for roots and joined overlays.
        with ds.transaction() as tx:
            tx.update({"n": [number]}, row_ids=ids[2:3])
    expected["n"][2] = 69
    check(ds, expected)
    assert ps.open(root, snapshot=before)["n"][:].dtype == np.int16
    with ds.transaction() as tx:
        tx.widen_column("r", "float64")
    assert ds["r"][2].dtype == np.float64 and same(ds["r"][5], expected["r"][5])
    for changes in (ds.diff(before), ds.diff(ds.snapshot, before)):
        found = {(change.kind, change.column): change.row_ids.tolist() for change in changes}
        assert found["changed", "n"] == [0, 1, 2, 5] and ("column widened", "n") in found, found
    branch = ds.create_branch("wide")
    branch.append({"n": [1 << 45]})
    ds.reset(before)
    assert ds["n"][:].dtype == np.int16
    ds.append({"n": [77]})
    ds.merge("wide")
    assert ds["n"][:].dtype == np.int64 and ds["n"][-1] == 1 << 45 and 77 in ds["n"][:].tolist() and not ds.verify()["problems"]


def test_both_branches_may_widen(root):
    ds = ps.create(root, {"n": "int16", "m": "int16", "k": "uint8"})
    ds.append({"n": [1, 2], "m": [3, 4], "k": [5, 6]})
    branch = ds.create_branch("exp")
    with branch.transaction() as tx:
        tx.widen_column("n", "int64")
        tx.widen_column("m", "int32")
        tx.append({"n": [1 << 40], "m": [1 << 20], "k": [7]})
    with ds.transaction() as tx:
        tx.widen_column("n", "int32")
        tx.append({"n": [1 << 20], "m": [9], "k": [8]})
    ds.merge("exp")
    assert ds["n"][:].tolist() == [1, 2, 1 << 20, 1 << 40] and ds["m"][:].tolist() == [3, 4, 9, 1 << 20]
    assert [str(ds[name][:].dtype) for name in ds.schema] == ["int64", "int32", "uint8"] and not ds.verify()["problems"]
    with ds.transaction() as tx:
        tx.widen_column("k", "int16")
    with branch.transaction() as tx:
        tx.widen_column("k", "uint16")
    with pytest.raises(ps.ConflictError, match="`k`"):
        ds.merge("exp")


@pytest.mark.parametrize("merges", ["dropper", "widener"])
@pytest.mark.parametrize("dtype", ["int32", "float64"])
def test_a_column_that_one_side_dropped_and_the_other_one_widened(root, merges, dtype):
    ds = ps.create(root, {"n": "int16", "m": "int32"})
    ids = ds.append({"n": [1, 2, 3], "m": [4, 5, 6]}).row_ids
    exp = ds.create_branch("exp")
    with exp.transaction() as tx:
        tx.widen_column("n", dtype)
    with exp.transaction() as tx:
        tx.update({"n": [2, 1 << 20]}, row_ids=ids[1:])
    with ds.transaction() as tx:
        tx.drop_column("n", force=True)
    one, other, word = (ds, "exp", "ours") if merges == "dropper" else (exp, "main", "theirs")
    with pytest.raises(ps.ConflictError, match="one side dropped column `n`, and the other one changed or added 1 values") as caught:
        one.merge(other)
    assert caught.value.row_ids == [2] and word in caught.value.hint
    one.merge(other, on_conflict=word)
    assert list(one.schema) == ["m"] and one["m"][:].tolist() == [4, 5, 6] and not one.verify()["problems"]


@pytest.mark.parametrize(
    ("narrow", "dtypes"), [("int32", ("int64", "float64")), ("uint32", ("uint64", "int64")), ("int16", ("int64", "float32"))]
)
@pytest.mark.parametrize("kind", ["scalar", "tensor"])
def test_values_of_two_dtypes_without_a_common_one_are_compared(root, narrow, dtypes, kind):
    shaped = (lambda value: value) if kind == "scalar" else (lambda value: np.full((2,), value))
    ds = ps.create(root, {"n": narrow if kind == "scalar" else ps.Tensor((None,), narrow), "m": "int8"})
    ids = ds.append({"n": [shaped(value) for value in range(6)], "m": [0] * 6}).row_ids
    snapshots = []
    for dtype, own in zip(dtypes, ([3, 9, 7, 1 << 40 if "64" in dtypes[0] else 0], [3, 8, 7, 4]), strict=True):
        branch = ds.create_branch(dtype)
        with branch.transaction() as tx:
            tx.widen_column("n", dtype)
        with branch.transaction() as tx:
            tx.update({"n": [shaped(value) for value in own]}, row_ids=ids[2:])
            tx.update({"n": [None]}, row_ids=ids[:1])
        snapshots.append(branch.snapshot)
    for one, other in (snapshots, snapshots[::-1]):
        found = [(entry.kind, entry.column, entry.row_ids.tolist()) for entry in ds.diff(one, other) if len(entry.row_ids)]
        assert found == [("changed", "n", [3, 5])]


def telling(dtype):
    """Return numbers at which dtypes differ: around 0, their limits, and around the largest whole numbers that floats represent exactly."""
    kind = np.dtype(NUMPY.get(dtype, dtype))
    whole = [sign * (2**bits + more) for bits in (8, 11, 24, 31, 53, 63) for more in (-1, 0, 1) for sign in (1, -1)]
    if kind.kind in "iu":
        return [number for number in [0, 1, *whole] if np.iinfo(kind).min <= number <= np.iinfo(kind).max]
    floats = [0.0, -0.0, 0.5, 1e30, float("inf"), float("-inf"), *map(float, whole)]
    with np.errstate(over="ignore"):
        return [number for number in floats if float(kind.type(number)) == number]


def meant(number):
    """Return what a number means, whatever its dtype: Python compares whole numbers and floats exactly."""
    return "minus zero" if isinstance(number, float) and number == 0 and math.copysign(1, number) < 0 else number


UNLIKE = [
    (one, other)
    for one in WIDER for other in WIDER
    if one < other and one not in WIDER[other] and other not in WIDER[one] and any({one, other} <= set(wider) for wider in WIDER.values())
]  # fmt: skip


@pytest.mark.local
@pytest.mark.parametrize(("one", "other"), UNLIKE)
def test_numbers_of_any_two_unlike_dtypes_are_compared_exactly(one, other):
    narrow = next(dtype for dtype, wider in WIDER.items() if {one, other} <= set(wider))
    pairs = [(left, right) for left in telling(one) for right in telling(other) if left == right or abs(left - right) <= 1]
    pairs += [(None, 0), (0, None), (None, None)]
    ds = ps.create(f"memory://unlike-{one}-{other}", {"n": narrow})
    ids = ds.append({"n": [1] * len(pairs)}).row_ids
    snapshots = []
    for dtype, own in ((one, [left for left, _ in pairs]), (other, [right for _, right in pairs])):
        branch = ds.create_branch(dtype)
        with branch.transaction() as tx:
            tx.widen_column("n", dtype)
            tx.update({"n": own}, row_ids=ids)
        snapshots.append(branch.snapshot)
    expected = [row for row, (left, right) in zip(ids.tolist(), pairs, strict=True) if meant(left) != meant(right)]
    assert 0 < len(expected) < len(pairs)
    for since, until in (snapshots, snapshots[::-1]):
        assert [row for entry in ds.diff(since, until) if entry.kind == "changed" for row in entry.row_ids.tolist()] == expected


def test_fill_values_and_keys_are_widened(root):
    ds = ps.create(root, {"key": "uint8", "n": "int8"})
    ids = ds.append({"key": [1, 2, 3], "n": [1, 2, 3]}).row_ids
    with ds.transaction() as tx:
        tx.add_column("f", "float16", fill=0.5)
    with ds.transaction() as tx:
        tx.widen_column("f", "float64")
        tx.widen_column("key", "int32")
        found = tx.upsert({"key": [2, 1000], "n": [20, 30]}, key="key")
        with pytest.raises(ps.InvalidInputError, match="used it as a key"):
            tx.widen_column("key", "int64")
    assert found[0] == ids[1] and ds["key"][:].tolist() == [1, 2, 3, 1000] and ds["n"][:].tolist() == [1, 20, 3, 30]
    assert ds["f"][:].tolist() == [0.5] * 4 and ds["f"][:].dtype == np.float64
    one, other = newest(ps.open(root), 4).transaction(), newest(ps.open(root), 4).transaction()
    one.widen_column("n", "int16")
    other.widen_column("n", "int32")
    one.commit()
    with pytest.raises(ps.ConflictError, match="changed the schema"):
        other.commit()
    for column, dtype, match in (
        ("n", "int8", "cannot widen"),
        ("n", "text", "dtype"),
        ("missing", "int64", "no such column"),
        ("n", "int16", "cannot widen"),
    ):
        with pytest.raises(ps.Error, match=match), ds.refresh().transaction() as tx:
            tx.widen_column(column, dtype)


def test_keys_and_wider_dtypes_in_the_meantime(root):
    ds = ps.create(root, {"k": "int32", "v": "int32"})
    ds.append({"k": [1, 2], "v": [0, 0]})
    other = newest(ps.open(root), 2)
    with ds.transaction() as tx:
        tx.upsert({"k": [7], "v": [1]}, key="k")
        tx.rename_column("k", "kk")
        with pytest.raises(ps.InvalidInputError, match="used it as a key"):
            tx.widen_column("kk", "int64")
        tx.abort()
    tx = ds.transaction()
    tx.upsert({"k": [7], "v": [1]}, key="k")
    with other.transaction() as rival:
        rival.widen_column("k", "int64")
    other.append({"k": [99], "v": [2]})
    with pytest.raises(ps.ConflictError, match="changed the dtype of the key column `k`"):
        tx.commit()
    with newest(ds, 3).transaction() as tx:
        tx.upsert({"k": [7, 99], "v": [1, 3]}, key="k")
    assert sorted(ds["k"][:].tolist()) == [1, 2, 7, 99] and ds["v"][:].tolist()[2] == 3


# Changes of one column: of its name, of its dtype or words, each with a value that only the changed column takes.
NUMBER = {
    "rename": (lambda tx: tx.rename_column("n", "m"), None), "widen": (lambda tx: tx.widen_column("n", "int32"), 100_000),
    "widen twice": (lambda tx: (tx.widen_column("n", "int32"), tx.widen_column("n", "int64")), 2**40),
}  # fmt: skip
WORDS = {
    "rename": (lambda tx: tx.rename_column("n", "m"), None), "add": (lambda tx: tx.add_classes("n", ["fox"]), "fox"),
    "rename class": (lambda tx: tx.rename_class("n", "cat", "lion"), None),
}  # fmt: skip


@pytest.mark.local
@pytest.mark.parametrize("into_main", [True, False])
@pytest.mark.parametrize(
    ("kind", "one", "two"),
    [("number", a, b) for a in NUMBER for b in NUMBER if a != b] + [("words", a, b) for a in WORDS for b in WORDS if a != b],
)
def test_two_sides_change_a_column_in_different_ways(kind, one, two, into_main):
    """A merge has both changes, whichever side made which, and every value that either side wrote."""
    changes = NUMBER if kind == "number" else WORDS
    ds = ps.create(f"memory://two-ways-{kind}-{one}-{two}-{into_main}", {"n": "int16" if kind == "number" else ps.Label(["cat", "dog"])})
    first = [1, -2] if kind == "number" else ["cat", "dog"]
    ds.append({"n": first})
    ds.create_branch("exp")
    exp, values = ps.open(ds.uri, branch="exp"), list(first)
    for side, change in ((ds, one), (exp, two)):
        make, value = changes[change]
        with side.transaction() as tx:
            make(tx)
        if value is not None:
            side.append({side.columns[0]: [value]})
            values.append(value)
    ds.refresh()
    merged = ds if into_main else exp
    merged.merge("exp" if into_main else "main")
    [name] = merged.schema
    assert name == ("m" if "rename" in (one, two) else "n")
    found = merged.to_arrow()[name].to_pylist()
    if kind == "number":
        assert merged.schema[name].dtype == ("int64" if "widen twice" in (one, two) else "int32")
    else:
        values = ["lion" if value == "cat" and "rename class" in (one, two) else value for value in values]
        assert set(merged.schema[name].names) >= set(values)
    assert sorted(found) == sorted(values) and not merged.verify()["problems"]


def test_a_transaction_fails_if_a_merge_brought_a_narrower_dtype(root):
    main = ps.create(root, {"n": "int16"})
    first = main.snapshot
    with main.transaction() as tx:
        tx.widen_column("n", "int64")
    exp = main.create_branch("exp")
    exp.append({"n": [1]})
    main.merge("exp")
    main.reset(first)
    late = exp.transaction("late")
    late.append({"n": [2**40]})
    # `exp` has no commits that `main` lacks, so it gets its state.
    exp.merge("main")
    assert str(exp["n"][:].dtype) == "int16"
    with pytest.raises(ps.ConflictError, match="it replaced the whole state"):
        late.commit()
    assert len(ps.open(root, branch="exp")) == 0 and not exp.verify()["problems"]

"""Compare `take`, indexing, `select`, `scan` and Arrow with plain Python, over many fragments."""

import duckdb
import numpy as np
import pandas as pd
import penstock as ps
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule


@pytest.fixture
def many(root):
    """Return a dataset of 1,000 samples in 100 commits, enough to have pages, roots and inline fragments."""
    ds = ps.create(root, {"number": "int64", "text": ps.Text(), "vector": ps.Tensor((4,), "float32")})
    for start in range(0, 1000, 10):
        numbers = np.arange(start, start + 10)
        ds.append(
            {"number": numbers, "text": [f"text {i}" for i in numbers], "vector": np.repeat(numbers[:, None], 4, 1).astype(np.float32)}
        )
    return ps.open(root)


def test_take_in_any_order_with_doubles_and_negatives(many):
    rng = np.random.default_rng(0)
    for count in (0, 1, 2, 32, 5000):
        positions = rng.integers(-1000, 1000, count)
        batch = many.take(positions)
        expected = positions % 1000
        assert np.array_equal(batch["number"], expected)
        assert batch["text"] == [f"text {i}" for i in expected]
        assert batch["vector"].shape == (count, 4) and np.array_equal(batch["vector"][:, 0], expected)


def test_every_form_of_index(many):
    assert many[5]["number"] == 5 and many[-1]["number"] == 999 and isinstance(many[5]["text"], str)
    assert many[5:8]["number"].tolist() == [5, 6, 7] and many[8:5]["number"].tolist() == []
    assert many[::-300]["number"].tolist() == [999, 699, 399, 99] and many[990:2000]["number"].tolist() == list(range(990, 1000))
    assert many[[9, 2]]["number"].tolist() == [9, 2] and many[np.array([3], np.uint8)]["number"].tolist() == [3]
    assert many[np.arange(1000) % 250 == 1]["number"].tolist() == [1, 251, 501, 751]
    assert many["number"][5] == 5 and many["text"][2:4] == ["text 2", "text 3"] and many["vector"][7, 1:3].tolist() == [7, 7]
    assert len(many["text"]) == 1000 and list(many.select([4, 2])["text"]) == ["text 4", "text 2"]
    assert [sample["number"] for sample in many.select(range(130))] == list(range(130))


def test_out_of_range_ends_iteration_and_names_the_range(many):
    for wrong in (1000, -1001, 2**40):
        with pytest.raises(ps.OutOfRangeError, match="1000 samples") as caught:
            many[wrong]
        assert caught.value.code == "position-out-of-range" and isinstance(caught.value, IndexError)
    with pytest.raises(ps.OutOfRangeError) as caught:
        many.take([1, 5000, 2])
    assert caught.value.rows == [1]
    with pytest.raises(ps.NotFoundError, match="columns: number, text, vector"):
        many.take([0], columns=["nope"])
    for wrong in ([1.5], [[1]], "abc", np.zeros(3, bool)):
        with pytest.raises((ps.InvalidInputError, ps.NotFoundError)):
            many[wrong]
    with pytest.raises(ps.InvalidInputError):
        many.take()


def test_row_ids_and_positions_are_two_address_spaces(many):
    batch = many.take([7, 3], columns=["_row_id", "_position", "number"])
    assert list(batch) == ["_row_id", "_position", "number"]
    assert batch["_position"].tolist() == [7, 3]
    assert many.take(row_ids=batch["_row_id"])["number"].tolist() == [7, 3]
    view = many.select([7, 3])
    assert view.take([0], columns=["_position"])["_position"].tolist() == [7]
    assert view.take(row_ids=batch["_row_id"][1:])["number"].tolist() == [3]
    with pytest.raises(ps.NotFoundError, match="not in this view"):
        view.take(row_ids=many.take([5], columns=["_row_id"])["_row_id"])
    with pytest.raises(ps.NotFoundError) as caught:
        many.take(row_ids=[2**41])
    assert caught.value.code == "row-id-not-found"


def test_select_nests_and_allows_doubles(many):
    view = many.select(range(100, 200)).select([5, 5, -1])
    assert len(view) == 3 and view[:]["number"].tolist() == [105, 105, 199] and view.select([])[:]["number"].tolist() == []
    with pytest.raises(ps.OutOfRangeError):
        many.select([1000])


def test_scan_gives_record_batches_of_the_size_asked(many):
    batches = list(many.scan(["number", "_row_id"], batch_size=300))
    assert [batch.num_rows for batch in batches] == [300, 300, 300, 100] and all(isinstance(batch, pa.RecordBatch) for batch in batches)
    assert pa.Table.from_batches(batches)["number"].to_pylist() == list(range(1000))
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ps.InvalidInputError):
            many.scan(batch_size=wrong)
    with pytest.raises(ps.NotFoundError):
        many.scan(["nope"])


def test_arrow_stream_feeds_duckdb_polars_and_pandas(root):
    ds = ps.create(
        root,
        {
            "i": "int16", "f": "float64", "b": "bool", "h": "bfloat16", "c": "complex64", "t": "timestamp", "s": ps.Text(), "j": ps.Json(), "y": ps.Bytes(),
            "l": ps.Label(["x", "y"]), "k": ps.Category(), "v": ps.Tensor((2, 3), "int32"), "r": ps.Tensor((None, 2), "float32"), "o": ps.Boxes(),
        },
    )  # fmt: skip
    ds.append({
        "i": [1, None, 3], "f": [0.5, 1.5, None], "b": [True, None, False], "h": [1, 2, None], "c": [1j, None, 2], "t": ["2026-01-01", None, "2026-01-03"],
        "s": ["a", None, ""], "j": [{"k": 1}, None, []], "y": [b"\0", None, b""], "l": ["x", None, "y"], "k": ["p", "q", None],
        "v": [np.zeros((2, 3)).astype(int), None, np.ones((2, 3)).astype(int)], "r": [np.ones((2, 2), "f4"), None, np.ones((0, 2), "f4")],
        "o": [None, np.ones((1, 4), "f4"), None],
    })  # fmt: skip
    table = pa.table(ds)
    table.validate(full=True)
    assert (
        table["l"].to_pylist() == ["x", None, "y"]
        and table["k"].to_pylist() == ["p", "q", None]
        and table["s"].to_pylist() == ["a", None, ""]
    )
    assert table["r"].to_pylist()[0] == {"data": [1, 1, 1, 1], "shape": [2, 2]} and table["r"].to_pylist()[1] is None
    assert isinstance(table.schema.field("v").type, pa.FixedShapeTensorType) and table["y"].to_pylist() == [b"\0", None, b""]
    assert table["t"].to_pylist()[0].year == 2026 and str(table.schema.field("t").type) == "timestamp[us, tz=UTC]"
    stream = pa.RecordBatchReader.from_stream(ds)  # noqa: F841 (DuckDB looks the variable up by name)
    assert duckdb.sql("SELECT l, sum(i), min(t) IS NOT NULL FROM stream GROUP BY l ORDER BY l NULLS FIRST").fetchall()[1:] == [
        ("x", 1, True),
        ("y", 3, True),
    ]
    assert pl.DataFrame(pa.table(ds.select([2, 0])).select(["i", "s"])).rows() == [(3, ""), (1, "a")]
    assert isinstance(table.select(["i", "s", "l"]).to_pandas(), pd.DataFrame)


class Model(RuleBasedStateMachine):
    """Compares a real dataset with a list of rows, and reopens old snapshots."""

    @initialize()
    def begin(self):
        import tempfile

        self.folder = tempfile.TemporaryDirectory()
        self.uri = self.folder.name + "/d"
        self.ds = ps.create(self.uri, {"n": "int32", "t": ps.Text(codec="lz4"), "r": ps.Tensor((None,), "uint8")})
        self.rows, self.kept = [], [(self.ds.snapshot, 0)]

    @rule(
        rows=st.lists(
            st.tuples(st.one_of(st.none(), st.integers(-9, 9)), st.one_of(st.none(), st.text(max_size=4)), st.binary(max_size=5)),
            max_size=6,
        )
    )
    def append(self, rows):
        receipt = self.ds.append({
            "n": [row[0] for row in rows], "t": [row[1] for row in rows], "r": [np.frombuffer(row[2], np.uint8) for row in rows],
        })  # fmt: skip
        assert receipt.row_ids.tolist() == list(range(len(self.rows), len(self.rows) + len(rows)))
        self.rows += rows
        self.kept.append((receipt.snapshot, len(self.rows)))

    @rule(rows=st.integers(1, 3))
    def give_up(self, rows):
        with pytest.raises(ZeroDivisionError), self.ds.transaction() as tx:
            tx.append({"n": [1] * rows})
            raise ZeroDivisionError

    @rule()
    def reopen(self):
        self.ds = ps.open(self.uri)

    @rule(choice=st.randoms(use_true_random=False))
    def look_back(self, choice):
        snapshot, count = choice.choice(self.kept)
        assert len(ps.open(self.uri, snapshot=snapshot)) == count

    @invariant()
    def reads_the_same(self):
        if not hasattr(self, "ds"):
            return
        assert len(self.ds) == len(self.rows)
        batch = self.ds.take(list(range(len(self.rows)))[::-1])
        for place, (n, t, r) in enumerate(reversed(self.rows)):
            assert ps.views.sample.unwrap(batch["n"], place) == n and batch["t"][place] == t and batch["r"][place].tobytes() == r

    def teardown(self):
        if hasattr(self, "folder"):
            assert not self.ds.verify()["problems"]
            self.folder.cleanup()


Model.TestCase.settings = settings(max_examples=25, stateful_step_count=12, deadline=None)
TestModel = Model.TestCase


@pytest.mark.parametrize(
    "shape, dtype", [((3,), "float32"), ((300,), "float32"), ((5,), "uint8"), ((7, 11), "int16"), ((1025,), "uint8"), ((24_001,), "uint8")]
)
def test_samples_of_odd_sizes_are_the_same_whenever_they_are_read(root, shape, dtype):
    """Blocks are padded, so a reader must not assume that samples are contiguous, even after verifying all blocks."""
    count = 2 + 20_000 // np.prod(shape)
    values = np.random.default_rng(0).integers(0, 100, (count, *shape)).astype(dtype)
    ds = ps.create(root, {"v": ps.Tensor(shape, dtype)})
    ds.append({"v": values})
    for _ in range(3):
        assert (ds["v"][:] == values).all()
        order = np.random.default_rng(1).permutation(count)
        assert (ds.take(order)["v"] == values[order]).all()


def test_what_is_appended_meanwhile_does_not_come_into_a_scan(root):
    ds = ps.create(root, {"x": "int64", "c": ps.Category()})
    ds.append({"x": range(4), "c": list("abab")})
    rows = []
    for batch in ds.scan(batch_size=2):
        rows += batch.column("c").to_pylist()
        ds.append({"x": [9], "c": [f"new {len(rows)}"]})
    assert rows == list("abab")
    for number, _ in enumerate(ds):
        assert number < 6
        ds.append({"x": [9], "c": [f"newer {number}"]})
    stream = pa.RecordBatchReader.from_stream(ds)
    before = len(ds)
    ds.append({"x": [9] * 5, "c": ["last"] * 5})
    assert len(stream.read_all()) == before == 12


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_batches_of_rows_of_very_different_sizes_keep_to_the_budget(root, codec):
    """Each batch takes at most an eighth of the budget, wherever the large rows are."""
    ds = ps.create(root, {"b": ps.Bytes(codec=codec), "v": ps.Tensor((None,), "uint8", codec=codec)})
    small, large = np.zeros(1, np.uint8), np.random.default_rng(0).integers(0, 255, 1 << 18, dtype=np.uint8)
    for rows in ([small] * 3000, [large] * 150, [small] * 3000):
        ds.append({"b": [row.tobytes() for row in rows], "v": rows})
    before = ps.configure()["memory_bytes"]
    try:
        ps.configure(memory_bytes=32 << 20)
        batches = [(batch.num_rows, batch.nbytes) for batch in ps.open(root).scan()]
    finally:
        ps.configure(memory_bytes=before)
    assert sum(rows for rows, _ in batches) == 6150 and len(batches) < 100
    assert max(size for _, size in batches) <= 4.5 * (1 << 20), max(batches)

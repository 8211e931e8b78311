"""Values from pandas, PyTorch, Arrow, Polars and other libraries keep their meaning when stored, or are refused with an error that names
the row.
"""

import datetime
import decimal
import json
import subprocess
import sys
import tracemalloc

import ml_dtypes
import numpy as np
import pandas as pd
import penstock as ps
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

pytestmark = pytest.mark.local


@pytest.fixture
def given(root):
    """Return a function that appends values to a new dataset, reads the column back and returns it."""
    made = []

    def append(kind, values):
        made.append(ps.create(f"{root}-{len(made)}", {"c": kind}))
        made[-1].append({"c": values})
        return made[-1]["c"][:]

    return append


@pytest.mark.parametrize("form", ["series", "index", "array"])
@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo"])
def test_times_with_a_zone_in_any_century(given, form, zone):
    times = [datetime.datetime(year, 3, 4, 5, 6, 7, 89, tzinfo=datetime.UTC) for year in (1500, 1969, 2026, 3000)]
    series = pd.Series(times).astype("datetime64[us, UTC]").dt.tz_convert(zone)
    values = {"series": series, "index": pd.DatetimeIndex(series), "array": series.array}[form]
    assert given("timestamp", values).tolist() == [time.replace(tzinfo=None) for time in times]
    with_null = pd.Series([times[0], pd.NaT]).astype(f"datetime64[us, {zone}]")
    assert np.ma.getmaskarray(given("timestamp", with_null)).tolist() == [False, True]


def tensors(shape, permutation=None, count=4, null=None):
    kind = pa.fixed_shape_tensor(pa.float32(), shape, permutation=permutation)
    size = int(np.prod(shape))
    flat = pa.array(np.arange(count * size, dtype=np.float32))
    mask = None if null is None else pa.array([row == null for row in range(count)])
    return pa.ExtensionArray.from_storage(kind, pa.FixedSizeListArray.from_arrays(flat, size, mask=mask))


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("permutation", [None, [2, 0, 1], [1, 0, 2]])
def test_tensors_of_arrow_keep_their_shape_and_order_of_axes(given, tmp_path, permutation, free, chunked):
    array = tensors([2, 3, 4], permutation)
    # Computed according to Arrow's specification. In pyarrow 26, `to_numpy_ndarray` is correct only for self-inverse permutations.
    expected = np.arange(96, dtype=np.float32).reshape(4, 2, 3, 4).transpose(0, *(axis + 1 for axis in permutation or range(3)))
    assert permutation == [2, 0, 1] or np.array_equal(expected, array.to_numpy_ndarray())
    shape = (None,) * 3 if free else expected.shape[1:]
    values = pa.chunked_array([array[:1], array[1:]]) if chunked else array
    found = given(ps.Tensor(shape, "float32"), values)
    assert np.array_equal(np.stack(list(found)), expected)
    part = given(ps.Tensor(shape, "float32"), array[1:3])
    assert np.array_equal(np.stack(list(part)), expected[1:3])
    with_null = given(ps.Tensor(shape, "float32"), tensors([2, 3, 4], permutation, null=1))
    for row, tensor in enumerate(with_null):
        if row == 1:
            assert tensor is None or np.ma.getmaskarray(tensor).all()
        else:
            assert np.array_equal(tensor, expected[row])
    pq.write_table(pa.table({"t": array}), tmp_path / "t.parquet")
    ps.importers.import_data(tmp_path / "t.parquet", tmp_path / "ds")
    assert np.array_equal(ps.open(tmp_path / "ds")["t"][:], expected)


@pytest.mark.parametrize("shape", [(3, 2), (6,), (1, 6), (2, 3, 1), (None,)])
def test_tensors_of_arrow_of_another_shape_are_refused(given, shape):
    with pytest.raises(ps.InvalidInputError, match="shape"):
        given(ps.Tensor(shape, "float32"), tensors([2, 3]))


def test_what_scan_gives_can_be_appended(root):
    """Test most column types. Images, masks, complex numbers and JSON (which `scan` returns as text) are omitted."""
    schema = {
        "b": "bfloat16", "bs": ps.Tensor((2,), "bfloat16"), "t": ps.Tensor((2, 3), "int16"), "r": ps.Tensor((None, 2), "float32"), "x": ps.Boxes(),
        "k": ps.Keypoints(points=2), "w": ps.Category(), "l": ps.Label(["a", "b"]), "s": ps.Text(), "y": ps.Bytes(), "when": "timestamp", "n": "uint64",
    }  # fmt: skip
    one = ps.create(root, schema)
    rng = np.random.default_rng(0)
    one.append(
        {
            "b": [1.5, None, -2.0], "bs": [[1, 2], None, [0.5, 3]], "t": [np.arange(6).reshape(2, 3), None, -np.arange(6).reshape(2, 3)],
            "r": [rng.random((3, 2), np.float32), None, np.zeros((0, 2), np.float32)], "x": [np.float32([[0.1, 0.2, 0.5, 0.7], [0, 0, 1, 1]]), None, np.zeros((0, 4))],
            "k": [rng.random((1, 2, 2), np.float32), None, np.zeros((0, 2, 2))], "w": ["v", None, "w"], "l": ["b", None, "a"], "s": ["é", None, ""],
            "y": [b"\xff", None, b""], "when": [7, None, -7], "n": [2**64 - 1, None, 0],
        }
    )  # fmt: skip
    table = pa.table(one)
    other = ps.create(f"{root}-other", schema)
    other.append({name: table[name] for name in schema})
    assert pa.table(other).equals(table)
    assert table["b"].to_pylist() == [1.5, None, -2.0]
    assert other["b"][:].dtype == ml_dtypes.bfloat16


def test_lists_of_torch_tensors(given):
    rows = [torch.arange(6, dtype=torch.float32).reshape(2, 3) + row for row in range(3)]
    expected = np.stack([row.numpy() for row in rows])
    for make in (lambda row: row, lambda row: row.clone().requires_grad_(), lambda row: row.to(torch.bfloat16)):
        for shape in ((2, 3), (None, 3)):
            dtype = "bfloat16" if make(rows[0]).dtype == torch.bfloat16 else "float32"
            found = given(ps.Tensor(shape, dtype), [make(rows[0]), None, make(rows[2])])
            assert np.array_equal(np.asarray(found[0], np.float32), expected[0]) and np.array_equal(
                np.asarray(found[2], np.float32), expected[2]
            )
    turned = torch.complex(torch.ones(2), torch.ones(2)).conj()
    assert given(ps.Tensor((2,), "complex64"), turned[None])[0].tolist() == [1 - 1j, 1 - 1j]
    for odd in (torch.empty(2, device="meta"), torch.eye(2).to_sparse()):
        with pytest.raises(ps.InvalidInputError, match="torch tensor"):
            given(ps.Tensor((2,), "float32"), [odd])


@pytest.mark.parametrize("text", ["", "now", "today", "NaT", "202001", "2026-1-1", "20260101", "1"])
def test_texts_that_numpy_takes_for_times_are_refused(given, text):
    with pytest.raises(ps.InvalidInputError, match="ISO 8601") as caught:
        given("timestamp", ["2026-01-31", text])
    assert caught.value.rows == [1]


def test_times_as_iso_8601(given):
    texts = [
        "2026",
        "2026-02",
        "2026-02-03",
        "2026-02-03T04",
        "2026-02-03 04:05",
        "2026-02-03T04:05:06",
        "2026-02-03T04:05:06.789012",
        "2026-02-03T04:05:06+01:00",
    ]
    found = given("timestamp", texts)
    assert found.tolist()[:3] == [datetime.datetime(2026, 1, 1), datetime.datetime(2026, 2, 1), datetime.datetime(2026, 2, 3)]
    assert found.tolist()[5:] == [
        datetime.datetime(2026, 2, 3, 4, 5, 6), datetime.datetime(2026, 2, 3, 4, 5, 6, 789012), datetime.datetime(2026, 2, 3, 3, 5, 6),
    ]  # fmt: skip
    assert given("timestamp", ["-0044-03-15"])[0] == np.datetime64("-0044-03-15", "us")


@pytest.mark.parametrize(
    "second", ["2300-01-01T00:00:00", "1600-01-01T00:00:00", "9999-12-31T23:59:59", "-0044-03-15T00:00:00", "1969-12-31T23:59:59"]
)
def test_times_with_nine_decimals_of_any_year(given, second):
    """NumPy parses such a string as nanoseconds, which wrap around outside the years 1677 to 2262."""
    found = given("timestamp", [f"{second}.{digits}" for digits in ("1", "123456", "123456000", "999999000", "000001000")])
    whole = np.datetime64(second).astype("datetime64[us]")
    assert (found - whole).astype(int).tolist() == [100_000, 123_456, 123_456, 999_999, 1]
    for digits in ("000000999", "123456001", "9999999"):
        with pytest.raises(ps.InvalidInputError, match="below a microsecond"):
            given("timestamp", [f"{second}.{digits}"])


@pytest.mark.parametrize(
    "text",
    [
        "2026-01-01T00:00:00.1234567890",
        "2026-01-01T00:00:00.",
        "2026-01-01T00:00.5",
        "+2026-01-01",
        "-290309-01-01T00:00:00.5",
    ],
)
def test_times_that_are_none_or_beyond_microseconds(given, text):
    with pytest.raises(ps.InvalidInputError) as caught:
        given("timestamp", ["2026-01-31", text])
    assert caught.value.rows == [1]


def test_a_csv_of_pandas_with_times_in_a_zone(tmp_path):
    times = pd.DatetimeIndex(np.array(["2026-01-31T12:00:00.123456", "NaT", "1999-12-31T23:59:59"], "datetime64[us]")).tz_localize(
        "Europe/Berlin"
    )
    pd.DataFrame({"n": [1, 2, 3], "t": times}).to_csv(tmp_path / "t.csv", index=False)
    ps.importers.import_data(tmp_path / "t.csv", tmp_path / "ds")
    found = ps.open(tmp_path / "ds")["t"][:]
    expected = times.tz_convert(None).to_numpy().astype("datetime64[us]")
    assert np.ma.getmaskarray(found).tolist() == [False, True, False] and (found[[0, 2]] == expected[[0, 2]]).all()
    (tmp_path / "mixed.csv").write_text("t\n2026-01-31T00:00:00Z\n2026-01-31T00:00:00\nx\n2026-01-31T00:00:00.123456000\n")
    report = ps.importers.import_data(tmp_path / "mixed.csv", tmp_path / "mixed", types={"t": "timestamp"}, on_error="skip")
    assert [refusal.path.rpartition("row ")[2] for refusal in report.refused] == ["3"]
    assert ps.open(tmp_path / "mixed")["t"][:].astype("int64").tolist() == [1769817600000000, 1769817600000000, 1769817600123456]


def test_whole_numbers_of_a_csv_stay_what_they_are(tmp_path):
    lines = ["u,t,f", f"{2**63 + 1},{2**64},0.5", f"{2**63 + 3},-1,{2**63}"]
    (tmp_path / "n.csv").write_text("\n".join(lines) + "\n")
    ps.importers.import_data(tmp_path / "n.csv", tmp_path / "ds")
    batch = ps.open(tmp_path / "ds")[:]
    assert batch["u"].tolist() == [2**63 + 1, 2**63 + 3] and batch["u"].dtype == np.uint64
    assert batch["t"] == [str(2**64), "-1"] and batch["f"].tolist() == [0.5, 2.0**63]


def test_rows_with_numbers_for_names_and_dates(tmp_path):
    ps.importers.import_data([{1: "a", "d": datetime.date(2026, 1, 31)}, {1: "b", "d": None}], tmp_path / "ds")
    ds = ps.open(tmp_path / "ds")
    assert ds["1"][:] == ["a", "b"] and ds["d"][0] == np.datetime64("2026-01-31", "us")


def test_binary_values_never_become_the_text_that_python_shows(tmp_path):
    pq.write_table(pa.table({"b": pa.array([b"ab", None])}), tmp_path / "good.parquet")
    ps.importers.import_data(tmp_path / "good.parquet", tmp_path / "good", types={"b": ps.Text()})
    assert ps.open(tmp_path / "good")["b"][:] == ["ab", None]
    pq.write_table(pa.table({"b": pa.array([b"ab", b"\xff"])}), tmp_path / "bad.parquet")
    with pytest.raises(ps.Error, match="row 1"):
        ps.importers.import_data(tmp_path / "bad.parquet", tmp_path / "bad", types={"b": ps.Text()})
    pq.write_table(pa.table({"b": pa.array([[b"ab"]]), "s": pa.array([{"k": [1, None], "t": "é"}])}), tmp_path / "nested.parquet")
    for kind in (ps.Json(), ps.Text()):
        with pytest.raises(ps.Error, match="binary"):
            ps.importers.import_data(tmp_path / "nested.parquet", tmp_path / "nested", types={"b": kind})
    pq.write_table(pa.table({"s": pa.array([{"k": [1, None], "t": "é"}])}), tmp_path / "struct.parquet")
    ps.importers.import_data(tmp_path / "struct.parquet", tmp_path / "struct", types={"s": ps.Text()})
    assert [json.loads(text) for text in ps.open(tmp_path / "struct")["s"][:]] == [{"k": [1, None], "t": "é"}]


def test_a_batch_of_samples_is_the_batch_that_a_take_gives(root):
    """`ConcatDataset` reads samples one at a time. Ragged columns remain lists, and nulls in fixed columns are refused."""
    ds = ps.create(root, {"n": "int32", "t": ps.Tensor((2,), "float32"), "x": ps.Boxes(), "r": ps.Tensor((None,), "int16"), "s": ps.Text()})
    ds.append(
        {
            "n": [1, None, 3, 4], "t": [[1, 2], [3, 4], None, [5, 6]], "x": [np.ones((1, 4)), np.zeros((1, 4)), None, np.ones((2, 4))],
            "r": [[1], [2], [3], None], "s": ["a", None, "c", "d"],
        }
    )  # fmt: skip
    for columns, rows in ((["x", "r", "s"], [0, 1]), (["x", "r", "s"], [0, 1, 2, 3]), (["n", "t"], [0, 3])):
        data = ds.torch(columns)
        whole, single = ps.torch.collate(data.__getitems__(rows)), ps.torch.collate([data[row] for row in rows])
        assert list(whole) == list(single) == columns
        for name in columns:
            assert type(whole[name]) is type(single[name]), name
            for one, other in zip(whole[name], single[name], strict=True):
                assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    for column, rows in (("n", [0, 1]), ("n", [1, 0]), ("t", [0, 2])):
        data = ds.torch([column])
        for samples in (data.__getitems__(rows), [data[row] for row in rows]):
            with pytest.raises(ps.InvalidInputError, match="null"):
                ps.torch.collate(samples)


def test_numbers_beyond_every_float_are_refused(given):
    if np.finfo(np.longdouble).max <= np.finfo(np.float64).max:
        return  # This platform has no wider floats.
    beyond = np.longdouble("1e4000")
    for dtype in ("float64", "float32", "bfloat16", "complex64"):
        for form in (np.array, list):
            with pytest.raises(ps.InvalidInputError, match=r"1e\+4000.* out of the range"):
                given(dtype, form([1.5, beyond]))
            assert given(dtype, form([1.5, np.longdouble("inf")])).tolist() == [1.5, float("inf")]


@pytest.mark.parametrize("form", ["series", "array"])
def test_pandas_numbers_with_na(given, form):
    whole = pd.Series([1, None, -(2**62) - 1, 3], dtype="Int64")
    whole = whole if form == "series" else whole.array
    assert given("int64", whole).tolist() == [1, None, -(2**62) - 1, 3]
    assert given("float32", pd.Series([1, None], dtype="UInt8")).tolist() == [1.0, None]
    assert given("bool", pd.Series([True, None, False], dtype="boolean")).tolist() == [True, None, False]
    floats = given("float64", pd.array([1.5, None, np.nan], dtype="Float64"))
    assert np.ma.getmaskarray(floats).tolist() == [False, True, True], "pandas converts NaN to NA here"
    assert given("int64", pd.Series([1, None, 3], dtype="int64[pyarrow]")).tolist() == [1, None, 3]
    assert given(ps.Json(), pd.Series([1, None], dtype="Int64")) == [1, None]
    assert given(ps.Label(["a", "b"]), pd.Series([1, None, 0], dtype="Int64")).tolist() == [1, None, 0]
    with pytest.raises(ps.InvalidInputError) as caught:
        given("int8", pd.Series([1, None, 300, 3], dtype="Int64"))
    assert caught.value.rows == [2] and "300" in str(caught.value)


@pytest.mark.parametrize("count", [4, 4000])
@pytest.mark.parametrize("dtype", ["str", "string", "string[python]", "object", "category"])
def test_pandas_text(given, dtype, count):
    texts = ["one", None, "", "zwölf"] * (count // 4)
    series = pd.Series(texts, dtype=dtype)
    assert list(given(ps.Text(), series)) == texts
    words = given(ps.Category(), series)
    assert np.ma.getmaskarray(words).tolist() == [text is None for text in texts]
    labels = ps.Label(["", "one", "zwölf"])
    assert given(labels, series[1:]).tolist() == [None if text is None else labels.names.index(text) for text in texts[1:]]
    with pytest.raises(ps.InvalidInputError):
        given(ps.Bytes(), series[:1])  # A string is accepted neither as bytes nor as a path.


def of_lists(values, large=False):
    return pa.array(values, pa.large_list(pa.int16()) if large else pa.list_(pa.int16()))


@pytest.mark.parametrize("large", [False, True])
def test_lists_of_numbers_of_arrow(given, large):
    values = [[1, 2], None, [], [-3], [4, 5, 6], None]
    array = of_lists(values, large)
    # An Arrow list array may store numbers behind a null.
    hidden = pa.ListArray.from_arrays(pa.array([0, 2, 4, 5]), pa.array([1, 2, 8, 9, 3], pa.int16()), mask=pa.array([False, True, False]))
    for given_values, wanted in [
        (array, values), (array[1:4], values[1:4]), (pa.chunked_array([array[:2], array[2:]]), values), (hidden, [[1, 2], None, [3]]),
        (of_lists([[], None]), [[], None]),
    ]:  # fmt: skip
        for dtype in ("int16", "float32", "int64"):
            got = given(ps.Tensor((None,), dtype), given_values)
            assert [None if one is None else one.tolist() for one in got] == wanted
    assert given(ps.Tensor((2,), "int64"), of_lists([[1, 2], [3, 4]], large)).tolist() == [[1, 2], [3, 4]]
    assert given(ps.Tensor((2,), "int64"), of_lists([[1, 2], None], large)).tolist() == [[1, 2], [None, None]]
    assert given(ps.Tensor((None,), "bool"), pa.array([[True], [False, True]]))[1].tolist() == [False, True]
    for bad, kind in [
        ([[1], [2, None]], ps.Tensor((None,), "int16")), ([[1], [300]], ps.Tensor((None,), "int8")),
        ([[1, 2], [2]], ps.Tensor((2,), "int16")), ([[1], [3, 2, 1]], ps.Tensor((2,), "int16")),
    ]:  # fmt: skip
        with pytest.raises(ps.InvalidInputError) as caught:
            given(kind, of_lists(bad, large))
        assert caught.value.rows == ([0] if bad[0] == [1] and kind.shape == (2,) else [1]), caught.value


def test_arrow_numbers_with_nulls(given):
    assert given("int64", pa.array([2**62 + 1, None])).tolist() == [2**62 + 1, None]
    assert given("float64", pa.array([0.1, None, 3.0])).tolist() == [0.1, None, 3.0]
    assert given("bool", pa.array([True, None])).tolist() == [True, None]
    assert given("float16", pa.array([np.float16(2), None], pa.float16())).tolist() == [2, None]
    with pytest.raises(ps.InvalidInputError) as caught:
        given("int8", pa.array([None, 1, 300]))
    assert caught.value.rows == [2]


@pytest.mark.long
def test_what_python_must_make_of_arrow_is_made_a_little_at_a_time(root):
    """The limits apply to the peak of Python's own allocations, including NumPy's."""
    columns = [
        (ps.Json(), pa.array([{"a": row, "b": str(row)} for row in range(200_000)]), 24),
        (ps.Tensor((None,), "float32"), pa.ListArray.from_arrays(pa.array(range(0, 4_000_001, 4)), pa.array(np.zeros(4_000_000, np.float32))), 32),
        (ps.Scalar("int64"), pd.array(np.arange(4_000_000), dtype="Int64"), 48),
        (ps.Text(), pd.Series([f"text {row}" for row in range(400_000)], dtype="str"), 16),
    ]  # fmt: skip
    for number, (kind, values, most) in enumerate(columns):
        ds = ps.create(f"{root}-{number}", {"c": kind})
        tracemalloc.start()
        try:
            ds.append({"c": values})
            assert tracemalloc.get_traced_memory()[1] <= most << 20, (kind, tracemalloc.get_traced_memory()[1] / (1 << 20))
        finally:
            tracemalloc.stop()


def test_keys_that_json_would_make_one_are_refused(given, tmp_path):
    assert given(ps.Json(), [{1: "a", "2": {3: "b"}}]) == [{"1": "a", "2": {"3": "b"}}]
    for value in ({1: "a", "1": "b"}, [0, ({"x": {None: 1, "null": 2}},)], {True: 0, "true": 1}):
        with pytest.raises(ps.InvalidInputError, match="row 1 is not JSON: two of its keys") as caught:
            given(ps.Json(), [{}, value])
        assert caught.value.rows == [1]
    rows = [{"1": 5}, {1: 6}, {1: 7, "1": 8}]
    report = ps.importers.import_data(rows, tmp_path / "set", on_error="skip")
    assert [refusal.path for refusal in report.refused] == ["row 2"] and "the same string" in report.refused[0].message
    assert ps.open(tmp_path / "set")["1"][:].tolist() == [5, 6]


JAX = """
import jax, numpy as np, penstock as ps, sys
jax.config.update("jax_enable_x64", sys.argv[1] == "x64")
ds = ps.create("memory://jax", {"n": "int64", "u": "uint64", "f": "float64", "t": "timestamp"})
ds.append({"n": [2**31 - 1, -2**31], "u": [0, 2**32 - 1], "f": [0.5, 1.5], "t": np.array([0, 1], "datetime64[us]")})
ds.append({"n": [2**31, 0], "u": [2**32, 0], "f": [1e300, 0], "t": np.array(["2026-01-01", "2026-01-02"], "datetime64[us]")})
for name in ds.schema:
    batches = []
    try:
        for batch in ds.loader(batch_size=2, columns=[name], output="jax"):
            batches.append(np.asarray(batch[name]).tolist())
    except ps.InvalidInputError as error:
        batches.append(f"column `{name}`" in str(error) and "JAX_ENABLE_X64" in error.hint)
    print(name, batches)
"""


@pytest.mark.parametrize("width", ["x32", "x64"])
def test_jax_never_changes_a_whole_number(width):
    done = subprocess.run([sys.executable, "-c", JAX, width], capture_output=True, text=True, check=True)
    got = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    times = [1_767_225_600_000_000, 1_767_312_000_000_000]
    narrow = width == "x32"
    assert got["n"] == str([[2**31 - 1, -(2**31)], True if narrow else [2**31, 0]])
    assert got["u"] == str([[0, 2**32 - 1], True if narrow else [2**32, 0]])
    assert got["t"] == str([[0, 1], True if narrow else times])
    assert got["f"] == str([[0.5, 1.5], True if narrow else [1e300, 0.0]])


def test_series_of_polars(given):
    words = pl.Series(["a", "b", None, "a"])
    for series in (words, words.cast(pl.Categorical), words.cast(pl.Enum(["b", "a"]))):
        assert given(ps.Category(), series).tolist() == [0, 1, None, 0] and given(ps.Text(), series) == ["a", "b", None, "a"]
        assert given(ps.Label(["b", "a"]), series[1:]).tolist() == [0, None, 1] and given(ps.Json(), series) == ["a", "b", None, "a"]
    assert given("int64", pl.Series([2**62 + 1, None])).tolist() == [2**62 + 1, None]
    assert given("timestamp", pl.Series([datetime.date(1969, 1, 2)])).tolist() == [datetime.datetime(1969, 1, 2)]
    assert [None if one is None else one.tolist() for one in given(ps.Tensor((None,), "int8"), pl.Series([[1, 2], None, []]))] == [
        [1, 2],
        None,
        [],
    ]
    assert given(ps.Tensor((2, 1), "float32"), pl.Series([[[1], [2]]], dtype=pl.Array(pl.Float32, (2, 1)))).tolist() == [[[1.0], [2.0]]]
    assert given(ps.Json(), pl.Series([{"a": 1}, {"a": None}])) == [{"a": 1}, {"a": None}]


@pytest.mark.parametrize("form", ["arrow", "pandas"])
def test_lists_within_lists_of_arrow(given, form):
    def made(values, kind):
        array = pa.array(values, kind)
        return array if form == "arrow" else pd.Series(pd.arrays.ArrowExtensionArray(array))

    four, pairs = pa.list_(pa.float32(), 4), pa.list_(pa.list_(pa.float64()))
    boxes = [[[1, 2, 3, 4]], [], None, [[5, 6, 7, 8], [9, 10, 11, 12]]]
    for kind in (pa.list_(four), pa.list_(pa.list_(pa.float32())), pa.large_list(pa.large_list(pa.int16()))):
        assert [None if one is None else one.tolist() for one in given(ps.Boxes(), made(boxes, kind))] == boxes
    got = given(ps.Tensor((None, 2), "float64"), made([[[1.0, 2.0]], None, [[3.0, 4.0], [5.0, 6.0]]], pairs))
    assert got[1] is None and got[2].tolist() == [[3.0, 4.0], [5.0, 6.0]]
    two = given(ps.Tensor((2, 2), "float32"), made([[[1, 2], [3, 4]], None], pa.list_(pa.list_(pa.float32(), 2), 2)))
    assert two.tolist() == [[[1, 2], [3, 4]], [[None, None]] * 2]
    flat = made([list(range(6)), None], pa.list_(pa.int64(), 6))
    assert given(ps.Tensor((2, 3), "int64"), flat).tolist() == [[[0, 1, 2], [3, 4, 5]], [[None] * 3] * 2]
    for values, kind, column in [
        ([[1.0], [2.0, None]], pa.list_(pa.float64()), ps.Tensor((None,), "float64")),
        ([[1.0, 2.0], [2.0, None]], pa.list_(pa.float64()), ps.Tensor((2,), "float64")),
        ([[[1, 2, 3, 4]], [[1, 2, 3]]], pa.list_(pa.list_(pa.float32())), ps.Boxes()),
        ([[[1.0, 2.0]], [None]], pairs, ps.Tensor((None, 2), "float64")),
    ]:
        with pytest.raises(ps.InvalidInputError) as caught:
            given(column, made(values, kind))
        assert caught.value.rows == [1], caught.value
    assert given(ps.Json(), made([{"a": [1, 2]}, None], pa.struct([("a", pa.list_(pa.int64()))]))) == [{"a": [1, 2]}, None]
    assert given(ps.Text(), made(["a", None], pa.string_view())) == ["a", None]


@pytest.mark.parametrize("kind", [pa.timestamp("s"), pa.timestamp("ns", "UTC"), pa.date32(), pa.date64()])
def test_times_of_arrow_with_nulls(given, kind):
    times = pa.array([datetime.datetime(1969, 12, 30, tzinfo=datetime.UTC), None], pa.timestamp("us", "UTC")).cast(kind)
    for values in (times, pd.Series(pd.arrays.ArrowExtensionArray(times)), pa.chunked_array([times[:1], times[1:]])):
        assert given("timestamp", values).tolist() == [datetime.datetime(1969, 12, 30), None]
    assert given("timestamp", times[:0]).tolist() == []
    far = pa.array([2**40, None], pa.timestamp("s"))  # Python's datetime does not support these years.
    assert given("timestamp", far)[0] == np.datetime64(2**40, "s")


def test_no_rows_of_any_kind(given):
    for values in (
        np.array([], "M8[us]"), np.array([], "M8[D]"), pd.Series([], dtype="datetime64[ns]"), pa.array([], pa.timestamp("ms")),
        pl.Series([], dtype=pl.Datetime("us")), [],
    ):  # fmt: skip
        assert len(given("timestamp", values)) == 0
    assert len(given(ps.Tensor((2,), "float32"), pa.array([], pa.list_(pa.float32())))) == 0
    assert len(given(ps.Tensor((None,), "float32"), pa.array([], pa.list_(pa.float32())))) == 0


def test_what_lies_below_a_null_is_nobodys_value(given):
    assert given("float32", np.ma.MaskedArray([1.0, 1e300], [0, 1])).tolist() == [1.0, None]
    assert given("uint8", np.ma.MaskedArray([1, 300], [0, 1])).tolist() == [1, None]
    days = np.ma.MaskedArray(np.array(["2020-01-01", "NaT"], "M8[D]"), [0, 1])
    assert given("timestamp", days).tolist() == [datetime.datetime(2020, 1, 1), None]
    pairs = np.ma.MaskedArray([[1, 2], [300, 300]], [[0, 0], [1, 1]])
    assert given(ps.Tensor((2,), "int8"), pairs).tolist() == [[1, 2], [None, None]]
    assert pairs.data.tolist() == [[1, 2], [300, 300]], "the caller's array must not change"


def test_words_of_arrow_in_chunks(given):
    nothing = pa.array([None], pa.string()).dictionary_encode()
    assert given(ps.Category(), pa.chunked_array([nothing, nothing])).tolist() == [None, None]
    with_null = pa.DictionaryArray.from_arrays([0, 1], pa.array(["a", None]))
    assert given(ps.Category(), pa.chunked_array([with_null, with_null])).tolist() == [0, None, 0, None]
    chunks = [pa.array(["b", "a"]).dictionary_encode(), pa.array(["a", "b", None]).dictionary_encode()]
    assert given(ps.Label(["a", "b"]), pa.chunked_array(chunks)).tolist() == [1, 0, 0, 1, None]


def test_rows_of_data_frames(tmp_path):
    """Data frames represent nulls as NaN or NA, even in text columns."""
    rows = [{"t": "a", "s": np.str_("x"), "n": 1}, {"t": np.nan, "s": np.str_("y"), "n": pd.NA}]
    assert ps.importers.import_data(rows, tmp_path / "set").samples == 2
    ds = ps.open(tmp_path / "set")
    assert ds.schema == {"t": ps.Text(), "s": ps.Text(), "n": ps.Scalar("int64")}
    assert ds["t"][:] == ["a", None] and ds["s"][:] == ["x", "y"] and ds["n"][:].tolist() == [1, None]


def test_hints_name_types_that_there_are(given):
    with pytest.raises(ps.InvalidInputError) as caught:
        given("int64", np.array([1], "m8[us]"))
    assert caught.value.hint == "choose a unit, as in values // numpy.timedelta64(1, 'ms'), or make the column duration"
    with pytest.raises(ps.InvalidInputError) as caught:
        given("int64", np.array([1.5]))
    assert caught.value.hint == "cast them first, or make the column float64"


@pytest.mark.long
def test_rows_of_very_different_sizes_are_appended_a_few_at_a_time(root):
    """The limit applies to Python's own allocations. If slices were sized by the mean row size, one slice would contain all large rows."""
    large, small = 200, 100_000
    body = np.zeros(1 << 18, np.uint8).tobytes()
    binary = pa.chunked_array([pa.array([body] * large, pa.large_binary()), pa.array([b""] * small, pa.large_binary())])
    ends = np.concatenate([np.arange(large + 1) * (1 << 16), np.full(small, large << 16)])
    lists = pa.LargeListArray.from_arrays(pa.array(ends), pa.array(np.zeros(large << 16, np.float32)))
    structs = pa.array([{"a": "x" * (1 << 18), "b": 1}] * large + [{"a": "", "b": 1}] * small)
    for number, (kind, values) in enumerate([(ps.Bytes(), binary), (ps.Tensor((None,), "float32"), lists), (ps.Json(), structs)]):
        ds = ps.create(f"{root}-{number}", {"c": kind})
        tracemalloc.start()
        try:
            ds.append({"c": values})
            assert tracemalloc.get_traced_memory()[1] <= 34 << 20, (kind, tracemalloc.get_traced_memory()[1] / (1 << 20))
        finally:
            tracemalloc.stop()
        assert len(ds) == large + small


@pytest.mark.parametrize("dtype", ["float64", "float32", "int64", "uint8", "bool", "timestamp"])
def test_nulls_among_the_words_of_a_dictionary_are_nulls(given, dtype):
    kind = pa.timestamp("us") if dtype == "timestamp" else pa.bool_() if dtype == "bool" else getattr(pa, dtype)()
    words = pa.array([1, None, 0], pa.int64()).cast(kind)
    coded = pa.DictionaryArray.from_arrays(pa.array([0, 1, None, 2, 1]), words)
    expected = pa.array([1, None, None, 0, None], pa.int64())
    for values, wanted in (
        (coded, expected),
        (coded[1:4], expected[1:4]),
        (pa.chunked_array([coded, coded[:1]]), pa.concat_arrays([expected, expected[:1]])),
    ):
        found = given(dtype, values)
        assert np.ma.getmaskarray(found).tolist() == wanted.is_null().to_pylist(), values
        assert np.ma.getdata(found).astype(np.int64)[~np.ma.getmaskarray(found)].tolist() == wanted.drop_null().to_pylist()


def test_times_in_several_of_a_unit(given):
    assert given("timestamp", np.array([3, -1], "i8").view("M8[7us]")).astype("int64").tolist() == [21, -7]
    for count, unit in ((2**61, "7us"), (2**62, "10ms"), (2**62, "3000ns"), (1, "1500ns")):
        value = np.array([0, count], "i8").view(f"M8[{unit}]")
        for values in (value, list(value)):
            with pytest.raises(ps.InvalidInputError, match=r"out of the range of 64-bit microseconds|does not fit timestamp"):
                given("timestamp", values)


def test_values_that_are_not_numbers_or_bytes_are_named(given):
    with pytest.raises(ps.InvalidInputError, match=r"row 0 contains '1\.5', expected int64"):
        given(ps.Tensor((None,), "int64"), [[decimal.Decimal("1.5"), decimal.Decimal("1")]])
    with pytest.raises(ps.InvalidInputError, match="void"):
        given(ps.Bytes(), np.array([(1, 2.5)], [("a", "i4"), ("b", "f8")]))
    assert given(ps.Bytes(), np.array([b"ab"], "V2")) == [b"ab"]


@pytest.mark.parametrize("dtype", ["bool", "int8", "int64", "float32", "float64", "complex64"])
def test_arrays_without_dimensions_in_lists_are_numbers(given, dtype):
    one = np.ones((), dtype)
    found = given(dtype, [one, None, one.item()])
    assert np.ma.getmaskarray(found).tolist() == [False, True, False]
    assert found.compressed().tolist() == [one.item(), one.item()]
    with pytest.raises(ps.InvalidInputError, match="row 1"):
        given(dtype, [one, np.ones((1,), dtype)])


def test_torch_numbers_in_lists_are_codes_and_times(given):
    torch = pytest.importorskip("torch")
    assert given(ps.Label(["a", "b"]), [torch.tensor(1), np.array(0), 1, None]).compressed().tolist() == [1, 0, 1]
    assert given("timestamp", [np.array("2020-01-01", "M8[s]"), None]).compressed().tolist() == [datetime.datetime(2020, 1, 1)]
    with pytest.raises(ps.InvalidInputError, match="row 1"):
        given(ps.Label(["a", "b"]), [1, np.array([1])])


@pytest.mark.parametrize("sign", [1, -1])
def test_durations_of_python_beyond_64_bits_are_refused(given, sign):
    largest = datetime.timedelta(microseconds=2**63 - 1)
    assert given("duration", [sign * largest, None])[0] == sign * np.timedelta64(2**63 - 1, "us")
    for value in (
        sign * (largest + datetime.timedelta(microseconds=1)),
        sign * datetime.timedelta(days=213_503_983),
        datetime.timedelta.max,
    ):
        for values in ([None, value], np.array([None, value], object)):
            with pytest.raises(ps.InvalidInputError, match=r"row 1 is .*out of the range of 64-bit microseconds"):
                given("duration", values)


def test_cells_of_frames_that_are_arrays_of_text_are_imported(root):
    ds = ps.create(f"{root}-source", {"tags": ps.Labels(["x", "y"])})
    ds.append({"tags": [["x"], None, [], ["y", "x"]]})
    frame = ds.to_pandas()
    for place, cells in enumerate([frame, frame.iloc[[2]], pd.DataFrame({"tags": [np.array(["x"]), None, [], ["y", "x"]]})]):
        ps.importers.import_data(cells, f"{root}-{place}")
        assert [sample["tags"] for sample in ps.open(f"{root}-{place}")] == ([[]] if place == 1 else [["x"], None, [], ["y", "x"]])


def test_lists_keep_the_sizes_before_an_empty_dimension(given):
    found = given(ps.Tensor((None, None, 2), "int64"), [[[], []], [], [[[1, 2]]]])
    assert [value.shape for value in found] == [(2, 0, 2), (0, 0, 2), (1, 1, 2)]
    with pytest.raises(ps.InvalidInputError, match="row 0 has the shape"):
        given(ps.Tensor((None, 3, 2), "int64"), [[[], []]])

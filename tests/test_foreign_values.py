"""Values as other libraries hold them: pandas, PyTorch, Arrow, Polars. They come as what they are, or are refused with their row."""

import datetime
import json

import ml_dtypes
import numpy as np
import pandas as pd
import penstock as ps
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

pytestmark = pytest.mark.local


@pytest.fixture
def given(root):
    """What a column gives back of values; each call has a dataset of its own."""
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
    # Arrow's specification; `to_numpy_ndarray` of pyarrow 26 holds to it only where the permutation is its own inverse.
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
    """All but JSON, whose text is text, and complex numbers."""
    schema = {
        "b": "bfloat16", "bs": ps.Tensor((2,), "bfloat16"), "t": ps.Tensor((2, 3), "int16"), "r": ps.Tensor((None, 2), "float32"), "x": ps.Boxes(),
        "k": ps.Keypoints(points=2), "w": ps.Category(), "l": ps.Label(["a", "b"]), "s": ps.Text(), "y": ps.Bytes(), "when": "timestamp", "n": "uint64",
    }  # fmt: skip
    one = ps.create(root, schema)
    rng = np.random.default_rng(0)
    one.append(
        {
            "b": [1.5, None, -2.0], "bs": [[1, 2], None, [0.5, 3]], "t": [np.arange(6).reshape(2, 3), None, -np.arange(6).reshape(2, 3)],
            "r": [rng.random((3, 2), np.float32), None, np.zeros((0, 2), np.float32)], "x": [rng.random((2, 4), np.float32), None, np.zeros((0, 4))],
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


def test_a_csv_of_pandas_with_times_in_a_zone(tmp_path):
    times = pd.DatetimeIndex(np.array(["2026-01-31T12:00:00.123456", "NaT", "1999-12-31T23:59:59"], "datetime64[us]")).tz_localize(
        "Europe/Berlin"
    )
    pd.DataFrame({"n": [1, 2, 3], "t": times}).to_csv(tmp_path / "t.csv", index=False)
    ps.importers.import_data(tmp_path / "t.csv", tmp_path / "ds")
    found = ps.open(tmp_path / "ds")["t"][:]
    expected = times.tz_convert(None).to_numpy().astype("datetime64[us]")
    assert np.ma.getmaskarray(found).tolist() == [False, True, False] and (found[[0, 2]] == expected[[0, 2]]).all()
    (tmp_path / "mixed.csv").write_text("t\n2026-01-31T00:00:00Z\n2026-01-31T00:00:00\nx\n2026-01-31T00:00:00.123456789\n")
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
    """`ConcatDataset` asks for samples one by one: what is ragged stays a list, nulls of fixed columns are refused."""
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
        return  # No wider floats here.
    beyond = np.longdouble("1e4000")
    for dtype in ("float64", "float32", "bfloat16", "complex64"):
        with pytest.raises(ps.InvalidInputError, match="out of the range"):
            given(dtype, np.array([1.5, beyond]))
        assert given(dtype, np.array([1.5, np.longdouble("inf")])).tolist() == [1.5, float("inf")]

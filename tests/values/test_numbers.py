"""Whole numbers are never rounded, and NaN is not a null: by append and by import, from every library and format."""

import json
import uuid

import ml_dtypes
import numpy as np
import pandas as pd
import penstock as ps
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from penstock.importers import import_data

pytestmark = pytest.mark.local
BITS = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53, "complex64": 24, "complex128": 53}
LARGEST = {"bfloat16": 2**127, "float16": 2**15, "float32": 2**127}


def new(kind):
    return ps.create(f"memory://numbers-{uuid.uuid4()}", {"x": kind})


def exact(number, dtype):
    """Return whether a dtype represents a whole number, from the definition: its digits between the first and the last 1."""
    digits = f"{abs(number):b}".strip("0")
    return len(digits) <= BITS[dtype] and abs(number) <= LARGEST.get(dtype, 2**1000)


def numbers(dtype):
    bits = BITS[dtype]
    found = {sign * (2**power + by) for power in (bits - 1, bits, bits + 1, 40, 62) for by in (-2, -1, 0, 1, 2) for sign in (-1, 1)}
    return sorted(number for number in found if -(2**63) <= number < 2**63)


WAYS = {
    "array": lambda numbers: np.array(numbers),
    "list": list,
    "beside a fraction": lambda numbers: [0.5, *numbers],
    "beside a null": lambda numbers: [None, *numbers],
    "numpy items": lambda numbers: [np.int64(number) for number in numbers],
    "long list": lambda numbers: [0.5] * 1500 + numbers,
    "pandas": lambda numbers: pd.Series(numbers),
    "pandas nullable": lambda numbers: pd.Series([None, *numbers], dtype="Int64"),
    "pandas objects": lambda numbers: pd.Series([0.5, *numbers], dtype=object),
    "arrow": lambda numbers: pa.array(numbers),
    "arrow with nulls": lambda numbers: pa.array([None, *numbers]),
    "polars": lambda numbers: pl.Series(numbers),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", BITS)
def test_whole_numbers_are_kept_exactly_or_refused(dtype, way):
    ds = new(dtype)
    for number in numbers(dtype):
        try:
            ds.append({"x": WAYS[way]([number])})
        except ps.InvalidInputError as error:
            assert not exact(number, dtype), (number, error)
            assert error.rows and ("represent exactly" in str(error) or "out of the range" in str(error))
        else:
            found = ds[len(ds) - 1]["x"]
            assert exact(number, dtype) and int(found.real) == number, (number, found)


@pytest.mark.parametrize("shape", [(2,), (None,)])
@pytest.mark.parametrize("dtype", BITS)
def test_whole_numbers_within_tensors_are_kept_exactly_or_refused(dtype, shape):
    bad = 2 ** (BITS[dtype] + 1) + 1
    ds = new(ps.Tensor(shape, dtype))
    for make in (list, np.array, lambda row: [np.int64(row[0]), row[1]], lambda row: [float(row[0]) and row[0], 0.5]):
        ds.append({"x": [make([2 ** BITS[dtype], 1])]})
        with pytest.raises(ps.InvalidInputError, match=rf"row 1 has {bad}, which {dtype} does not represent exactly"):
            ds.append({"x": [make([1, 1]), make([bad, 1])]})
    for lists in (pa.array([[1, 1], [bad, 1]]), pa.array([[1, 1], [bad, 1]], pa.list_(pa.int64(), 2))):
        with pytest.raises(ps.InvalidInputError, match=r"row 1 .*represent exactly"):
            ds.append({"x": lists})
    mixed = [np.array([0.5, 0.5], np.float64), np.array([bad, 1])]
    with pytest.raises(ps.InvalidInputError, match="represent exactly"):
        ds.append({"x": mixed})
    assert len(ds) == 4


def test_floats_are_rounded_as_their_dtype_says():
    ds = new("float32")
    ds.append({"x": [0.1, 16777217.5, float(2**24 + 1)]})
    ds.append({"x": np.array([0.1, 2.0**24 + 1])})
    assert ds["x"][:].tolist() == [*np.array([0.1, 16777217.5, 2.0**24 + 1, 0.1, 2.0**24 + 1]).astype(np.float32).tolist()]
    with pytest.raises(ps.InvalidInputError, match="represent exactly"), ds.transaction() as tx:
        tx.add_column("y", "float32", fill=2**24 + 1)


BIG = 2**53 + 1


def write(place, source, rows):
    """Write rows of one number each, in the order given."""
    if source == "csv":
        place.write_text("x,n\n" + "".join(f"{row},{number}\n" for number, row in enumerate(rows)))
    else:
        place.write_text("".join(json.dumps({"x": row, "n": number}) + "\n" for number, row in enumerate(rows)))
    return place


@pytest.mark.parametrize("source", ["csv", "jsonl"])
@pytest.mark.parametrize(
    ("dtype", "big"), [("float64", BIG), ("float64", -BIG), ("float64", 10**25), ("float32", 2**24 + 1), ("float16", 2049)]
)
def test_whole_numbers_in_text_beside_fractions_are_refused_by_their_row(tmp_path, source, dtype, big):
    place = write(tmp_path / f"a.{source}", source, [0.5, big, 2.0**60, 2**11])
    if dtype == "float16":
        write(place, source, [0.5, big, 2.0**10, 2**11])
    with pytest.raises(ps.InvalidInputError, match=rf"(row|line) 2.*{'' if dtype == 'float16' else 'represent exactly'}"):
        import_data(place, tmp_path / "none", types={"x": dtype})
    report = import_data(place, tmp_path / "set", types={"x": dtype}, on_error="skip")
    assert ps.open(tmp_path / "set")["n"][:].tolist() == [0, 2, 3] and len(report.refused) == 1
    assert str(big) in report.refused[0].message and "represent exactly" in report.refused[0].message
    assert ps.open(tmp_path / "set")["x"][:].tolist() == [0.5, 2.0**10 if dtype == "float16" else 2.0**60, 2048.0]


def test_whole_numbers_beside_fractions_are_kept_if_no_type_is_given(tmp_path):
    rows = [0.5, BIG, None, BIG + 1]
    import_data(write(tmp_path / "a.csv", "csv", ["" if row is None else row for row in rows]), tmp_path / "csv")
    import_data(write(tmp_path / "a.jsonl", "jsonl", rows), tmp_path / "jsonl")
    import_data([{"x": row} for row in rows], tmp_path / "rows")
    assert ps.open(tmp_path / "csv")["x"][:] == ["0.5", str(BIG), "", str(BIG + 1)]
    assert ps.open(tmp_path / "jsonl")["x"][:] == rows == ps.open(tmp_path / "rows")["x"][:]
    late = [0.5] * 1500 + [BIG]
    with pytest.raises(ps.InvalidInputError, match=r"line 1501.*represent exactly"):
        import_data(write(tmp_path / "late.jsonl", "jsonl", late), tmp_path / "late")
    import_data(write(tmp_path / "late.jsonl", "jsonl", [0.5] * 1500 + [2**53, 2.0**70, 10**15]), tmp_path / "fits")
    assert ps.open(tmp_path / "fits")["x"][-3:].tolist() == [2.0**53, 2.0**70, 1e15]


NAN = float("nan")
FLOATS = [1.5, NAN, None, 2.0]
KEPT = ["1.5", "nan", "None", "2.0"]
# Tables with a number, a NaN, a null and a number.
NULLABLE = {
    "list": lambda: {"x": FLOATS},
    "rows": lambda: [{"x": value} for value in FLOATS],
    "masked": lambda: {"x": np.ma.MaskedArray([1.5, NAN, 0, 2.0], [False, False, True, False])},
    "pandas objects": lambda: pd.DataFrame({"x": pd.Series(FLOATS, dtype=object)}),
    "pandas arrow": lambda: pd.DataFrame({"x": pd.Series(pd.arrays.ArrowExtensionArray(pa.array(FLOATS)))}),
    "series": lambda: {"x": pd.Series(FLOATS, dtype=object)},
    "arrow": lambda: pa.table({"x": FLOATS}),
    "batches": lambda: pa.table({"x": FLOATS}).to_reader(),
    "polars": lambda: pl.DataFrame({"x": pl.Series(FLOATS, dtype=pl.Float64)}),
}


def shown(ds):
    values = ds["x"][:]
    return [str(None if gone else float(value)) for value, gone in zip(np.ma.getdata(values), np.ma.getmaskarray(values), strict=True)]


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("form", NULLABLE)
def test_nan_and_null_are_two_things_on_both_paths(form, dtype):
    ds = new(dtype)
    ds.append(NULLABLE[form]())
    assert shown(ds) == KEPT
    place = f"memory://nan-{uuid.uuid4()}"
    import_data(NULLABLE[form](), place, types={"x": dtype})
    assert shown(ps.open(place)) == KEPT
    if dtype == "float64":
        import_data(NULLABLE[form](), f"{place}-untyped")
        assert shown(ps.open(f"{place}-untyped")) == KEPT


def test_a_bare_nan_of_pandas_stays_nan_unless_it_is_converted():
    frame = pd.DataFrame({"x": [1.5, NAN]})
    for number, (given, wanted) in enumerate([(frame, "nan"), (frame.convert_dtypes(), "None"), (frame.astype("Float64"), "None")]):
        ds = new("float64")
        ds.append(given)
        import_data(given, f"memory://bare-{number}")
        assert shown(ds) == ["1.5", wanted] == shown(ps.open(f"memory://bare-{number}"))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("way", ["pandas", "polars", "arrow", "parquet"])
def test_frames_of_ours_keep_nan_and_null(tmp_path, way, dtype):
    ds = new(dtype)
    ds.append({"x": FLOATS})
    copy = new(dtype)
    if way == "parquet":
        ds.to_parquet(tmp_path / "a.parquet")
        copy.append(pq.read_table(tmp_path / "a.parquet"))
        import_data(tmp_path / "a.parquet", tmp_path / "set")
    else:
        copy.append(getattr(ds, f"to_{way}")())
        import_data(getattr(ds, f"to_{way}")(), tmp_path / "set", types={"x": dtype})
    assert shown(copy) == KEPT == shown(ps.open(tmp_path / "set"))


def test_nan_in_columns_that_are_not_floats_is_a_null_or_refused():
    """In pandas, a NaN among words, bytes and objects is a null. Among numbers of an array, it is a number, which integers lack."""
    frame = pd.DataFrame({
        "t": pd.Series(["a", NAN], dtype=object), "b": pd.Series([b"a", NAN], dtype=object), "j": pd.Series([{"a": 1}, NAN], dtype=object),
        "n": pd.Series([1, NAN], dtype=object), "v": pd.Series([np.ones(2), NAN], dtype=object),
    })  # fmt: skip
    kinds = {"t": ps.Text(), "b": ps.Bytes(), "j": ps.Json(), "n": "int64", "v": ps.Tensor((2,), "float64")}
    ds = ps.create("memory://nan-words", kinds)
    ds.append(frame)
    import_data(frame, "memory://nan-imported")
    for found in (ds, ps.open("memory://nan-imported")):
        assert found.schema == ds.schema
        assert [found[name][1] for name in kinds] == [None] * 5 and found["j"][0] == {"a": 1}
    with pytest.raises(ps.InvalidInputError):
        new("int64").append({"x": [1.0, NAN]})


@pytest.mark.parametrize("late", [False, True])
def test_nan_in_a_csv(tmp_path, late, monkeypatch):
    """An empty field, NA and null are nulls. NaN is a number in a column of floats, and a null in all others."""
    rows = ["1.5,1,a", "NaN,2,NaN", ",NaN,b", "nan,,", "2,3,c"]
    if late:
        rows = ["0.5,0,z"] * 5 + rows
        monkeypatch.setattr("penstock.importers.csv.BLOCK_BYTES", 40)
    (tmp_path / "a.csv").write_text("x,n,c\n" + "\n".join(rows) + "\n")
    import_data(tmp_path / "a.csv", tmp_path / "set", types={"n": "int64", "c": ps.Category()})
    ds = ps.open(tmp_path / "set")
    assert shown(ds)[-5:] == ["1.5", "nan", "None", "nan", "2.0"]
    assert ds["n"][-5:].tolist() == [1, 2, None, None, 3] and ds.to_arrow()["c"].to_pylist()[-5:] == ["a", None, "b", None, "c"]


@pytest.mark.parametrize(
    ("fields", "kind"), [(["1", "NaN"], "float64"), (["NaN", "NaN"], "float64"), (["1", ""], "int64"), (["1", "NA"], "int64")]
)
def test_nan_beside_whole_numbers_in_a_csv_makes_floats(tmp_path, fields, kind):
    (tmp_path / "a.csv").write_text("x,n\n" + "".join(f"{field},1\n" for field in fields))
    import_data(tmp_path / "a.csv", tmp_path / "set")
    assert ps.open(tmp_path / "set").schema["x"] == ps.Scalar(kind)
    assert shown(ps.open(tmp_path / "set")) == [{"NaN": "nan", "": "None", "NA": "None", "1": "1.0"}[field] for field in fields]


# Cells of a frame that other types would change: keys would be padded, and times and NaN would become text and null.
CELLS = {
    "dicts": ([{"a": 1}, {"b": []}, {}], True),
    "lists of dicts": ([[{"a": 1}, {"b": 2}], [], [{}]], True),
    "nested": ([{"a": {"x": [1, {"y": None}]}}, {"a": {"z": 2}}, {"a": {}}], True),
    "mixed": ([{"a": 1}, [1, 2], "text"], True),
    "null": ([{"a": None}, None, {}], True),
    "nan within": ([{"a": 1.5}, {"a": NAN}, {}], False),
    "time within": ([{"a": pd.Timestamp(0)}, {}, {}], False),
    "bytes within": ([{"a": b"x"}, {}, {}], False),
    "duration within": ([[{"a": pd.Timedelta(1, "s")}], [], []], False),
}


@pytest.mark.parametrize("cells", CELLS)
def test_a_frame_with_objects_gives_the_same_by_every_path(cells):
    values, fits = CELLS[cells]
    column = pd.Series(values, dtype=object)
    for number, given in enumerate(
        [pd.DataFrame({"j": column}), {"j": values}, {"j": column}, [{"j": value} for value in values], [pd.DataFrame({"j": column})]]
    ):
        ds, place = ps.create(f"memory://cells-{cells}-{number}", {"j": ps.Json()}), f"memory://cells-in-{cells}-{number}"
        if fits:
            ds.append(given)
            import_data(given, place)
            assert ds["j"][:] == values == ps.open(place)["j"][:] and ps.open(place).schema == ds.schema
            continue
        for call in (lambda: ds.append(given), lambda: import_data(given, place)):  # noqa: B023
            with pytest.raises(ps.InvalidInputError, match="is not JSON") as caught:
                call()
            assert caught.value.column == "j"


def test_values_that_json_lacks_within_arrow_are_refused_before_anything_is_read(tmp_path):
    for number, inner in enumerate([pa.timestamp("us"), pa.date32(), pa.duration("s"), pa.time64("us"), pa.decimal128(5), pa.binary()]):
        table = pa.table({"j": pa.array([None, {"a": None}], pa.struct({"a": inner}))})
        with pytest.raises(ps.UnsupportedError, match="which JSON cannot represent") as caught:
            import_data(table, tmp_path / "none")
        assert ("--type" in caught.value.hint) == (inner != pa.binary())
        if inner != pa.binary():
            import_data(table, tmp_path / str(number), types={"j": ps.Text()})
            assert ps.open(tmp_path / str(number))["j"][:] == [None, '{"a": null}']
    lists = pa.table({"j": pa.array([[0], []], pa.list_(pa.timestamp("us")))})
    import_data(lists, tmp_path / "lists")
    assert ps.open(tmp_path / "lists").schema == {"j": ps.Tensor((None,), "timestamp")}


def test_bfloat16_and_nan_payloads_are_kept_by_arrays():
    ds = new("bfloat16")
    values = np.array([0x7FC1, 0xFFC0, 0x3F80], np.uint16).view(ml_dtypes.bfloat16)
    ds.append({"x": values})
    assert np.array_equal(ds["x"][:].view(np.uint16), values.view(np.uint16))


BOOLS = {
    "scalar": ("{}", [True]), "NumPy's scalar": ("{}", [np.True_]), "late": ("{}", [0, None, False]), "array": ("{}", np.array([True])),
    "masked": ("{}", np.ma.MaskedArray([True, False], [False, True])), "pandas": ("{}", pd.Series([True, None], dtype="boolean")),
    "objects": ("{}", pd.Series([1, True], dtype=object)), "Arrow": ("{}", pa.array([True, None])), "tensor": ("fixed", [[True, False]]), "beside": ("fixed", [[1, 2], [1, True]]),
    "of NumPy": ("fixed", [(1, np.False_)]), "array of tensors": ("fixed", np.array([[True, False]])), "two kinds": ("fixed", [np.array([1, 2]), np.array([True, False])]),
    "list": ("free", [[1, 2, True]]), "deep": ("two", [[[1, 2], [1, True]]]), "list of arrays": ("two", [[np.array([1]), np.array([False])]]), "lists of bools": ("free", [[False]]),
    "Arrow lists": ("free", pa.array([[True]])), "array of each": ("free", [np.array([True])]), "torch": ("free", [torch.tensor([True])]),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["int64", "uint8", "float32", "float64", "complex64", "bfloat16"])
@pytest.mark.parametrize("case", BOOLS)
def test_bools_are_refused_in_columns_of_numbers(dtype, case):
    """As numbers are in columns of bools, however they are given."""
    form, values = BOOLS[case]
    kind = {"fixed": ps.Tensor((2,), dtype), "free": ps.Tensor((None,), dtype), "two": ps.Tensor((None, None), dtype)}.get(form, dtype)
    ds = ps.create("memory://" + uuid.uuid4().hex, {"c": kind})
    with pytest.raises(ps.InvalidInputError, match=f"(?i)(is True|is False|bool).*{dtype}"):
        ds.append({"c": values})
    assert len(ds) == 0


@pytest.mark.parametrize("form", ["json", "jsonl", "csv", "rows", "frame"])
@pytest.mark.parametrize("early, late", [("1", "true"), ("1.5", "false"), ("[1, 2]", "[true, 2]"), ("[1.5, 2]", "[false, 2]")])
def test_late_bool_in_a_column_of_numbers_is_refused_by_its_row(tmp_path, form, early, late):
    texts, source = [early] * 1200 + [late] + [early], tmp_path / f"data.{form}"
    if form in ("json", "jsonl"):
        lines = [f'{{"c": {text}}}' for text in texts]
        source.write_text("[" + ",".join(lines) + "]" if form == "json" else "\n".join(lines))
    elif form == "csv":
        source.write_text("c\n" + "\n".join(f'"{text}"' for text in texts))
    else:
        source = [{"c": json.loads(text)} for text in texts]
        source = pd.DataFrame(source) if form == "frame" else source
    kind = ps.Tensor((None,), "float64" if "." in early else "int64") if "[" in early else "float64" if "." in early else "int64"
    for types in ({}, {"c": kind}):
        if form in ("csv", "frame") and (not types or (form == "csv" and "[" in early)):
            continue  # Text, and JSON: their first block has all rows.
        place = "memory://" + uuid.uuid4().hex
        with pytest.raises(
            ps.InvalidInputError, match=r"(line 120[12]|(element|row) 1200|row 1201).*(is|contains|`c`:) .*(True|False|true|false|bool)"
        ):
            ps.importers.import_data(source, place, types=types)
        report = ps.importers.import_data(source, place, types=types, on_error="skip")
        assert report.samples == 1201 and len(report.refused) == 1

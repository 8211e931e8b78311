"""Exports: Arrow readers, tables and datasets, pandas and Polars frames, torch, and Parquet files that restore their columns."""

import os
import subprocess
import sys

import duckdb
import numpy as np
import pandas as pd
import penstock as ps
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pytest
import torch
from penstock.views.sample import unwrap

IMAGE = np.arange(300, dtype=np.uint8).reshape(10, 10, 3)
ONES = np.ones((2, 3))
# The type of each column, and three values of it, one of them null.
COLUMNS = {
    "image": (ps.Image(mode="L"), [IMAGE, IMAGE, None]),
    "mask": (ps.Mask(of="image"), [IMAGE[:, :, 0], None, None]),
    "boxes": (ps.Boxes("xywh", of="image"), [[[1, 2, 3, 4]], [], None]),
    "points": (ps.Keypoints(3, 3, of="image"), [np.ones((2, 3, 3)), np.zeros((0, 3, 3)), None]),
    "label": (ps.Label(["cat", "dog"]), ["cat", None, "dog"]),
    "category": (ps.Category(), ["x", "y", None]),
    "text": (ps.Text(codec="zstd"), ["a", None, ""]),
    "json": (ps.Json(), ["text", {"a": [1, None]}, None]),
    "bytes": (ps.Bytes(), [b"\0\1", b"", None]),
    "vector": (ps.Tensor((4,), "float32"), [[1, 2, 3, 4], None, [5, 6, 7, 8]]),
    "matrix": (ps.Tensor((2, 3), "int8"), [ONES.astype("int8"), None, ONES.astype("int8")]),
    "halves": (ps.Tensor((2,), "float16"), [[1, 2], None, [3, 4]]),
    "ragged": (ps.Tensor((None, 3), "int16"), [ONES.astype("int16"), np.ones((0, 3), "int16"), None]),
    "free": (ps.Tensor((None, None), "bool"), [np.ones((2, 1), bool), np.ones((1, 3), bool), None]),
    "brain": (ps.Tensor((2,), "bfloat16"), [[1, 2], None, [3, 4]]),
    "complexes": (ps.Tensor((2,), "complex64"), [[1 + 2j, 3], None, [0, 1j]]),
    "waves": (ps.Tensor((None,), "complex64"), [[1j], [], None]),
    "complex": ("complex128", [1j, None, 2]),
    "short": ("bfloat16", [1.5, None, 2]),
    "half": ("float16", [1.5, None, float("nan")]),
    "time": ("timestamp", ["2020-01-01", None, "1960-05-05T01:02:03.456789Z"]),
    "number": ("int32", [1, None, -3]),
    "large": ("uint64", [2**64 - 1, None, 0]),
    "flag": ("bool", [True, None, False]),
}


@pytest.fixture
def ds(tmp_path):
    made = ps.create(tmp_path / "set", {name: kind for name, (kind, _) in COLUMNS.items()})
    made.append({name: values for name, (_, values) in COLUMNS.items()})
    return made


def same(one, other):
    one, other = np.asarray(one), np.asarray(other)
    return one.shape == other.shape and one.dtype == other.dtype and bool(np.array_equal(one, other, equal_nan=one.dtype.kind in "fc"))


def test_a_parquet_file_restores_columns_and_values(ds, tmp_path):
    assert ds.to_parquet(tmp_path / "all.parquet") == 3
    ps.importers.import_data(tmp_path / "all.parquet", tmp_path / "copy")
    copy = ps.open(tmp_path / "copy")
    assert copy.schema == ds.schema
    for name in ds.columns:
        for index in range(3):
            one, other = unwrap(ds[name][:], index), unwrap(copy[name][:], index)
            assert (one is None) == (other is None) and (one is None or same(one, other)), name
    assert ds[["boxes", "label"]].to_parquet(tmp_path / "some.parquet", ["boxes"]) == 3
    ps.importers.import_data(tmp_path / "some.parquet", tmp_path / "some")
    assert ps.open(tmp_path / "some").schema == {"boxes": ps.Boxes("xywh")}, "without the image column, boxes belong to none"
    assert {path.name for path in tmp_path.iterdir()} == {"set", "all.parquet", "copy", "some.parquet", "some"}


def test_a_type_in_the_metadata_counts_only_if_it_fits(tmp_path):
    table = pa.table({"a": [1, 2], "b": ["x", "y"]})
    for noted in (b"", b"{", b'{"type": "boxes"}', b'{"type": "nothing"}', b"[]", b'{"type": "label", "names": 3}'):
        fields = [field.with_metadata({b"penstock.column": noted}) for field in table.schema]
        place = tmp_path / f"{len(list(tmp_path.iterdir()))}.arrow"
        with pa.ipc.new_file(place, pa.schema(fields)) as writer:
            writer.write(table.cast(pa.schema(fields)))
        ps.importers.import_data(place, f"memory://noted-{place.stem}")
        assert ps.open(f"memory://noted-{place.stem}").schema == {"a": ps.Scalar("int64"), "b": ps.Text()}


def test_a_failed_export_leaves_nothing(ds, tmp_path, monkeypatch):
    place = tmp_path / "out.parquet"
    place.write_bytes(b"older")
    for wrong in (tmp_path / "none" / "x.parquet", tmp_path):
        with pytest.raises(ps.InvalidInputError):
            ds.to_parquet(wrong)
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "no space")))
    with pytest.raises(OSError, match="no space"):
        ds.to_parquet(place)
    assert place.read_bytes() == b"older" and sorted(path.name for path in tmp_path.iterdir()) == ["out.parquet", "set"]


def test_frames_keep_values_exactly(ds):
    frame = ds.to_pandas()
    assert list(frame) == ds.columns and len(frame) == 3 and isinstance(frame["label"].dtype, pd.CategoricalDtype)
    assert frame["number"].dtype == "Int32" and frame["large"][0] == 2**64 - 1 and frame["flag"].dtype == "boolean"
    assert frame["number"][1] is pd.NA and same(frame["ragged"][0], ds["ragged"][0]) and frame["vector"][1] is None
    assert frame["image"][0].startswith(b"\x89PNG") and frame["time"][0] == pd.Timestamp("2020-01-01", tz="UTC")
    assert ds.select([0])[["number"]].to_pandas()["number"].dtype == np.int32
    assert frame["complex"][0] == 1j and ds.select([0])[["complex"]].to_pandas()["complex"].dtype == np.complex128
    assert list(ds.to_pandas([])) == []
    with pytest.raises(ps.InvalidInputError, match="same name"):
        ds.to_pandas(["text", "text"])
    polars = ds.to_polars()
    assert (
        polars.columns == ds.columns and polars["number"].to_list() == [1, None, -3] and polars["label"].to_list() == ["cat", None, "dog"]
    )
    assert polars["matrix"][0].to_list() == [1] * 6 and polars["large"][0] == 2**64 - 1
    tensors = ds.select([0, 2]).to_torch(["vector", "ragged", "text", "image"], ragged=["image"])
    assert tensors["vector"].shape == (2, 4) and tensors["ragged"][1] is None and isinstance(tensors["ragged"][0], torch.Tensor)
    with pytest.raises(ps.InvalidInputError, match="some samples are null"):
        ds.to_torch(["number"])
    for convert in (ds.to_pandas, ds.to_polars, ds.to_arrow, ds.to_torch):
        with pytest.raises(ps.NotFoundError):
            convert(["nothing"])


def test_scan_is_a_reader_and_raises_our_errors(ds, tmp_path):
    reader = ds.scan(["number", "label", "number"], batch_size=2)
    assert isinstance(reader, pa.RecordBatchReader) and reader.schema.names == ["number", "label", "number"]
    assert [batch.num_rows for batch in reader] == [2, 1] and ds.scan().read_all().num_rows == 3
    assert duckdb.from_arrow(ds.scan(["number"])).fetchall() == [(1,), (None,), (-3,)]
    assert ds.scan([]).read_all().num_columns == 0 and sum(batch.num_rows for batch in ds.scan([], batch_size=2)) == 3
    big = ps.create(tmp_path / "big", {"v": ps.Tensor((1000,), "float32")})
    big.append({"v": np.ones((200, 1000))})
    [file] = (tmp_path / "big" / "d").iterdir()
    body = bytearray(file.read_bytes())
    body[400_000] ^= 1
    file.chmod(0o600)
    file.write_bytes(body)
    with pytest.raises(ps.CorruptError) as caught:
        list(ps.open(tmp_path / "big").scan(batch_size=10))
    assert caught.value.code == "block-checksum" and caught.value.row_ids
    with big.transaction() as tx:
        assert isinstance(tx.scan(["v"]), pa.RecordBatchReader)


@pytest.mark.parametrize("order", ["forward", "some"])
def test_images_are_read_only_where_a_condition_is_true(tmp_path, order):
    """Positions are those of the view, and conditions on columns that may be null select as Arrow does."""
    ds = ps.create(tmp_path / "set", {"image": ps.Bytes(), "n": "int32", "path": ps.Text()})
    bodies = [bytes([n]) * 50_000 for n in range(200)]
    ds.append({"image": bodies, "n": [None if n == 4 else n for n in range(200)], "path": [f"{n}.jpg" for n in range(200)]})
    places = list(range(200)) if order == "forward" else [7, 3, 190, 4, 191]

    def table():
        view = ps.open(tmp_path / "set", io="buffered")
        view = view if order == "forward" else view.select(places)
        return view, view.to_arrow_dataset()

    for condition, test in (
        (pc.field("n") < 5, lambda n: n != 4 and n < 5),
        (pc.field("n") > 189, lambda n: n > 189),
        (~(pc.field("n") > 1), lambda n: n != 4 and n <= 1),
        (pc.field("n").is_null(), lambda n: n == 4),
        (pc.field("n") > 1000, lambda n: False),
    ):
        wanted = [n for n in places if test(n)]
        for rows in (1, 7, 1000):
            view, photos = table()
            found = photos.to_table(filter=condition, batch_size=rows)
            assert found.column_names == ["image", "n", "path"]
            assert found["image"].to_pylist() == [bodies[n] for n in wanted] and found["path"].to_pylist() == [f"{n}.jpg" for n in wanted]
            assert view.stats()["range_bytes"] < 40_000 + 66_000 * len(wanted), "only these images were read"
    view, photos = table()
    lengths = photos.to_table(columns={"bytes": pc.binary_length(pc.field("image"))}, filter=pc.field("n") == 190)
    assert lengths["bytes"].to_pylist() == [50_000] and view.stats()["range_bytes"] < 120_000
    view, photos = table()
    assert duckdb.connect().sql("SELECT image FROM photos WHERE n = 190").fetchall() == [(bodies[190],)]
    assert view.stats()["range_bytes"] < 120_000
    view, photos = table()
    with_image = photos.to_table(["n"], filter=pc.binary_length(pc.field("image")) > 5)
    assert with_image["n"].to_pylist() == [None if n == 4 else n for n in places], "a condition on the large column itself"


def test_stopped_and_concurrent_scans_do_not_exhaust_the_threads_of_arrow(tmp_path):
    """A scanner within a scanner needs two of Arrow's threads, and those of a stopped scan are busy for good."""
    program = f"""
import threading, penstock as ps, pyarrow.dataset as pads
ds = ps.create({str(tmp_path / "set")!r}, {{"n": "int32", "x": ps.Bytes()}})
ds.append({{"n": range(150), "x": [b"a"] * 150}})
table, condition = ds.to_arrow_dataset(), pads.field("n") > 1
for _ in range(40):
    assert table.head(3, columns=["x"], filter=condition).num_rows == 3
    for batch in table.to_batches(columns=["n", "x"], filter=condition, batch_size=7):
        break
found = []
work = lambda: found.append(table.to_table(columns=["n", "x"], filter=condition, batch_size=50).num_rows)
threads = [threading.Thread(target=work) for _ in range(24)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
print(found == [148] * 24)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.stdout == "True\n", done.stderr


def test_queries_read_only_the_columns_that_they_need(tmp_path):
    ds = ps.create(tmp_path / "set", {"path": ps.Text(), "image": ps.Bytes(), "n": "int32", "half": ps.Tensor((3,), "float16")})
    ds.append({"path": [f"{n}.jpg" for n in range(200)], "image": [bytes(50_000)] * 200, "n": range(200), "half": np.ones((200, 3), "f2")})

    def read(query):
        view = ps.open(tmp_path / "set", io="buffered")
        found = query(view.to_arrow_dataset())
        assert view.stats()["range_bytes"] < 40_000, "no image was read"
        return found

    photos = "photos"
    connection = duckdb.connect()

    def sql(text):
        return lambda photos: connection.sql(text).fetchall()

    assert read(sql(f"SELECT max(length(path)) FROM {photos}")) == [(7,)]
    assert read(sql(f"SELECT path FROM {photos} WHERE n BETWEEN 3 AND 4 ORDER BY n")) == [("3.jpg",), ("4.jpg",)]
    assert read(lambda table: pl.scan_pyarrow_dataset(table).filter(pl.col("n") > 197).select("path").collect()["path"].to_list()) == [
        "198.jpg",
        "199.jpg",
    ]
    assert read(lambda table: table.to_table(columns={"twice": pc.field("n") * 2}, filter=pc.field("n") < 2)["twice"].to_pylist()) == [0, 2]
    assert read(lambda table: table.count_rows(pc.field("path") == "7.jpg")) == 1
    assert read(lambda table: table.filter(pc.field("n") > 190).filter(pc.field("n") < 193).to_table(["path"]).num_rows) == 2
    assert read(lambda table: table.head(3, columns=["n"])["n"].to_pylist()) == [0, 1, 2]
    assert read(lambda table: table.filter(pc.field("n") > 5).take([1], columns=["n"])["n"].to_pylist()) == [7]
    assert read(lambda table: [batch.num_rows for batch in table.to_batches(["n"], batch_size=150)]) == [150, 50]
    narrow = ds[["n", "path"]].to_arrow_dataset()
    for condition, projection, found in (
        (pc.field(0) > 197, ["path"], ["198.jpg", "199.jpg"]),
        (pc.field(0) < 2, {"path": pc.field(1)}, ["0.jpg", "1.jpg"]),
    ):
        assert narrow.to_table(columns=projection, filter=condition)["path"].to_pylist() == found, "a field by its number"
    scanner = narrow.scanner(["n"], pc.field("n") > 5)
    assert scanner.count_rows() == scanner.to_table().num_rows == scanner.to_reader().read_all().num_rows == 194
    table = ds.to_arrow_dataset()
    assert (
        isinstance(table, pads.Dataset)
        and len(table.to_table()) == 200 == table.count_rows()
        and table.take([5, 3], ["n"])["n"].to_pylist() == [5, 3]
    )
    assert table.schema.field("half").type == pa.fixed_shape_tensor(pa.float32(), [3]), "DuckDB does not read float16"
    for refused in (table.get_fragments, lambda: table.sort_by("n"), lambda: table.join(table, "n"), lambda: table.partition_expression):
        with pytest.raises(ps.UnsupportedError):
            refused()

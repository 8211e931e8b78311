"""Parquet for others: lists instead of Arrow's tensors, features of Hugging Face, several files, files in stores."""

import os
import re
import socket
import stat
import threading
import uuid

import numpy as np
import penstock as ps
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from anything import SCHEMA, values
from servers import BUCKET

KINDS = {
    "image": ps.Image(), "boxes": ps.Boxes(of="image"), "label": ps.Label(["cat", "dog"]), "classes": ps.Labels(["a", "b"]), "word": ps.Category(),
    "text": ps.Text(), "n": "int32", "flag": "bool", "time": "timestamp", "vector": ps.Tensor((2, 3), "float32"), "cloud": ps.Tensor((None, 2, None), "int16"),
    "meta": ps.Json(),
}  # fmt: skip


@pytest.fixture(scope="module")
def ds():
    ds = ps.create("memory://parquet-out", KINDS)
    rng = np.random.default_rng(0)
    for first in (0, 20):
        ds.append(
            {
                "image": [rng.integers(0, 255, (4, 5, 3), np.uint8) if n % 6 else None for n in range(20)],
                "boxes": [np.tile([0, 0, 2, 3], (n % 3 if n % 6 else 0, 1)).astype(np.float32) if n % 7 else None for n in range(20)],
                "label": ["cat" if n % 2 else "dog" for n in range(20)], "classes": [["a", "b", "a"][: n % 4] if n % 5 else None for n in range(20)],
                "word": [f"w{n % 3}" for n in range(20)], "text": [f"t{first + n}" if n % 4 else None for n in range(20)], "n": range(first, first + 20),
                "flag": [None if n % 3 == 0 else n % 2 == 0 for n in range(20)], "time": [np.datetime64(n, "s") for n in range(20)],
                "vector": [rng.random((2, 3), np.float32) if n % 8 else None for n in range(20)],
                "cloud": [rng.integers(0, 9, (n % 3, 2, n % 4), np.int16) if n % 9 else None for n in range(20)], "meta": [{"a": n} for n in range(20)],
            }
        )  # fmt: skip
    return ds


def nested(value):
    return None if value is None else value.tolist()


@pytest.mark.parametrize("of", ["all", "slice", "shuffled"])
def test_tensors_and_boxes_are_lists_that_every_reader_knows(ds, tmp_path, of):
    view = {"all": ds, "slice": ds.select(slice(3, 31)), "shuffled": ds.select(np.random.default_rng(1).permutation(len(ds)))}[of]
    assert view.to_parquet(tmp_path / "f.parquet", tensors="list") == len(view)
    schema = pq.read_schema(tmp_path / "f.parquet")
    assert schema.field("boxes").type == pa.list_(pa.list_(pa.float32())) and schema.field("vector").type == pa.list_(
        pa.list_(pa.float32())
    )
    for rows in (pq.read_table(tmp_path / "f.parquet").to_pylist(), pl.read_parquet(tmp_path / "f.parquet").to_dicts()):
        for row, sample in zip(rows, view, strict=True):
            assert [row[name] for name in ("boxes", "vector", "cloud")] == [nested(sample[name]) for name in ("boxes", "vector", "cloud")]


def test_hugging_face_opens_what_is_exported(ds, tmp_path):
    datasets = pytest.importorskip("datasets")
    ds.to_parquet(tmp_path / "files", tensors="list", file_bytes=2000)
    assert len(list((tmp_path / "files").iterdir())) > 2
    theirs = datasets.load_dataset("parquet", data_dir=str(tmp_path / "files"), split="train", cache_dir=str(tmp_path / "cache"))
    assert isinstance(theirs.features["image"], datasets.Image)
    assert len(theirs) == len(ds)
    for row, sample in zip(theirs, ds, strict=True):
        assert (row["image"] is None) == (sample["image"] is None)
        if row["image"] is not None:
            assert (np.asarray(row["image"]) == sample["image"]).all()
        assert [row[name] for name in ("n", "flag", "text")] == [sample[name] for name in ("n", "flag", "text")]
        assert row["label"] == ["cat", "dog"][sample["label"]]
        assert row["classes"] == (None if sample["classes"] is None else [["a", "b"][code] for code in sample["classes"]])
        for name in ("boxes", "vector", "cloud"):
            assert row[name] == nested(sample[name]), name


@pytest.mark.parametrize("tensors", ["arrow", "list"])
@pytest.mark.parametrize("several", [False, True])
def test_our_own_import_restores_types_and_values(tmp_path, tensors, several):
    kinds = {name: kind for name, kind in SCHEMA.items() if name not in ("page", "tiled")}
    ds, rng = ps.create("memory://parquet-" + tensors + str(several), kinds), np.random.default_rng(3)
    ds.append({name: values(rng, name, kind, 30) for name, kind in kinds.items()})
    ds.to_parquet(tmp_path / "out", tensors=tensors, file_bytes=10_000 if several else None)
    files = tmp_path / "out" if several else (tmp_path / "out").rename(tmp_path / "out.parquet")
    ps.importers.import_data(files, tmp_path / "again")
    again = ps.open(tmp_path / "again")
    assert dict(again.schema) == dict(ds.schema)
    for name in kinds:
        if name != "twice" or tensors == "arrow":  # Lists cannot keep the sizes behind an empty dimension.
            assert str(again.to_arrow([name])[name].to_pylist()) == str(ds.to_arrow([name])[name].to_pylist()), (
                name
            )  # As text, NaN is equal to NaN.


def test_files_have_about_the_wanted_size_and_all_samples_in_order(tmp_path):
    ds = ps.create("memory://parquet-sizes", {"n": "int64", "blob": ps.Bytes()})
    rng = np.random.default_rng(0)
    ds.append({"n": range(400), "blob": [rng.bytes(10_000) for _ in range(400)]})
    assert ds.to_parquet(tmp_path / "files", file_bytes=1_000_000) == 400
    files = sorted((tmp_path / "files").iterdir())
    assert [file.name for file in files] == [f"part-{number:05d}.parquet" for number in range(len(files))]
    assert all(900_000 < file.stat().st_size < 2_100_000 for file in files[:-1]) and 2 <= len(files) <= 5
    assert pq.read_table(tmp_path / "files")["n"].to_pylist() == list(range(400))


def test_empty_view_is_one_file_with_a_schema(ds, tmp_path):
    assert ds.head(0).to_parquet(tmp_path / "files", file_bytes=1000, tensors="list") == 0
    [file] = (tmp_path / "files").iterdir()
    assert pq.read_table(file).num_rows == 0 and pq.read_schema(file).names == list(KINDS)


@pytest.mark.parametrize("several", [False, True])
def test_failed_export_leaves_nothing(ds, tmp_path, monkeypatch, several):
    from penstock.frameworks import parquet

    written = []

    def fails(self, table, *more):
        written.append(table)
        if len(written) == 2:
            raise OSError("no space")
        return write(self, table, *more)

    write = pq.ParquetWriter.write_table
    monkeypatch.setattr(parquet.pq.ParquetWriter, "write_table", fails)
    monkeypatch.setattr(parquet, "ROW_GROUP_BYTES", 1000)
    with pytest.raises(OSError, match="no space"):
        ds.to_parquet(tmp_path / "out", file_bytes=1000 if several else None)
    assert list(tmp_path.iterdir()) == []


def test_existing_files_are_kept_or_replaced_as_documented(ds, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").write_text("x")
    with pytest.raises(ps.InvalidInputError, match="it has `mine`"):
        ds.to_parquet(tmp_path / "folder", file_bytes=1000)
    with pytest.raises(ps.InvalidInputError, match="it is a folder"):
        ds.to_parquet(tmp_path / "folder")
    with pytest.raises(ps.InvalidInputError, match="does not exist"):
        ds.to_parquet(tmp_path / "none" / "files", file_bytes=1000)
    for wrong in ({"tensors": "lists"}, {"file_bytes": 0}, {"file_bytes": "1GB"}):
        with pytest.raises(ps.InvalidInputError, match="expected"):
            ds.to_parquet(tmp_path / "x.parquet", **wrong)
    (tmp_path / "empty").mkdir()
    assert ds.to_parquet(tmp_path / "empty", file_bytes=10**9) == len(ds) and len(list((tmp_path / "empty").iterdir())) == 1
    assert ds.to_parquet((tmp_path / "a b.parquet").as_uri()) == len(ds) and (tmp_path / "a b.parquet").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("several", [False, True])
def test_files_are_written_to_object_stores(minio, ds, several):
    folder = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    uri = f"{folder}/files" if several else f"{folder}/one.parquet"
    options = {"endpoint_url": minio.endpoint}
    assert ds.to_parquet(uri, tensors="list", file_bytes=1000 if several else None, storage_options=options) == len(ds)
    store, key = minio.client(), uri.removeprefix(f"s3://{BUCKET}/")
    names = [entry["Key"] for entry in store.list_objects_v2(Bucket=BUCKET, Prefix=key)["Contents"]]
    assert (len(names) > 2) == several and len({name.split("-")[1] for name in names if several}) == several
    bodies = [store.get_object(Bucket=BUCKET, Key=name)["Body"].read() for name in names]
    assert [n for body in bodies for n in pq.read_table(pa.BufferReader(body))["n"].to_pylist()] == list(range(len(ds)))
    if several:
        with pytest.raises(ps.InvalidInputError, match=r"it has `part-\w{8}-00000\.parquet`"):
            ds.to_parquet(uri, file_bytes=3000, storage_options=options)


@pytest.mark.parametrize("is_root", [False, True])
def test_empty_objects_are_no_files_and_deep_ones_are(minio, ds, is_root):
    """Consoles represent a folder by an empty object."""
    bucket, options = f"b{uuid.uuid4().hex}", {"endpoint_url": minio.endpoint}
    store, prefix = minio.client(), "" if is_root else "out/"
    store.create_bucket(Bucket=bucket)
    store.put_object(Bucket=bucket, Key=f"{prefix}sub/")
    uri = f"s3://{bucket}/{prefix}".rstrip("/")
    store.put_object(Bucket=bucket, Key=f"{prefix}a/b/c", Body=b"x")
    with pytest.raises(ps.InvalidInputError, match="it has `a/b/c`"):
        ds.to_parquet(uri, file_bytes=1000, storage_options=options)
    store.delete_object(Bucket=bucket, Key=f"{prefix}a/b/c")
    assert ds.to_parquet(uri, file_bytes=1000, storage_options=options) == len(ds)


def failing(monkeypatch, number):
    """Let the write of this row group fail. Returns the list of those that were begun."""
    begun, write = [], pq.ParquetWriter.write_table

    def fails(self, table, *more):
        begun.append(table)
        if len(begun) == number:
            raise OSError("no space")
        return write(self, table, *more)

    monkeypatch.setattr(pq.ParquetWriter, "write_table", fails)
    return begun


def test_failed_export_to_a_store_deletes_its_files(minio, ds, monkeypatch):
    failing(monkeypatch, 4)
    with pytest.raises(OSError, match="no space"):
        ds.to_parquet(f"s3://{BUCKET}/failed-export", tensors="list", file_bytes=1000)
    assert minio.client().list_objects_v2(Bucket=BUCKET, Prefix="failed-export").get("Contents", []) == []


def test_a_failed_export_to_an_object_keeps_the_one_that_was_there(minio, ds, monkeypatch):
    from penstock.frameworks import parquet

    begun = failing(monkeypatch, 2)
    monkeypatch.setattr(parquet, "ROW_GROUP_BYTES", 1000)
    key = f"{uuid.uuid4().hex}/one.parquet"
    for before in (None, b"older"):
        begun.clear()
        if before is not None:
            minio.put(BUCKET, key, before)
        with pytest.raises(OSError, match="no space"):
            ds.to_parquet(f"s3://{BUCKET}/{key}", tensors="list")
        found = minio.client().list_objects_v2(Bucket=BUCKET, Prefix=key).get("Contents", [])
        assert [minio.get(BUCKET, entry["Key"]) for entry in found] == ([] if before is None else [before])


def listed(minio, folder):
    return [entry["Key"] for entry in minio.client().list_objects_v2(Bucket=BUCKET, Prefix=folder).get("Contents", [])]


@pytest.mark.parametrize("fails", [False, True])
def test_exports_at_the_same_time_into_one_folder_keep_each_others_files(minio, ds, monkeypatch, fails):
    """The first one has begun when the second one runs. It is refused, or fails on its own, and deletes only its own files."""
    folder, write = uuid.uuid4().hex, pq.ParquetWriter.write_table
    begun, others_done, errors = threading.Event(), threading.Event(), []

    def waits(self, table, *more):
        if threading.current_thread().name == "first":
            begun.set()
            others_done.wait()
            if fails:
                raise OSError("no space")
        return write(self, table, *more)

    def first():
        try:
            ds.to_parquet(f"s3://{BUCKET}/{folder}", file_bytes=1000)
        except (OSError, ps.InvalidInputError) as error:
            errors.append(error)

    monkeypatch.setattr(pq.ParquetWriter, "write_table", waits)
    thread = threading.Thread(target=first, name="first")
    thread.start()
    begun.wait()
    try:
        assert ds.to_parquet(f"s3://{BUCKET}/{folder}", tensors="list", file_bytes=10**8) == len(ds)
    finally:
        others_done.set()
        thread.join()
    [error] = errors
    assert re.search("no space" if fails else r"it has `part-\w{8}-00000\.parquet`", str(error))
    [left] = listed(minio, folder)
    assert pq.read_metadata(pa.BufferReader(minio.get(BUCKET, left))).num_rows == len(ds)


@pytest.mark.parametrize("name", ["é ü.parquet", "50%.parquet", "a%20b.parquet", "a#b?.parquet", "a+b", "k=v/größe.parquet"])
@pytest.mark.parametrize("several", [False, True])
def test_keys_of_objects_are_literal(minio, ds, name, several):
    folder = f"größe-{uuid.uuid4().hex}"
    ds.head(1).to_parquet(f"s3://{BUCKET}/{folder}/{name}", file_bytes=10**8 if several else None)
    [key] = listed(minio, folder)
    assert key.removesuffix("/" + key.rpartition("/")[2] if several else "") == f"{folder}/{name}"


@pytest.mark.parametrize("path", ["s3://bucket", "s3://bucket/", "gs://bucket", "memory://name", "s3://"])
def test_uri_without_the_name_of_a_file_is_refused(ds, tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ps.InvalidInputError, match="it has no file name") as caught:
        ds.to_parquet(path)
    assert "s3://bucket/name.parquet" in caught.value.hint and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["x//y.parquet", "./y.parquet", "../y.parquet"])
def test_uri_with_empty_parts_is_refused(minio, ds, path):
    with pytest.raises(ps.InvalidInputError, match="empty parts"):
        ds.to_parquet(f"s3://{BUCKET}/{path}")


@pytest.mark.parametrize("kind", ["fifo", "socket", "link to a fifo", "pipe"])
@pytest.mark.parametrize("several", [False, True])
def test_devices_pipes_and_sockets_are_not_replaced(ds, tmp_path, kind, several):
    path, ends = tmp_path / "place", os.pipe()
    if kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
    elif kind == "pipe":
        path = f"/dev/fd/{ends[1]}"
    else:
        os.mkfifo(tmp_path / "fifo")
        path.symlink_to("fifo") if kind != "fifo" else (tmp_path / "fifo").rename(path)
    before, names = os.stat(path), sorted(os.listdir(tmp_path))
    with pytest.raises(ps.InvalidInputError, match="it is not a folder" if several else "it is a device, pipe or socket"):
        ds.to_parquet(path, file_bytes=1000 if several else None)
    assert (os.stat(path).st_ino, os.stat(path).st_mode) == (before.st_ino, before.st_mode) and sorted(os.listdir(tmp_path)) == names
    os.close(ends[0])
    os.close(ends[1])


def test_existing_empty_folder_is_filled_and_keeps_its_mode(ds, tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(0o2750)
    before = folder.stat()
    monkeypatch.chdir(folder)
    failing(monkeypatch, 3)
    with pytest.raises(OSError, match="no space"):
        ds.to_parquet(".", tensors="list", file_bytes=1000)
    assert list(folder.iterdir()) == []
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    assert ds.to_parquet(".", tensors="list", file_bytes=1000) == len(ds) == pq.read_table(folder).num_rows
    assert (folder.stat().st_ino, folder.stat().st_mode) == (before.st_ino, before.st_mode)
    assert sorted(os.listdir()) == [f"part-{number:05d}.parquet" for number in range(len(os.listdir()))] and len(os.listdir()) > 2


def test_folder_that_gets_other_files_meanwhile_is_refused(ds, tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    folder.mkdir()
    write = pq.ParquetWriter.write_table

    def other(self, table, *more):
        monkeypatch.setattr(pq.ParquetWriter, "write_table", write)
        with pytest.raises(ps.InvalidInputError, match="it has `\\."):
            ds.to_parquet(folder, file_bytes=10**8)
        (folder / "part-00000.parquet").write_text("mine")
        return write(self, table, *more)

    monkeypatch.setattr(pq.ParquetWriter, "write_table", other)
    with pytest.raises(ps.InvalidInputError, match=r"it has `part-00000\.parquet`"):
        ds.to_parquet(folder, file_bytes=10**8)
    assert [file.read_text() for file in folder.iterdir()] == ["mine"]


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o664])
def test_replaced_file_keeps_its_mode(ds, tmp_path, mode):
    path = tmp_path / "secret.parquet"
    path.write_text("x")
    path.chmod(mode)
    assert ds.to_parquet(path) == len(ds) == pq.read_table(path).num_rows
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_nothing_is_written_after_an_error(minio, ds, monkeypatch):
    from penstock.frameworks import parquet

    begun, write = failing(monkeypatch, 4), parquet._Stored.write

    def lost(self, data):
        if len(begun) == 4:
            raise ValueError("lost")
        return write(self, data)

    monkeypatch.setattr(parquet._Stored, "write", lost)
    with pytest.raises(OSError, match="no space"):
        ds.to_parquet(f"s3://{BUCKET}/{uuid.uuid4().hex}", tensors="list", file_bytes=1000)


@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt, None])
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("large", [False, True])
def test_first_error_is_raised_if_the_store_is_lost(ds, tmp_path, monkeypatch, kind, several, large):
    import servers
    from penstock.frameworks import parquet

    own, begun, write = servers.Minio(tmp_path), [], pq.ParquetWriter.write_table
    error = None if kind is None else kind("no space")

    def fails(self, table, *more):
        begun.append(table)
        if len(begun) == 3:
            own.process.kill()
            own.process.wait()
            if error is not None:
                raise error
        return write(self, table, *more)

    if large:  # Parts of an object are on their way.
        ds = ps.create("memory://" + uuid.uuid4().hex, {"blob": ps.Bytes()})
        ds.append({"blob": [os.urandom(12 << 20) for _ in range(3)]})
    monkeypatch.setattr(pq.ParquetWriter, "write_table", fails)
    monkeypatch.setattr(parquet, "ROW_GROUP_BYTES", 1000)
    options = {"endpoint_url": own.endpoint, "access_key_id": own.environment["AWS_ACCESS_KEY_ID"], "timeout_seconds": 1}
    options |= {"secret_access_key": own.environment["AWS_SECRET_ACCESS_KEY"], "region": "us-east-1"}
    try:
        with pytest.raises(kind or ps.UnavailableError) as caught:
            ds.to_parquet(f"s3://{BUCKET}/lost", tensors="list", file_bytes=1000 if several else None, storage_options=options)
    finally:
        if own.process.poll() is None:
            own.stop()
    notes = getattr(caught.value, "__notes__", [])
    assert "cannot write" in str(caught.value) if error is None else caught.value is error
    assert len(notes) == several and all(re.search(r"lost` may still have `part-\w{8}-00000\.parquet`, `part-", note) for note in notes)


@pytest.mark.parametrize("columns, why", [(["n", "text", "n"], "`n` twice"), ([], "no columns")])
def test_columns_that_no_reader_could_find_are_refused(ds, tmp_path, columns, why):
    with pytest.raises(ps.InvalidInputError, match=f"cannot write Parquet with {why}"):
        ds.to_parquet(tmp_path / "x.parquet", columns)
    assert list(tmp_path.iterdir()) == []

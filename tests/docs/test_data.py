"""Tests on real data and real hostile files. They run only if PENSTOCK_TEST_DATA points to these files."""

import csv
import hashlib
import pathlib
import shutil
import tarfile

import numpy as np
import penstock as ps
import pyarrow.parquet as pq
import pytest
from anything import ROTATION
from penstock.importers import import_data

pytestmark = pytest.mark.data


def files_of(folder):
    return [
        path for path in folder.rglob("*") if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]


def test_all_corrupt_images_through_import(data, root, tmp_path):
    folder = tmp_path / "corrupt"
    shutil.copytree(data / "corrupt-images", folder)
    for archive in list(folder.rglob("*.tar.gz")):
        with tarfile.open(archive) as tar:
            tar.extractall(archive.with_suffix(".d"), filter="data")
    offered = files_of(folder)
    report = import_data(folder, root, validate="decode", on_error="skip", ignore=["lists", "json"])
    assert report.samples + len(report.refused) + len(report.left_out) == len(offered)
    ds = ps.open(root)
    decoded = sum(1 for image in ds["image"] if image.ndim == 3 and image.size)
    assert decoded == report.samples > 50, "every stored sample must decode"
    assert not ds.verify()["problems"]
    print(f"{len(offered)} files, {report.samples} samples, {len(report.refused)} refused")


def test_all_bad_parquet_through_import(data, tmp_path):
    bad = (
        files_of(data / "parquet-testing" / "parquet-testing" / "bad_data")
        if (data / "parquet-testing" / "parquet-testing").exists()
        else []
    )
    bad = bad or [path for path in (data / "parquet-testing").rglob("bad_data/*") if path.is_file()]
    files = [path for path in bad if path.suffix == ".parquet"]
    assert len(files) > 5
    outcomes = {"refused": 0, "read": 0}
    for number, path in enumerate(files):
        root = tmp_path / str(number)
        try:
            report = import_data(path, root, on_error="skip")
        except ps.Error:
            outcomes["refused"] += 1
            assert not root.exists()
        else:
            outcomes["read"] += 1
            assert len(ps.open(root)) == report.samples
    assert outcomes["refused"] > 0
    print(outcomes)


def test_good_parquet_files(data, tmp_path):
    files = sorted(path for path in (data / "parquet-testing").rglob("data/*.parquet"))
    assert len(files) > 30
    files = files[ROTATION % 6 :: 6]  # Each run imports a sixth of the files.
    read = 0
    for number, path in enumerate(files):
        try:
            report = import_data(path, tmp_path / str(number))
        except ps.Error as error:
            assert error.code in ("object-malformed", "unsupported-format", "invalid-schema", "invalid-value", "source-not-found"), path
            continue
        # The metadata of one old file claims 0 rows, but the file has 6.
        claimed = pq.ParquetFile(path).metadata.num_rows
        assert report.samples == claimed or (claimed == 0 and path.name == "repeated_no_annotation.parquet" and report.samples == 6)
        read += 1
    assert read > 0.7 * len(files)


def test_flowers_bit_for_bit(data, root):
    with pytest.raises(ps.UnsupportedError, match=r"\(table\), such as `index.csv`"):
        import_data(data / "photos-flowers", root)
    report = import_data(data / "photos-flowers", root, validate="decode", on_error="skip", ignore=["table"])
    ds = ps.open(root)
    assert report.samples == 300
    for position in np.random.default_rng(0).permutation(len(ds))[:100]:
        sample = ds.take([position], columns=["image", "path"], decode=False)
        original = (data / "photos-flowers" / sample["path"][0]).read_bytes()
        assert hashlib.sha256(sample["image"][0]).digest() == hashlib.sha256(original).digest()


def test_photographs_in_all_formats_and_orientations(data, root):
    report = import_data(data / "photos-formats", root, validate="decode", on_error="skip")
    ds = ps.open(root)
    assert report.samples + len(report.refused) + len(report.left_out) == len(files_of(data / "photos-formats")) and report.samples > 15
    assert {pathlib.Path(name).suffix for name in report.left_out} <= {"", ".txt", ".md", ".json"} | {".html"}, report.left_out
    paths = ds["path"][:]
    turned = [index for index, path in enumerate(paths) if "orientation" in path.lower() or "exif" in path.lower()]
    shapes = {ds["image"][index].shape for index in turned}
    assert all(len(shape) == 3 for shape in shapes)
    refused = {pathlib.Path(refusal.path).suffix.lower() for refusal in report.refused}
    assert refused <= {
        ".webp",
        ".tif",
        ".tiff",
        ".jp2",
        ".bmp",
        ".ppm",
        ".pgm",
        ".pnm",
        ".pbm",
        ".txt",
        ".md",
        ".jpg",
        ".jpeg",
        ".json",
        ".pam",
        "",
    }


def test_tweets_as_csv_and_italian_text(data, root):
    path = next((data / "tweets").glob("umsab*.csv"))
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    report = import_data(path, root)
    ds = ps.open(root)
    assert report.samples == len(rows) - 1
    name = next(name for name, kind in ds.schema.items() if isinstance(kind, ps.Text))
    column = rows[0].index(name)
    positions = np.random.default_rng(0).integers(0, len(ds), 500)
    found = ds.take(positions, columns=[name])[name]
    assert all((value or "") == rows[1 + position][column] for value, position in zip(found, positions, strict=True))
    lines = (data / "text-italian" / "italian_sentences.txt").read_text(encoding="utf-8").splitlines()
    text = ps.create(root.with_name("italian"), {"t": ps.Text(codec="zstd")})
    text.append({"t": lines})
    assert text["t"][:] == lines


def test_arrays_of_different_shape(data, root):
    arrays = []
    for path in sorted((data / "npy").rglob("*.npy")):
        array = np.load(path)
        if array.ndim == 1 and array.dtype.kind in "fiu":
            arrays.append(array.astype(np.float32))
    assert len(arrays) > 3
    ds = ps.create(root, {"a": ps.Tensor((None,), "float32", codec="lz4")})
    ds.append({"a": arrays})
    assert all(np.array_equal(found, array, equal_nan=True) for found, array in zip(ds["a"], arrays, strict=True))


def test_annotations_of_real_datasets_are_named_and_counted(data, tmp_path):
    with pytest.raises(ps.UnsupportedError, match=r"159 files of Pascal VOC \(voc\).*2 files of lists of images \(lists\)"):
        import_data(data / "detect-bccd", tmp_path / "voc")
    report = import_data(data / "detect-bccd", tmp_path / "voc", ignore=["voc", "lists"])
    assert report.left_out_kinds["voc"] == 159 and report.samples > 100
    with pytest.raises(ps.UnsupportedError, match=r"50 polygons, or runs of pixels \(polygons\)"):
        import_data(data / "detect-pixabay", tmp_path / "coco")
    assert import_data(data / "detect-pixabay", tmp_path / "coco", masks="instance").left_out_kinds.get("polygons") is None

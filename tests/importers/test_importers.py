"""Importers: every format, inferred and given types, refusal reports, and no partial datasets."""

import datetime
import gzip
import io
import json

import numpy as np
import penstock as ps
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from penstock.importers import import_data
from PIL import Image as Pillow
from servers import left_empty


def picture(seed, size=(8, 6), format="PNG"):
    out = io.BytesIO()
    Pillow.fromarray(np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)).save(out, format)
    return out.getvalue()


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "images"
    for name, format in (("cats/1.png", "PNG"), ("cats/2.jpg", "JPEG"), ("dogs/ünï.png", "PNG"), ("dogs/wrong_ending.txt", "JPEG")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(picture(len(name), format=format))
    return folder


def test_a_folder_of_images_with_classes(images, root):
    report = import_data(images, root)
    ds = ps.open(root)
    assert report.samples == len(ds) == 4 and report.refused == [] and report.snapshot == ds.snapshot
    assert ds.schema["label"].names == ("cats", "dogs") and ds["label"][:].tolist() == [0, 0, 1, 1]
    assert ds["path"][:] == ["cats/1.png", "cats/2.jpg", "dogs/wrong_ending.txt", "dogs/ünï.png"]
    assert ds.take(range(4), decode=False)["image"] == [(images / path).read_bytes() for path in ds["path"][:]]
    assert [commit.samples_added for commit in ds.log()] == [4, 0], "the import must be one commit"
    import_data(images, root, mode="append")
    assert len(ps.open(root)) == 8, "an import into a dataset with these columns appends"


def test_refusals_are_skipped_nulled_or_raised(images, root):
    (images / "cats" / "bad.jpg").write_bytes(b"not an image")
    (images / "cats" / "empty.png").write_bytes(b"")
    (images / "dogs" / "cut.jpg").write_bytes(picture(1, (200, 200), "JPEG")[:3000])
    import os

    with open(os.fsencode(images / "dogs") + b"/\xff.png", "wb") as file:
        file.write(picture(3))
    with pytest.raises(ps.Error) as caught:
        import_data(images, root, validate="decode")
    assert "bad.jpg" in str(caught.value) or "xff" in str(caught.value) or "udcff" in str(caught.value)
    assert left_empty(root)
    report = import_data(images, root, validate="decode", on_error="skip")
    assert report.samples == 4 and sorted(refusal.code for refusal in report.refused) == ["invalid-value"] + ["media-undecodable"] * 3
    assert report.samples + len(report.refused) == 8
    report = import_data(images, root.with_name("nulls"), validate="decode", on_error="null")
    ds = ps.open(root.with_name("nulls"))
    assert report.samples == len(ds) == 7 and sum(value is None for value in ds["image"]) == 3
    report = import_data(images, root.with_name("header"), validate="header", on_error="skip")
    assert report.samples == 5, "a truncated file with a complete header is accepted"


CSV = 'name,age,score,ok,when,note\nada,36,1.5,true,2026-01-02 03:04:05,"a ""quoted"", note"\nalan,,2,false,2026-01-03,\n"two\nlines",7,,true,,x\n'


def test_csv_types_are_inferred(tmp_path, root):
    (tmp_path / "a.csv").write_text(CSV)
    assert import_data(tmp_path / "a.csv", root).samples == 3
    ds = ps.open(root)
    kinds = {name: getattr(kind, "dtype", kind.type) for name, kind in ds.schema.items()}
    assert kinds == {"name": "text", "age": "int64", "score": "float64", "ok": "bool", "when": "timestamp", "note": "text"}
    assert ds[0]["note"] == 'a "quoted", note' and ds[1]["age"] is None and ds[2]["name"] == "two\nlines" and ds[2]["score"] is None
    assert ds[0]["when"] == np.datetime64("2026-01-02T03:04:05") and ds[2]["when"] is None


def test_csv_options(tmp_path, root):
    path = tmp_path / "b.tsv.gz"
    with gzip.open(path, "wb") as file:
        file.write("Zoë\t1\nRené\t2\n".encode("latin-1"))
    report = import_data(path, root, types={"f0": ps.Category(), "f1": "int8"}, encoding="latin-1", header=False)
    ds = ps.open(root)
    assert report.samples == 2 and ds.vocabulary("f0") == ["Zoë", "René"] and ds.schema["f1"] == ps.Scalar("int8")
    (tmp_path / "c.csv").write_bytes("x;y\ncaf\u00e9;1\n".encode("utf-16"))
    import_data(tmp_path / "c.csv", root.with_name("c"), encoding="utf-16", delimiter=";")
    assert ps.open(root.with_name("c"))[0]["x"] == "café"
    (tmp_path / "d.csv").write_text("l,t\ncat,'a,b'\ndog,c\n")
    import_data(tmp_path / "d.csv", root.with_name("d"), quote="'", types={"l": ps.Label(["cat", "dog"])})
    assert ps.open(root.with_name("d"))[:]["t"] == ["a,b", "c"]


def test_csv_that_is_none(tmp_path, root):
    def offer(body, **options):
        (tmp_path / "x.csv").write_bytes(body)
        return import_data(tmp_path / "x.csv", root, **options)

    for body, text in (
        (b"", "0 bytes"),
        (b"a,a\n1,2\n", "same name"),
        ("ü".encode("latin-1") + b"\n1\n", "encoding"),
        (b"a\n\xff\xfe\n", "encoding"),
    ):
        with pytest.raises(ps.InvalidInputError) as caught:
            offer(body)
        assert text in str(caught.value) or text in str(caught.value.hint)
        assert left_empty(root)
    with pytest.raises(ps.InvalidInputError, match="is not valid utf-16"):
        offer(b"a\nb", encoding="utf-16")
    with pytest.raises(ps.InvalidInputError, match="unknown encoding"):
        offer(b"a\n1\n", encoding="klingon")
    with pytest.raises(ps.InvalidInputError, match=r"2 fields|Expected"):
        offer(b"a\n1\n2,3\n")
    report = offer(b"a\n1\n2,3\n4\n", on_error="skip")
    assert report.samples == 2 and len(report.refused) == 1 and "2 fields" in report.refused[0].message


def test_jsonl(tmp_path, root):
    lines = [{"i": 1, "f": 1, "s": "a", "n": {"deep": [1]}, "b": True}, {"i": 2, "f": 2.5, "s": None, "n": {}, "b": None}]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    import_data(path, root)
    ds = ps.open(root)
    assert (
        [ds[0]["n"], ds[1]["s"], ds[1]["b"]] == [{"deep": [1]}, None, None]
        and ds.schema["f"] == ps.Scalar("float64")
        and ds.schema["i"] == ps.Scalar("int64")
    )
    path.write_bytes(b'{"i": 1}\n\nnot json\n[1]\n{"i": "x"}\n{"i": 5}\n\xff\n')
    with pytest.raises(ps.Error):
        import_data(path, root.with_name("b"), types={"i": "int64"})
    report = import_data(path, root.with_name("b"), types={"i": "int64"}, on_error="skip")
    assert report.samples == 2 and len(report.refused) == 4 and "line 3" in " ".join(refusal.path for refusal in report.refused)
    report = import_data(path, root.with_name("c"), types={"i": "int64"}, on_error="null")
    assert report.samples == 3 and ps.open(root.with_name("c"))["i"][1] is None


def arrow_table():
    return pa.table({
        "i8": pa.array([1, None, 3], pa.int8()), "u64": pa.array([1, 2, 2**63], pa.uint64()), "f16": pa.array(np.array([1, 2, 3], "f2")), "b": pa.array([True, None, False]),
        "s": ["x", None, "z"], "y": pa.array([b"1", None, b""]), "d": pa.array(["p", "q", "p"]).dictionary_encode(), "t": pa.array([0, None, 10**15], pa.timestamp("ns")),
        "day": pa.array([datetime.date(2026, 1, 1), None, None]), "l": pa.array([[1, 2], None, []], pa.list_(pa.float32())), "v": pa.array([[1, 2]] * 3, pa.list_(pa.int16(), 2)),
        "st": pa.array([{"a": 1}, None, {"a": None}]), "dec": pa.array([1, None, 2], pa.decimal128(5, 2)), "nothing": pa.nulls(3), "ls": pa.array([["a"], None, []]),
    })  # fmt: skip


@pytest.mark.parametrize("format", ["parquet", "arrow", "feather", "stream"])
def test_parquet_and_arrow(tmp_path, root, format):
    table = arrow_table()
    path = tmp_path / f"a.{'arrow' if format == 'stream' else format}"
    if format == "parquet":
        pq.write_table(table, path, row_group_size=2)
    else:
        with (pa.ipc.new_stream if format == "stream" else pa.ipc.new_file)(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    assert import_data(path, root).samples == 3
    ds = ps.open(root)
    assert (
        ds["i8"][:].tolist() == [1, None, 3]
        and ds["u64"][2] == 2**63
        and ds["b"][1] is None
        and ds["s"][:] == ["x", None, "z"]
        and ds["y"][:] == [b"1", None, b""]
    )
    assert (
        ds.vocabulary("d") == ["p", "q"]
        and ds["t"][2] == np.datetime64(10**12, "us")
        and ds["day"][0] == np.datetime64("2026-01-01")
        and ds["day"][1] is None
    )
    assert ds["l"][0].tolist() == [1, 2] and ds["l"][1] is None and ds["l"][2].shape == (0,) and ds["v"][:].tolist() == [[1, 2]] * 3
    assert (
        ds["st"][:] == [{"a": 1}, None, {"a": None}]
        and ds["dec"][:] == ["1.00", None, "2.00"]
        and ds["nothing"][:] == [None] * 3
        and ds["ls"][0] == ["a"]
    )


def test_a_folder_of_parquet_files(tmp_path, root):
    (tmp_path / "parts").mkdir()
    for number in range(3):
        pq.write_table(pa.table({"n": [number] * 5}), tmp_path / "parts" / f"{number}.parquet")
    assert import_data(tmp_path / "parts", root, format="parquet").samples == 15
    assert ps.open(root)["n"][:].tolist() == [0] * 5 + [1] * 5 + [2] * 5
    pq.write_table(pa.table({"m": [1]}), tmp_path / "parts" / "3.parquet")
    with pytest.raises(ps.InvalidInputError, match="columns"):
        import_data(tmp_path / "parts", root.with_name("b"), format="parquet")


def test_damaged_parquet(tmp_path, root):
    pq.write_table(arrow_table(), tmp_path / "a.parquet")
    body = (tmp_path / "a.parquet").read_bytes()
    for damaged in (b"", b"PAR1", body[:50], body[:-10], b"nonsense" * 10, body[:4] + bytes(len(body) - 12) + body[-8:]):
        (tmp_path / "b.parquet").write_bytes(damaged)
        with pytest.raises(ps.Error):
            import_data(tmp_path / "b.parquet", root)
        assert left_empty(root)


def test_any_iterable(root, tmp_path):
    (tmp_path / "x.png").write_bytes(picture(0))
    rows = (
        {
            "n": number,
            "v": np.full(3, number, "f4"),
            "r": np.zeros((number % 3, 2)),
            "image": tmp_path / "x.png",
            "when": datetime.datetime(2026, 1, 1),
        }
        for number in range(3000)
    )
    report = import_data(rows, root)
    ds = ps.open(root)
    assert report.samples == len(ds) == 3000 and ds["n"][:].tolist() == list(range(3000))
    assert (
        ds.schema["v"] == ps.Tensor((3,), "float32")
        and ds.schema["r"] == ps.Tensor((None, 2), "float64")
        and ds.schema["image"] == ps.Image()
    )
    report = import_data([{"a": 1}, 5, {"a": 2, "b": 3}, {}], root.with_name("odd"), on_error="skip", types={"a": "int32"})
    assert report.samples == 3 and len(report.refused) == 1
    for wrong in ([], [1, 2], 5):
        with pytest.raises(ps.InvalidInputError):
            import_data(wrong, root.with_name("none"))


def test_sources_that_cannot_be_imported_are_refused(tmp_path, root):
    with pytest.raises(ps.NotFoundError, match="no such file"):
        import_data(tmp_path / "gone.csv", root)
    (tmp_path / "a.xyz").write_text("x")
    with pytest.raises(ps.InvalidInputError, match="unknown file extension"):
        import_data(tmp_path / "a.xyz", root)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ps.InvalidInputError, match="no files"):
        import_data(tmp_path / "empty", root)
    (tmp_path / "a.csv").write_text("x\n1\n")
    for wrong in (
        {"format": "xml"},
        {"on_error": "shrug"},
        {"validate": "maybe"},
        {"types": {"x": "int33"}},
        {"types": {"x": ps.Boxes()}},
        {"delimiter": "ab"},
    ):
        with pytest.raises(ps.InvalidInputError):
            import_data(tmp_path / "a.csv", root, **wrong)
    ps.create(root, {"y": "int32"})
    with pytest.raises(ps.InvalidInputError, match="no column `x`"):
        import_data(tmp_path / "a.csv", root)


@pytest.mark.local
def test_vectors_of_a_batch_that_is_cut_are_its_own(tmp_path):
    """A batch larger than a chunk is split into parts, each of which must contain its own vectors."""
    vectors = np.arange(300_000 * 8, dtype=np.float64).reshape(-1, 8)
    table = pa.table({"v": pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), 8)})
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as out:
        out.write_table(table)
    pq.write_table(table, tmp_path / "a.parquet")
    for kind in ("arrow", "parquet"):
        import_data(tmp_path / f"a.{kind}", tmp_path / kind)
        assert (ps.open(tmp_path / kind)["v"][:] == vectors).all()

"""Imports of invalid values: each refusal reports its row and reason, and other writers' commits are kept."""

import json
import os
import subprocess
import sys

import measured
import numpy as np
import penstock as ps
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from penstock.importers import import_data
from PIL import Image as Pillow


def test_a_failed_import_keeps_what_others_committed(root):
    def rows():
        for number in range(3000):
            yield {"a": number}
        ps.open(root).append({"a": [7]})
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError):
        import_data(rows(), root)
    assert ps.open(root)["a"][:].tolist() == [7] and not list(root.parent.glob(".*failed*"))


def test_coarse_timestamps_in_parquet_are_refused(root, tmp_path):
    pq.write_table(pa.table({"t": pa.array([2**60], pa.timestamp("ms"))}), tmp_path / "t.parquet")
    with pytest.raises(ps.Error):
        import_data(tmp_path / "t.parquet", root)


def test_one_bad_row_does_not_end_an_import(root, tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [{"a": number} for number in range(3000)]
    lines[1500], lines[1600], lines[1700] = {"a": 1.5}, {"a": 2**70}, {"a": [1]}
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    report = import_data(path, root, on_error="skip")
    assert report.samples == 2997 and [refusal.path.rsplit(" ", 1)[1] for refusal in report.refused] == ["1501", "1601", "1701"]
    assert all("row" not in refusal.message for refusal in report.refused), "the refusal's path already names the row"
    csv = tmp_path / "b.csv"
    csv.write_text("a,b\n" + "\n".join(f"{number},x{'y' * 60}" for number in range(100_000)) + "\nzz,x\n5,\n")
    report = import_data(csv, root.with_name("b"), on_error="skip")
    assert report.samples == 100_001 and "zz" in report.refused[0].message and report.refused[0].path.endswith("row 100001")
    with pytest.raises(ps.InvalidInputError, match="row 100001"):
        import_data(csv, root.with_name("c"))
    images = [Pillow.effect_noise((300, 300), 50) for _ in range(3)]
    report = import_data(
        [{"m": image} for image in images] + [{"m": b"bad"}], root.with_name("d"), types={"m": ps.Image()}, on_error="skip"
    )
    assert report.samples == 3 and len(report.refused) == 1


def test_each_refusal_has_its_own_reason(root, tmp_path):
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "a.png").write_bytes(b"")
    (tmp_path / "f" / "b.png").write_bytes(b"nonsense")
    report = import_data(tmp_path / "f", root, on_error="skip")
    assert "0 bytes" in report.refused[0].message and "begins with" in report.refused[1].message and "label" not in ps.open(root).schema


@pytest.mark.parametrize("on_error", ["skip", "null"])
def test_a_corrected_box_beside_a_refused_one_counts_once(root, on_error):
    boxes = [[[-1, 0, 5, 5], [1, 1, 2, 2]] for _ in range(100)]
    boxes[30][1][0] = float("nan")
    rows = [{"image": Pillow.new("L", (9, 9)), "boxes": box} for box in boxes]
    report = import_data(rows, root, types={"image": ps.Image(), "boxes": ps.Boxes(of="image")}, boxes="clip", on_error=on_error)
    assert len(report.refused) == 1 and report.corrected_boxes == 99
    assert sum(len(found) for found in ps.open(root)["boxes"] if found is not None) == 198


def test_jsonl_encodings(root, tmp_path):
    (tmp_path / "a.jsonl").write_bytes('{"x": "é"}\n{"x": "ü"}\n'.encode("utf-16"))
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + '{"x": "é"}\n'.encode())
    import_data(tmp_path / "a.jsonl", root, encoding="utf-16")
    import_data(tmp_path / "b.jsonl", root.with_name("b"))
    assert ps.open(root)["x"][:] == ["é", "ü"] and ps.open(root.with_name("b"))["x"][:] == ["é"]
    with pytest.raises(ps.InvalidInputError, match="unknown encoding"):
        import_data(tmp_path / "b.jsonl", root.with_name("c"), encoding="klingon")
    (tmp_path / "c.csv").write_text("x,t\n1,12:30:00\n")
    import_data(tmp_path / "c.csv", root.with_name("d"))
    assert ps.open(root.with_name("d"))["t"][0] == "12:30:00"
    for wrong in ({"delimiter": "é"}, {"types": {"nope": "int8"}}):
        with pytest.raises(ps.InvalidInputError):
            import_data(tmp_path / "c.csv", root.with_name("e"), **wrong)


def test_brackets_are_no_markup(root):
    ds = ps.create(root, {"t[/x]": ps.Text()})
    ds.append({"t[/x]": ["closing [/foo] and [red]hi[/red]"]}, message="[/bar] [red]x[/red]")
    for verb in ("head", "log", "info"):
        done = subprocess.run(
            [sys.executable, "-m", "penstock", verb, str(root)], capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"}
        )
        assert done.returncode == 0, done.stderr
        assert "[/" in done.stdout


@pytest.mark.local
def test_memory_of_a_parquet_import_is_bounded(root, tmp_path):
    path = tmp_path / "a.parquet"
    rng = np.random.default_rng(0)
    with pq.ParquetWriter(path, pa.schema([("b", pa.binary())])) as writer:
        for _ in range(20):
            writer.write_table(pa.table({"b": pa.array([rng.bytes(60_000) for _ in range(150)], pa.binary())}))
    script = """
import pyarrow.parquet as pq
before = peak()
importers.import_data(sys.argv[2], sys.argv[1])
print(peak() - before)
"""
    assert measured.peak_growth(script, root, path) <= 96 << 20, "a Parquet row group, its decoded batch, and the budget must fit"
    assert len(ps.open(root)) == 3000

"""Values that importers refuse. Each refusal must report the right row and column, even if values look like messages."""

import csv
import gc
import gzip
import io
import json
import shutil
import subprocess
import sys
import threading
from types import GeneratorType

import measured
import numpy as np
import penstock as ps
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
import pytest
from penstock.importers import import_data
from PIL import Image as Pillow


def encoded(kind="PNG", size=(4, 3), colour=(9, 8, 7)):
    body = io.BytesIO()
    Pillow.new("RGB", size, colour).save(body, kind)
    return body.getvalue()


def test_a_value_that_names_another_column_nulls_its_own(root):
    """The text `see column `a`` in a value must not be parsed as a message."""
    rows = [{"a": index, "b": index} for index in range(10)]
    rows[3]["b"] = "see column `a`, row 0 at row 7"
    report = import_data(rows, root, types={"a": "int64", "b": "int64"}, on_error="null")
    ds = ps.open(root)
    assert ds["a"][:].tolist() == list(range(10)) and ds["b"][3:4].mask.all() and ds["b"][:].count() == 9
    [refusal] = report.refused
    assert refusal.path == "row 3" and "see column `a`, row 0 at row 7" in refusal.message and "column `b`" in refusal.message


def test_columns_named_like_messages(root):
    names = ["row 0", "column `x`", "a`b", "at row 1"]
    rows = [{name: index for name in names} for index in range(5)]
    rows[2]["a`b"] = "row 0"
    report = import_data(rows, root, types=dict.fromkeys(names, "int64"), on_error="null")
    assert [refusal.path for refusal in report.refused] == ["row 2"]
    ds = ps.open(root)
    assert [ds[name][:].count() if np.ma.isMaskedArray(ds[name][:]) else 5 for name in names] == [5, 5, 4, 5]


def test_rows_in_values_are_never_renumbered(tmp_path):
    ds = ps.create(tmp_path / "set", {"n": "int32", "t": ps.Text()})
    texts = ["x"] * 600_000  # Enough rows for several slices.
    with pytest.raises(ps.InvalidInputError) as caught:
        ds.append({"n": [1] * 599_000 + ["row 5"] + [1] * 999, "t": texts})
    error = caught.value
    assert error.rows == [599_000] and error.column == "n" and "row 599000 is 'row 5'" in str(error), error
    ds = ps.create(tmp_path / "words", {"label": ps.Label(["row 1", "row 2"])})
    with pytest.raises(ps.InvalidInputError) as caught:
        ds.append({"label": ["row 1"] * 2_200_000 + ["row 9"]})
    assert caught.value.rows == [2_200_000] and caught.value.column == "label" and "row 2200000 contains `row 9`" in str(caught.value)
    assert "labels: row 1, row 2" in str(caught.value)


def test_rows_of_values_that_are_pulled_are_counted_from_the_beginning(tmp_path):
    ds = ps.create(tmp_path / "set", {"v": ps.Tensor((None, None), "float64", tile=(8, 8))})
    values = [np.zeros((8, 8))] * 65_540
    values[65_537] = np.zeros((8, 8, 8))
    with pytest.raises(ps.InvalidInputError) as caught:
        ds.append({"v": values})
    assert caught.value.rows == [65_537] and "row 65537" in str(caught.value) and caught.value.column == "v"


@pytest.mark.parametrize("bad", [[0], [4], [0, 1, 4], [2, 3], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize("mode", ["skip", "null"])
def test_every_refusal_names_its_own_row(root, bad, mode):
    """Both columns can have bad values. `null` reports one refusal per bad value, and `skip` reports one per row."""
    rows = [{"a": index, "b": index * 10} for index in range(5)]
    for row in bad:
        rows[row] = {"a": f"bad a{row}", "b": f"bad b{row}" if row % 2 else row * 10}
    report = import_data(rows, root, types={"a": "int64", "b": "int64"}, on_error=mode)
    ds = ps.open(root)
    if mode == "skip":
        assert [refusal.path for refusal in report.refused] == [f"row {row}" for row in bad]
        assert ds["a"][:].tolist() == [row for row in range(5) if row not in bad] and report.samples == 5 - len(bad)
    else:
        wanted = [(row, column) for row in bad for column in ("a", "b") if column == "a" or row % 2]
        assert sorted(
            (refusal.path, f"bad {column}{row}" in refusal.message) for refusal, (row, column) in zip(report.refused, wanted, strict=True)
        ) == [(f"row {row}", True) for row, _ in wanted]
        assert report.samples == 5 and ds["b"][:].tolist() == [None if row in bad and row % 2 else row * 10 for row in range(5)]


@pytest.mark.parametrize("mode", ["skip", "null"])
def test_columns_that_come_late_are_refused_and_never_dropped(root, tmp_path, mode):
    rows = [{"a": index} for index in range(1500)]
    rows[1200] = {"a": 1, "late": 5}
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = import_data(path, root, on_error=mode)
    [refusal] = report.refused
    assert "late" in refusal.message and "1201" in refusal.path and report.samples == 1499
    with pytest.raises(ps.InvalidInputError, match="late"):
        import_data(path, root.with_name("again"), on_error="raise")


def test_an_image_alone_is_not_taken_for_many(root):
    ds = ps.create(root, {"image": ps.Image(mode="stored"), "label": "int32"})
    pixels = np.zeros((5, 6, 3), np.uint8)
    for one in (pixels, pixels[:, :, :1], np.zeros((5, 6, 4), np.uint16)):
        with pytest.raises(ps.InvalidInputError, match="one image") as caught:
            ds.append({"image": one, "label": [1]})
        assert "write [array]" in str(caught.value)
    ds.append({"image": [pixels], "label": [1]})
    ds.append({"image": np.zeros((2, 5, 6, 3), np.uint8), "label": [1, 2]})
    ds.append({"image": np.zeros((2, 5, 6), np.uint8), "label": [3, 4]})
    assert [image.shape for image in ds["image"][:]] == [(5, 6, 3)] * 3 + [(5, 6, 1)] * 2


def hugging(bodies, paths):
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    values = [None if body is None and path is None else {"bytes": body, "path": path} for body, path in zip(bodies, paths, strict=True)]
    return pa.table({"image": pa.array(values, kind), "n": pa.array(range(len(values)))})


def test_images_as_hugging_face_stores_them(root, tmp_path):
    bodies = [None, encoded(), encoded("JPEG", (8, 8))]
    pq.write_table(hugging(bodies, [None, "a.png", None]), tmp_path / "images.parquet")
    assert import_data(tmp_path / "images.parquet", root).samples == 3
    ds = ps.open(root)
    assert isinstance(ds.schema["image"], ps.Image) and ds.take([0, 1, 2], decode=False)["image"] == bodies
    assert ds["image"][1].shape == (3, 4, 3) and ds["image"][0] is None


def test_other_media_as_hugging_face_stores_them_stay_bytes(root, tmp_path):
    pq.write_table(hugging([b"RIFF....WAVE", b"x"], ["a.wav", "b.wav"]), tmp_path / "audio.parquet")
    import_data(tmp_path / "audio.parquet", root)
    assert isinstance(ps.open(root).schema["image"], ps.Bytes) and list(ps.open(root)["image"][:]) == [b"RIFF....WAVE", b"x"]


def test_media_that_are_only_a_path_are_refused(root, tmp_path):
    pq.write_table(hugging([encoded(), None], ["a.png", "/elsewhere/b.png"]), tmp_path / "images.parquet")
    with pytest.raises(ps.InvalidInputError, match=r"/elsewhere/b\.png"):
        import_data(tmp_path / "images.parquet", root)


@pytest.mark.parametrize("values", [[[b"a", b"b"]], [{"x": b"a", "y": 1}], [{"bytes": b"a", "path": "p", "more": 1}], [[{"deep": [b"x"]}]]])
def test_binary_inside_other_values_is_refused_and_never_text(root, tmp_path, values):
    pq.write_table(pa.table({"nested": pa.array(values), "n": pa.array(range(len(values)))}), tmp_path / "nested.parquet")
    with pytest.raises(ps.UnsupportedError, match="binary"):
        import_data(tmp_path / "nested.parquet", root)


@pytest.fixture
def folder(tmp_path):
    """Return a typical folder, with images of two classes and some other files."""
    folder = tmp_path / "photos"
    for name in ("cat/1.png", "cat/2.jpg", "dog/1.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(encoded("PNG" if name.endswith("png") else "JPEG"))
    for name in ("README.md", "LICENSE", ".DS_Store", "labels.json", "cat/Thumbs.db", "scripts/make.py", "docs/index.html"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("not an image")
    return folder


def test_other_files_are_left_out_and_counted(folder, root):
    report = import_data(folder, root)
    assert report.samples == 3 and not report.refused
    assert sorted(report.left_out) == ["LICENSE", "README.md", "cat/Thumbs.db", "docs/index.html", "labels.json", "scripts/make.py"]
    ds = ps.open(root)
    assert ds.schema["label"].names == ("cat", "dog") and ds["path"][:] == ["cat/1.png", "cat/2.jpg", "dog/1.png"]


def test_an_image_without_a_name_of_one_is_one(folder, root):
    (folder / "dog" / "download").write_bytes(encoded("JPEG"))
    assert import_data(folder, root).samples == 4


@pytest.mark.parametrize(
    "name,body",
    [("cat/broken.jpg", b"\xff\xd8\xff broken"), ("cat/empty.png", b""), ("dog/anim.gif", b"GIF89a..."), ("dog/x", b"RIFF....WEBP")],
)
def test_a_broken_image_or_one_of_another_format_stops_it(folder, root, name, body):
    (folder / name).write_bytes(body)
    with pytest.raises(ps.Error, match=name.partition("/")[2]):
        import_data(folder, root)
    report = import_data(folder, root.with_name("skipped"), on_error="skip")
    assert report.samples == 3 and [refusal.path for refusal in report.refused] == [name]


def test_classes_come_from_images_that_are_accepted(folder, root):
    (folder / "ghost").mkdir()
    (folder / "ghost" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    shutil.rmtree(folder / "docs")
    import_data(folder, root, on_error="skip")
    assert ps.open(root).schema["label"].names == ("cat", "dog")


def test_include_and_exclude_choose(folder, root):
    report = import_data(folder, root, include=["*.png", "*.jpg"], exclude=["dog/*"])
    assert report.samples == 2 and "dog/1.png" in report.left_out and ps.open(root).schema["label"].names == ("cat",)
    with pytest.raises(ps.Error, match=r"README\.md"):
        import_data(folder, root.with_name("wrong"), include=["*.md", "*.png"])


@pytest.mark.parametrize("pattern", ["*", "cat/*", "**/*", "[cd]*", "*.[pj]*"])
def test_a_pattern_of_places_leaves_other_kinds_of_files_out(folder, root, pattern):
    (folder / "cat" / "notes.md").write_text("# Cats")
    (folder / "cat" / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    report = import_data(folder, root, include=[pattern])
    assert report.samples == (2 if pattern == "cat/*" else 3) and "cat/notes.md" in report.left_out


def test_a_value_that_stops_an_import_is_named_by_one_row(tmp_path):
    """The message reports the row's number in the input, not its number within an internal chunk."""
    with pytest.raises(ps.InvalidInputError) as caught:
        import_data([{"a": index} for index in range(3000)] + [{"a": "x"}], tmp_path / "rows")
    assert "`row 3000`" in caught.value.message and caught.value.message.count("row") == 1 and caught.value.column == "a"
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(f'{{"a": {index}}}\n' for index in range(5000)) + '{"a": 2.5}\n')
    with pytest.raises(ps.InvalidInputError) as caught:
        import_data(lines, tmp_path / "lines")
    assert "line 5001`" in caught.value.message and "row" not in caught.value.message


def test_the_command_says_what_it_left_out(folder, tmp_path):
    from penstock.cli import app
    from typer.testing import CliRunner

    done = CliRunner().invoke(app, ["import", str(folder), str(tmp_path / "set"), "--exclude", "dog/*"])
    assert done.exit_code == 0 and "left out 1 unselected, 6 other: " in done.output and "imported 2 samples" in done.output
    done = CliRunner().invoke(app, ["import", str(folder), str(tmp_path / "json"), "--json"])
    assert len(json.loads(done.output)["left_out"]) == 6


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_two_bad_values_of_a_row_are_two_refusals_with_null(root, tmp_path, kind):
    rows = [{"a": index, "b": index} for index in range(8)]
    rows[2], rows[5] = {"a": "bad a2", "b": "bad b2"}, {"a": 5, "b": "bad b5"}
    path = tmp_path / f"rows.{kind}"
    if kind == "csv":
        path.write_text("a,b\n" + "".join(f"{row['a']},{row['b']}\n" for row in rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = import_data(path, root, types={"a": "int64", "b": "int64"}, on_error="null")
    assert report.samples == 8 and len(report.refused) == 3
    for refusal, (row, value) in zip(
        sorted(report.refused, key=lambda refusal: refusal.message), [(2, "bad a2"), (2, "bad b2"), (5, "bad b5")], strict=True
    ):
        assert value in refusal.message and refusal.path.endswith(f"{'row' if kind == 'csv' else 'line'} {row + 1}")
    ds = ps.open(root)
    assert ds["a"][:].tolist() == [0, 1, None, 3, 4, 5, 6, 7] and ds["b"][:].tolist() == [0, 1, None, 3, 4, None, 6, 7]


def test_numbers_beyond_a_type_are_refused_by_every_parser(tmp_path):
    """float32 cannot represent 1e39, and float64 cannot represent 1e400, even in text. An explicit `inf` is accepted."""
    (tmp_path / "a.csv").write_text("g,h\n1.5,1e400\n1e39,2\ninf,-inf\n,3\n")
    with pytest.raises(ps.InvalidInputError, match="1e400") as caught:
        import_data(tmp_path / "a.csv", tmp_path / "raised", types={"g": "float32"})
    assert caught.value.column == "h"
    report = import_data(tmp_path / "a.csv", tmp_path / "csv", types={"g": "float32"}, on_error="skip")
    assert [refusal.path[-5:] for refusal in report.refused] == ["row 1", "row 2"]
    assert ps.open(tmp_path / "csv")["h"][:].tolist() == [-np.inf, 3.0]
    (tmp_path / "b.jsonl").write_text('{"g":1}\n{"g":1e39}\n{"g":' + "9" * 400 + '}\n{"g":2}\n')
    report = import_data(tmp_path / "b.jsonl", tmp_path / "jsonl", types={"g": "float32"}, on_error="skip")
    assert [refusal.path[-6:] for refusal in report.refused] == ["line 2", "line 3"] and ps.open(tmp_path / "jsonl")["g"][:].tolist() == [
        1.0,
        2.0,
    ]
    # Such numbers are also refused if the block contains a value that is not a number.
    (tmp_path / "b.csv").write_text("g,h\n1.5,1e400\n2.5,many\n3.5,4\n")
    report = import_data(tmp_path / "b.csv", tmp_path / "both", types={"h": "float64"}, on_error="skip")
    assert [refusal.path[-5:] for refusal in report.refused] == ["row 1", "row 2"] and ps.open(tmp_path / "both")["h"][:].tolist() == [4.0]


@pytest.mark.parametrize("odd", ["null", '{"g":1} {"g":2}\n', '{"g":\n1}\n{"g":1} {"g":2}', "[1]", '"text"', '{"g":3}{"g":4}\n\n'])
def test_a_line_that_is_not_an_object_is_refused_among_good_ones(tmp_path, odd):
    (tmp_path / "a.jsonl").write_text('{"g":5}\n' + odd + '\n{"g":6}\n')
    report = import_data(tmp_path / "a.jsonl", tmp_path / "out", on_error="skip", types={"g": "int32"})
    assert report.refused and {refusal.path.split("line ")[1] for refusal in report.refused} <= {"2", "3", "4"}
    assert ps.open(tmp_path / "out")["g"][:].tolist() == [5, 6]


def test_damage_in_a_compressed_or_checked_source_names_the_file(tmp_path):
    lines = "".join(f'{{"g":{number},"t":"{number:090}"}}\n' for number in range(200_000)).encode()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines)[:-2000])
    with pytest.raises(ps.CorruptError, match=r"a\.jsonl\.gz"):
        import_data(tmp_path / "a.jsonl.gz", tmp_path / "gz")
    place = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"g": np.random.default_rng(0).random(300_000)}),
        place,
        row_group_size=100_000,
        compression="none",
        write_page_checksum=True,
        use_dictionary=False,
    )
    body = bytearray(place.read_bytes())
    body[len(body) // 2] ^= 4
    place.write_bytes(body)
    with pytest.raises(ps.CorruptError, match=r"a\.parquet"):
        import_data(place, tmp_path / "pq")
    assert not (tmp_path / "pq").exists() and not (tmp_path / "gz").exists()


@pytest.mark.parametrize("options, told", [({"include": "cat/*"}, "include=.'cat/.'."), ({"delimeter": ";"}, "unknown option `delimeter`")])
def test_options_that_are_none_are_refused(tmp_path, options, told):
    (tmp_path / "a.csv").write_text("a\n1\n")
    with pytest.raises(ps.InvalidInputError, match=told):
        import_data(tmp_path / "a.csv", tmp_path / "out", **options)


def test_patterns_may_be_any_iterable_of_str_or_none(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    for name in ("a.png", "b.jpg"):
        Pillow.new("RGB", (4, 4)).save(folder / name)
    for number, (options, names) in enumerate([
        ({"include": iter(["*.png"])}, ["a.png"]), ({"exclude": iter(["*.png"])}, ["b.jpg"]), ({"include": {"*.jpg"}}, ["b.jpg"]),
        ({"include": None, "exclude": None}, ["a.png", "b.jpg"]),
    ]):  # fmt: skip
        import_data(folder, tmp_path / str(number), **options)
        assert ps.open(tmp_path / str(number))["path"][:] == names, number
    for wrong in (5, True):
        with pytest.raises(ps.InvalidInputError, match=f"include={wrong}, expected a list of patterns"):
            import_data(folder, tmp_path / "wrong", include=wrong)
    assert not (tmp_path / "wrong").exists()


def test_many_bad_values_are_nulled_column_by_column(tmp_path, monkeypatch):
    """A column is scanned once per chunk, however many of its values are bad."""
    import penstock.importers.appender as run

    lines = [f"{row},{row if row % 3 else 'x'},{'y' if row % 5 == 0 else row}" for row in range(20_000)]
    (tmp_path / "a.csv").write_text("n,a,b\n" + "\n".join(lines) + "\n")
    made, items_of = [], run.items_of
    monkeypatch.setattr(run, "items_of", lambda values: made.append(len(values)) or items_of(values))
    types = {"n": "int64", "a": "int64", "b": "int64"}
    report = ps.importers.import_data(tmp_path / "a.csv", tmp_path / "ds", types=types, on_error="null")
    assert report.samples == 20_000 and len(report.refused) == len(range(0, 20_000, 3)) + len(range(0, 20_000, 5))
    assert sum(made) <= 2 * 20_000
    batch = ps.open(tmp_path / "ds").take(np.arange(20_000))
    assert np.array_equal(np.ma.getmaskarray(batch["a"]), np.arange(20_000) % 3 == 0)
    assert np.array_equal(np.ma.getmaskarray(batch["b"]), np.arange(20_000) % 5 == 0)


def test_quoted_lines_lie_across_the_blocks_of_a_large_csv(tmp_path):
    """Files are parsed in blocks of a few megabytes. A multi-line value stays intact even if it crosses a block boundary."""
    text = "\n".join(f"line {number}" for number in range(200))
    with (tmp_path / "a.csv").open("w") as out:
        out.write("n,text\n" + "".join(f'{row},"{row}\n{text}"\n' for row in range(6_000)))
    report = ps.importers.import_data(tmp_path / "a.csv", tmp_path / "ds")
    assert (tmp_path / "a.csv").stat().st_size > 8 << 20 and report.samples == 6_000 and not report.refused
    batch = ps.open(tmp_path / "ds")[:]
    assert batch["n"].tolist() == list(range(6_000))
    assert batch["text"] == [f"{row}\n{text}" for row in range(6_000)]


@pytest.mark.parametrize("unit", ["s", "ms"])
def test_times_beyond_microseconds_are_refused_not_wrapped(tmp_path, unit):
    far = pa.array([0, 2**62], pa.timestamp(unit))
    pq.write_table(pa.table({"t": pa.array([0, 1], pa.timestamp(unit)), "n": [1, 2]}), tmp_path / "near.parquet")
    ps.importers.import_data(tmp_path / "near.parquet", tmp_path / "near")
    with pa.OSFile(str(tmp_path / "far.arrow"), "wb") as file, pa.ipc.new_file(file, pa.schema([("t", far.type)])) as writer:
        writer.write_table(pa.table({"t": far}))
    with pytest.raises(ps.Error, match="out of the range of 64-bit microseconds"):
        ps.importers.import_data(tmp_path / "far.arrow", tmp_path / "far")


def test_bad_lines_of_later_blocks_have_their_own_numbers(tmp_path):
    lines = [json.dumps({"n": row, "text": "x" * 1000}) for row in range(12_000)]
    for row in (5_000, 11_999):
        lines[row] = "{" + lines[row]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    report = ps.importers.import_data(tmp_path / "a.jsonl", tmp_path / "ds", on_error="skip")
    assert [refusal.path.rpartition("line ")[2] for refusal in report.refused] == ["5001", "12000"]
    with pytest.raises(ps.Error, match="line 5001"):
        ps.importers.import_data(tmp_path / "a.jsonl", tmp_path / "other")
    # Bad values in blocks that Arrow parses must also be reported with their own line numbers.
    bad = [1, 4_095, 4_099, 4_333, 7_777, 8_191, 11_998]
    lines = [json.dumps({"g": 1e39 if row in bad else row / 2, "text": "x" * (900 + row % 90)}) for row in range(12_000)]
    (tmp_path / "b.jsonl").write_text("\n".join(lines) + "\n")
    report = ps.importers.import_data(tmp_path / "b.jsonl", tmp_path / "values", types={"g": "float32"}, on_error="skip")
    assert [int(refusal.path.rpartition("line ")[2]) - 1 for refusal in report.refused] == bad


@pytest.mark.parametrize("parquet", [False, True])
def test_each_bad_medium_of_a_row_is_nulled(tmp_path, parquet):
    out = io.BytesIO()
    Pillow.fromarray(np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)).save(out, "JPEG")
    whole, cut = out.getvalue(), out.getvalue()[: len(out.getvalue()) * 3 // 4]
    rows = [{"a": whole, "b": whole}, {"a": cut, "b": cut}, {"a": whole, "b": cut}]
    types = {"a": ps.Image(), "b": ps.Image()}
    source = tmp_path / "rows.parquet" if parquet else rows
    if parquet:
        pq.write_table(pa.table({name: pa.array([row[name] for row in rows], pa.binary()) for name in "ab"}), source)
    report = import_data(source, tmp_path / "ds", types=types, validate="decode", on_error="null")
    assert report.samples == 3 and [refusal.code for refusal in report.refused] == ["media-undecodable"] * 3
    batch = ps.open(tmp_path / "ds")[:]
    assert [[image is None for image in batch[name]] for name in "ab"] == [[False, True, False], [False, True, True]]


def test_linked_folders_are_classes(tmp_path):
    """Links to folders are followed, unless the target folder contains the link."""
    for name in ("cat", "dog"):
        (tmp_path / "real" / name).mkdir(parents=True)
        (tmp_path / "real" / name / "1.png").write_bytes(encoded())
    (tmp_path / "chosen").mkdir()
    (tmp_path / "chosen" / "cat").symlink_to(tmp_path / "real" / "cat")
    (tmp_path / "chosen" / "feline").symlink_to("../real/cat")
    (tmp_path / "chosen" / "loop").symlink_to(tmp_path / "chosen")
    (tmp_path / "chosen" / "up").symlink_to(tmp_path)
    for one, other in (("x", "y"), ("y", "x")):  # Two folders with links to each other.
        (tmp_path / "each" / one).mkdir(parents=True)
        (tmp_path / "each" / one / "1.png").write_bytes(encoded())
        (tmp_path / "each" / one / "other").symlink_to(f"../{other}")
    report = import_data(tmp_path / "chosen", tmp_path / "ds")
    ds = ps.open(tmp_path / "ds")
    assert report.samples == 2 and ds.schema["label"].names == ("cat", "feline") and ds["path"][:] == ["cat/1.png", "feline/1.png"]
    import_data(tmp_path / "each", tmp_path / "each-ds")
    assert ps.open(tmp_path / "each-ds")["path"][:] == ["x/1.png", "x/other/1.png", "y/1.png", "y/other/1.png"]
    with pytest.raises(ps.InvalidInputError, match="2 files, none of them selected by include and exclude"):
        import_data(tmp_path / "real", tmp_path / "other", include=["*.jpg"])


@pytest.mark.parametrize("on_error", ["raise", "skip", "null"])
def test_media_that_are_only_a_path_are_refused_row_by_row(tmp_path, on_error):
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    values = [{"bytes": encoded(), "path": "a"}, {"bytes": None, "path": "b.png"}, None, {"bytes": encoded(), "path": None}]
    pq.write_table(pa.table({"image": pa.array(values, kind), "n": [0, 1, 2, 3]}), tmp_path / "t.parquet")
    if on_error == "raise":
        with pytest.raises(ps.InvalidInputError, match=r"row 1.*`image`.*No such file.*b\.png") as caught:
            import_data(tmp_path / "t.parquet", tmp_path / "ds")
        assert caught.value.column == "image"
        return
    report = import_data(tmp_path / "t.parquet", tmp_path / "ds", on_error=on_error)
    [refusal] = report.refused
    assert refusal.path.endswith("row 1") and "b.png" in refusal.message
    assert ps.open(tmp_path / "ds")["n"][:].tolist() == ([0, 2, 3] if on_error == "skip" else [0, 1, 2, 3])


def test_bytes_that_are_no_image_are_bytes(tmp_path):
    """Only media columns must contain valid media."""
    import_data([{"b": b"no image", "p": encoded()}, {"b": None, "p": b""}], tmp_path / "ds", types={"p": ps.Bytes()})
    assert ps.open(tmp_path / "ds")["b"][:] == [b"no image", None]


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_a_csv_that_ends_within_quotes_is_refused(tmp_path, on_error, encoding):
    """Without this check, if a file is truncated within quotes, everything after the last opening quote would become one value."""
    path = tmp_path / "table.csv"
    whole = "id,text\n" + "".join(f'{row},"line {row}\nwith ""quotes"" and ü"\n' for row in range(50))
    path.write_text(whole, encoding)
    assert import_data(path, tmp_path / "set", encoding=encoding, on_error=on_error).samples == 50
    for cut in ("line 49", "with", '"" and', " ü"):
        path.write_text(whole[: whole.rindex(cut) + len(cut)], encoding)
        with pytest.raises(ps.InvalidInputError, match="a quote in row 50 is never closed"):
            import_data(path, tmp_path / "cut", encoding=encoding, on_error=on_error)
    path.write_text(whole + '50,"', encoding)
    with pytest.raises(ps.InvalidInputError, match="a quote in row 51 is never closed"):
        import_data(path, tmp_path / "end", encoding=encoding, on_error=on_error)


@pytest.mark.parametrize("last", ['""', '""""', '"a"""', '"a"', "", 'a"b"', '"x\ny"', '"x\n"', '","', "'"])
@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_csv_whose_last_value_is_whole_is_read(tmp_path, last, end, packed):
    text = f'id,text\n1,"first"\n2,{last}{end}'
    path = tmp_path / ("table.csv.gz" if packed else "table.csv")
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    assert import_data(path, tmp_path / "set").samples == 2
    assert ps.open(tmp_path / "set")["text"][1] == list(csv.reader(io.StringIO(text, newline="")))[2][1]


def test_a_quote_that_swallows_a_large_csv_is_reported_with_its_place(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("id,text\n" + "".join(f"{row},t{row}\n" for row in range(1000)) + '1000,"open\n' + "1,t\n" * 3_000_000)
    with pytest.raises(ps.InvalidInputError, match="a row after row 1000 has more than 4 MiB, or a quote in it is never closed") as caught:
        import_data(path, tmp_path / "set")
    assert "--quote" in caught.value.hint
    assert import_data(path, tmp_path / "set", quote="").samples == 3_001_001


def test_parquet_is_read_in_few_pieces(tmp_path):
    pq.write_table(pa.table({"n": pa.array([1] * 200_000, pa.int16())}), tmp_path / "t.parquet")
    done = []
    import_data(tmp_path / "t.parquet", tmp_path / "set", progress=lambda now, *_: done.append(now))
    assert len(done) == 4, "a piece must hold 65,536 rows"


def test_a_large_row_group_is_read_a_part_at_a_time(tmp_path):
    """At most three 16 MiB parts are in memory: one being read, one waiting, and one being stored."""
    values = pa.table({"b": pa.array([np.random.default_rng(row).bytes(1 << 18) for row in range(512)])})
    with pq.ParquetWriter(tmp_path / "t.parquet", values.schema, compression="none", use_dictionary=False, write_batch_size=4) as writer:
        writer.write_table(values, row_group_size=512)
    code = """
import sys, pyarrow
from penstock.importers import import_data
import_data(sys.argv[1], sys.argv[2])
print(pyarrow.default_memory_pool().max_memory())
"""
    command = [sys.executable, "-c", code, tmp_path / "t.parquet", tmp_path / "set"]
    assert int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) <= 56 << 20


@pytest.mark.parametrize("number", [-(2**63), 2**63 - 1, -(2**63) - 1, 2**63, 2**64 - 1, 2**64])
def test_whole_numbers_of_rows_at_the_edges(root, number):
    import_data([{"n": number}, {"n": 0}], root)
    ds = ps.open(root)
    kind = "int64" if -(2**63) <= number < 2**63 else "uint64" if 0 <= number < 2**64 else None
    assert ds.schema["n"] == (ps.Scalar(kind) if kind else ps.Json())
    assert list(ds["n"][:]) == [number, 0]


def test_a_dataset_that_a_failed_import_leaves_is_named():
    """In a bucket or in memory, a dataset cannot be removed atomically, so an empty dataset remains after a failed import."""
    place, rows = "memory://failed-import", [{"n": 1}, {"n": "x"}]
    for attempt, left in ((1, True), (2, False)):
        with pytest.raises(ps.InvalidInputError) as caught:
            import_data(rows, place, types={"n": "int64"})
        assert caught.value.hint.startswith("pass --on-error skip"), attempt
        assert (f"the empty dataset `{place}` remains" in caught.value.hint) == left
    assert import_data(rows[:1], place).samples == 1 and ps.open(place)["n"][:].tolist() == [1]


def test_numbers_beyond_float64_in_json_lines_are_refused_by_their_line(tmp_path):
    path = tmp_path / "a.jsonl"
    for number in ("1e400", "-1e400", "9" * 400):
        path.write_text(f'{{"a": 1.5}}\n{{"a": {number}}}\n{{"a": 2}}\n')
        for types in ({}, {"a": "float32"}):
            with pytest.raises(ps.InvalidInputError, match="line 2"):
                import_data(path, tmp_path / "raised", types=types)
            report = import_data(path, f"memory://json-lines-{number[:5]}-{len(types)}", types=types, on_error="skip")
            assert [refusal.path.rpartition("line ")[2] for refusal in report.refused] == ["2"] and report.samples == 2


def test_a_folder_of_tables_as_other_programs_leave_it(tmp_path):
    folder = tmp_path / "tables"
    (folder / "more").mkdir(parents=True)
    pq.write_table(pa.table({"n": pa.array([None, None]), "t": ["a", "b"]}), folder / "0.parquet")
    pq.write_table(pa.table({"n": [5], "t": ["c"]}), folder / "more" / "1.parquet")
    (folder / "2").write_bytes((folder / "more" / "1.parquet").read_bytes())
    for name in ("_SUCCESS", "README.md", "_metadata.parquet", ".0.parquet.crc"):
        (folder / name).write_text("no table")
    report = import_data(folder, tmp_path / "all")
    assert report.samples == 4 and report.left_out == [".0.parquet.crc", "README.md", "_SUCCESS", "_metadata.parquet"]
    assert ps.open(tmp_path / "all")["n"][:].tolist() == [None, None, 5, 5], "a null column takes its type from the other file"
    assert import_data(folder, tmp_path / "some", format="parquet", exclude=["more/*"]).samples == 3
    assert import_data(folder, tmp_path / "one", include=["1.parquet"]).left_out[-1] == "_metadata.parquet"
    with pytest.raises(ps.CorruptError, match=r"README\.md"):
        import_data(folder, tmp_path / "none", format="parquet", include=["README.md"])
    with pytest.raises(ps.InvalidInputError, match="no files that end in"):
        import_data(folder, tmp_path / "none", format="parquet", exclude=["*"])
    (folder / "year=2020").mkdir()
    (folder / "2").rename(folder / "year=2020" / "2.parquet")
    with pytest.raises(ps.InvalidInputError, match="the folder name `year=2020` contains a value"):
        import_data(folder, tmp_path / "parted")


def test_a_struct_that_holds_nan_is_refused_as_json_is(tmp_path):
    pq.write_table(pa.table({"s": [{"x": 1.5}, {"x": float("nan")}]}), tmp_path / "a.parquet")
    with pytest.raises(ps.InvalidInputError, match="row 1"):
        import_data(tmp_path / "a.parquet", tmp_path / "raised")
    assert import_data(tmp_path / "a.parquet", tmp_path / "nulled", on_error="null").samples == 2
    assert ps.open(tmp_path / "nulled")["s"][:] == [{"x": 1.5}, None]


@pytest.mark.parametrize("text", ["name,age\nada,36\nalan,41\n", "a,b\n1,2\n3\n", 'a\n"', "a\n" + "1\n" * 4_000_000 + "x,y\n"])
def test_python_does_not_end_while_threads_of_arrow_hold_a_function_of_ours(tmp_path, text):
    """A thread that releases the function during shutdown aborts the process. This happened in 20 of 400 refused imports."""
    (tmp_path / "a.csv").write_text(text)
    ps.create(tmp_path / "ds", {"z": "int32"})
    program = """
import atexit, sys
atexit.register(lambda: print(len(csv._Reading.functions)))
from penstock.importers import csv, import_data
made, invalid = [], csv._Reading._invalid
csv._Reading._invalid = staticmethod(lambda refuse: made.append(1) or invalid(refuse))
atexit.register(lambda: print(len(made)))
import_data(sys.argv[1], sys.argv[2])
"""
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "a.csv", tmp_path / "ds"], capture_output=True, text=True)
    made, left = map(int, done.stdout.split())
    assert made > 0 and left == 0 and done.returncode == 1 and "Error: cannot import" in done.stderr


def test_an_import_into_a_dataset_goes_by_the_types_that_are_there(tmp_path):
    """In existing text and category columns, a word that looks like a number stays a word.

    If it were parsed as a number, it would be mistaken for another word's code.
    """
    path = tmp_path / "a.csv"
    path.write_text("zip,label,text,bool\n20,7,007,1\n10,8,008,0\n2,0,1e3,1\n0,7,,0\n1,8,true,1\n")
    kinds = {"zip": ps.Category(), "label": ps.Label(["7", "8", "0"]), "text": ps.Text(), "bool": "bool"}
    ds = ps.create(tmp_path / "ds", kinds)
    for _ in range(2):
        assert import_data(path, ds.uri, mode="append").samples == 5
    got = pa.table(ps.open(ds.uri)).to_pydict()
    assert got["zip"] == 2 * ["20", "10", "2", "0", "1"] and got["label"] == 2 * ["7", "8", "0", "7", "8"]
    assert got["text"] == 2 * ["007", "008", "1e3", "", "true"] and got["bool"] == 2 * [True, False, True, False, True]
    import_data(path, ds.uri, types={"text": ps.Text()}, mode="append")
    rows = [{"zip": "20", "label": "8", "text": "x", "bool": False}, {"zip": None, "label": None, "text": None, "bool": None}]
    assert import_data(rows, ds.uri).samples == 2 and ps.open(ds.uri)["zip"][15] == 0


@pytest.mark.parametrize("kind", ["rows", "jsonl", "parquet"])
@pytest.mark.parametrize("on_error", ["raise", "skip", "null"])
def test_numbers_are_no_words_of_a_category(tmp_path, kind, on_error):
    """Numbers must be refused, because they would be mistaken for codes, which represent different words in other datasets."""
    ds = ps.create(tmp_path / "ds", {"c": ps.Category()})
    ds.append({"c": ["one", "two"]})
    values, source = [1, None, 0], tmp_path / f"a.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table({"c": values}), source)
    elif kind == "jsonl":
        source.write_text("".join(json.dumps({"c": value}) + "\n" for value in values))
    else:
        source = [{"c": value} for value in values]
    if on_error == "raise":
        with pytest.raises(ps.InvalidInputError, match="the value is 1, expected a word") as caught:
            import_data(source, ds.uri)
        assert caught.value.column == "c" and len(ps.open(ds.uri)) == 2
    else:
        report = import_data(source, ds.uri, on_error=on_error)
        assert len(report.refused) == 2 and report.samples == (1 if on_error == "skip" else 3)
        assert pa.table(ps.open(ds.uri))["c"].to_pylist() == ["one", "two"] + report.samples * [None]


@pytest.mark.parametrize("on_error", ["skip", "null"])
@pytest.mark.parametrize("row", ['"2,y', '2,"y'])
def test_an_open_quote_in_a_row_that_is_refused_does_not_swallow_the_rest(tmp_path, on_error, row):
    """The refused row must not extend to the end of the file and hide all later rows."""
    path = tmp_path / "a.csv"
    path.write_text(f"a,b,c\n1,x,z\n{row}\n" + "".join(f"{i},z,z\n" for i in range(3, 20_000)))
    with pytest.raises(ps.InvalidInputError, match="a quote in row 2 is never closed") as caught:
        import_data(path, tmp_path / "ds", on_error=on_error)
    assert "--quote" in caught.value.hint
    path.write_text(f'a,b,c\n1,x,z\n{row}\n3,z,z\n4,"z\n5,z,z\n')
    report = import_data(path, tmp_path / "ds", on_error=on_error)
    assert report.samples == 2 and [refusal.message for refusal in report.refused] == [
        f"{2 if row[0] == '2' else 1} fields, expected 3, over 3 lines"
    ]


@pytest.mark.long
@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_line_ends_within_quotes_are_kept_wherever_a_piece_ends(tmp_path, encoding):
    """Arrow drops the LF of a CR LF that is split between two pieces. This bug damaged one or two values in 44 MiB of addresses."""
    rng = np.random.default_rng(5)
    addresses = ["\r\n".join("x" * length for length in lengths) for lengths in rng.integers(0, 30, (180_000, 4))]
    path = tmp_path / "a.csv"
    with path.open("w", encoding=encoding, newline="") as out:
        out.write("n,address\r\n")
        out.writelines(f'{number},"{address}"\r\n' for number, address in enumerate(addresses))
    assert path.stat().st_size > 12 << 20
    import_data(path, tmp_path / "ds", encoding=encoding)
    assert ps.open(tmp_path / "ds")["address"][:] == addresses
    piece, row = 4 << 20, b"1," + b"x" * 996 + b"\r\n"
    for size in (piece, piece - piece // 64):  # Also test pieces of 4 MiB, and slightly smaller ones, that end near the CR LF.
        for at in range(-3, 4):
            rows, rest = divmod(size + at - 20, len(row))
            body = b"a,b\r\n" + row * (rows - 1) + b"1," + b"x" * (rest + len(row) - 4) + b"\r\n"
            path.write_bytes(body + b'2,"yyyyyyy\r\n\r\nz"\r\n3,w\r\n')
            import_data(path, f"memory://{encoding}{at}{size}", encoding=encoding)
            assert ps.open(f"memory://{encoding}{at}{size}")["b"][rows:] == ["yyyyyyy\r\n\r\nz", "w"]


@pytest.mark.long
def test_numbers_of_rows_where_very_many_are_refused(tmp_path):
    """Row numbers are computed in one pass. Scanning all refused rows for each refused value would take hours."""
    path, many = tmp_path / "a.csv", 150_000
    path.write_text("a,b\n" + "1,2\n" * 100 + "1\nx,2\n" * many)
    report = import_data(path, tmp_path / "ds", types={"a": "int64"}, on_error="skip")
    assert report.samples == 100 and len(report.refused) == 2 * many
    assert {int(refusal.path.rpartition(" ")[2]) for refusal in report.refused} == set(range(101, 101 + 2 * many))
    from penstock.importers.csv import _numbers

    rng = np.random.default_rng(0)
    for _ in range(200):
        first, gone = int(rng.integers(0, 5)), sorted({int(row) for row in rng.integers(0, 30, rng.integers(0, 20))})
        gone = [row for row in gone if row >= first]
        number = _numbers(first, gone)
        assert [number(row) for row in range(40)] == [row for row in range(first, 100) if row not in gone][:40]


@pytest.mark.parametrize("on_error", ["raise", "skip", "null"])
@pytest.mark.parametrize("early", [True, False])
def test_a_row_of_a_csv_that_is_not_utf_8_is_refused_by_its_row(tmp_path, on_error, early):
    path, before = tmp_path / "a.csv", 1 if early else 1_000_000
    path.write_bytes(b"a,b\n" + b"1,x\n" * before + b"2,\xffy\n3,w\n")
    if on_error == "raise":
        with pytest.raises(ps.InvalidInputError, match="not UTF-8") as caught:
            import_data(path, tmp_path / "ds")
        assert "--encoding" in str(caught.value)
        return
    report = import_data(path, tmp_path / "ds", on_error=on_error)
    assert [refusal.path for refusal in report.refused] == [f"{path}: row {before + 1}"] and "not UTF-8" in report.refused[0].message
    assert report.samples == before + (1 if on_error == "skip" else 2) and ps.open(tmp_path / "ds")["a"][-1] == 3
    path.write_bytes(b"a,b\n1,x\n\xff,y,z\n3,w\n")
    with pytest.raises(ps.InvalidInputError, match="not UTF-8") as caught:
        import_data(path, tmp_path / "other", on_error=on_error)
    assert "--encoding" in caught.value.hint


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_an_import_in_a_thread_continues_when_the_main_thread_ends(tmp_path, kind):
    """At exit, Python waits for the thread, but Python's thread pools no longer accept work."""
    table, path = pa.table({"a": np.arange(300_000), "b": ["text"] * 300_000}), tmp_path / f"a.{kind}"
    if kind == "parquet":
        pq.write_table(table, path)
    elif kind == "csv":
        path.write_text("a,b\n" + "".join(f"{number},text\n" for number in range(300_000)))
    else:
        path.write_text("".join(f'{{"a":{number},"b":"text"}}\n' for number in range(300_000)))
    code = (
        "import sys, threading\nfrom penstock.importers import import_data\nthreading.Thread(target=import_data, args=sys.argv[1:]).start()"
    )
    done = subprocess.run([sys.executable, "-c", code, path, tmp_path / "ds"], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert np.array_equal(ps.open(tmp_path / "ds")["a"][:], np.arange(300_000))


def test_unreadable_files_are_reported(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a\n1\n")
    for encoding in ("hex", "base64", "rot13", "zlib", "a\0b", "no-such"):
        with pytest.raises(ps.InvalidInputError, match="unknown encoding"):
            import_data(path, tmp_path / "ds", encoding=encoding)
    for name in ("a.csv.xz", "a.jsonl.xz"):
        (tmp_path / name).write_bytes(b"\xfd7zXZ\0")
        with pytest.raises(ps.InvalidInputError, match="xz is not supported"):
            import_data(tmp_path / name, tmp_path / "ds")
    whole = gzip.compress(b"a,b\n" + np.random.default_rng(0).integers(48, 57, 1 << 20, dtype=np.uint8).tobytes())
    (tmp_path / "a.csv.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ps.CorruptError, match=r"a\.csv\.gz"):
        import_data(tmp_path / "a.csv.gz", tmp_path / "ds")
    (tmp_path / "b.jsonl").write_text('{"a":1}\n' * 400_000 + '{"a":"q"}\n')
    with pytest.raises(ps.InvalidInputError, match="line 400001") as caught:
        import_data(tmp_path / "b.jsonl", tmp_path / "ds")
    assert caught.value.rows == [] and caught.value.column == "a"
    folder = tmp_path / "images"
    for number, name in enumerate(("cat/1", "dog/2")):
        (folder / name).parent.mkdir(parents=True)
        Pillow.new("RGB", (4, 4), number).save(folder / f"{name}.{'webp' if number else 'png'}", format="WEBP" if number else "PNG")
    for options, text in (({"types": {"imgae": ps.Bytes()}}, "no column `imgae`"), ({"include": [1]}, "is not a pattern")):
        with pytest.raises(ps.InvalidInputError, match=text):
            import_data(folder, tmp_path / "ds", **options)
    for on_error in ("raise", "skip", "null"):
        report = import_data(folder, tmp_path / on_error, types={"image": ps.Bytes()}, on_error=on_error)
        assert report.samples == 2 and not report.refused, on_error


def imported(root, text, **options):
    source = root.parent / "source.csv"
    source.write_bytes(text if isinstance(text, bytes) else text.encode())
    report = import_data(source, root, **options)
    return report, ps.open(root)


@pytest.mark.local
def test_words_of_a_csv_that_look_like_numbers_stay_words(tmp_path):
    """Arrow parses hexadecimal digits as bits, so 0xdeadbeefdeadbeef is a negative int64. Parsed numbers lose leading zeros."""
    text = "id,zip,n,x\n0xdeadbeefdeadbeef,00501,1,0.5\n0X11,10115,-20,7\n"
    _, ds = imported(tmp_path / "set", text)
    assert list(ds["id"][:]) == ["0xdeadbeefdeadbeef", "0X11"] and list(ds["zip"][:]) == ["00501", "10115"]
    assert list(ds["n"][:]) == [1, -20] and list(ds["x"][:]) == [0.5, 7.0]


@pytest.mark.local
@pytest.mark.parametrize("text", ["0x7f", "0xFF", "0X10", "-0x1", " 0x1 "])
@pytest.mark.parametrize("kind", ["int8", "int32", "int64", "uint64", "float64"])
def test_hexadecimal_numbers_are_refused_where_numbers_are_wanted(tmp_path, text, kind):
    report, ds = imported(tmp_path / "set", f"v\n1\n{text}\nx\n2\n", types={"v": kind}, on_error="skip")
    assert list(ds["v"][:]) == [1, 2]
    assert [refusal.path.rpartition(": ")[2] for refusal in report.refused] == ["row 2", "row 3"]
    with pytest.raises(ps.InvalidInputError, match=f"row 2.*{text.strip()}"):
        imported(tmp_path / "set", f"v\n1\n{text}\nx\n2\n", mode="append")


@pytest.mark.local
@pytest.mark.parametrize("rest", ["", "x\n"])
def test_json_and_bytes_of_a_csv_do_not_depend_on_the_other_rows(tmp_path, rest):
    ps.create(tmp_path / "json", {"v": ps.Json()})
    rows = ['"[1, {""a"": null}]"', "9007199254740993", "1.50", '"""word"""', "true", ""]
    report, ds = imported(tmp_path / "json", "v\n" + "".join(f"{row}\n" for row in rows[:5]) + '"null"\n' + rest, on_error="skip")
    assert [ds[row]["v"] for row in range(len(ds))] == [[1, {"a": None}], 9007199254740993, 1.5, "word", True, None]
    assert [refusal.path.rpartition(": ")[2] for refusal in report.refused] == (["row 7"] if rest else [])
    ps.create(tmp_path / "bytes", {"v": ps.Bytes()})
    _, ds = imported(tmp_path / "bytes", "v\n007\n12\n" + rest)
    assert [ds[row]["v"] for row in range(2)] == [b"007", b"12"]


@pytest.mark.local
@pytest.mark.parametrize("on_error", ["raise", "skip", "null"])
@pytest.mark.parametrize("end", ["", "\n", "\r\n", "\r"])
def test_quotes_at_the_end_of_a_csv(tmp_path, on_error, end):
    """An import fails only if a closing quote is missing. Odd numbers of quotes, and line ends within quotes, are valid."""
    closed = ['a,b\r\n1,"x"\r\n2,"\r\n"', 'a,b\n1,x\n2,19"', 'a\n1\n"2"', 'a\n"x\ny"', 'a,b\n1,"\n"']
    for number, text in enumerate(closed):
        _, ds = imported(tmp_path / f"closed{number}", text + end, on_error=on_error)
        expected = [row for row in csv.reader(io.StringIO(text + end, newline="")) if row][1:]
        assert [[str(ds[row][name]) for name in ds.schema] for row in range(len(ds))] == expected
    for number, text in enumerate(['a,b\n1,x\n2,"y', 'a\nx\n"', 'a,b\n1,x\n2,"y"",', 'a,b\n1,x\n2"3,y,"z']):
        with pytest.raises(ps.InvalidInputError, match=r"a quote in row \d is never closed"):
            imported(tmp_path / f"open{number}", text + end, on_error=on_error)
        assert not (tmp_path / f"open{number}").exists()
    if on_error != "raise":
        report, ds = imported(tmp_path / "stray", f'a,b\n1,x\n2,y\n3,19" monitor,extra{end}', on_error=on_error)
        assert (report.samples, len(ds)) == (2, 2)
        assert [(refusal.path.rpartition(": ")[2], refusal.message) for refusal in report.refused] == [("row 3", "3 fields, expected 2")]


@pytest.mark.local
def test_times_before_1970_are_the_same_by_every_way(tmp_path):
    """Zeros below a microsecond do not count."""
    texts = ["1969-12-31T23:59:59.999999000", "1969-12-31T23:59:58.000001000", "1970-01-01T00:00:00.000000000"]
    times = np.array(texts, "datetime64[ns]")
    expected = times.astype("datetime64[us]").tolist()
    assert expected[0].microsecond == 999_999
    ps.create(tmp_path / "append", {"t": "timestamp"}).append({"t": times})
    pq.write_table(pa.table({"t": pa.array(times)}), tmp_path / "t.parquet")
    (tmp_path / "t.csv").write_text("t\n" + "\n".join(texts) + "\n")
    (tmp_path / "mixed.csv").write_text("t\n" + "\n".join(texts) + "\nx\n")
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"t": text}) + "\n" for text in texts))
    for source in ("t.parquet", "t.csv", "mixed.csv", "t.jsonl"):
        import_data(tmp_path / source, tmp_path / source.replace(".", "-"), types={"t": "timestamp"}, on_error="skip")
    for name in ("append", "t-parquet", "t-csv", "mixed-csv", "t-jsonl"):
        assert ps.open(tmp_path / name)["t"][:].tolist() == expected, name


@pytest.mark.local
def test_values_that_are_not_times_do_not_become_times(tmp_path):
    ps.create(tmp_path / "set", {"t": "timestamp"})
    for kind in (pa.duration("s"), pa.time32("s"), pa.time64("us")):
        pq.write_table(pa.table({"t": pa.array([3], kind)}), tmp_path / "t.parquet")
        for destination, types in (("set", None), ("new", {"t": "timestamp"})):
            with pytest.raises(ps.InvalidInputError, match=r"its column `t` is .*, which is a .*time.*, expected timestamp"):
                import_data(tmp_path / "t.parquet", tmp_path / destination, types=types)
    assert len(ps.open(tmp_path / "set")) == 0 and not (tmp_path / "new").exists()
    folder = tmp_path / "folder"
    folder.mkdir()
    for number, other in enumerate([pa.array([1577836800]), pa.array([3], pa.duration("s")), pa.array(["2020-01-01"])]):
        pq.write_table(pa.table({"t": pa.array([1577836800], pa.timestamp("s"))}), folder / "0.parquet")
        pq.write_table(pa.table({"t": other}), folder / "1.parquet")
        for order in ("01", "10"):
            with pytest.raises(ps.InvalidInputError, match=r"1\.parquet`: its column `t` is"):
                import_data(folder, tmp_path / f"folder{number}{order}")
            (folder / "0.parquet").rename(folder / "2.parquet")
            (folder / "1.parquet").rename(folder / "0.parquet")
            (folder / "2.parquet").rename(folder / "1.parquet")
    pq.write_table(pa.table({"t": pa.array([1577836800], pa.timestamp("s"))}), folder / "0.parquet")
    pq.write_table(pa.table({"t": pa.array([1577836800000], pa.timestamp("ms"))}), folder / "1.parquet")
    import_data(folder, tmp_path / "units")
    assert len(set(ps.open(tmp_path / "units")["t"][:].tolist())) == 1


PARQUET = """
import sys
import threading
from types import GeneratorType
import penstock as ps
import pandas, pyarrow.parquet
from measured import Grown
from penstock.importers import import_data

ps.configure(memory_bytes=16 << 20)
with Grown() as grown:
    import_data(sys.argv[1], sys.argv[2])
print(grown.peak)
"""


@pytest.mark.local
def test_what_parquet_stores_once_counts_as_often_as_it_comes(tmp_path):
    """A 100 KB file encodes 400 MB of text. Neither its encoded size nor its small first rows predict the size of later rows."""
    words = [f"{number} " * 4000 for number in range(50)]
    rows = ["a"] * 5000 + [words[row % 50] for row in range(20_000)]
    pq.write_table(pa.table({"t": rows, "n": range(len(rows))}), tmp_path / "t.parquet", row_group_size=len(rows))
    assert int(measured.run(PARQUET, tmp_path / "t.parquet", tmp_path / "set")) <= 200 << 20  # Before the fix, memory grew by 735 MiB.
    ds = ps.open(tmp_path / "set")
    assert len(ds) == 25_000 and ds[24_999]["t"] == words[49] and list(ds["n"][[0, 4999, 24_999]]) == [0, 4999, 24_999]


INTERRUPTED = """
import signal, sys
from penstock.importers import import_data

# pyarrow imports pandas on first use and swallows exceptions raised by that import, such as the Ctrl-C here.
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "pandas":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Finder())
try:
    import_data(sys.argv[1], sys.argv[2])
    print("finished")
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.local
@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_a_ctrl_c_while_pandas_is_imported_ends_the_import(tmp_path, kind):
    source = tmp_path / f"t.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table({"n": [1], "t": ["x"]}), source)
    else:
        source.write_text("n,t\n1,x\n" if kind == "csv" else '{"n": 1, "t": "x"}\n')
    command = [sys.executable, "-c", INTERRUPTED, source, tmp_path / "set"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "interrupted\n"
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (pa.array([0.5], pa.float32()), pa.array([123456789.123]), "float64"),
        (pa.array([123456789.123]), pa.array([0.5], pa.float32()), "float64"),
        (pa.array([7], pa.int32()), pa.array([2**53 + 1]), "int64"),
        (pa.array([200], pa.uint8()), pa.array([-7], pa.int8()), "int16"),
        (pa.array([0.5], pa.float32()), pa.array([2**24 + 1], pa.int32()), "float64"),
        (pa.array([0.5], pa.float32()), pa.array([-7], pa.int16()), "float32"),
        (pa.array([[0.5]], pa.list_(pa.float32())), pa.array([[0.1]], pa.list_(pa.float64())), ps.Tensor((None,), "float64")),
        (pa.array([0.5]), pa.array([2**53 + 1]), None),
        (pa.array([2**53 + 1]), pa.array([0.5]), None),
        (pa.array([1], pa.int64()), pa.array([2**63], pa.uint64()), None),
        (pa.array([0.5], pa.float32()), pa.array([2**24 + 1]), None),
        (pa.array([[0.5]], pa.list_(pa.float32())), pa.array([[2**24 + 1]], pa.list_(pa.int64())), None),
        (pa.array([1], pa.int8()), pa.array([True]), None),
    ],
)
def test_files_of_other_numbers_lose_nothing(tmp_path, first, second, expected):
    """A column gets the smallest type that fits all files. If no type fits, the import is refused unless the user chooses a type."""
    (tmp_path / "source").mkdir()
    for name, values in (("a", first), ("b", pa.array([None] * 2, pa.null())), ("c", second)):
        pq.write_table(pa.table({"n": values}), tmp_path / "source" / f"{name}.parquet")
    if expected is None:
        with pytest.raises(ps.InvalidInputError, match=r"c.parquet`: its column `n` is .*, expected .* as in files such as `.*a.parquet`"):
            import_data(tmp_path / "source", tmp_path / "set")
        assert not (tmp_path / "set").exists()
        exact = all(
            type(number) is not bool and float(number) == number
            for number in (first[0].as_py(), second[0].as_py())
            if not pa.types.is_list(first.type)
        )
        if not pa.types.is_list(first.type) and exact:
            assert import_data(tmp_path / "source", tmp_path / "set", types={"n": "float64"}).samples == 4
        elif not pa.types.is_list(first.type):
            with pytest.raises(ps.InvalidInputError, match=r"float64 does not represent exactly|bool, which does not fit float64"):
                import_data(tmp_path / "source", tmp_path / "set", types={"n": "float64"})
        return
    import_data(tmp_path / "source", tmp_path / "set")
    ds = ps.open(tmp_path / "set")
    assert ds.schema["n"] == (ps.Scalar(expected) if isinstance(expected, str) else expected)
    stored = [np.asarray(ds[row]["n"]).tolist() for row in (0, 3)]
    assert stored == [first[0].as_py(), second[0].as_py()]


@pytest.mark.parametrize(("first", "second"), [(pa.duration("s"), pa.int64()), (pa.timestamp("s"), pa.int64())])
def test_units_within_dictionaries_are_looked_at(tmp_path, first, second):
    (tmp_path / "source").mkdir()
    for name, kind in (("a", first), ("b", second)):
        table = pa.table({"d": pa.array([5], kind).dictionary_encode()})
        with pa.ipc.new_file(tmp_path / "source" / f"{name}.arrow", table.schema) as out:
            out.write_table(table)
    with pytest.raises(ps.InvalidInputError, match=r"b.arrow`: its column `d` is"):
        import_data(tmp_path / "source", tmp_path / "set")


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["00340123450000000018", "18446744073709551615"], ["00340123450000000018", "18446744073709551615"]),
        (["00501", "1.5"], ["00501", "1.5"]),
        (["0", "0.5", "-0.25"], [0.0, 0.5, -0.25]),
    ],
)
def test_leading_zeros_are_kept_in_every_column(tmp_path, lines, expected):
    (tmp_path / "a.csv").write_text("id,b\n" + "".join(f"{line},1\n" for line in lines))
    import_data(tmp_path / "a.csv", tmp_path / "set")
    assert list(ps.open(tmp_path / "set")["id"][:]) == expected


@pytest.mark.parametrize(("numbers", "late"), [("%d", "00501"), ("%d.5", "-007")])
def test_zeros_in_front_behind_the_first_block_are_refused(tmp_path, numbers, late):
    """If the type is inferred from the first 4 MiB, later numbers with leading zeros are refused. Given or existing types accept them."""
    rows = [f"{numbers % number},{'y' * 60}\n" for number in range(1, 80_000)]
    (tmp_path / "a.csv").write_text("id,x\n" + "".join(rows) + f"{late},z\n0,z\n")
    with pytest.raises(ps.InvalidInputError, match=rf"row 80000`: cannot append to column `id`: '{late}', expected"):
        import_data(tmp_path / "a.csv", tmp_path / "set")
    report = import_data(tmp_path / "a.csv", tmp_path / "set", on_error="skip")
    assert report.samples == 80_000 and len(report.refused) == 1
    assert import_data(tmp_path / "a.csv", tmp_path / "set", mode="append").samples == 80_001
    assert import_data(tmp_path / "a.csv", tmp_path / "given", types={"id": "float64"}).samples == 80_001
    assert float(ps.open(tmp_path / "given")["id"][79_999]) == float(late)


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "UTC", "+05:30", "Foo/Bar"])
def test_nanoseconds_of_any_zone_are_microseconds(tmp_path, zone):
    """When daylight saving time ends, some local times occur twice."""
    counts = np.concatenate([np.arange(1_698_364_800, 1_698_537_600, 1800), np.arange(1_712_300_000, 1_712_400_000, 1800)]) * 10**9 + 1000
    counts = np.concatenate([counts, [-1000, -(2**63) // 1000 * 1000 + 1000, 2**63 // 1000 * 1000]])
    times = pa.array(counts, mask=np.arange(len(counts)) == 5).cast(pa.timestamp("ns", tz=zone))
    with pa.ipc.new_file(tmp_path / "t.arrow", pa.schema({"t": times.type})) as out:
        out.write_table(pa.table({"t": times}))
    assert import_data(tmp_path / "t.arrow", tmp_path / "set").samples == len(counts)
    stored = ps.open(tmp_path / "set")["t"][:]
    assert stored.mask.nonzero()[0].tolist() == [5]
    kept = ~stored.mask
    assert (np.ma.getdata(stored).view("int64")[kept] == counts[kept] // 1000).all()


def test_a_failed_import_leaves_links_and_folders_as_they_were(tmp_path):
    (tmp_path / "a.csv").write_text("a\nx\n")
    for name in ("real", "folder"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    before = sorted(tmp_path.iterdir())
    for name in ("link", "folder", "nothing"):
        with pytest.raises(ps.InvalidInputError, match="expected int64"):
            import_data(tmp_path / "a.csv", tmp_path / name, types={"a": "int64"})
        assert sorted(tmp_path.iterdir()) == before
        assert not any((tmp_path / "real").iterdir()) and not any((tmp_path / "folder").iterdir())
    assert (tmp_path / "link").is_symlink()


def test_a_line_without_an_end_is_a_line(tmp_path):
    (tmp_path / "a.csv").write_text("1,2,3")
    assert import_data(tmp_path / "a.csv", tmp_path / "row", header=False).samples == 1
    assert ps.open(tmp_path / "row")[0] == {"f0": 1, "f1": 2, "f2": 3}
    (tmp_path / "a.csv").write_text("a,b")
    assert import_data(tmp_path / "a.csv", tmp_path / "names").samples == 0
    assert list(ps.open(tmp_path / "names").schema) == ["a", "b"]


@pytest.mark.parametrize("kind", [ps.Label(["b"]), ps.Category(), ps.Text()])
def test_a_word_that_is_not_text_is_refused_with_its_line(tmp_path, kind):
    (tmp_path / "a.jsonl").write_bytes(b'{"a":"b"}\n{"a":"\xff"}\n{"a":"b"}\n')
    report = import_data(tmp_path / "a.jsonl", tmp_path / "set", types={"a": kind}, on_error="skip")
    assert report.samples == 2 and [refusal.path.rpartition(": ")[2] for refusal in report.refused] == ["line 2"]
    with pytest.raises(ps.InvalidInputError, match=r"a\.jsonl: line 2"):
        import_data(tmp_path / "a.jsonl", tmp_path / "other", types={"a": kind})


def test_times_in_text_of_parquet_are_refused_one_by_one(tmp_path):
    texts = ["2020-01-01T00:00:00Z", "x", None, "2020-01-01 00:00:00.1234567", "0001-01-01T00:00:00.0000010"]
    for kind in (pa.string(), pa.large_string()):
        pq.write_table(pa.table({"t": pa.array(texts, kind)}), tmp_path / "t.parquet")
        place = tmp_path / str(kind)
        report = import_data(tmp_path / "t.parquet", place, types={"t": "timestamp"}, on_error="null")
        why = "which has digits below a microsecond: cut them off first, or import the column as text"
        assert [refusal.message for refusal in report.refused] == [
            "cannot append to column `t`: 'x', expected timestamp", f"cannot append to column `t`: {texts[3]!r}, {why}",
        ]  # fmt: skip
        found = ps.open(place)["t"][:]
        assert found.mask.tolist() == [False, True, True, True, False]
        assert [str(time) for time in np.ma.getdata(found)[[0, 4]]] == ["2020-01-01T00:00:00.000000", "0001-01-01T00:00:00.000001"]


def test_times_beyond_nanoseconds_keep_their_microseconds(tmp_path):
    """The first three times use the .NET format. The first two are the minimum and maximum times in .NET."""
    times = ["0001-01-01T00:00:00.0000000", "9999-12-31T23:59:59.9999990", "1969-12-31T23:59:59.9999990Z", "2020-01-01"]
    (tmp_path / "a.csv").write_text("t,b\n" + "".join(f"{time},1\n" for time in times))
    import_data(tmp_path / "a.csv", tmp_path / "set", types={"t": "timestamp"})
    assert [str(time) for time in ps.open(tmp_path / "set")["t"][:]] == [
        "0001-01-01T00:00:00.000000", "9999-12-31T23:59:59.999999", "1969-12-31T23:59:59.999999", "2020-01-01T00:00:00.000000",
    ]  # fmt: skip


def test_rows_without_columns_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}\n{}\n")
    for source in (tmp_path / "a.jsonl", [{}, {}]):
        with pytest.raises(ps.InvalidInputError, match="no columns"):
            import_data(source, tmp_path / "set")


@pytest.mark.parametrize(
    "options", [{"delimiter": "\0"}, {"delimiter": 5}, {"quote": "\n"}, {"encoding": None}, {"encoding": "unicode_escape"}]
)
def test_options_that_mean_nothing_are_refused_by_us(tmp_path, options):
    (tmp_path / "a.csv").write_text("a,b\n\\ud800,2\n")
    with pytest.raises(ps.InvalidInputError, match=r"cannot import"):
        import_data(tmp_path / "a.csv", tmp_path / "set", **options)
    assert not (tmp_path / "set").exists()


def test_times_of_spark_in_any_century(tmp_path):
    """Spark and Hive write 96-bit times. By default, pyarrow converts them to nanoseconds, where the year 9999 overflows."""
    times = ["9999-12-31", "1500-01-01", "2024-01-01T00:00:00.000001", "0001-01-01"]
    table = pa.table({"t": pa.array(np.array(times, "datetime64[us]"))})
    pq.write_table(table, tmp_path / "t.parquet", use_deprecated_int96_timestamps=True)
    import_data(tmp_path / "t.parquet", tmp_path / "set")
    assert ps.open(tmp_path / "set")["t"][:].tolist() == table["t"].to_pylist()


@pytest.mark.parametrize(
    ("text", "header", "expected"),
    [
        ("x\n1\n\n3\n", True, [1, None, 3]),
        ("x\r\n\r\n1\r\n\r\n\r\n", True, [None, 1, None, None]),
        ("\n\nx\n\n3", True, [None, 3]),
        ("\ufeff\nx\n1\n", True, [1]),
        ("\n1\n", False, [None, 1]),
    ],
)
def test_empty_lines_of_a_csv_of_one_column_are_nulls(tmp_path, text, header, expected):
    (tmp_path / "a.csv").write_bytes(text.encode())
    assert import_data(tmp_path / "a.csv", tmp_path / "set", header=header).samples == len(expected)
    assert ps.open(tmp_path / "set")["x" if header else "f0"][:].tolist() == expected


def test_refusals_count_the_empty_lines_of_one_column(tmp_path):
    (tmp_path / "a.csv").write_text("x\n1\n\n\nbad,1\n2\n")
    report = import_data(tmp_path / "a.csv", tmp_path / "set", on_error="skip")
    assert [refusal.path.rpartition(": ")[2] for refusal in report.refused] == ["row 4"] and report.samples == 4


def test_durations_are_no_whole_numbers(tmp_path):
    rows = [{"x": np.timedelta64(1, "ns")}, {"x": np.timedelta64(1, "s")}, {"x": 7}, {"x": np.timedelta64("NaT", "ns")}]
    report = import_data(rows, tmp_path / "set", types={"x": "int64"}, on_error="skip")
    assert ps.open(tmp_path / "set")["x"][:].tolist() == [7, None] and len(report.refused) == 2
    report = import_data(rows, tmp_path / "durations", types={"x": "duration"}, on_error="skip")
    assert ps.open(tmp_path / "durations")["x"][:].astype("int64").tolist() == [10**6, None] and len(report.refused) == 2
    with pytest.raises(ps.InvalidInputError, match="row 0 is 1 seconds, expected float64"):
        ps.create(tmp_path / "f", {"x": "float64"}).append({"x": [np.timedelta64(1, "s")]})


def test_times_of_day_keep_their_nanoseconds_or_are_refused(tmp_path):
    times = pa.array([45296123456789], pa.time64("ns"))
    pq.write_table(pa.table({"t": times}), tmp_path / "plain.parquet")
    import_data(tmp_path / "plain.parquet", tmp_path / "set", types={"t": ps.Text()})
    assert ps.open(tmp_path / "set")["t"][0] == "12:34:56.123456789"
    for nested, match in (
        (pa.StructArray.from_arrays([times], ["at"]), "times in nanoseconds"),
        (pa.ListArray.from_arrays([0, 1], times), "below a micro"),
    ):
        pq.write_table(pa.table({"t": nested}), tmp_path / "nested.parquet")
        with pytest.raises((ps.UnsupportedError, ps.InvalidInputError), match=match):
            import_data(tmp_path / "nested.parquet", tmp_path / "nested")


def test_media_behind_a_null_are_what_they_are(tmp_path):
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({"image": pa.array([None, {"bytes": encoded(), "path": "x"}], kind)})
    with pa.ipc.new_file(tmp_path / "m.arrow", table.schema) as out:
        out.write(table)
    import_data(tmp_path / "m.arrow", tmp_path / "set")
    assert isinstance(ps.open(tmp_path / "set").schema["image"], ps.Image)


@pytest.mark.parametrize("other", ["uint64", "float64"])
def test_arrays_of_numbers_that_no_type_holds_are_refused(tmp_path, other):
    rows = [{"x": np.array([2**53 + 1])}, {"x": np.array([1], other)}]
    with pytest.raises(ps.InvalidInputError, match="column `x`: its arrays have dtypes"):
        import_data(rows, tmp_path / "set")


def test_dictionaries_and_views_of_text(tmp_path):
    texts = pa.array(["2020-01-01T00:00:00Z", "x", None]).dictionary_encode()
    views = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0]), pa.array(["a", "b"], pa.string_view()))
    table = pa.table({"t": texts, "v": views})
    with pa.ipc.new_file(tmp_path / "s.arrow", table.schema) as out:
        out.write(table)
    report = import_data(tmp_path / "s.arrow", tmp_path / "set", types={"t": "timestamp"}, on_error="null")
    assert [refusal.path.rpartition(": ")[2] for refusal in report.refused] == ["row 1"]
    ds = ps.open(tmp_path / "set")
    assert [str(ds["t"][0]), *ds["t"][:].mask.tolist()] == ["2020-01-01T00:00:00.000000", False, True, True]
    assert ds.schema["v"] == ps.Category() and [ds.vocabulary("v")[code] for code in ds["v"][:]] == ["a", "b", "a"]


def test_a_plus_sign_of_a_csv(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n1,a\n+5,b\n-3,c\n")
    import_data(tmp_path / "a.csv", tmp_path / "set")
    assert ps.open(tmp_path / "set")["x"][:].tolist() == [1, 5, -3]


def test_two_values_of_one_name_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a":1,"j":{}}\n{"a":1,"a":2,"j":{}}\n{"a":3,"j":{"b":1,"b":2}}\n')
    report = import_data(tmp_path / "a.jsonl", tmp_path / "set", on_error="skip")
    assert report.samples == 1 and ["two values have the name" in refusal.message for refusal in report.refused] == [True, True]


def test_empty_lists_of_another_depth_are_refused(tmp_path):
    with pytest.raises(ps.InvalidInputError, match="shape"):
        ps.create(tmp_path / "set", {"x": ps.Tensor((None,), "int8")}).append({"x": [[[], []]]})


def test_a_failed_import_removes_the_folders_it_made(tmp_path):
    (tmp_path / "a.csv").write_text("x\n1\ny\n")
    with pytest.raises(ps.InvalidInputError):
        import_data(tmp_path / "a.csv", tmp_path / "new" / "a" / "b", types={"x": "int64"})
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "csv"])
def test_a_failed_import_leaves_nothing_to_the_collector_of_garbage(tmp_path, ending):
    """Read-ahead stops when the import ends. If the garbage collector stopped read-ahead, a thread could end up waiting for itself."""
    path = tmp_path / f"x.{ending}"
    if ending == "parquet":
        pq.write_table(pa.table({"a": ["x", "y"]}), path)
    else:
        path.write_text('{"a": "x"}\n' if ending == "jsonl" else "a\nx\n")
    with pytest.raises(ps.InvalidInputError) as caught:
        import_data(path, tmp_path / "set", types={"a": "int64"})
    assert caught.value.__traceback__ is not None  # The traceback keeps the frame of `import_data` and its locals alive.
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("penstock-import")]
    suspended = [thing for thing in gc.get_objects() if isinstance(thing, GeneratorType) and thing.gi_frame is not None]
    assert not [thing for thing in suspended if "/penstock/importers/" in thing.gi_code.co_filename]


def _arrow(path, **columns):
    table = pa.table(columns)
    with pa.ipc.new_file(path, table.schema) as out:
        out.write(table)
    return path


@pytest.mark.parametrize("given", [{}, {"c": ps.Category()}])
@pytest.mark.parametrize("codes", [pa.array([0, 2]), pa.array([0, 2], pa.uint8()).dictionary_encode()])
def test_numbers_are_never_taken_for_codes_of_words(tmp_path, given, codes):
    ps.create(tmp_path / "set", {"c": ps.Category()}).append({"c": ["red", "green", "blue"]})
    path = _arrow(tmp_path / "c.arrow", c=codes)
    with pytest.raises(ps.InvalidInputError, match=r"row 0.*expected a word"):
        import_data(path, tmp_path / "set", types=given)
    report = import_data(path, tmp_path / "set", types=given, on_error="skip")
    assert report.samples == 0 and len(report.refused) == 2 and len(ps.open(tmp_path / "set")) == 3


@pytest.mark.parametrize("on_error", ["skip", "null"])
def test_views_beside_a_row_that_is_refused(tmp_path, on_error):
    media = pa.struct([("bytes", pa.binary_view()), ("path", pa.string())])
    columns = {
        "b": pa.array([b"x", b"y", None], pa.binary_view()),
        "s": pa.array(["x", "y", None], pa.string_view()),
        "c": pa.DictionaryArray.from_arrays(pa.array([0, 1, 0]), pa.array(["a", "b"], pa.string_view())),
        "v": pa.array(["p", "q", None], pa.string_view()),
        "m": pa.array([{"bytes": b"1", "path": "a"}, None, {"bytes": b"2", "path": None}], media),
        "n": pa.array([1, 300, 2]),
    }
    given = {"n": "int8", "c": ps.Category(), "v": ps.Category()}
    report = import_data(_arrow(tmp_path / "v.arrow", **columns), tmp_path / "set", types=given, on_error=on_error)
    assert [refusal.path.rpartition(": ")[2] for refusal in report.refused] == ["row 1"]
    ds = ps.open(tmp_path / "set")
    rows = [0, 2] if on_error == "skip" else [0, 1, 2]
    for name in ("b", "s"):
        assert list(ds[name][:]) == [columns[name][row].as_py() for row in rows], name
    assert list(ds["m"][:]) == [[b"1", None, b"2"][row] for row in rows]
    words = {name: [None if code is None else ds.vocabulary(name)[code] for code in ds[name][:].tolist()] for name in ("c", "v")}
    assert words == {"c": [["a", "b", "a"][row] for row in rows], "v": [["p", "q", None][row] for row in rows]}


def test_words_in_views_are_appended(tmp_path):
    ds = ps.create(tmp_path / "set", {"c": ps.Category(), "t": ps.Text(), "b": ps.Bytes()})
    views = pa.array(["a", None, "b"], pa.string_view())
    words = pa.DictionaryArray.from_arrays(pa.array([1, None, 0]), pa.array(["a", "b"], pa.string_view()))
    ds.append({"c": views, "t": views, "b": pa.array([b"x", None, b"y"], pa.binary_view())})
    ds.append({"c": words, "t": ["x"] * 3, "b": [b"x"] * 3})
    ds = ps.open(tmp_path / "set")
    assert ds.vocabulary("c") == ["a", "b"] and ds["c"][:].tolist() == [0, None, 1, 1, None, 0]
    assert list(ds["t"][:3]) == ["a", None, "b"] and list(ds["b"][:3]) == [b"x", None, b"y"]


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(3)])
def test_bytes_do_not_become_json_that_python_shows(tmp_path, kind):
    path = _arrow(tmp_path / "j.arrow", j=pa.array([b'{"}', b"[1]"], kind))
    with pytest.raises(ps.UnsupportedError, match="binary"):
        import_data(path, tmp_path / "set", types={"j": ps.Json()})


@pytest.mark.parametrize(
    "values",
    [pa.array([1.5]), pa.array([True]), pa.array([b"1"]), pa.array([[1]]), pa.array([2**31 - 1], pa.int32()).cast(pa.date32())],
)
def test_values_that_are_not_times_are_refused_with_their_column(tmp_path, values):
    path = _arrow(tmp_path / "t.arrow", t=values)
    with pytest.raises(ps.InvalidInputError, match=r"t\.arrow.*`t`.*(expected timestamp|out of the range)"):
        import_data(path, tmp_path / "set", types={"t": "timestamp"})


def test_runs_have_the_type_of_their_values_and_intervals_none(tmp_path):
    times = pa.array([5, 5, None], pa.timestamp("ms"))
    runs = {"t": times, "n": pa.array([1, 1, 2]), "s": pa.array(["a", None, None])}
    path = _arrow(tmp_path / "r.arrow", **{name: pa.compute.run_end_encode(values) for name, values in runs.items()})
    import_data(path, tmp_path / "set")
    ds = ps.open(tmp_path / "set")
    assert ds.schema == {"t": ps.Scalar("timestamp"), "n": ps.Scalar("int64"), "s": ps.Text()}
    assert (
        ds["t"][:].astype("int64").tolist() == [5000, 5000, None]
        and ds["n"][:].tolist() == [1, 1, 2]
        and list(ds["s"][:]) == ["a", None, None]
    )
    months = pa.array([pa.MonthDayNano([1, 2, 3])])
    for types, values in ((None, months), ({"i": ps.Text()}, months), (None, pa.StructArray.from_arrays([months], ["i"]))):
        with pytest.raises(ps.UnsupportedError, match="intervals of months"):
            import_data(_arrow(tmp_path / "i.arrow", i=values), tmp_path / "none", types=types)

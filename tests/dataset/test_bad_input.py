"""Bad input raises an error with the right class and code. The error names the cause and the location, and nothing is committed."""

import io
import subprocess

import numpy as np
import penstock as ps
import pytest
from penstock import _core, errors
from PIL import Image as Pillow
from servers import left_empty


def test_codes_and_classes_are_in_step():
    assert set(kind for _, kind in _core.CODES) <= set(errors._CLASSES)
    for code, kind in _core.CODES:
        made = errors.make(kind, code, ("", None, "m"), "h", [1], [], (None, None, None))
        assert type(made).__name__ in (kind + "Error",) and made.code == code and str(made) == "m\nhint: h"
    defaults = {cls.code for cls in errors._CLASSES.values()}
    assert defaults <= {code for code, _ in _core.CODES}
    assert (
        issubclass(ps.NotFoundError, KeyError)
        and issubclass(ps.InvalidInputError, ValueError)
        and issubclass(ps.OutOfRangeError, IndexError)
    )


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"": "int32"}, "1 to 255 bytes"), ({"_row_id": "int32"}, "virtual columns"), ({"x": "int33"}, "unknown dtype"), ({"x": ps.Text}, "ps.Text()"),
        ({"x": ps.Label(["a", "a"])}, "given twice"), ({"x": ps.Boxes("abcd")}, "box format"), ({"x": ps.Boxes(of="y")}, "not an image column"),
        ({"x": ps.Tensor((1 << 40, 1 << 20), "int8")}, r"2\^48"), ({"x": ps.Text(codec="brotli")}, "unknown codec"), ({1: "int32"}, "expected a str as the name"),
        ({"x": ps.Tensor((1,) * 33, "int8")}, "33 dimensions"), ({"x": ps.Keypoints(1, 9)}, "9 numbers each"), ({"a\nb": "int32"}, "control"), ([], "expected a dict"),
    ],
)  # fmt: skip
def test_schemas_that_cannot_be(root, schema, text):
    with pytest.raises(ps.InvalidInputError, match=text) as caught:
        ps.create(root, schema)
    assert caught.value.code == "invalid-schema" and not root.exists()
    for shape in ((-1,), (1.5,), (True,)):
        with pytest.raises(ps.InvalidInputError):
            ps.Tensor(shape, "int8")


SCHEMA = {
    "i": "int8", "f": "float32", "b": "bool", "time": "timestamp", "t": ps.Text(), "y": ps.Bytes(), "j": ps.Json(), "l": ps.Label(["cat", "dog"]), "k": ps.Category(),
    "v": ps.Tensor((2, 3), "float32"), "r": ps.Tensor((None, 2), "int16"), "m": ps.Image(), "o": ps.Boxes(), "mask": ps.Mask(),
}  # fmt: skip


@pytest.mark.parametrize(
    ("columns", "kind", "code"),
    [
        ({"i": [1], "f": [1.0, 2.0]}, ps.InvalidInputError, "column-lengths-differ"),
        ({"nope": [1]}, ps.NotFoundError, "column-not-found"),
        ({"i": [300]}, ps.InvalidInputError, "invalid-value"),
        ({"i": [1.5]}, ps.InvalidInputError, "invalid-value"),
        ({"i": ["1"]}, ps.InvalidInputError, "invalid-value"),
        ({"i": 5}, ps.InvalidInputError, "invalid-value"),
        ({"i": [[1, 2]]}, ps.InvalidInputError, "invalid-value"),
        ({"i": [2**70]}, ps.InvalidInputError, "invalid-value"),
        ({"f": ["x"]}, ps.InvalidInputError, "invalid-value"),
        ({"f": [1j]}, ps.InvalidInputError, "invalid-value"),
        ({"b": [2]}, ps.InvalidInputError, "invalid-value"),
        ({"time": ["not a time"]}, ps.InvalidInputError, "invalid-value"),
        ({"t": "abc"}, ps.InvalidInputError, "invalid-value"),
        ({"t": [5]}, ps.InvalidInputError, "invalid-value"),
        ({"t": [b"abc"]}, ps.InvalidInputError, "invalid-value"),
        ({"t": ["a", "\ud800"]}, ps.InvalidInputError, "invalid-value"),
        ({"y": ["text"]}, ps.InvalidInputError, "invalid-value"),
        ({"j": [{1, 2}]}, ps.InvalidInputError, "invalid-value"),
        ({"j": [float("nan")]}, ps.InvalidInputError, "invalid-value"),
        ({"l": ["cow"]}, ps.InvalidInputError, "invalid-value"),
        ({"l": [2]}, ps.InvalidInputError, "invalid-value"),
        ({"l": [-1]}, ps.InvalidInputError, "invalid-value"),
        ({"l": [True]}, ps.InvalidInputError, "invalid-value"),
        ({"k": [1.5]}, ps.InvalidInputError, "invalid-value"),
        ({"k": [0]}, ps.InvalidInputError, "invalid-value"),
        ({"v": np.zeros((2, 3, 2), "f4")}, ps.InvalidInputError, "invalid-value"),
        ({"v": [np.zeros((2, 3)), np.zeros((3, 2))]}, ps.InvalidInputError, "invalid-value"),
        ({"r": [np.zeros((2, 3), "i2")]}, ps.InvalidInputError, "invalid-value"),
        ({"r": [np.zeros((2, 2), "f4")]}, ps.InvalidInputError, "invalid-value"),
        ({"r": [np.full((1, 2), 99_999)]}, ps.InvalidInputError, "invalid-value"),
        ({"m": [b"no image"]}, ps.CorruptError, "media-undecodable"),
        ({"m": [b""]}, ps.CorruptError, "media-undecodable"),
        ({"m": [np.zeros((2, 2, 2), "u1")]}, ps.InvalidInputError, "invalid-value"),
        ({"m": [np.zeros((2, 2, 3), "f4")]}, ps.InvalidInputError, "invalid-value"),
        ({"m": [np.zeros((0, 2, 3), "u1")]}, ps.InvalidInputError, "invalid-value"),
        ({"mask": [np.zeros((2, 2, 3), "u1")]}, ps.InvalidInputError, "invalid-value"),
        ({"o": [[1, 2, 3]]}, ps.InvalidInputError, "invalid-value"),
        ([1], ps.InvalidInputError, "invalid-argument"),
    ],
)
def test_values_that_do_not_fit(root, columns, kind, code):
    ds = ps.create(root, SCHEMA)
    before = sorted(root.rglob("*"))
    with pytest.raises(kind) as caught:
        ds.append(columns)
    assert caught.value.code == code, str(caught.value)
    assert len(ds) == len(ps.open(root)) == 0 and sorted(root.rglob("*")) == before, "nothing is committed, and no file remains"
    message = str(caught.value)
    if isinstance(columns, dict) and code != "column-lengths-differ":
        assert f"`{next(iter(columns))}`" in message, "the message names the column"


def test_missing_files_and_odd_arguments(root, tmp_path):
    ds = ps.create(root, SCHEMA)
    with pytest.raises(ps.NotFoundError) as caught:
        ds.append({"m": [tmp_path / "gone.jpg"]})
    assert caught.value.code == "source-not-found" and "gone.jpg" in str(caught.value)
    with pytest.raises(ps.InvalidInputError):
        ds.append({"m": [None]}, validate="maybe")
    with pytest.raises(ps.InvalidInputError):
        ds.take([], on_corrupt="maybe")
    for wrong in ({"threads": 0}, {"memory_bytes": -1}, {"image_pixels": 1.5}, {"threads": True}):
        with pytest.raises(ps.InvalidInputError):
            ps.configure(**wrong)


def test_empty_things_are_whole(root):
    ds = ps.create(root, {})
    assert len(ds) == 0 and ds[:] == {} and list(ds.scan()) == []
    ds = ps.create(root.with_name("two"), SCHEMA)
    receipt = ds.append({name: [] for name in SCHEMA})
    assert len(receipt.row_ids) == 0 and len(ds) == 0 and len(ds.log()) == 2
    assert {name: len(values) for name, values in ds[:].items()} == dict.fromkeys(SCHEMA, 0)
    ds.append({})
    ds.append({"v": np.zeros((0, 2, 3), "f4"), "t": ["", ""][:0]})
    ds.append({"t": ["", ""], "y": [b"", b""], "r": [np.zeros((0, 2), "i2")] * 2})
    assert ds["t"][:] == ["", ""] and ds["y"][:] == [b"", b""] and ds["r"][1].shape == (0, 2) and not ds.verify()["problems"]


def jpeg(size=(64, 48)):
    out = io.BytesIO()
    Pillow.fromarray(np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)).save(out, "JPEG")
    return out.getvalue()


def test_truncated_media_are_found_by_decode_and_reported_with_their_rows(root):
    whole = jpeg()
    half = whole[: len(whole) // 2]
    ds = ps.create(root, {"m": ps.Image()})
    with pytest.raises(ps.CorruptError) as caught:
        ds.append({"m": [whole, half, whole, half]}, validate="decode")
    assert caught.value.rows == [1, 3] and caught.value.code == "media-undecodable"
    ds.append({"m": [whole, half, whole]})  # The image is truncated, but its header is complete.
    with pytest.raises(ps.CorruptError) as caught:
        ds.take([2, 1, 0])
    assert caught.value.rows == [1] and caught.value.row_ids == [1] and "sample 1" in str(caught.value)
    found = ds.take([2, 1, 0], on_corrupt="null")["m"]
    assert found[1] is None and found[0].shape == (48, 64, 3)
    assert ds.take([1], decode=False)["m"] == [half]


def test_hostile_images_through_import(root, hostile):
    offered = [path for path in hostile.iterdir() if path.is_file()]
    report = ps.importers.import_data(hostile, root, validate="decode", on_error="skip")
    assert report.samples + len(report.refused) == len(offered) and len(report.refused) > 40
    ds = ps.open(root)
    assert all(image.ndim == 3 for image in ds["image"])
    with pytest.raises(ps.Error):
        ps.importers.import_data(hostile, root.with_name("other"), validate="decode")
    assert left_empty(root.with_name("other")), "a failed import leaves no dataset"


def test_pixel_limit(root):
    ds = ps.create(root, {"m": ps.Image()})
    before = ps.configure()["image_pixels"]
    try:
        ps.configure(image_pixels=1000)
        with pytest.raises(ps.InvalidInputError) as caught:
            ds.append({"m": [jpeg()]})
        assert caught.value.code == "media-too-large" and "3072" not in str(caught.value.hint)
    finally:
        ps.configure(image_pixels=before)
    ds.append({"m": [jpeg()]})


@pytest.mark.local
def test_damaged_datasets_in_fresh_processes(root, tmp_path):
    """Flip one bit in each log or data file in turn, and read the dataset in a new process. The testkit flips far more bits in memory."""
    import shutil
    import sys

    ds = ps.create(root, {"t": ps.Text(), "v": ps.Tensor((300,), "float64")})
    ds.append({"t": ["some text"] * 5, "v": np.arange(1500.0).reshape(5, 300)})
    script = "import sys, penstock as ps\nds = ps.open(sys.argv[1]); b = ds[:]; assert b['t'] == ['some text'] * 5 and b['v'].sum() == 1124250.0; print('same')"
    outcomes = []
    for path in sorted(path for path in root.rglob("*") if (path.is_file() and "log" in str(path)) or path.parent.name == "d"):
        copy = tmp_path / "copy"
        shutil.copytree(root, copy)
        target = copy / path.relative_to(root)
        body = bytearray(target.read_bytes())
        body[len(body) // 3] ^= 4
        target.write_bytes(bytes(body))
        run = subprocess.run([sys.executable, "-c", script, str(copy)], capture_output=True, text=True)
        outcomes.append(run.stdout.strip() or run.stderr.strip().splitlines()[-2][:60])
        assert run.returncode == 0 or "CorruptError" in run.stderr or "NotFoundError" in run.stderr or "UnsupportedError" in run.stderr, (
            run.stderr
        )
        shutil.rmtree(copy)
    assert sum(outcome != "same" for outcome in outcomes) >= 2


def crc32c(data):
    """Return the CRC-32C of `data`, computed bit by bit."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return (value ^ 0xFFFFFFFF).to_bytes(4, "little")


def test_unknown_features_are_refused(root):
    """Set a feature bit in a real record and recompute its checksum. Readers refuse unknown read bits, and writers refuse unknown write
    bits. Later bits have no meaning, and are ignored.
    """
    ds = ps.create(root, {"n": "int32"})
    record = next(path for path in (root / "log").rglob("*") if path.is_file() and path.name != "hint")
    body = bytearray(record.read_bytes())
    assert crc32c(body[:-4]) == bytes(body[-4:])
    first = 8 + 1 + 16 + 8 + 8  # These are the sizes of the header, kind, dataset, branch and number.
    for offset, outcome in ((first, "read"), (first + 8, "write"), (first + 16, "ignored")):
        changed = bytearray(body)
        changed[offset + 5] |= 1
        changed[-4:] = crc32c(changed[:-4])
        record.write_bytes(changed)
        if outcome == "read":
            with pytest.raises(ps.UnsupportedError) as caught:
                ps.open(root)
            assert caught.value.code == "unknown-feature" and "upgrade" in caught.value.hint
        elif outcome == "write":
            with pytest.raises(ps.UnsupportedError):
                ps.open(root).append({"n": [1]})
        else:
            assert len(ps.open(root)) == 0
    record.write_bytes(body)
    assert len(ds.refresh()) == 0


@pytest.mark.parametrize(
    "kind, value", [("bool", 2), ("int8", 300), ("float16", 1e9), ("float32", "x"), ("timestamp", "x"), ("complex64", "x")]
)
def test_a_value_that_does_not_fit_is_reported_in_its_own_row_after_nulls(kind, value):
    ds = ps.create(f"memory://own-row-{kind}", {"v": kind, "n": "int8"})
    good = {"timestamp": "2026-01-01"}.get(kind, 1 if kind != "bool" else True)
    for values, row in (([None, None, value], 2), ([None, good, value], 2), ([None, value, None, value], 1), ([value, None], 0)):
        with pytest.raises(ps.InvalidInputError, match=f"column `v`: row {row} (is|has) {value!r}") as caught:
            ds.append({"v": values, "n": [0] * len(values)})
        assert (caught.value.column, caught.value.rows) == ("v", [row]) and len(ds) == 0

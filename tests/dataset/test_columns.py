"""Values of every column type and dtype are read back bit for bit, including nulls, with every codec and layout."""

import datetime
import decimal
import fractions
import io
import itertools
import pathlib
import uuid

import ml_dtypes
import numpy as np
import pandas as pd
import penstock as ps
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.values.dtypes import DTYPES, numpy_dtype
from PIL import Image as Pillow


def random_array(rng, shape, dtype):
    wanted = numpy_dtype(dtype)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype == "time":
        return rng.integers(0, 86_400_000_000, shape).view(wanted)
    raw = rng.integers(0, 256, (*shape, wanted.itemsize), dtype=np.uint8)
    return raw.reshape(-1).view(wanted).reshape(shape)


def same(a, b):
    """Return whether two arrays are identical bit for bit, including NaN payloads."""
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", ["none", "lz4", "zstd"])
def test_scalars_and_tensors_of_every_dtype(root, dtype, codec):
    rng = np.random.default_rng(0)
    scalar, fixed = random_array(rng, (300,), dtype), random_array(rng, (300, 3, 70), dtype)
    ragged = [random_array(rng, (i % 4, 2, i % 3), dtype) for i in range(300)]
    big = [random_array(rng, (i * 50,), dtype) for i in range(300)]
    schema = {
        "scalar": ps.Scalar(dtype, codec=codec),
        "fixed": ps.Tensor((3, 70), dtype, codec=codec),
        "ragged": ps.Tensor((None, 2, None), dtype, codec=codec),
        "big": ps.Tensor((None,), dtype, codec=codec),
    }
    ds = ps.create(root, schema)
    ds.append({"scalar": scalar, "fixed": fixed, "ragged": ragged, "big": big})
    ds = ps.open(root)
    assert ds.schema == schema
    order = rng.permutation(300)
    batch = ds.take(order)
    assert same(batch["scalar"], scalar[order])
    assert same(batch["fixed"], fixed[order])
    for place, position in enumerate(order):
        assert same(batch["ragged"][place], ragged[position])
        assert same(batch["big"][place], big[position])
    assert batch["fixed"].flags.writeable and batch["fixed"].flags.owndata
    assert not ds.verify()["problems"]


SOURCES = [
    np.dtype(name)
    for name in (
        "int8",
        "uint8",
        "int16",
        "uint16",
        "int32",
        "uint32",
        "int64",
        "uint64",
        "float16",
        "float32",
        "float64",
        "complex64",
        "complex128",
    )
]
SOURCES.append(np.dtype(ml_dtypes.bfloat16))


def extremes(dtype):
    """Return the smallest and largest values of a dtype, and values near the limits of other dtypes."""
    if dtype.kind in "iu":
        low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
        some = [
            low,
            high,
            0,
            *(sign * 2**power + by for power in (7, 8, 15, 16, 31, 32, 63) for sign in (-1, 1) for by in (-1, 0, 1)),
            65504,
            65519,
            65520,
        ]
        return np.array(sorted({value for value in some if low <= value <= high}), dtype)
    info = ml_dtypes.finfo(dtype)
    some = [float(info.max), float(info.min), 65504.0, 65519.0, 65520.0, 3.4e38, 3.5e38, 1e300, 0.0, float("inf"), float("nan")]
    with np.errstate(over="ignore"):
        values = np.array([value for value in some if abs(value) <= float(info.max) or not np.isfinite(value)]).astype(dtype)
    return values * (1 + 1j) if dtype.kind == "c" else values


@pytest.mark.parametrize("names", [1, 2, 255, 256, 257, 258, 65_535, 65_536, 65_537, 65_538])
def test_every_name_of_a_label_has_a_code(root, names):
    ds = ps.create(root, {"l": ps.Label([f"name {number}" for number in range(names)])})
    codes = sorted({0, names // 2, names - 1})
    ds.append({"l": codes})
    ds.append({"l": [f"name {code}" for code in codes]})
    assert ds["l"][:].tolist() == [*codes, *codes] and ds.verify()["problems"] == []
    with pytest.raises(ps.Error, match=str(names)):
        ds.append({"l": [names]})


@pytest.mark.parametrize("source", SOURCES, ids=str)
@pytest.mark.parametrize("dtype", [name for name in DTYPES if name not in ("bool", "timestamp", "duration", "time")])
def test_a_value_of_any_other_type_is_stored_or_refused_but_no_other_value(source, dtype):
    ds = ps.create(f"memory://pairs-{source}-{dtype}", {"scalar": dtype, "tensor": ps.Tensor((2,), dtype)})
    for value in extremes(source):
        for name, values in (
            ("scalar", np.array([value])),
            ("scalar", [value.item()]),
            ("scalar", [value]),
            ("tensor", np.array([[value, value]])),
        ):
            try:
                ds.append({name: values})
            except ps.InvalidInputError:
                continue
            found = np.ravel(ds[len(ds) - 1][name])[0]
            if not np.isfinite(complex(value)):
                assert str(complex(found)) == str(complex(value)), (name, value, found)
            elif numpy_dtype(dtype).kind in "iu":
                assert int(found) == int(value), (name, value, found)
            elif numpy_dtype(source).kind in "iu":
                assert int(complex(found).real) == int(value), (name, value, found)
            else:
                for part in ("real", "imag"):
                    wanted = getattr(complex(value), part)
                    assert abs(getattr(complex(found), part) - wanted) <= abs(wanted) / 100, (name, value, found)


@pytest.mark.parametrize("free", [2, 3, 4])
def test_a_tensor_of_any_empty_shape_keeps_it(free):
    """Append each shape separately, and then all shapes in one append."""
    shapes = list(itertools.product(range(3), repeat=free))
    ds = ps.create(f"memory://empty-{free}", {"v": ps.Tensor((None,) * free, "int16")})
    for shape in shapes:
        ds.append({"v": [np.zeros(shape, np.int16)]})
    ds.append({"v": [np.zeros(shape, np.int16) for shape in shapes]})
    assert [value.shape for value in ds[:]["v"]] == shapes * 2 == [ds[index]["v"].shape for index in range(len(ds))]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_ragged_tensors_keep_each_size_however_many_are_none(data):
    """A size of 0 makes a value empty, so the element count does not determine the value's other sizes."""
    free = data.draw(st.integers(1, 4))
    fixed = data.draw(st.lists(st.integers(1, 3), max_size=1))
    shapes = data.draw(st.lists(st.one_of(st.none(), st.lists(st.integers(0, 4), min_size=free, max_size=free)), min_size=1, max_size=20))
    values = [None if shape is None else np.full((*shape, *fixed), index % 100, np.int8) for index, shape in enumerate(shapes)]
    ds = ps.create(f"memory://ragged-{uuid.uuid4()}", {"v": ps.Tensor((*[None] * free, *fixed), "int8")})
    ds.append({"v": values})
    for got in (ds[:]["v"], [ds[index]["v"] for index in range(len(values))]):
        for found, value in zip(got, values, strict=True):
            assert found is None if value is None else same(found, value), (found, value)


def test_nulls_everywhere(root):
    rng = np.random.default_rng(1)
    pixels = rng.integers(0, 255, (4, 5, 3), dtype=np.uint8)
    values = {
        "scalar": 7, "flag": True, "time": np.datetime64("2026-01-02T03:04:05.000006"), "text": "héllo", "blob": b"\0\xff", "json": {"a": [1, None]},
        "label": "dog", "category": "tabby", "fixed": np.arange(6, dtype=np.float32).reshape(2, 3), "ragged": np.ones((2, 4), np.int16),
        "image": pixels, "boxes": np.ones((1, 4), np.float32), "mask": pixels[..., 0], "points": np.ones((2, 3, 2), np.float32),
    }  # fmt: skip
    schema = {
        "scalar": "int32", "flag": "bool", "time": "timestamp", "text": ps.Text(), "blob": ps.Bytes(), "json": ps.Json(), "label": ps.Label(["cat", "dog"]),
        "category": ps.Category(), "fixed": ps.Tensor((2, 3), "float32"), "ragged": ps.Tensor((None, 4), "int16"), "image": ps.Image(),
        "boxes": ps.Boxes(of="image"), "mask": ps.Mask(of="image"), "points": ps.Keypoints(3, 2, of="image"),
    }  # fmt: skip
    ds = ps.create(root, schema)
    for name, value in values.items():  # Append values to one column, and leave all others null.
        ds.append({name: [value, None, value]})
    assert len(ds) == 3 * len(values)
    for index, (name, value) in enumerate(values.items()):
        there, gone, again = ds[3 * index], ds[3 * index + 1], ds[3 * index + 2]
        expected = {"label": 1, "category": 0}.get(name, value)
        for sample in (there, again):
            assert np.array_equal(sample[name], expected), name
            assert all(other is None for key, other in sample.items() if key != name)
        assert all(other is None for other in gone.values())
    column = ds["scalar"][:]
    assert isinstance(column, np.ma.MaskedArray) and column.mask.sum() == len(ds) - 2
    assert isinstance(ds["fixed"][:], np.ma.MaskedArray) and ds["fixed"][:].mask.shape == (len(ds), 2, 3)
    assert not isinstance(ds["scalar"][0:1], np.ma.MaskedArray), "the array is masked only if it contains a null"
    assert not ds.verify()["problems"]


def encoded(array, format, **options):
    out = io.BytesIO()
    Pillow.fromarray(array).save(out, format, **options)
    return out.getvalue()


def test_images_keep_their_bytes_and_decode_as_pillow_does(root):
    rng = np.random.default_rng(2)
    rgb, grey, rgba = (rng.integers(0, 256, shape, dtype=np.uint8) for shape in ((37, 53, 3), (37, 53), (9, 8, 4)))
    deep = rng.integers(0, 65536, (6, 7), dtype=np.uint16)
    palette = io.BytesIO()
    Pillow.fromarray(rgb).quantize(7).save(palette, "PNG")
    offered = [
        encoded(rgb, "JPEG", quality=95), encoded(rgb, "JPEG", progressive=True), encoded(grey, "JPEG"), encoded(rgb, "PNG"), encoded(rgba, "PNG"),
        encoded(grey, "PNG"), encoded(deep, "PNG"), encoded(grey > 128, "PNG"), palette.getvalue(),
    ]  # fmt: skip
    ds = ps.create(root, {"image": ps.Image(mode="stored")})
    ds.append({"image": offered}, validate="decode")
    assert ds.take(range(len(offered)), decode=False)["image"] == offered
    for index, body in enumerate(offered):
        picture = Pillow.open(io.BytesIO(body))
        if picture.mode in ("P", "1"):
            picture = picture.convert("RGB" if picture.mode == "P" else "L")
        expected = np.asarray(picture)
        expected = expected.astype(np.uint16) if expected.dtype == np.int32 else expected
        found = ds["image"][index]
        assert found.dtype == expected.dtype
        assert found.shape == (*expected.shape[:2], 1 if expected.ndim == 2 else expected.shape[2])
        # Pillow may be linked against a different libjpeg, so decoded JPEGs may differ by rounding.
        assert np.abs(found.squeeze().astype(int) - expected.astype(int)).max() <= (1 if body[:2] == b"\xff\xd8" else 0)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("before", [[], [b"http://ns.adobe.com/xap/1.0/\0<x/>"], [b"other\0", b"http://ns.adobe.com/xap/1.0/\0<x/>"]])
def test_exif_orientation_and_its_switch(root, orientation, before):
    pixels = np.zeros((16, 32, 3), np.uint8)
    pixels[:8, :8] = 255
    exif = Pillow.Exif()
    exif[0x0112] = orientation
    body = encoded(pixels, "JPEG", exif=exif, quality=100)
    # XMP segments have the same marker as EXIF segments.
    others = b"".join(b"\xff\xe1" + (len(part) + 2).to_bytes(2, "big") + part for part in before)
    body = body[:2] + others + body[2:]
    ds = ps.create(root, {"upright": ps.Image(), "raw": ps.Image(exif_orientation=False)})
    ds.append({"upright": [body], "raw": [body]})
    from PIL import ImageOps

    expected = np.asarray(ImageOps.exif_transpose(Pillow.open(io.BytesIO(body))))
    assert ds[0]["upright"].shape == expected.shape
    assert np.abs(ds[0]["upright"].astype(int) - expected).max() <= 2
    assert ds[0]["raw"].shape == (16, 32, 3)


def test_masks_keep_class_numbers(root):
    classes = np.arange(12, dtype=np.uint8).reshape(3, 4) % 5
    picture = Pillow.fromarray(classes, "P")
    picture.putpalette([200, 10, 10] * 5)
    out = io.BytesIO()
    picture.save(out, "PNG", bits=4)
    ds = ps.create(root, {"mask": ps.Mask()})
    ds.append({"mask": [out.getvalue(), classes, classes.astype(np.uint16) * 300, classes > 2]})
    assert np.array_equal(ds["mask"][0], classes) and np.array_equal(ds["mask"][1], classes)
    assert np.array_equal(ds["mask"][2], classes.astype(np.uint16) * 300) and np.array_equal(ds["mask"][3], classes > 2)


def test_categories_keep_codes_across_commits_and_take_codes(root):
    ds = ps.create(root, {"breed": ps.Category()})
    ds.append({"breed": ["tabby", "siamese", "tabby"]})
    first = ds["breed"][:].tolist()
    ds.append({"breed": ["persian", "tabby"]})
    ds.append({"breed": np.array([2, 0])})
    assert first == [0, 1, 0] and ds["breed"][:].tolist() == [0, 1, 0, 2, 0, 2, 0]
    assert ds.vocabulary("breed") == ["tabby", "siamese", "persian"]
    with pytest.raises(ps.InvalidInputError, match="vocabulary has 3 words"):
        ds.append({"breed": [3]})


def test_two_writers_add_the_same_word(root):
    one = ps.create(root, {"breed": ps.Category()})
    two = ps.open(root)
    one.append({"breed": ["tabby", "siamese"]})
    two.append({"breed": ["persian", "tabby"]})  # The handle `two` has not seen the word `tabby` yet.
    codes = ps.open(root)["breed"][:]
    words = ps.open(root).vocabulary("breed")
    assert [words[code] for code in codes] == ["tabby", "siamese", "persian", "tabby"]
    assert codes[0] == codes[3]


def test_timestamps_in_all_forms(root):
    aware = datetime.datetime(2026, 5, 4, 3, 2, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=2)))
    ds = ps.create(root, {"time": "timestamp"})
    ds.append({"time": [aware, "2026-01-01", None, datetime.datetime(1969, 1, 1)]})
    ds.append({"time": np.array(["2026-01-01T00:00:00.123456000"], "datetime64[ns]")})
    assert ds["time"][0] == np.datetime64("2026-05-04T01:02:01") and ds["time"][3] < np.datetime64(0, "us") and ds["time"][2] is None
    assert ds["time"][4] == np.datetime64("2026-01-01T00:00:00.123456")


def test_bfloat16_is_that(root):
    ds = ps.create(root, {"x": "bfloat16"})
    ds.append({"x": [1.0, 2.5]})
    assert ds["x"][:].dtype == ml_dtypes.bfloat16 and ds["x"][:].astype(float).tolist() == [1.0, 2.5]


shapes = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    shapes=shapes, texts=st.lists(st.one_of(st.none(), st.text(max_size=30)), max_size=12), codec=st.sampled_from(["none", "lz4", "zstd"])
)
def test_any_ragged_shapes_and_texts_come_back(tmp_path_factory, shapes, texts, codec):
    count = min(len(shapes), len(texts))
    arrays = [np.full(shape, index, np.int32) for index, shape in enumerate(shapes[:count])]
    ds = ps.create(tmp_path_factory.mktemp("any") / "d", {"a": ps.Tensor((None, None), "int32", codec=codec), "t": ps.Text(codec=codec)})
    ds.append({"a": arrays, "t": texts[:count]})
    assert ds["t"][:] == texts[:count]
    found = ds["a"][:]
    assert len(found) == count and all(same(found[i], arrays[i]) for i in range(count))


def test_files_are_stored_as_they_are_read(tmp_path):
    """Files are read straight into the column's buffer. Values include nulls, bytes, empty files and a file whose reported size is 0."""
    paths = []
    for number, size in enumerate([5, 0, 300_000, 1, 2_000_000]):
        paths.append(tmp_path / f"{number}")
        paths[-1].write_bytes(bytes([number]) * size)
    grows = pathlib.Path("/proc/version")  # The system reports a size of 0 bytes for this file.
    for values in ([*paths], [paths[0], None, paths[2]], [None, b"between", *paths, grows, None, paths[4]], [grows]):
        ds = ps.create(tmp_path / f"ds{len(values)}", {"blob": ps.Bytes()})
        ds.append({"blob": values})
        stored = [value.read_bytes() if isinstance(value, pathlib.Path) else value for value in values]
        assert ds["blob"][:] == stored
    missing = tmp_path / "missing"
    with pytest.raises(ps.Error, match=r"row 1.*missing|missing.*row 1") as told:
        ds.append({"blob": [paths[0], missing]})
    assert told.value.rows == [1]


ODD = [
    None, True, False, 0, -1, 7, 255, 256, 2**31, 2**53 + 1, 2**63, 2**70, 0.0, 1.0, 1.5, 1e300, float("nan"), float("inf"), "", "a", "7", "\ud800", b"a", b"\xff",
    np.int8(3), np.int64(2**40), np.float16(0.1), np.float32(0.1), np.float64(0.1), np.bool_(True), np.str_("b"), np.datetime64("2020-01-01"),
    datetime.datetime(2020, 1, 1), datetime.date(2020, 1, 1), decimal.Decimal("1.5"), fractions.Fraction(1, 2), 1j, pd.NA, pd.NaT, pd.Timestamp("2020-01-01"),
    [1], [], {}, object(), np.ma.masked, np.zeros(1), np.zeros(()), ml_dtypes.bfloat16(2),
]  # fmt: skip
MANY_KINDS = {
    **{dtype: dtype for dtype in DTYPES}, "text": ps.Text(), "bytes": ps.Bytes(), "json": ps.Json(), "label": ps.Label(["a", "b", "7"]), "category": ps.Category(),
}  # fmt: skip


@pytest.mark.parametrize("kind", MANY_KINDS)
def test_a_long_list_takes_and_refuses_what_a_short_one_does(tmp_path, kind):
    """A long list is converted in one step, but the same values are accepted and stored as for a short list. Errors name the row."""
    like = {
        "text": ["a", "é"],
        "bytes": [b"a", b"b"],
        "json": [{}, [1]],
        "label": ["a", "b"],
        "category": ["a", "c"],
        "bool": [True, False],
        "duration": [datetime.timedelta(1), np.timedelta64(-5, "s")],
        "time": ["01:00", datetime.time(23)],
    }.get(kind)
    like = like or {"u": [1, 2], "i": [1, -2], "f": [1.5, 2.5], "c": [1j, 2.0]}.get(numpy_dtype(kind).kind, [1, 2])
    at = 1777
    for number, value in enumerate(ODD):
        outcomes = []
        for place, values in ((1, [like[0], value, like[1]]), (at, like * (at // 2) + [like[0], value, *like[::-1] * 100])):
            ds = ps.create(f"memory://{kind}-{place}-{number}", {"v": MANY_KINDS[kind]})
            try:
                ds.append({"v": values})
            except ps.Error as error:
                outcomes.append((error.code, [row - place for row in error.rows or ()]))
            else:
                column = ds.take([place - 1, place, place + 1])["v"]
                if kind in ("label", "category"):
                    words = ds.vocabulary("v")
                    column = [
                        None if missing else words[code]
                        for code, missing in zip(np.ma.getdata(column), np.ma.getmaskarray(column), strict=True)
                    ]
                outcomes.append(repr(column))
        assert outcomes[0] == outcomes[1], f"{value!r} of {type(value)}"


def test_nulls_within_a_value_are_reported_as_such(tmp_path):
    for kind in (ps.Tensor((None,), "float32"), ps.Tensor((2,), "float32")):
        ds = ps.create(tmp_path / str(kind.shape[0]), {"v": kind})
        with pytest.raises(ps.InvalidInputError, match=r"row 1 contains.*None") as caught:
            ds.append({"v": [[1.0, 2.0], [1.0, None]]})
        assert caught.value.rows == [1]


@pytest.mark.parametrize("count", [10, 1500])
def test_numpy_dates_before_numpy_numbers_are_a_null_and_numbers(tmp_path, count):
    """Arrow crashes the process on such a list unless the element types are checked first."""
    ds = ps.create(tmp_path / "ds", {"v": "float32"})
    ds.append({"v": [np.datetime64("NaT")] + [np.float32(0.5)] * count})
    found = ds["v"][:]
    assert found.mask.tolist() == [True] + [False] * count and found.compressed().tolist() == [0.5] * count


LOCAL = ["mapped", "buffered", "direct"]


def test_two_categories_in_one_file_keep_their_words(root):
    schema = {"one": ps.Category(), "two": ps.Category(), "three": ps.Category()}
    ds = ps.create(root, schema)
    words = {"one": ["a", "b", "c"], "two": ["c", "a", "d"], "three": ["x", "c", "x"]}
    ds.append(words)
    ds.append({name: list(reversed(values)) for name, values in words.items()})
    ds = ps.open(root)
    batch = ds.take([5, 0, 2, 4])
    for name, values in words.items():
        both, names = values + values[::-1], ds.vocabulary(name)
        assert [names[code] for code in batch[name]] == [both[place] for place in (5, 0, 2, 4)]
        assert [names[code] for code in ds[name][:]] == both
    assert next(ds.scan(batch_size=6)).to_pydict() == {name: values + values[::-1] for name, values in words.items()}


@pytest.mark.local
@pytest.mark.parametrize("io", LOCAL)
def test_memory_below_a_null_is_zero(tmp_path, io):
    rows = 1_500_000
    ds = ps.create(tmp_path / "set", {"n": "int8", "b": "bool", "f": "float64"})
    ds.append({"n": np.ones(rows, np.int8)})
    ds.append({"n": [1], "b": [True], "f": [1.0]})
    ds = ps.open(tmp_path / "set", io=io)
    for name in ("b", "f", "b"):
        filled = ds.take(np.arange(rows), columns=["n"])["n"]
        filled[:] = 17
        del filled
        found = ds[name][:]
        assert found.mask[:-1].all() and not found.mask[-1] and not np.ma.getdata(found)[:-1].any()

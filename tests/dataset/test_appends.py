"""Append values from many libraries, including nulls, containers and dates. Also check casts, and the cost of wide or uneven schemas."""

import collections
import datetime
import gc
import io
import os
import pathlib
import struct

import measured
import ml_dtypes
import numpy as np
import pandas as pd
import penstock as ps
import pyarrow as pa
import pytest
import torch
from PIL import Image as Pillow


def test_a_fork_with_an_open_transaction_leaves_it_to_the_parent(root):
    ds = ps.create(root, {"x": ps.Tensor((1 << 20,), "uint8")})
    tx = ds.transaction("forked")
    for value in range(3):
        tx.append({"x": np.full((8, 1 << 20), value, "u1")})
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            for forbidden in (lambda: tx.append({"x": np.zeros((1, 1 << 20), "u1")}), tx.commit):
                try:
                    forbidden()
                except ps.ClosedError:
                    continue
                os._exit(2)
            tx.abort()
            del tx
            gc.collect()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    tx.commit()
    assert len(ds) == 24 and ds[17]["x"].sum() == 2 << 20 and not ds.verify()["problems"]


def test_pillow_images_of_every_mode(root):
    rng = np.random.default_rng(0)
    rgb = Pillow.fromarray(rng.integers(0, 255, (6, 7, 3), dtype=np.uint8))
    modes = ["L", "RGB", "RGBA", "P", "1", "LA", "CMYK", "YCbCr"]
    offered = [rgb.convert(mode) for mode in modes]
    ds = ps.create(root, {"m": ps.Image(mode="stored")})
    ds.append({"m": offered})
    for image, mode, found in zip(offered, modes, ds["m"][:], strict=True):
        wanted = np.asarray(image.convert("L" if mode in ("L", "1") else "RGBA" if mode in ("RGBA", "LA") else "RGB"))
        assert np.array_equal(found.squeeze(), wanted), mode
    with pytest.raises(ps.InvalidInputError, match="mode"):
        ds.append({"m": [rgb.convert("HSV")]})
    masks = ps.create(root.with_name("masks"), {"m": ps.Mask()})
    indexed = rgb.quantize(5)
    masks.append({"m": [indexed]})
    assert np.array_equal(masks["m"][0], np.asarray(indexed))


@pytest.mark.parametrize("mode, key", [("RGB", (255, 0, 255)), ("L", 7), ("P", 3)])
def test_a_pillow_image_with_a_transparent_colour_keeps_it(root, mode, key):
    image = Pillow.new(mode, (4, 3), key)
    image.putpixel((1, 1), (1, 2, 3) if mode == "RGB" else 1)
    file = io.BytesIO()
    image.save(file, "PNG", transparency=key)
    picture = Pillow.open(file)
    ds = ps.create(root, {"image": ps.Image(mode="stored")})
    ds.append({"image": [picture, file.getvalue()]})
    as_object, as_file = next(iter(ds.loader(batch_size=2)))["image"]
    assert np.array_equal(as_object, np.asarray(picture.convert("RGBA"))) and (as_object[1, 1, 3], mode) != (0, "RGB")
    assert mode != "RGB" or np.array_equal(as_file, as_object)


def test_collate_turns_images_only(root):
    ds = ps.create(root, {"x": ps.Tensor((2, 3, 4), "float32"), "r": ps.Tensor((None, None, 3), "uint8"), "m": ps.Image()})
    ds.append({"x": np.zeros((2, 2, 3, 4), "f4"), "r": np.zeros((2, 5, 6, 3), "u1"), "m": np.zeros((2, 8, 9, 3), "u1")})
    for samples in (ds.take([0, 1]), [ds[0], ds[1]], [ds.torch()[0], ds.torch()[1]], ds.torch().__getitems__([0, 1])):
        batch = ps.torch.collate(samples)
        assert batch["x"].shape == (2, 2, 3, 4) and batch["m"].shape == (2, 3, 8, 9)
        assert all(value.shape == (5, 6, 3) for value in batch["r"])


def test_masks_are_nulls_as_a_whole_or_refused(root):
    ds = ps.create(root, {"r": ps.Tensor((None,), "float32"), "v": ps.Tensor((2,), "float32")})
    whole = np.ma.masked_array(np.ones((2, 2)), [[0, 0], [1, 1]])
    ds.append({"r": whole, "v": whole})
    assert ds[1] == {"r": None, "v": None} and ds[0]["r"].tolist() == [1, 1]
    for column in ("r", "v"):
        with pytest.raises(ps.InvalidInputError, match="row 0 is partly masked"):
            ds.append({column: np.ma.masked_array(np.ones((2, 2)), [[0, 1], [0, 0]])})


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        ("timestamp", np.array([2**60], "M8[s]")), ("timestamp", np.array([400_000], "M8[Y]")), ("timestamp", np.array([2**64 - 1], np.uint64)),
        ("float16", [1e10]), ("float32", [1e300]), ("float32", np.array([1e300])), ("bfloat16", np.array([1e300])), ("uint64", [-1]), ("uint64", [2**64]),
        ("int64", np.array([2**63], np.uint64)), ("complex64", np.array([1e300j])),
    ],
)  # fmt: skip
def test_no_cast_changes_a_value(root, dtype, values):
    ds = ps.create(root, {"x": dtype})
    with pytest.raises(ps.InvalidInputError, match="row 0"):
        ds.append({"x": values})
    assert len(ds) == 0


def test_dimensions_of_nothing(root):
    for shape in ((0, 3), (None, 0)):
        with pytest.raises(ps.InvalidInputError, match="dimension of 0"):
            ps.create(root, {"x": ps.Tensor(shape, "int8")})


def test_positions_that_are_none(root):
    ds = ps.create(root, {"x": "int32"})
    ds.append({"x": [1, 2]})
    for wrong in (np.array([2**64 - 1], np.uint64), 2**70, [2**70]):
        with pytest.raises((ps.OutOfRangeError, ps.InvalidInputError)):
            ds[wrong] if not isinstance(wrong, np.ndarray) else ds.take(wrong)
    for wrong in (True, np.True_, np.ma.masked_array([0], [True])):
        with pytest.raises(ps.InvalidInputError):
            ds[wrong]
    with pytest.raises(ps.InvalidInputError, match="columns="):
        ds.take([0], columns="x")


def test_nulls_of_every_library(root):
    ds = ps.create(
        root, {"t": "timestamp", "i": "uint64", "f": "float64", "s": ps.Text(), "k": ps.Category(), "v": ps.Tensor((2,), "float32")}
    )
    ds.append({"t": np.array(["NaT", "2026-01-01"], "M8[us]"), "i": [None, 2**63], "f": pd.array([None, 1.5], "Float64")})
    ds.append(
        {"t": [np.datetime64("NaT"), 5], "i": pd.array([None, 7], "Int64"), "s": pd.Series([np.nan, "x"]), "k": pd.Categorical([None, "y"])}
    )
    ds.append({"t": pd.Series(pd.to_datetime([None, "2026-01-01T02:00:00+02:00"], utc=True)), "i": pa.array([None, 2**63], pa.uint64())})
    ds.append({"v": pa.array([None, [1, 2]], pa.list_(pa.float32(), 2)), "f": np.array([None, 2], object)})
    ds.append({"v": pa.array([[3, 4], [1, 2]], pa.list_(pa.float32(), 2)), "f": [float("nan"), 2]})
    assert all(ds[index]["t"] is None and ds[index]["i"] is None for index in (0, 2, 4)) and ds[1]["i"] == ds[5]["i"] == 2**63
    assert (
        ds[0]["f"] is None
        and ds[2]["s"] is None
        and ds[2]["k"] is None
        and ds[6]["v"] is None
        and ds[6]["f"] is None
        and np.isnan(ds[8]["f"])
    )
    assert ds[5]["t"] == np.datetime64("2026-01-01") and ds[3]["t"] == np.datetime64(5, "us") and ds[8]["v"].tolist() == [3, 4]


def test_containers_of_every_library(root):
    ds = ps.create(root, {"x": "float32", "h": "bfloat16", "m": ps.Image(mode="stored"), "l": ps.Label(["a", "b"])})
    for values in (
        collections.deque([1, 2]),
        (1, 2),
        range(1, 3),
        (n for n in (1, 2)),
        torch.tensor([1, 2]),
        pd.Series([1, 2]),
        pa.chunked_array([[1], [2]]),
        {1: 0, 2: 0}.keys(),
    ):
        ds.append({"x": values})
    assert ds["x"][:].tolist() == [1, 2] * 8
    ds.append({"h": torch.tensor([1.5], dtype=torch.bfloat16), "m": torch.zeros((1, 4, 4, 3), dtype=torch.uint8)})
    assert ds[16]["h"] == ml_dtypes.bfloat16(1.5) and ds[16]["m"].shape == (4, 4, 3)
    ds.append({"m": [np.arange(16, dtype=">u2").reshape(4, 4)]})
    assert ds[17]["m"].squeeze().tolist() == np.arange(16).reshape(4, 4).tolist()
    for wrong in (pd.DataFrame({"a": [1]}), np.array(5), 5, {"a": 1}, [[1], [1, 2]], ["x"], [object()]):
        with pytest.raises(ps.InvalidInputError, match="`x`"):
            ds.append({"x": wrong})
    with pytest.raises(ps.InvalidInputError):
        ds.append({"l": [2**70]})
    for wrong in (lambda: ds.log(-1), lambda: ps.configure(memory_bytes=2**70), lambda: ds.append({}, message="\ud800"), lambda: ds.append({}, message=5), lambda: ps.open(root, snapshot=5), lambda: ds.transaction(properties={"a": {1}}), lambda: ps.Label("abc"), lambda: ps.Scalar(None)):  # fmt: skip
        with pytest.raises(ps.InvalidInputError):
            wrong()


def test_wide_schemas_can_be_appended_to(root):
    wide = ps.create(root, {f"c{number}": "int8" for number in range(3000)})
    wide.append({f"c{number}": [1] for number in range(3000)})
    assert wide["c2999"][:].tolist() == [1] and not ps.open(root).verify()["problems"]
    words = ps.create(root.with_name("words"), {f"k{number}": ps.Category() for number in range(32)})
    for round in range(3):
        words.append({f"k{number}": [f"w{round}"] for number in range(32)})
    assert words["k31"][:].tolist() == [0, 1, 2]
    with pytest.raises(ps.InvalidInputError, match="at most 32"):
        ps.create(root.with_name("more"), {f"k{number}": ps.Category() for number in range(33)})
    own = ps.create(root.with_name("own"), {f"b{number}": ps.Bytes() for number in range(150)})
    own.append({f"b{number}": [bytes(70_000)] for number in range(150)})
    assert len(list(root.with_name("own").glob("d/*"))) == 150 and len(own[0]["b149"]) == 70_000


def test_one_cache_for_all_datasets(root):
    for number in range(6):
        ds = ps.create(root.with_name(f"d{number}"), {"x": ps.Tensor((4096,), "float64", codec="lz4")})
        ds.append({"x": np.random.default_rng(number).normal(size=(1000, 4096))})
    script = """
sets = [ps.open(f"{sys.argv[2]}/d{n}") for n in range(6)]
before = peak()
for ds in sets:
    for start in range(0, 1000, 50): ds[start:start + 50]
print(peak() - before)
"""
    # The 200 MB of mapped files count as resident memory. Decoded blocks may add at most half of the budget.
    mapped = sum(path.stat().st_size for number in range(6) for path in root.with_name(f"d{number}").glob("d/*"))
    assert measured.peak_growth(script, root, root.parent) <= mapped + (32 << 20) + (24 << 20)


def test_small_texts_after_large_ones_are_packed(root):
    ds = ps.create(root, {"t": ps.Text()})
    with ds.transaction() as tx:
        tx.append({"t": ["x" * 2000] * 5000})
        tx.append({"t": ["y" * 10] * 260_000})
    stored = sum(path.stat().st_size for path in root.glob("d/*"))
    assert stored - 5000 * 2000 - 2_600_000 <= 3 * 265_000 and ds[5000]["t"] == "y" * 10


def test_a_column_left_out_later_costs_nothing(root):
    ds = ps.create(root, {"n": "int32", "big": ps.Tensor((1000, 100), "float32")})
    with ds.transaction() as tx:
        tx.append({"n": [1], "big": np.ones((1, 1000, 100), "f4")})
        tx.append({"n": np.arange(100_000)})
        tx.append({"n": [2], "big": np.ones((1, 1000, 100), "f4")})
    assert sum(path.stat().st_size for path in root.glob("d/*")) < 3 << 20
    assert ds[0]["big"].sum() == ds[-1]["big"].sum() == 100_000 and ds[5]["big"] is None and not ds.verify()["problems"]


@pytest.mark.local
def test_lenient_takes_of_categories(root, separate_files):
    ds = ps.create(root, {"k": ps.Category(), "n": "int32"})
    ds.append({"k": ["a", "b"], "n": [1, 2]})
    [data] = root.glob("d/*")
    ds.append({"k": ["c"], "n": [3]})
    data.write_bytes(data.read_bytes()[:-40])
    found = ps.open(root).take([0, 1, 2], on_corrupt="null")
    assert found["k"].tolist() == [None, None, 2] and found["n"].tolist() == [None, None, 3]


@pytest.mark.local
def test_categories_of_many_words_are_looked_up_once(root):
    ds = ps.create(root, {"k": ps.Category()})
    ds.append({"k": [f"word {number}" for number in range(100_000)]})
    ds.take([5, 99_999])
    before = ds.stats()
    assert [int(ds.take([position])["k"][0]) for position in (0, 99_999, 777)] == [0, 99_999, 777]
    assert ds.stats() == before, "these takes read neither words nor files again"


@pytest.mark.long
@pytest.mark.local
@pytest.mark.parametrize("form", ["list", "arrow", "dictionary"])
def test_a_file_ends_when_its_words_fill_the_tail(root, form):
    words = [f"{number:020}" for number in range(200_000)]  # 4.4 MB of tails
    given = pa.array([*words, None, *words])
    kept = {"list": given.to_pylist(), "arrow": given, "dictionary": given.dictionary_encode()}[form]
    text, matrix = [f"t{n}" for n in range(len(given))], np.arange(len(given) * 2).reshape(-1, 2)
    ds = ps.create(root, {"k": ps.Category(), "text": ps.Text(), "m": ps.Tensor((2,), "int64")})
    ds.append({"k": kept, "text": text, "m": matrix})
    files = [path.read_bytes() for path in pathlib.Path(root, "d").iterdir()]
    tails = [struct.unpack_from("<I", body, len(body) - 24)[0] for body in files]  # spec/format-v1.md section 6
    assert max(tails) <= (2 << 20) + (64 << 10) and sorted(tails)[3] <= (1 << 20) + (64 << 10), "the limit grows for repeated words"
    assert sum(tails) >= 8_400_000
    ds = ps.open(root)
    assert ds.vocabulary("k") == words
    found = pa.Table.from_batches(ds.scan())
    assert found["k"].cast(pa.string()).combine_chunks().equals(given.cast(pa.string()))
    assert found["text"].to_pylist() == text and found["m"].to_pylist() == matrix.tolist()
    assert ds.verify()["problems"] == []


@pytest.mark.local
def test_samples_that_repeat_the_words_of_a_full_tail_need_no_new_file(root):
    ds = ps.create(root, {"k": ps.Category()})
    long, files = "x" * 1_100_000, pathlib.Path(root, "d")
    with ds.transaction() as tx:
        for count in (1, 200, 200):
            tx.append({"k": [long] * count})
    assert len(list(files.iterdir())) == 1
    assert pa.Table.from_batches(ps.open(root).scan())["k"].to_pylist() == [long] * 401


@pytest.mark.local
def test_a_long_word_does_not_give_each_new_word_a_file_of_its_own(root):
    ds = ps.create(root, {"k": ps.Category(), "n": ps.Category()})
    long = "x" * 1_100_000
    rows = [(long, f"w{number % 3}") for number in range(20)] + [(None, f"v{number}") for number in range(20)]
    with ds.transaction() as tx:
        for k, n in rows:
            tx.append({"k": [k], "n": [n]})
    assert len(os.listdir(f"{root}/d")) == 1
    found = pa.Table.from_batches(ps.open(root).scan())
    assert list(zip(found["k"].to_pylist(), found["n"].to_pylist(), strict=True)) == rows
    ds.append({"k": [letter * len(long) for letter in "abababcd"]})
    assert len(os.listdir(f"{root}/d")) == 3, "two of the long words fill a tail"


@pytest.mark.local
@pytest.mark.parametrize("appends", [1, 10])
def test_words_that_repeat_in_random_order_need_few_files(root, appends):
    words = [f"{number:01000}" for number in range(3000)]  # 3 MB
    rows = np.random.default_rng(0).choice(words, 30_000)
    ds = ps.create(root, {"k": ps.Category()})
    with ds.transaction() as tx:
        for part in np.array_split(rows, appends):
            tx.append({"k": part})
    files = [path.stat().st_size for path in pathlib.Path(root, "d").iterdir()]
    assert len(files) <= 8 and sum(files) <= 12_000_000, "with tails of 1 MiB, there would be 25 files and 26 MB"
    assert pa.Table.from_batches(ps.open(root).scan())["k"].to_pylist() == rows.tolist()


@pytest.mark.long
@pytest.mark.local
@pytest.mark.parametrize("appends", [1, 10])
def test_a_tail_holds_the_words_of_all_categories_together(root, appends):
    names, rows = [f"c{number}" for number in range(20)], 30_000
    ds = ps.create(root, {name: ps.Category() for name in names})
    words = {name: [f"{name} {row:020}" for row in range(rows)] for name in names}  # 0.8 MB per column
    with ds.transaction() as tx:
        for part in np.array_split(np.arange(rows), appends):
            tx.append({name: words[name][part[0] : part[-1] + 1] for name in names})
    files = [path.read_bytes() for path in pathlib.Path(root, "d").iterdir()]
    assert max(struct.unpack_from("<I", body, len(body) - 24)[0] for body in files) <= (1 << 20) + (64 << 10)
    found = pa.Table.from_batches(ps.open(root).scan())
    assert all(found[name].to_pylist() == words[name] for name in names)


@pytest.mark.local
@pytest.mark.parametrize("io", ["mapped", "buffered"])
def test_scan_batches_do_not_shrink_with_the_number_of_words(tmp_path, io):
    ds = ps.create(tmp_path / "ds", {"k": ps.Category(), "n": "int64"})
    words = [f"a rather long word, number {number:020}" for number in range(150_000)]  # 7 MB in memory
    ds.append({"k": words, "n": range(len(words))})
    before = ps.configure()
    ps.configure(memory_bytes=16 << 20)
    try:
        batches = list(ps.open(tmp_path / "ds", io=io).scan(batch_size=1000))
    finally:
        ps.configure(memory_bytes=before["memory_bytes"])
    assert [len(batch) for batch in batches] == [1000] * 150
    assert [word for batch in batches for word in batch["k"].to_pylist()] == words


def test_dates_of_every_kind(root):
    ds = ps.create(root, {"t": "timestamp"})
    ds.append(
        {
            "t": [
                datetime.date(2026, 1, 2),
                "2026-01-02T00:00:00Z",
                "2026-01-02T02:00:00+02:00",
                "2026-01-01T19:00:00-05:00",
                pd.Timestamp("2026-01-02", tz="UTC"),
                np.datetime64("2026-01-02"),
            ]
        }
    )
    assert (ds["t"][:] == np.datetime64("2026-01-02")).all()

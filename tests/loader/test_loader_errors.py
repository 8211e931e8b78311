"""Loader errors name the sample, function, thread, rank, or file. No failure is silent."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import threading
import types

import numpy as np
import penstock as ps
import pytest
from penstock import transforms as T
from penstock.loader.stages import function_name
from PIL import Image

pytestmark = pytest.mark.local


def photograph():
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)).save(out, "JPEG")
    return out.getvalue()


def test_undecodable_media_name_their_row_ids():
    good = photograph()
    ds = ps.create("memory://errors-media", {"image": ps.Image()})
    ds.append({"image": [good, good[: len(good) // 2], good, good[: len(good) // 3]]})
    ds.append({"image": [good, good[: len(good) // 2]]})
    with pytest.raises(ps.CorruptError) as caught:
        next(iter(ds.select([5, 0, 3, 2]).loader(batch_size=4)))
    assert (sorted(caught.value.rows), sorted(caught.value.row_ids)) == (
        [3, 5],
        sorted(ds.take([3, 5], columns=["_row_id"])["_row_id"].tolist()),
    )
    with pytest.raises(ps.CorruptError) as caught:
        ds.take([0, 1])
    assert caught.value.row_ids == ds.take([1], columns=["_row_id"])["_row_id"].tolist()


def test_a_damaged_block_names_a_row_id(tmp_path):
    ds = ps.create(tmp_path / "a", {"n": ps.Tensor((600,), "uint8")})
    ds.append({"n": np.arange(6000, dtype=np.uint16).astype(np.uint8).reshape(10, 600)})
    (path,) = (tmp_path / "a" / "d").iterdir()
    body = bytearray(path.read_bytes())
    body[24 + 6 * 600 + 100] ^= 1  # Each block has six samples, and this byte is in the second block.
    path.write_bytes(body)
    with pytest.raises(ps.CorruptError) as caught:
        ps.open(tmp_path / "a").take([8])
    assert caught.value.row_ids == ds.take([8], columns=["_row_id"])["_row_id"].tolist()


class Local:
    """A callable that can be pickled, although its results cannot."""

    def __call__(self, sample, rng):
        return {"n": threading.Lock()}


def test_a_result_that_cannot_be_sent_from_a_worker_is_reported(tmp_path):
    ds = ps.create(tmp_path / "ds", {"n": "int64"})
    ds.append({"n": range(8)})
    with pytest.raises(ps.InvalidInputError, match="cannot be sent from a python worker") as caught:
        list(ds.loader(batch_size=4, transform=[Local()], python_workers=1))
    assert "__main__" not in str(caught.value)


def test_threads_over_one_loader_lose_nothing_in_silence():
    ds = ps.create("memory://errors-threads", {"n": "int64"})
    ds.append({"n": range(20_000)})
    for _ in range(10):
        loader = ds.loader(batch_size=10, shuffle=True, threads=2)
        whole, errors, gate = [], [], threading.Barrier(4)

        def iterate(loader=loader, whole=whole, errors=errors, gate=gate):
            gate.wait()
            seen = []
            try:
                for batch in loader:
                    seen += batch["n"].tolist()
                whole.append(sorted(seen) == list(range(20_000)))
            except ps.ClosedError as error:
                errors.append(error)

        threads = [threading.Thread(target=iterate) for _ in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert len(whole) + len(errors) == 4 and all(whole)


def test_one_thread_after_another_may_iterate():
    ds = ps.create("memory://errors-turns", {"n": "int64"})
    ds.append({"n": range(100)})
    loader, counts = ds.loader(batch_size=10), []
    for _ in range(3):
        thread = threading.Thread(target=lambda: counts.append(sum(len(batch["n"]) for batch in loader)))
        thread.start()
        thread.join()
    assert counts == [100] * 3


@pytest.mark.parametrize(
    ("kind", "values"),
    [(ps.Text(), ["a", None]), (ps.Bytes(), [b"a", None]), (ps.Json(), [{"a": 1}, None]), (ps.Boxes(), [[[0, 0, 1, 1]], None]), (ps.Tensor((None,), "int8"), [[1], None]), ("int64", [1, None])],
    ids=["text", "bytes", "json", "boxes", "tensor", "scalar"],
)  # fmt: skip
def test_nulls_are_an_error_in_every_column_until_it_is_said_what_they_become(kind, values):
    ds = ps.create(f"memory://errors-nulls-{kind}", {"x": kind})
    ds.append({"x": values})
    with pytest.raises(ps.InvalidInputError, match="column `x` has 1 nulls in this batch") as caught:
        next(iter(ds.loader(batch_size=2)))
    assert caught.value.column == "x"
    batch = next(iter(ds.loader(batch_size=2, nulls={"x": "mask"})))
    assert batch["x_valid"].tolist() == [True, False]


def one(sample, rng):
    return sample


def other(sample, rng):
    return {**sample, "n": 0}


def test_functions_have_names_that_ranks_can_compare():
    assert function_name(one) != function_name(other)
    assert function_name(one) == function_name(one)
    assert function_name(lambda sample, rng: sample) != function_name(lambda sample, rng: {**sample, "n": 0})
    assert function_name(T.PerBatch(one)) == function_name(one)


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<f4', 'fortran_order': False, 'shape': (-2, -3), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296, 4), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': 'abc', }",
        "{'descr': [[[[", "((((((((((", "{'descr': '|V0', 'fortran_order': False, 'shape': (1,), }", "\x00\x01", "{1: 2}", "lambda: 0",
    ],
)  # fmt: skip
def test_absurd_npy_headers_are_refused_by_us(tmp_path, header):
    text = (header + " " * 64)[: max(64, len(header))].encode("latin-1") + b"\n"
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + b"\x00" * 24)
    with pytest.raises(ps.Error, match=r"a\.npy"):
        ps.files(tmp_path / "*.npy")


@pytest.mark.parametrize(
    "wrong", [{"length": -1}, {"length": 0}, {"length": 2.5}, {"length": "8"}, {"length": True}, {"pad": "x"}, {"pad": 2**63}]
)
def test_tokenize_refuses_invalid_options(wrong):
    with pytest.raises(ps.InvalidInputError, match=f"Tokenize: {next(iter(wrong))}="):
        T.Tokenize(None, on="text", **wrong)


WINDOWED = """
import gc, os, pathlib, sys
import numpy as np
import penstock as ps
place = pathlib.Path(sys.argv[1])
ds = ps.open(place, io="buffered")
loader = ds.loader(batch_size=4, shuffle=ps.Window(bytes=1 << 20), threads=4)
batches = iter(loader.stream(2))
next(batches)
for path in (place / "d").iterdir():
    os.truncate(path, path.stat().st_size // 8)
try:
    for _ in batches:
        pass
except ps.Error as error:
    print(error.code)
del batches, loader  # This ends the loader's threads.
gc.collect()
print("ended")
"""


def test_windows_of_a_file_that_is_cut_short_raise_and_end(tmp_path):
    """Batches share runs. If the fetch of a run fails, the batches waiting for it must wake up, and closing must not hang."""
    ds = ps.create(tmp_path / "ds", {"n": ps.Tensor((64,), "int64")})
    ds.append({"n": np.zeros((20_000, 64), np.int64)})
    done = subprocess.run([sys.executable, "-c", WINDOWED, str(tmp_path / "ds")], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["object-truncated", "ended"], done.stdout + done.stderr


def test_a_truncated_jpeg_is_refused_whether_or_not_it_has_a_thumbnail():
    rng, out, small = np.random.default_rng(0), io.BytesIO(), io.BytesIO()
    picture = Image.fromarray(rng.integers(0, 256, (200, 300, 3), dtype=np.uint8))
    picture.resize((30, 20)).save(small, "JPEG")
    picture.save(out, "JPEG", exif=b"Exif\0\0" + small.getvalue())
    whole = out.getvalue()
    assert whole.count(b"\xff\xd9") == 2
    ds = ps.create("memory://cut-short", {"image": ps.Image()})
    ds.append({"image": [whole, whole[: len(whole) * 3 // 4]]})
    assert ds.take([0])["image"][0].shape == (200, 300, 3)
    with pytest.raises(ps.CorruptError) as caught:
        ds.take([1])
    assert caught.value.code == "media-undecodable"
    for transform in ([], [T.Resize((50, 50))]):  # A crop might stop reading before the truncated part.
        with pytest.raises(ps.CorruptError):
            list(ds.select([1]).loader(batch_size=1, transform=transform).stream(1))


STANDINS = """
import sys
import penstock as ps
ds = ps.open(sys.argv[1])
loader = ds.loader(batch_size=4, on_corrupt=sys.argv[2], columns=["image", "_position", "_valid"])
seen = [int(position) for batch in loader.stream(1) for position in batch["_position"]]
print(len(seen), loader.stats()["refused"])
"""


@pytest.mark.parametrize("on_corrupt", ["substitute", "mask"])
def test_stand_ins_that_are_undecodable_too_are_replaced_in_turn(tmp_path, on_corrupt):
    good = photograph()
    ds = ps.create(tmp_path / "ds", {"image": ps.Image()})
    bad = [good[: len(good) * part // 10] for part in (6, 7, 8)]
    ds.append({"image": [good, *bad, good, good, bad[0], good]})
    done = subprocess.run([sys.executable, "-c", STANDINS, ds.uri, on_corrupt], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    samples, refused = map(int, done.stdout.split())
    assert samples == 8 and refused >= 4, done.stdout  # Refused stand-ins are counted too.


def _cut(file):
    os.truncate(file, os.path.getsize(file) - 1)


def _emptied(file):
    os.truncate(file, 0)


def _tail(file):
    with open(file, "r+b") as opened:
        opened.seek(os.path.getsize(file) - 60)
        opened.write(b"\x99\x88")


@pytest.mark.local
@pytest.mark.parametrize("io", ["mapped", "buffered", "direct"])
@pytest.mark.parametrize("damage", [_cut, _emptied, _tail])
def test_a_file_that_is_damaged_as_a_whole_ends_no_training(tmp_path, damage, io):
    """Every loader either masks or replaces each sample in the damaged file. A plain take's error names the column, object, and sample."""
    ds = ps.create(tmp_path / "set", {"x": "int64", "v": ps.Tensor((20_000,), "float32"), "t": ps.Text()})
    for commit in range(3):
        rows = np.arange(40) + 40 * commit
        ds.append({"x": rows, "v": np.ones((40, 20_000), np.float32) * rows[:, None], "t": [f"text {row}" for row in rows]})
    file = max((tmp_path / "set" / "d").iterdir(), key=os.path.getsize)  # This file contains column `v` from one commit.
    damage(file)
    for shuffle in (True, ps.Window(bytes=1 << 20)):
        for on_corrupt in ("mask", "substitute"):
            loader = ps.open(ds.uri, io=io).loader(batch_size=16, shuffle=shuffle, columns=["x", "v", "t", "_valid"], on_corrupt=on_corrupt)
            seen, valid = [], []
            for batch in loader:
                assert (batch["v"] == batch["x"][:, None]).all() and batch["t"] == [f"text {x}" for x in batch["x"]]
                seen += batch["x"].tolist()
                valid += batch["_valid"].tolist()
            gone = set(range(120)) - set(seen)
            assert len(seen) == 120 and len(gone) >= 40 and len({number // 40 for number in seen}) == 2
            assert valid.count(False) == (40 if on_corrupt == "mask" else 0)
    with pytest.raises(ps.CorruptError) as caught:
        ps.open(ds.uri, io=io).take(range(120), columns=["x", "v"])
    error = caught.value
    assert (error.column, error.object) == ("v", f"d/{file.name}") and error.rows == error.row_ids and error.rows[0] in (0, 40, 80)


def test_results_of_one_name_are_refused(root):
    """Neither a null mask nor tokenizer output may replace an existing column."""
    ds = ps.create(root, {"x": "int32", "x_valid": "int32", "a": ps.Text(), "b": ps.Text(), "input_ids": "int64"})
    ds.append({"x": [1, None], "x_valid": [7, 8], "a": ["p", "q"], "b": ["r", "s"], "input_ids": [3, 4]})
    with pytest.raises(ps.InvalidInputError, match="already has a column `x_valid`"):
        ds.loader(batch_size=2, nulls={"x": "mask"})
    batch = next(iter(ds.loader(batch_size=2, nulls={"x": "mask"}, outputs={"x": "x", "other": "x_valid"})))
    assert batch["x_valid"].tolist() == [True, False] and batch["other"].tolist() == [7, 8]

    class Letters:
        def encode_batch(self, texts):
            return [types.SimpleNamespace(ids=[ord(letter) for letter in text]) for text in texts]

    for columns, transform in (
        (["a", "b"], [T.Tokenize(Letters(), "a"), T.Tokenize(Letters(), "b")]),
        (["a", "input_ids"], [T.Tokenize(Letters(), "a")]),
    ):
        with pytest.raises(ps.InvalidInputError, match=r"`(attention_mask|input_ids)`, which the batch already has"):
            ds.loader(batch_size=2, columns=columns, transform=transform)
    assert next(iter(ds.loader(batch_size=2, columns=["a"], transform=[T.Tokenize(Letters(), "a")])))["input_ids"].tolist() == [
        [112],
        [113],
    ]


def test_each_null_is_filled_with_a_value_of_its_own(root):
    ds = ps.create(root, {"meta": ps.Json()})
    ds.append({"meta": [None, None, {"a": 1}, None]})
    loader = ds.loader(batch_size=2, nulls={"meta": {"tags": []}})
    for batch in loader.stream(2):
        for value in batch["meta"]:
            assert value in ({"tags": []}, {"a": 1})
            value.setdefault("tags", []).append("mine")


@pytest.mark.parametrize("size", [4, (4,), [4], np.int64(4)])
def test_a_crop_of_one_number_fits_tensors_of_one_dimension(root, size):
    ds = ps.create(root, {"line": ps.Tensor((9,), "int16"), "free": ps.Tensor((None,), "int16"), "plane": ps.Tensor((9, 8), "int16")})
    ds.append({"line": [np.arange(9)] * 5, "free": [np.arange(9 + row) for row in range(5)], "plane": [np.arange(72).reshape(9, 8)] * 5})
    for crop in (T.CenterCrop, T.RandomCrop):
        batch = next(iter(ds.loader(batch_size=5, transform=[crop(size, on="line"), crop(size, on="free"), crop(size, on="plane")])))
        assert batch["line"].shape == (5, 4) and batch["plane"].shape == (5, 4, 4)
        assert all((np.diff(line) == 1).all() for line in batch["line"]) and all(
            len(line) == 4 and (np.diff(line) == 1).all() for line in batch["free"]
        )


def _raises_what_cannot_be_pickled(sample, rng):
    raise ValueError(threading.Lock())


@pytest.mark.local
def test_an_exception_that_cannot_be_pickled_is_not_an_internal_error(tmp_path):
    ds = ps.create(tmp_path / "set", {"n": "int64"})
    ds.append({"n": range(4)})
    loader = ds.loader(batch_size=2, transform=[_raises_what_cannot_be_pickled], python_workers=1)
    with pytest.raises(ps.InvalidInputError, match="_raises_what_cannot_be_pickled"), loader:
        next(iter(loader))


@pytest.mark.parametrize("count", [2, 3, 5, 7, 15])
def test_one_good_sample_replaces_all_others(tmp_path, count):
    """Each attempt uses a different stand-in, regardless of the number of samples."""

    def png(value):
        out = io.BytesIO()
        Image.fromarray(np.full((8, 8, 3), value, np.uint8)).save(out, "PNG")
        return bytearray(out.getvalue())

    for good in range(count):
        images = [png(number) for number in range(count)]
        for number, body in enumerate(images):
            body[-20] ^= number != good
        ds = ps.create(tmp_path / f"set-{good}", {"image": ps.Image(), "n": "int64"})
        ds.append({"image": [bytes(body) for body in images], "n": range(count)})
        for shuffle in (False, True):
            batches = list(ds.loader(batch_size=count, shuffle=shuffle, on_corrupt="substitute").stream(1))
            assert [batch["n"].tolist() for batch in batches] == [[good] * count]
    with pytest.raises(ps.CorruptError, match=f"{count} samples in a row are damaged"):
        images[good][-20] ^= 1
        ds = ps.create(tmp_path / "none", {"image": ps.Image()})
        ds.append({"image": [bytes(body) for body in images]})
        list(ds.loader(batch_size=1, on_corrupt="substitute").stream(1))


def test_workers_have_the_budgets_of_their_process(tmp_path):
    ds = ps.create(tmp_path / "set", {"n": "int64"})
    ds.append({"n": range(4)})
    before = ps.configure()
    try:
        ps.configure(memory_bytes=33 << 20, image_pixels=12_345)
        batches = list(ds.loader(batch_size=2, transform=[T.PerBatch(budgets)], python_workers=1).stream(1))
    finally:
        ps.configure(memory_bytes=before["memory_bytes"], image_pixels=before["image_pixels"])
    assert [batch["n"].tolist() for batch in batches] == [[33 << 20, 12_345]] * 2


def budgets(batch):
    now = ps.configure()
    return {"n": np.array([now["memory_bytes"], now["image_pixels"]])}


@pytest.mark.parametrize("how", ["a sample", "a batch", "a null"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_that_fails_in_python_is_not_passed_by(tmp_path, how, workers):
    """Resuming from the state saved at the failure returns every remaining sample."""
    ds = ps.create(tmp_path / "ds", {"n": "int64", "o": "int64", "text": ps.Text()})
    ds.append({"n": range(20), "o": [None if row == 9 and how == "a null" else row for row in range(20)], "text": ["a"] * 20})
    options = {"batch_size": 4, "columns": ["n", "o"], "python_workers": workers}
    options["transform"] = [fails_at_9] if how == "a sample" else [T.PerBatch(fails_with_9)] if how == "a batch" else [T.PerBatch(kept)]
    loader, given = ds.loader(**options), []
    with pytest.raises((OSError, ps.Error, TypeError)):
        for batch in loader:
            given += [int(number) for number in batch["n"]]
    assert given == list(range(8))
    again = ds.loader(batch_size=4, columns=["n"])
    again.load_state_dict(loader.state_dict())
    assert [number for batch in again for number in batch["n"].tolist()] == list(range(8, 20))


def fails_at_9(sample, rng):
    if sample["n"] == 9:
        raise OSError("network away")
    return sample


def fails_with_9(batch):
    if 9 in batch["n"]:
        raise OSError("network away")
    return batch


def kept(batch):
    return batch


@pytest.mark.parametrize(
    ("ids", "mask"),
    [([2**70], [1]), ([2**63], [1]), ([[1]], [1]), (["a"], [1]), (None, [1]), ([1.5], [1]), ([1, 2], [1]), ([1], ["x"]), ([1], [[1]]), ([[1], 2], [1, 1])],
)  # fmt: skip
def test_what_a_tokenizer_gives_is_looked_at(ids, mask):
    class Odd:
        def encode_batch(self, texts):
            return [types.SimpleNamespace(ids=[7], attention_mask=[1])] + [types.SimpleNamespace(ids=ids, attention_mask=mask)] * (
                len(texts) - 1
            )

    with pytest.raises(ps.InvalidInputError, match=r"Tokenize: (ids|attention_mask) of text 1"):
        T.Tokenize(Odd(), "text")({"text": ["a", "b"]})


def test_a_tokenizer_that_is_none_or_leaves_texts_out_is_refused():
    class Short:
        def encode_batch(self, texts):
            return [types.SimpleNamespace(ids=[7])]

    with pytest.raises(ps.InvalidInputError, match="1 encodings for 2 texts"):
        T.Tokenize(Short(), "text")({"text": ["a", "b"]})
    assert T.Tokenize(Short(), "text")({"text": ["a"]})["input_ids"].tolist() == [[7]]
    with pytest.raises(ps.InvalidInputError, match="has no encode_batch"):
        T.Tokenize(len, "text")


@pytest.mark.parametrize(
    ("kind", "fill"),
    [(ps.Text(), 5), (ps.Text(), b"a"), (ps.Bytes(), "a"), (ps.Image(), 0), (ps.Image(), np.zeros((2, 2), np.uint8)), (ps.Mask(), 0), (ps.Mask(), np.zeros((2, 2, 1), np.uint8))],
)  # fmt: skip
def test_nulls_become_values_of_their_column_only(tmp_path, kind, fill):
    ds = ps.create(tmp_path / "ds", {"x": kind})
    ds.append({"x": [None]})
    with pytest.raises(ps.InvalidInputError, match="nulls in `x` cannot become"):
        ds.loader(batch_size=1, nulls={"x": fill})


def test_a_global_batch_below_the_ranks_is_refused():
    ds = ps.create("memory://errors-few", {"n": "int64"})
    ds.append({"n": range(10)})
    with pytest.raises(ps.InvalidInputError, match="global_batch_size"):
        ds.loader(global_batch_size=1, rank=0, world_size=2)

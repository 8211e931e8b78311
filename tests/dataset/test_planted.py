"""One test for each mistake that a tired expert might make. Each was planted in the code once, and passed all other tests.

The mistakes hide between two features, at sizes no generator makes, or where other tests try only one epoch or one fault.
"""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time

import crafted_runner
import measured
import numpy as np
import penstock as ps
import pytest
import wrong_s3
from conftest import spent
from penstock import transforms as T

UNIT = 64 << 10
LOCAL = ["mapped", "buffered", "direct"]


def damage(root, body, at):
    """Flip a bit of byte `at` of a value stored contiguously in some data file."""
    needle = bytes(body[at - 32 : at] + body[at : at + 8])
    [(path, content)] = [(path, path.read_bytes()) for path in root.rglob("d/*") if needle in path.read_bytes()]
    place = content.index(needle) + 32
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])


@pytest.mark.local
@pytest.mark.parametrize("io", LOCAL)
@pytest.mark.parametrize("kind", ["bytes", "fixed", "ragged", "tiled"])
@pytest.mark.parametrize("unit", ["first", "middle", "last, partial"])
def test_every_unit_of_a_value_of_several_is_checked(tmp_path, io, kind, unit):
    rng = np.random.default_rng(3)
    count = 3 * UNIT + 1000
    body = rng.integers(0, 256, count, dtype=np.uint8)
    column = {
        "bytes": ps.Bytes(), "fixed": ps.Tensor((count,), "uint8"), "ragged": ps.Tensor((None,), "uint8"),
        "tiled": ps.Tensor((None,), "uint8", tile=(2 * UNIT,)),
    }[kind]  # fmt: skip
    root = tmp_path / "set"
    other = rng.integers(0, 256, count, dtype=np.uint8)
    values = [other, body, other]
    ps.create(root, {"v": column}).append({"v": [value.tobytes() for value in values] if kind == "bytes" else values})
    damage(root, body.tobytes(), {"first": 100, "middle": UNIT + 100, "last, partial": count - 50}[unit])
    ds = ps.open(root, io=io)
    assert len(ds.take([0, 2])["v"]) == 2, "the neighbouring samples are intact"
    for read in (lambda: ds.take([1]), lambda: ds[0:3], lambda: list(ds.scan(batch_size=2)), lambda: list(ds.loader(batch_size=3))):
        with pytest.raises(ps.CorruptError) as caught:
            read()
        assert caught.value.code == "block-checksum"
    assert len(ds.verify()["problems"]) == 1
    taken = ds.take([0, 1, 2], on_corrupt="null")["v"]
    missing = taken.mask.reshape(3, -1).all(axis=1).tolist() if isinstance(taken, np.ma.MaskedArray) else [value is None for value in taken]
    assert missing == [False, True, False]
    doubles = ds.take([1, 0, 1, 1], on_corrupt="null")["v"]
    missing = (
        doubles.mask.reshape(4, -1).all(axis=1).tolist() if isinstance(doubles, np.ma.MaskedArray) else [value is None for value in doubles]
    )
    assert missing == [True, False, True, True]


@pytest.mark.local
def test_a_range_that_was_spoilt_on_its_way_is_asked_for_again():
    """If only the first answer is corrupt, the read returns the second one. If every answer is corrupt, the read raises an error."""
    with wrong_s3.serving() as (state, options):
        ds = ps.create("s3://bucket/set", {"v": ps.Tensor((50_000,), "uint8"), "t": ps.Text()}, storage_options=options)
        values = np.random.default_rng(0).integers(0, 256, (20, 50_000), dtype=np.uint8)
        ds.append({"v": values, "t": [f"text {i}" for i in range(20)]})
        # The first range is the tail, the second holds blocks. Blocks are cached, so none is requested twice.
        for place in range(9):
            fresh = ps.open("s3://bucket/set", storage_options=options)
            state.spoil, state.good_before_spoil = 1, place % 2
            batch = fresh.take([place, place + 10])
            assert state.spoil == 0, "the fault struck"
            assert np.array_equal(batch["v"], values[[place, place + 10]]) and batch["t"] == [f"text {place}", f"text {place + 10}"]
        fresh = ps.open("s3://bucket/set", storage_options=options)
        state.spoil, state.good_before_spoil = 1_000, 0
        with pytest.raises(ps.CorruptError):
            fresh.take([9])
        state.spoil = 0
        assert np.array_equal(fresh.take([9])["v"], values[9:10]), "corrupt bytes are not cached"


@pytest.mark.local
def test_a_small_object_that_was_spoilt_on_its_way_is_asked_for_again():
    """Corrupt, in turn, each whole object that opening, reading and committing request: first record, hint, record, root, page, words."""
    with wrong_s3.serving() as (state, options):
        made = ps.create("s3://bucket/set", {"n": "int64", "c": ps.Category()}, storage_options=options)
        for part in range(70):
            made.append({"n": range(part * 3, part * 3 + 3), "c": [f"word {part}"] * 3})

        def work(number):
            ds = ps.open("s3://bucket/set", storage_options=options)
            assert len(ds) == 210 + number and ds["n"][:].tolist()[:210] == list(range(210))
            assert ds.vocabulary("c")[:70] == [f"word {part}" for part in range(70)] and len(ds.log()) == 71 + number
            ds.append({"n": [-1], "c": ["word 3"]})

        state.whole = 0
        work(0)
        asked = state.whole
        assert asked > 70, "the log alone reads 71 records"
        for place in (*range(1, 10), *range(10, asked, 17), asked):
            state.whole, state.spoilt_whole = 0, place
            work(len(ps.open("s3://bucket/set", storage_options=options)) - 210)
            assert state.whole > place, "the fault struck"


@pytest.mark.local
def test_an_answer_that_is_too_short_is_not_taken_for_all():
    """After a broken connection, the client requests the rest. It refuses a server that answers with another range or in chunks."""
    values = [bytes([i]) * 150_000 for i in range(5)]
    with wrong_s3.serving() as (state, options):
        ps.create("s3://bucket/set", {"v": ps.Bytes()}, storage_options=options).append({"v": values})
        state.shorten, state.how = 3, wrong_s3.LONGER  # The connection breaks after the last byte.
        fresh = ps.open("s3://bucket/set", storage_options={**options, "timeout_seconds": 5})
        assert fresh.take([1, 3])["v"] == [values[1], values[3]] and state.shorten <= 1
        state.shorten, state.how = 3, wrong_s3.BROKEN
        fresh = ps.open("s3://bucket/set", storage_options={**options, "timeout_seconds": 5})
        assert fresh.take([1, 3])["v"] == [values[1], values[3]] and state.shorten == 0
        for how in (wrong_s3.HALF, wrong_s3.CHUNKED):
            state.shorten, state.how = 1, how
            fresh = ps.open("s3://bucket/set", storage_options={**options, "timeout_seconds": 5})
            with pytest.raises(ps.UnsupportedError, match="does not follow HTTP"):
                fresh.take([1])


@pytest.mark.local
def test_an_upload_that_cannot_be_completed_leaves_no_parts():
    """Parts of an upload that is neither completed nor aborted appear in no listing, but cost money."""
    with wrong_s3.serving() as (state, options):
        ds = ps.create("s3://bucket/set", {"v": ps.Bytes()}, storage_options=options)
        ds.append({"v": [bytes(20 << 20)]})
        assert len(ds.take([0])["v"][0]) == 20 << 20 and not state.uploads
        state.refuse_complete = True
        with pytest.raises(ps.Error, match=r"AccessDenied|403"):
            ds.append({"v": [bytes(20 << 20)]})
        assert not state.uploads and len(ds.refresh()) == 1


@pytest.mark.local
def test_an_upload_whose_last_answer_is_lost_is_there():
    """On the retry the store reports no such upload. The client then checks that the object exists with the uploaded length."""
    with wrong_s3.serving() as (state, options):
        ds = ps.create("s3://bucket/set", {"v": ps.Bytes()}, storage_options=options)
        state.unanswered = "/d/"
        ds.append({"v": [bytes([number]) * (9 << 20) for number in range(3)]})
        state.unanswered = None
        assert ps.open("s3://bucket/set", storage_options=options).take([2])["v"] == [bytes([2]) * (9 << 20)]


@pytest.mark.local
def test_a_create_that_nobody_can_tell_of_leaves_what_may_stand():
    """Commit 0 exists, but its answers were lost. The objects it references must not be deleted as leftovers."""
    with wrong_s3.serving() as (state, options):
        state.unanswered = "/log/"
        with pytest.raises(ps.Error) as caught:
            ps.create("s3://bucket/set", {"v": "int64"}, storage_options={**options, "timeout_seconds": 1})
        assert caught.value.code == "commit-state-unknown" and "check whether the object exists" in caught.value.hint
        state.unanswered = None
        ds = ps.open("s3://bucket/set", storage_options=options)
        ds.append({"v": [1]})
        assert ds.verify()["problems"] == [] and ds["v"][:].tolist() == [1]


@pytest.mark.local
def test_a_conflict_of_two_puts_is_asked_again():
    """S3 may answer 409 when two create-only puts of one name collide. Neither has won yet, so the client retries."""
    with wrong_s3.serving() as (state, options):
        refused = []

        def conflict(name):
            if name in refused:
                return None
            refused.append(name)
            return 409, "ConditionalRequestConflict"

        state.on_create = conflict
        ds = ps.create("s3://bucket/set", {"v": "int64"}, storage_options=options)
        for number in range(3):
            ds.append({"v": [number]})
        assert len([name for name in refused if "/log/" in name]) >= 4
        assert ps.open(ds.uri, storage_options=options)["v"][:].tolist() == [0, 1, 2]


RIVAL = """
import json, sys
import penstock as ps
ds = ps.open("s3://bucket/set", storage_options=json.loads(sys.argv[1]))
for line in sys.stdin:
    ds.append({"n": [int(line)]})
    print("done", flush=True)
"""


@pytest.mark.local
def test_a_commit_that_loses_a_race_describes_the_newer_parent():
    """A rival commits between the root and the record of a commit. The records cover all lengths, with one to six deltas."""
    with wrong_s3.serving() as (state, options):
        columns = {f"w{index}": ps.Category() for index in range(5)}
        ds = ps.create("s3://bucket/set", {"n": "int64", **columns}, storage_options=options)
        rival = subprocess.Popen(
            [sys.executable, "-c", RIVAL, json.dumps(options)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        races = []

        def race(name):
            if "/log/" in name and len(races) <= len(expected):  # Race once per commit.
                races.append(name)
                rival.stdin.write(f"{10_000 + len(races)}\n")
                rival.stdin.flush()
                assert rival.stdout.readline() == "done\n"

        expected, state.on_create = [], race
        for number in range(60):
            words = {name: [f"{name}-{number}"] for name in list(columns)[: number % 6]}
            ds.append({"n": [number], **words})
            expected.append((number, words))
        state.on_create = None
        rival.stdin.close()
        assert rival.wait(30) == 0
        ds = ps.open(ds.uri, storage_options=options)
        batch = ds[:]
        place = {int(n): row for row, n in enumerate(batch["n"])}
        assert len(races) == 60 and len(ds) == 60 + len(races) and not ds.verify()["problems"]
        for number, words in expected:
            for name, [word] in words.items():
                assert ds.vocabulary(name)[int(batch[name][place[number]])] == word


@pytest.mark.local
@pytest.mark.parametrize("io", LOCAL)
@pytest.mark.parametrize("what", ["removed", "tail", "first byte", "cut"])
@pytest.mark.parametrize("size", [100, 100_000])
def test_a_handle_that_has_read_verifies_what_is_there_now(tmp_path, io, what, size):
    values = np.random.default_rng(0).integers(0, 256, (10, size), dtype=np.uint8)
    ps.create(tmp_path / "set", {"v": ps.Tensor((size,), "uint8")}).append({"v": values})
    ds = ps.open(tmp_path / "set", io=io)
    assert np.array_equal(ds[:]["v"], values) and not ds.verify()["problems"]
    [path] = (tmp_path / "set" / "d").iterdir()
    body = path.read_bytes()
    path.unlink()  # Replace the file instead of changing bytes in the mapped one.
    if what != "removed":
        at = len(body) - 40 if what == "tail" else 0
        path.write_bytes(body[:-7] if what == "cut" else body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :])
    assert ds.verify()["problems"], what


class Failing:
    """A large array that cannot be read."""

    dtype, shape, ndim = np.dtype("uint8"), (3000, 4000), 2

    def __getitem__(self, key):
        raise OSError("it is gone")


@pytest.mark.local
def test_a_transaction_that_fails_after_many_files_leaves_none(tmp_path):
    ds = ps.create(tmp_path / "set", {"v": ps.Tensor((None, None), "uint8"), "n": "int64"})
    ds.append({"v": [np.ones((2, 2), np.uint8)], "n": [1]})
    before = sorted((tmp_path / "set" / "d").iterdir())
    with pytest.raises(OSError, match="it is gone"), ds.transaction() as tx:
        large = np.ones((3000, 4000), np.uint8)
        tx.append({"v": [large] * 25, "n": range(25)})  # This exceeds one fragment.
        tx.append({"v": [Failing()], "n": [1]})
    assert sorted((tmp_path / "set" / "d").iterdir()) == before and len(before) == len(ds.refresh()) == 1


@pytest.mark.local
def test_blocks_that_follow_each_other_are_read_in_ranges_of_megabytes(tmp_path):
    ps.create(tmp_path / "set", {"v": ps.Tensor((1024,), "float32"), "t": ps.Bytes()}).append(
        {"v": np.zeros((8192, 1024), np.float32), "t": [bytes(500)] * 8192}
    )
    ds = ps.open(tmp_path / "set", io="buffered")
    ds.take([0])
    for column, stored in (("v", 4096 * 4096), ("t", 4096 * 500)):
        cost = spent(ds, lambda column=column: ds.take(np.arange(4096), columns=[column]))
        assert cost["ranges"] <= 3 and cost["range_bytes"] <= 1.01 * stored, (column, cost)


@pytest.mark.local
@pytest.mark.parametrize("apart_bytes,ranges", [(1_000, 1), (10_000, 1), (100_000, 1), (500_000, 2)])
def test_blocks_that_lie_near_are_one_range(bucket, apart_bytes, ranges):
    """One range also covers the bytes between two values where that costs less than a second request."""
    ds = ps.create(bucket, {"v": ps.Bytes()})
    ds.append({"v": [b"a" * 40_000, b"b" * apart_bytes, b"c" * 40_000, b"d" * 600_000]})
    fresh = ps.open(bucket)
    fresh.take([3])  # The handle now knows the tail.
    assert spent(fresh, lambda: fresh.take([0, 2]))["ranges"] == ranges


@pytest.mark.local
@pytest.mark.parametrize("io", LOCAL)
@pytest.mark.parametrize("tile", [None, (2, 3, 5), (4, 8, 8)])
def test_windows_flat_in_some_dimensions(tmp_path, io, tile):
    """Windows may cover a dimension whole, in part, or at one index. Each must equal NumPy's result."""
    shape = (9, 10, 11)
    values = np.random.default_rng(1).integers(0, 1 << 15, (4, *shape)).astype(np.int16)
    free = ps.Tensor((None, None, None), "int16") if tile is None else ps.Tensor((None, None, None), "int16", tile=tile)
    ps.create(tmp_path / "set", {"v": free}).append({"v": list(values)})
    parts = [slice(None), slice(2, 3), slice(3, 9), slice(0, 0), 4, slice(None, None, 2)]
    for key in itertools.product(parts, parts, parts):
        ds = ps.open(tmp_path / "set", io=io)  # A fresh handle has no cached tiles.
        assert np.array_equal(ds["v"][(2, *key)], values[2][key]), key


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


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit, GeneratorExit, RuntimeError])
def test_whatever_ends_a_transaction_in_the_middle_commits_nothing(root, raised):
    ds = ps.create(root, {"n": "int32"})
    with pytest.raises(raised), ds.transaction("half") as tx:
        tx.append({"n": [1, 2]})
        if raised is KeyboardInterrupt:
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1_000_000):
                pass
        raise raised
    assert len(ps.open(root)) == 0 and [commit.message for commit in ds.log()] == ["create"]


# The loader


@pytest.fixture
def thousand(tmp_path):
    ds = ps.create(tmp_path / "thousand", {"n": "int64"})
    ds.append({"n": np.arange(1000)})
    return ds


def numbers(loader):
    return [number for batch in loader for number in batch["n"].tolist()]


@pytest.mark.local
@pytest.mark.parametrize("last_batch", ["drop", "short", "pad"])
@pytest.mark.parametrize("first,second", [(64, 48), (48, 64), (10, 1000), (7, 13)])
def test_a_resume_with_another_batch_size_goes_on_at_the_very_draw(thousand, last_batch, first, second):
    """Over three epochs, batches before and after the resume follow the sequence of one loader, except for what `drop` omits."""
    options = {"shuffle": True, "seed": 5, "last_batch": last_batch, "columns": ["n"]}
    whole = thousand.loader(batch_size=1, **options)
    sequence = [number for _ in range(3) for number in numbers(whole)]
    one = thousand.loader(batch_size=first, **options)
    given = [number for batch in itertools.islice(iter(one), 3) for number in batch["n"].tolist()]
    two = thousand.loader(batch_size=second, **options)
    two.load_state_dict(one.state_dict())
    at = len(given)
    if last_batch == "drop" and 1000 - at < second:
        with pytest.warns(UserWarning, match=f"{1000 - at} samples left"):
            rest = numbers(two)
    else:
        rest = numbers(two)
    assert given == sequence[:at]
    if last_batch == "drop":
        assert rest == sequence[at : at + (1000 - at) // second * second]
    else:
        assert rest[: 1000 - at] == sequence[at:1000]
    following = numbers(two)
    assert following[:500] == sequence[1000 : 1000 + len(following[:500])], "the next epoch starts at its beginning"


@pytest.mark.local
def test_augmentation_differs_from_epoch_to_epoch_and_sample_to_sample(tmp_path):
    ds = ps.create(tmp_path / "set", {"image": ps.Image(), "v": ps.Tensor((40, 40), "uint16")})
    picture = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    ds.append({"image": [picture] * 6, "v": np.arange(9600).reshape(6, 40, 40).astype(np.uint16) % 1600})
    for transform in (T.RandomResizedCrop(16, on="image"), T.RandomCrop(16, on="image"), T.RandomCrop(16, on="v")):
        column = transform.on[0] if isinstance(transform.on, tuple | list) else transform.on
        loader = ds.loader(batch_size=6, seed=1, columns=[column], transform=[transform])
        epochs = [np.stack(list(batch[column])) for _ in range(4) for batch in loader]
        for one, two in itertools.combinations(range(4), 2):
            assert not np.array_equal(epochs[one], epochs[two]), f"epochs {one} and {two}"
        assert len({part.tobytes() for part in epochs[0]}) > 3, "samples of one epoch"
        again = ds.loader(batch_size=6, seed=1, columns=[column], transform=[transform])
        assert all(np.array_equal(np.stack(list(batch[column])), epoch) for epoch, batch in zip(epochs[:1], again, strict=True))


@pytest.mark.local
@pytest.mark.parametrize("workers", [0, 2])
def test_functions_get_other_numbers_in_every_epoch(thousand, workers):
    loader = thousand.loader(batch_size=100, seed=2, columns=["n"], transform=[noise], python_workers=workers)
    epochs = [np.concatenate([batch["n"] for batch in loader]) for _ in range(3)]
    for one, two in itertools.combinations(epochs, 2):
        assert not np.array_equal(one, two)
    assert len(np.unique(epochs[0])) > 900
    again = thousand.loader(batch_size=50, seed=2, columns=["n"], transform=[noise])
    assert np.array_equal(np.concatenate([batch["n"] for batch in again]), epochs[0])


def noise(sample, rng):
    return {"n": sample["n"] * 0 + rng.integers(1 << 40)}


@pytest.mark.local
def test_the_block_of_a_state_decides_how_sources_mix(thousand):
    """A mixture shuffles within blocks sized by its first loader's batch. A resumed loader keeps them at any batch size."""
    mixed = ps.mix({"low": (thousand.select(range(300)), 2), "high": (thousand.select(range(300, 1000)), 5)}, epoch_samples=700)
    one = mixed.loader(batch_size=35, shuffle=True, seed=3, columns=["n"])
    sequence = numbers(one)
    state = mixed.loader(batch_size=35, shuffle=True, seed=3, columns=["n"]).state_dict()
    for batch_size in (20, 70, 175):
        other = mixed.loader(batch_size=batch_size, shuffle=True, seed=3, columns=["n"])
        assert numbers(other) != sequence, "without the state, its batch size sets the blocks"
        other = mixed.loader(batch_size=batch_size, shuffle=True, seed=3, columns=["n"])
        other.load_state_dict(state)
        assert numbers(other) == sequence
    windowed = thousand.loader(batch_size=40, shuffle=ps.Window(bytes=1600, lanes=4), seed=3, columns=["n"])
    state, sequence = windowed.state_dict(), numbers(windowed)
    other = thousand.loader(batch_size=60, shuffle=ps.Window(bytes=1600, lanes=4), seed=3, columns=["n"])
    other.load_state_dict(state)
    assert numbers(other) == sequence


@pytest.mark.local
@pytest.mark.parametrize("flip", [T.RandomHorizontalFlip, T.RandomVerticalFlip])
def test_boxes_masks_and_points_follow_flips_in_both_directions(tmp_path, flip):
    """In an image 30 wide and 40 high, box, mask and points locate the white rectangle, flipped or not."""
    ds = ps.create(
        tmp_path / "set",
        {"image": ps.Image(), "boxes": ps.Boxes(of="image"), "mask": ps.Mask(of="image"), "points": ps.Keypoints(points=1, of="image")},
    )
    image, mask = np.zeros((40, 30, 3), np.uint8), np.zeros((40, 30), np.uint8)
    image[5:12, 3:8], mask[5:12, 3:8] = 255, 1
    rows = 40
    ds.append({"image": [image] * rows, "boxes": [np.array([[3, 5, 8, 12]], "float32")] * rows, "mask": [mask] * rows,
               "points": [np.array([[[3, 5]]], "float32")] * rows})  # fmt: skip
    on = ("image", "boxes", "mask", "points")
    places = set()
    for batch in ds.loader(batch_size=rows, seed=0, columns=list(on), transform=[flip(0.5, on=on)]):
        for index in range(rows):
            (x1, y1, x2, y2), (x, y) = batch["boxes"][index][0], batch["points"][index][0][0]
            ys, xs = np.nonzero(np.asarray(batch["image"][index])[:, :, 0])
            assert (xs.min(), ys.min(), xs.max() + 1, ys.max() + 1) == (x1, y1, x2, y2)
            assert np.array_equal(np.asarray(batch["mask"][index]) > 0, np.asarray(batch["image"][index])[:, :, 0] > 0)
            assert (x in (x1, x2 - 1)) and (y in (y1, y2 - 1)) and (x == x1) == (x1 == 3) and (y == y1) == (y1 == 5)
            places.add((x1, y1))
    assert places == ({(3, 5), (22, 5)} if flip is T.RandomHorizontalFlip else {(3, 5), (3, 28)})


@pytest.mark.local
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "lanczos"])
def test_a_window_of_an_enlarged_image_is_that_part_of_it_whole(tmp_path, interpolation):
    """The filter reads pixels beyond the window even when it enlarges: for Lanczos, 3 source pixels on each side."""
    rng = np.random.default_rng(0)
    picture = rng.integers(0, 256, (24, 24, 3), dtype=np.uint8)
    ds = ps.create(tmp_path / "set", {"image": ps.Image()})
    ds.append({"image": [picture]})
    resize = T.Resize((96, 96), interpolation=interpolation, on="image")
    [whole] = ds.loader(batch_size=1, transform=[resize])
    for size in (10, 30, 64):
        [part] = ds.loader(batch_size=1, transform=[resize, T.CenterCrop(size, on="image")])
        begin = (96 - size) // 2
        expected = np.asarray(whole["image"][0])[begin : begin + size, begin : begin + size].astype(int)
        assert np.abs(np.asarray(part["image"][0]).astype(int) - expected).max() <= 1, size


FLAT = """
import sys, numpy as np, penstock as ps
ps.configure(memory_bytes=16 << 20)  # This is the minimum: a take of 8 MB exceeds half of the cache.
values = np.load(sys.argv[1])
for io in ("direct", "buffered", "mapped"):
    ds = ps.open(sys.argv[2], io=io)
    for name in ds.schema:
        got = ds.take([1, 0], columns=[name])[name]
        assert all(np.array_equal(got[row], values[1 - row]) for row in range(2)), (io, name)
        assert np.array_equal(ds[name][1], values[1]), (io, name)
"""


@pytest.mark.local
def test_large_samples_whose_tiles_are_cut_in_each_dimension_come_whole(tmp_path):
    """Samples too large for the cache are streamed. Only if the consecutive tiles equal the sample may they be read straight into it."""
    import subprocess
    import sys

    values = np.random.default_rng(0).integers(0, 1 << 16, (2, 32, 256, 256)).astype(np.uint16)
    tiles = {"first": (4, 256, 256), "second": (4, 64, 256), "third": (4, 256, 64), "one": (1, 64, 256), "all": (4, 64, 64)}
    schema = {name: ps.Tensor((None, None, None), "uint16", tile=tile) for name, tile in tiles.items()}
    schema["fixed"] = ps.Tensor((32, 256, 256), "uint16", tile=(4, 64, 256))
    ps.create(tmp_path / "set", schema).append({name: list(values) for name in schema})
    np.save(tmp_path / "values.npy", values)
    command = [sys.executable, "-c", FLAT, str(tmp_path / "values.npy"), str(tmp_path / "set")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_refused_append_forgets_its_own_words_only(root):
    """If a later column refuses the first append of a transaction, the snapshot's words keep their codes."""
    good = (np.zeros((2, 2, 3), np.uint8), np.ones((2, 2, 3), np.uint8), np.ones((2, 2, 3), np.uint8))
    ds = ps.create(root, {"word": ps.Category(), "image": ps.Image()})
    ds.append({"word": ["a", "b", "c"], "image": good})
    with ds.transaction() as tx:
        with pytest.raises(ps.Error, match="image"):
            tx.append({"word": ["d", "e"], "image": [b"nothing that is an image", b"nor this"]})
        tx.append({"word": ["e", "b", "d"], "image": good})
    back = ps.open(root)
    words = np.array(back.vocabulary("word"))
    assert words[back[:]["word"]].tolist() == ["a", "b", "c", "e", "b", "d"] and sorted(words.tolist()) == ["a", "b", "c", "d", "e"]


def test_an_append_that_ends_in_the_middle_is_not_committed_in_part(root, monkeypatch):
    """Ctrl-C interrupts an append between two slices, and the transaction body catches it. The first slice must not be committed."""
    ds = ps.create(root, {"x": ps.Tensor((1 << 20,), "uint8")})
    slices = []

    def interrupted(self, ready, start, end, validate):
        slices.append(start)
        if start > 0:
            raise KeyboardInterrupt
        return append_slice(self, ready, start, end, validate)

    append_slice = ps.dataset.Transaction.append_slice
    monkeypatch.setattr(ps.dataset.Transaction, "append_slice", interrupted)
    with pytest.raises(ps.ClosedError, match="an earlier append failed"), ds.transaction() as tx, contextlib.suppress(KeyboardInterrupt):
        tx.append({"x": np.zeros((40, 1 << 20), np.uint8)})
    assert len(slices) == 2 and len(ps.open(root)) == 0


def _resealed(root, change):
    """Change the only block of the only data file, and recompute all checksums."""
    objects = crafted_runner.Objects(root)
    [name] = [name for name in objects.bodies if name.startswith("d/")]
    body = objects.bodies[name]
    tail = int.from_bytes(body[-32:-24], "little")
    checksum = lambda part: crafted_runner.varint(crafted_runner.crc32c(part))  # noqa: E731
    assert checksum(body[24:tail]) in body[tail:]
    block = change(body[24:tail])
    changed = body[:24] + block + body[tail:].replace(checksum(body[24:tail]), checksum(block))
    for path, content in objects.changed(name, changed).items():
        (root / path).write_bytes(content)


@pytest.mark.local
@pytest.mark.parametrize("io", LOCAL)
@pytest.mark.parametrize("kind", [ps.Text(), ps.Json()])
def test_what_is_no_text_is_damage_of_its_sample(tmp_path, kind, io):
    words = ["w0", "w1", "w2", "w3", "w4", "w5"]
    ps.create(tmp_path / "set", {"word": kind}).append({"word": words})
    _resealed(tmp_path / "set", lambda block: block.replace(b"w3", b"\xff3"))
    ds = ps.open(tmp_path / "set", io=io)
    assert len(ds.verify()["problems"]) == 1
    with pytest.raises(ps.CorruptError, match="sample 3 of column `word`") as caught:
        ds.take(range(6))
    assert caught.value.column == "word" and caught.value.row_ids == [3]
    assert ds.take(range(6), on_corrupt="null")["word"] == [None if word == "w3" else word for word in words]
    for on_corrupt in ("mask", "substitute"):
        for batch in ds.loader(batch_size=4, columns=["word", "_valid"], on_corrupt=on_corrupt).stream(2):
            assert None not in batch["word"] and "w3" not in batch["word"]
            assert batch["_valid"].tolist() == [
                on_corrupt == "substitute" or word != 3 for word in range(4 if len(batch["word"]) == 4 else 2)
            ]
    with pytest.raises(ps.CorruptError):
        list(ds.loader(batch_size=4))


@pytest.mark.local
@pytest.mark.parametrize("kind", [ps.Category(), ps.Label(["a", "b", "c"])])
def test_a_code_that_nothing_stands_for_is_damage_of_its_sample(tmp_path, kind):
    """The checksum is recomputed, as if a faulty writer had stored the code."""
    words = ["a", "b", "c", "b", "a", "c"]
    ps.create(tmp_path / "set", {"word": kind}).append({"word": words})

    def wrong(block):
        codes = bytearray(block)
        codes[3 * (len(codes) // 6)] = 77
        return bytes(codes)

    _resealed(tmp_path / "set", wrong)
    ds = ps.open(tmp_path / "set")
    with pytest.raises(ps.CorruptError, match="sample 3 of column `word`: it has code 77") as caught:
        ds.take([2, 3])
    assert caught.value.rows == [1] and ds.verify()["problems"]
    found = ds.take(range(6), on_corrupt="null")["word"]
    assert [None if code is np.ma.masked else ds.vocabulary("word")[code] for code in found] == [*words[:3], None, *words[4:]]


@pytest.mark.local
def test_a_record_that_was_changed_and_sealed_anew_is_not_the_parent_of_its_child(tmp_path):
    ds = ps.create(tmp_path / "set", {"n": "int64"})
    for message in ("first one", "second one", "third one"):
        ds.append({"n": [1]}, message=message)
    objects = crafted_runner.Objects(tmp_path / "set")
    [name] = [name for name, body in objects.bodies.items() if name.startswith("log/") and b"first one" in body]
    changed = objects.changed(name, objects.bodies[name].replace(b"first one", b"forged it"))
    (tmp_path / "set" / name).write_bytes(changed[name])
    ds = ps.open(tmp_path / "set")
    assert ds.verify()["problems"]
    with pytest.raises(ps.CorruptError) as caught:
        ds.log()
    assert caught.value.code == "object-checksum"


@pytest.mark.local
def test_who_waits_for_a_block_that_another_could_not_read_reads_it():
    """Only one of the threads that need a block fetches it. It gets three corrupt answers; the other thread then gets a good one."""
    values = np.random.default_rng(0).integers(0, 256, (20, 50_000), dtype=np.uint8)
    with wrong_s3.serving() as (state, options):
        ps.create("s3://bucket/set", {"v": ps.Tensor((50_000,), "uint8")}, storage_options=options).append({"v": values})
        ds, told = ps.open("s3://bucket/set", storage_options=options), {}
        ds.take([19])
        state.delay_seconds, state.spoil = 0.2, 3

        def read(name):
            try:
                told[name] = np.array_equal(ds.take([5])["v"], values[[5]])
            except ps.Error as error:
                told[name] = error.code

        readers = [threading.Thread(target=read, args=(name,)) for name in ("first", "second")]
        for reader in readers:
            reader.start()
            time.sleep(0.05)  # The second thread asks while the first waits. If it starts late, it reads good bytes anyway.
        for reader in readers:
            reader.join()
        assert sorted(map(str, told.values())) == ["True", "block-checksum"] and state.spoil == 0


@pytest.mark.local
@pytest.mark.parametrize("io", LOCAL)
def test_below_a_null_is_zero_also_in_memory_that_is_used_again(tmp_path, io):
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


WIDE = """
import sys
import numpy as np, penstock as ps
from measured import anonymous
ps.configure(memory_bytes=64 << 20, threads=2)
names = [f"c{index}" for index in range(100)]
ds = ps.create(sys.argv[1], dict.fromkeys(names, "float32"))
part = np.ones(100_000, np.float32)
before = peak = anonymous()
with ds.transaction("wide") as tx:
    for _ in range(15):
        tx.append(dict.fromkeys(names, part))
        peak = max(peak, anonymous())
print(peak - before)
"""


@pytest.mark.local
def test_what_waits_to_be_written_is_bounded_over_all_columns(tmp_path):
    assert int(measured.run(WIDE, tmp_path / "set")) <= 48 << 20, "appending 600 MB under a budget of 64 MiB holds at most 48 MiB"


@pytest.mark.local
def test_two_views_of_an_image_are_two(tmp_path):
    ds = ps.create(tmp_path / "set", {"image": ps.Image(), "other": ps.Image()})
    picture = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    ds.append({"image": [picture] * 12, "other": [picture] * 12})
    for outputs in ({"a": "image", "b": "image"}, {"a": "image", "b": "other"}):
        for made in (
            lambda on: T.RandomResizedCrop(16, on=on),
            lambda on: T.RandomCrop(16, on=on),
            lambda on: T.RandomHorizontalFlip(on=on),
        ):
            [batch] = ds.loader(batch_size=12, outputs=outputs, transform=[made("a"), made("b")])
            assert any(not np.array_equal(a, b) for a, b in zip(batch["a"], batch["b"], strict=True))
            [batch] = ds.loader(batch_size=12, outputs=outputs, transform=[made(["a", "b"])])
            assert all(np.array_equal(a, b) for a, b in zip(batch["a"], batch["b"], strict=True))

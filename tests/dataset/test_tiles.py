"""Tiled tensors: a window equals NumPy's slice and reads only the tiles that it overlaps. Samples may be larger than memory."""

import itertools
import multiprocessing
import pathlib
import pickle
import subprocess
import sys

import h5py
import measured
import numpy as np
import penstock as ps
import pytest
import zarr
from handles import newest, spent


def numbered(*shape, dtype="int32"):
    return np.arange(np.prod(shape), dtype=dtype).reshape(shape)


KEYS = [
    (0, slice(None), slice(None)), (3, 5, 7), (slice(3, 17), slice(10, 11), slice(20, 3, -4)), (Ellipsis, 2), (slice(2, 30, 7), Ellipsis),
    (-1, slice(-9, None), -3), (slice(5, 5), 1), ([4, 0, -2], slice(1, 40, 3)), ([1, 8], [2, 3], 4), (None, 3, slice(None, None, -1)),
    (slice(None), np.arange(50) % 2 == 0, 1), (), (slice(39, None, -13), slice(49, 12), 0), (7, None, slice(30, 31), Ellipsis, None),
]  # fmt: skip


@pytest.mark.parametrize("codec", ["none", "lz4", "zstd"])
@pytest.mark.parametrize("tile", [(16, 16, 60), (7, 50, 9), (40, 50, 60), (1, 1, 60)])
def test_windows_are_what_numpy_gives(root, tile, codec):
    volumes = np.stack([numbered(40, 50, 60), -numbered(40, 50, 60)])
    ds = ps.create(root, {"volume": ps.Tensor((40, 50, 60), "int32", tile=tile, codec=codec)})
    ds.append({"volume": volumes})
    assert ds.schema["volume"].tile == tile
    for key in KEYS:
        for row in (0, 1, -1):
            found = ds["volume"][(row, *key)]
            np.testing.assert_array_equal(found, volumes[row][key])
            assert found.dtype == np.int32
    np.testing.assert_array_equal(ds["volume"][[1, 0, 1]], volumes[[1, 0, 1]])
    several = ds["volume"][[1, 0], 3:9, 4]
    np.testing.assert_array_equal(several[0], volumes[1, 3:9, 4])
    np.testing.assert_array_equal(several[1], volumes[0, 3:9, 4])
    assert [part.tolist() for part in ds["volume"][0:2, 0, 0, :3]] == [[0, 1, 2], [0, -1, -2]]
    again = pickle.loads(pickle.dumps(ds.select([1])))
    np.testing.assert_array_equal(again["volume"][0, 30:, 2], volumes[1, 30:, 2])
    assert ds.verify()["problems"] == []


def test_ragged_samples_nulls_and_empty_ones(root):
    ds = ps.create(root, {"number": "int32", "cloud": ps.Tensor((None, 3, None), "float32", tile=(100, 3, 2))})
    rng = np.random.default_rng(0)
    clouds = [rng.random((900, 3, 5), np.float32), None, rng.random((0, 3, 5), np.float32), rng.random((99, 3, 1), np.float32)]
    ds.append({"number": [0]})
    ds.append({"number": [1, 2, 3, 4], "cloud": clouds})
    with ds.transaction() as transaction:
        transaction.append({"number": [5]})
        transaction.append({"number": [6], "cloud": [clouds[0] + 1]})
        transaction.append({"number": [7]})
    values = ds.take(range(8))["cloud"]
    assert [value is None for value in values] == [True, False, True, False, False, True, False, True]
    for row, wanted in [(1, clouds[0]), (3, clouds[2]), (4, clouds[3]), (6, clouds[0] + 1)]:
        np.testing.assert_array_equal(values[row], wanted)
        np.testing.assert_array_equal(ds["cloud"][row, 5:250:3, 1], wanted[5:250:3, 1])
    assert ds["cloud"][2, 0] is None and ds["cloud"][[0, 2], 0] == [None, None]
    assert ds["cloud"][3].shape == (0, 3, 5)
    assert ds.verify()["problems"] == []
    with pytest.raises(ps.OutOfRangeError, match="cannot read index 99: the dimension has 99 elements"):
        ds["cloud"][4, 99]
    with pytest.raises(ps.OutOfRangeError, match="more indices than the 3 dimensions"):
        ds["cloud"][4, 0, 0, 0, 0]
    assert [len(batch) for batch in ds.scan(batch_size=5)] == [5, 3]


def test_nulls_of_fixed_shape_take_no_space(root):
    ds = ps.create(root, {"number": "int32", "volume": ps.Tensor((1 << 20, 1 << 20), "float64")})
    ds.append({"number": [1, 2], "volume": [None, None]})
    with ds.transaction() as transaction:
        transaction.append({"number": [3]})
        transaction.append({"number": [4], "volume": [None]})
    assert len(ds) == 4 and ds["volume"][2, 5:9, 7] is None and ds.layout()["volume"]["stored_bytes"] < 100
    assert ds.verify()["problems"] == []


def test_large_samples_are_tiled_by_themselves_and_small_ones_are_not(root):
    ds = ps.create(
        root, {"small": ps.Tensor((64, 64), "int32"), "large": ps.Tensor((2048, 1024), "int32"), "any": ps.Tensor((None, None), "int16")}
    )
    large = numbered(2, 2048, 1024)
    ds.append({"small": large[:, :64, :64], "large": large, "any": [np.ones((2, 2), np.int16), np.ones((3000, 2000), np.int16)]})
    layout = ds.layout()
    assert layout["large"]["blocks"] == 2 * 128 and layout["small"]["blocks"] < 3, "each tile is one checksum unit"
    ds.append({"any": [numbered(3000, 2000, dtype="int16"), None, numbered(2, 3, dtype="int16")]})
    np.testing.assert_array_equal(ds["any"][2, 2990:, ::500], numbered(3000, 2000, dtype="int16")[2990:, ::500])
    np.testing.assert_array_equal(ds["any"][4, 1], [3, 4, 5])
    np.testing.assert_array_equal(ds["large"][1, 1000:1003, 7], large[1, 1000:1003, 7])
    np.testing.assert_array_equal(ds["small"][1, 10:13, 7], large[1, 10:13, 7])
    np.testing.assert_array_equal(ds[0]["large"], large[0])
    assert ds.verify()["problems"] == []


def test_a_large_sample_after_small_ones_begins_a_fragment(root):
    ds = ps.create(root, {"any": ps.Tensor((None, None), "uint8"), "number": "int32"})
    rng = np.random.default_rng(0)
    small, large = rng.integers(0, 256, (3, 4), np.uint8), rng.integers(0, 256, (3000, 4000), np.uint8)
    with ds.transaction() as transaction:
        transaction.append({"any": [small] * 100, "number": range(100)})
        transaction.append({"any": [large], "number": [100]})
        transaction.append({"any": [small] * 5, "number": range(101, 106)})
        transaction.append({"any": [small] * 2000, "number": range(106, 2106)})
    assert ds["number"][:].tolist() == list(range(2106))
    np.testing.assert_array_equal(ds["any"][100, 17:2000:5, 3999], large[17:2000:5, 3999])
    for row in (0, 99, 101, 105, 2105):
        np.testing.assert_array_equal(ds["any"][row], small)
    assert ds.layout()["any"]["blocks"] < 400, "the last small samples are packed into blocks"


# Cost of a window


@pytest.fixture(scope="module")
def volume(tmp_path_factory):
    """Return the path of a dataset with one sample of 512 MiB, and the sample."""
    place = tmp_path_factory.mktemp("volume") / "dataset"
    ds = ps.create(place, {"volume": ps.Tensor((2048, 2048, 64), "int16")})
    values = np.random.default_rng(0).integers(-(2**15), 2**15, (2048, 2048, 64), dtype=np.int16)
    ds.append({"volume": values[None]})
    return place, values


def cost_of(place, key):
    """Return how many ranges and bytes a read requests, and the values that it returns. Call this in a fresh process, so that
    no tiles are cached. The tail is read before the measurement.
    """
    ds = ps.open(place, io="buffered")
    ds._view.shapes(np.array([0]), "volume")
    found = []
    cost = spent(ds, lambda: found.append(ds["volume"][key]))
    assert spent(ds, lambda: ds["volume"][key]) == {}, "all tiles are in the cache"
    return cost["ranges"], cost["range_bytes"], found[0]


@pytest.mark.long
@pytest.mark.local
def test_windows_read_little_more_than_they_give(volume):
    place, values = volume
    rng = np.random.default_rng(1)
    corners = [[int(rng.integers(0, size - 63)) for size in values.shape] for _ in range(60)]
    keys = [(0, *(slice(low, low + 64) for low in corner)) for corner in corners]
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        costs = pool.starmap(cost_of, [(place, key) for key in keys], chunksize=1)
        [(ranges, received, plane)] = pool.starmap(cost_of, [(place, (0, slice(1000, 1001)))])
    for key, (_, _, found) in zip(keys, costs, strict=True):
        np.testing.assert_array_equal(found, values[key[1:]])
    assert max(ranges for ranges, _, _ in costs) <= 4
    assert sum(received for _, received, _ in costs) <= 2.5 * len(costs) * 64**3 * 2
    np.testing.assert_array_equal(plane, values[1000:1001])
    assert ranges <= 4 and received <= 40 * 2048 * 64 * 2


@pytest.mark.local
def test_of_large_tiles_only_the_checksum_units_are_read(tmp_path):
    values = numbered(512, 1024, 4)
    ds = ps.create(tmp_path / "dataset", {"volume": ps.Tensor((512, 1024, 4), "int32", tile=(256, 1024, 4))})
    ds.append({"volume": values[None]})
    ds = ps.open(tmp_path / "dataset", io="buffered")
    ds["volume"][0, 0, 0]
    cost = spent(ds, lambda: np.testing.assert_array_equal(ds["volume"][0, 300:305], values[300:305]))
    assert cost == {"ranges": 1, "range_bytes": 2 << 16}, "rows take 16 KiB: a unit holds four, so five rows span two units"
    cost = spent(ds, lambda: np.testing.assert_array_equal(ds["volume"][0, 296:308, 1000:], values[296:308, 1000:]))
    assert cost["range_bytes"] == 1 << 16, "two of the three units are in the cache"


@pytest.mark.local
def test_the_second_read_of_a_tile_fetches_the_rest(tmp_path):
    values = numbered(128, 128, 128)
    ds = ps.create(tmp_path / "dataset", {"volume": ps.Tensor((128, 128, 128), "int32", tile=(64, 64, 64))})
    ds.append({"volume": values[None]})
    ds = ps.open(tmp_path / "dataset", io="buffered")
    window = lambda begin, end: np.testing.assert_array_equal(ds["volume"][0, begin:end, :64, :64], values[begin:end, :64, :64])  # noqa: E731
    ds["volume"][0, 127, 127, 127]
    tile = {"ranges": 1, "range_bytes": 1 << 20}
    assert spent(ds, lambda: window(0, 8)) == {"ranges": 1, "range_bytes": 2 << 16}, "a unit holds four planes"
    assert spent(ds, lambda: window(4, 12)) == {"ranges": 1, "range_bytes": 14 << 16}, "the other 14 units of the tile"
    assert spent(ds, lambda: window(0, 64)) == {}
    assert spent(ds, lambda: np.testing.assert_array_equal(ds["volume"][0, :32, 64:, :64], values[:32, 64:, :64])) == tile, "half of it"


@pytest.mark.local
def test_damage_beside_what_a_window_needs_is_not_noticed_until_it_is_read(tmp_path):
    values = numbered(64, 64, 64)
    ds = ps.create(tmp_path / "dataset", {"volume": ps.Tensor((64, 64, 64), "int32", tile=(64, 64, 64))})
    ds.append({"volume": values[None]})
    [data] = (tmp_path / "dataset" / "d").iterdir()
    body = bytearray(data.read_bytes())
    body[4096 + 15 * 65536 + 100] ^= 1  # In the last unit, of planes 60 to 63.
    data.write_bytes(body)
    ds = ps.open(tmp_path / "dataset", io="buffered")
    for end in (8, 40, 60):
        np.testing.assert_array_equal(ds["volume"][0, :end], values[:end])
    for _ in range(2):
        with pytest.raises(ps.CorruptError, match="crc32c"):
            ds["volume"][0, 60:]


@pytest.mark.local
@pytest.mark.parametrize("io", ["mapped", "buffered", "direct"])
def test_a_damaged_tile_spoils_only_what_needs_it(root, io):
    values = numbered(2, 1024, 1024)
    ds = ps.create(root, {"volume": ps.Tensor((1024, 1024), "int32", tile=(128, 128))})
    ds.append({"volume": values})
    [data] = (pathlib.Path(root) / "d").iterdir()
    body = bytearray(data.read_bytes())
    body[64 * 65536 + 5 * 65536 + 8192] ^= 1
    data.write_bytes(body)
    ds = ps.open(root, io=io)
    np.testing.assert_array_equal(ds["volume"][1, 128:], values[1, 128:])
    with pytest.raises(ps.CorruptError, match=r"sample 1 of column `volume`.*crc32c"):
        ds["volume"][1, :200]
    batch = ds.take([0, 1], on_corrupt="null")["volume"]
    assert batch[1].mask.all() and not np.ma.getmaskarray(batch)[0].any()
    np.testing.assert_array_equal(batch[0], values[0])
    assert [problem.code for _, problem in ds.verify()["problems"]] == ["block-checksum"]


@pytest.mark.local
@pytest.mark.parametrize("io", ["mapped", "buffered", "direct"])
def test_lenient_takes_of_ragged_tiles(root, io):
    clouds = [numbered(900, 300), numbered(500, 300), numbered(700, 300)]
    ds = ps.create(root, {"cloud": ps.Tensor((None, 300), "int32", tile=(50, 300))})
    ds.append({"cloud": clouds[:2]})
    [data] = (pathlib.Path(root) / "d").iterdir()
    ds.append({"cloud": clouds[2:]})
    body = bytearray(data.read_bytes())
    body[100_000] ^= 1
    data.write_bytes(body)
    found = ps.open(root, io=io).take([2, 0, 1], on_corrupt="null")["cloud"]
    assert found[1] is None
    np.testing.assert_array_equal(found[0], clouds[2])
    np.testing.assert_array_equal(found[2], clouds[1])
    data.write_bytes(body[:-40])
    found = ps.open(root, io=io).take([2, 0, 1], on_corrupt="null")["cloud"]
    assert found[1] is None and found[2] is None
    np.testing.assert_array_equal(found[0], clouds[2])


# Sources read part by part


def sources(folder, values):
    np.save(folder / "values.npy", values)
    with h5py.File(folder / "values.h5", "w") as file:
        file.create_dataset("values", data=values, chunks=True)
    zarr.save_array(folder / "values.zarr", values)
    yield np.load(folder / "values.npy", mmap_mode="r")
    yield h5py.File(folder / "values.h5")["values"]
    yield zarr.open_array(folder / "values.zarr", mode="r")


def test_arrays_that_read_their_parts(root, tmp_path):
    values = np.random.default_rng(0).random((3, 600, 800), dtype=np.float32)
    given = list(sources(tmp_path, values))
    ds = ps.create(root, {"volume": ps.Tensor((600, 800), "float32", tile=(100, 100)), "plain": ps.Tensor((600, 800), "float64")})
    for source in given:
        ds.append({"volume": source, "plain": source})
        ds.append({"volume": [source[0], None], "plain": [None, source[1]]})
    assert len(ds) == 15
    for first in (0, 5, 10):
        np.testing.assert_array_equal(ds["volume"][first : first + 3], values)
        np.testing.assert_array_equal(ds["plain"][first : first + 3], values)
        np.testing.assert_array_equal(ds["volume"][first + 3], values[0])
    cube = ps.create(f"{root}-cube", {"cube": ps.Tensor((3, 600, None), "float32", tile=(1, 300, 300))})
    for source in given:
        cube.append({"cube": [source]})
        np.testing.assert_array_equal(cube["cube"][-1, :, 299:302, 7], values[:, 299:302, 7])


class Broken:
    """A source that fails once half of it has been read."""

    shape, dtype = (2048, 4096), np.dtype("float32")

    def __getitem__(self, key):
        if key[0].stop > 1024:
            raise OSError("the disk went away")
        return np.zeros((2048, 4096), np.float32)[key]


@pytest.mark.parametrize("tile", [None, (64, 4096)])
def test_a_source_that_fails_leaves_nothing(root, tile):
    ds = ps.create(root, {"volume": ps.Tensor((2048, 4096), "float32", tile=tile), "number": "int32"})
    ps.configure(memory_bytes=64 << 20)
    try:
        with pytest.raises(OSError, match="the disk went away"):
            ds.append({"volume": [Broken()], "number": [1]})
    finally:
        ps.configure(memory_bytes=512 << 20)
    assert len(ds) == len(ds.refresh()) == 0
    ds.append({"volume": [np.ones((2048, 4096), np.float32)], "number": [2]})
    assert ds["volume"][0, 7, 8] == 1 and ds.verify()["problems"] == []


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros((2048, 4095), np.float32), r"row 0 has the shape \(2048, 4095\), expected \(2048, 4096\)"),
        (np.zeros((2048, 4096), np.complex64), "complex64, which does not fit float32"),
        (np.full((2048, 4096), 1e300), "row 0 has 1e.300, which is out of the range of float32"),
    ],
)
def test_large_values_that_do_not_fit(root, value, message):
    ds = ps.create(root, {"volume": ps.Tensor((2048, 4096), "float32")})
    with pytest.raises(ps.InvalidInputError, match=message):
        ds.append({"volume": [value]})
    assert len(ds.refresh()) == 0


def test_tiles_that_cannot_be(root):
    for tile in [(0, 4), (4,), (4, 4, 4), (4, -1), (4, 2.5), (True, 4)]:
        with pytest.raises(ps.InvalidInputError, match="expected a whole number above 0 for each of 2 dimensions"):
            ps.Tensor((8, 8), "int8", tile=tile)
    ds = ps.create(root, {"volume": ps.Tensor((None, 2048), "int8", tile=(1, 1))})
    with pytest.raises(ps.InvalidInputError, match=r"has 2097152 tiles of \[1, 1\], but at most 1048576 are supported"):
        ds.append({"volume": [np.zeros((1024, 2048), np.int8)]})


PROGRAM = """
import sys
import numpy as np
import penstock as ps
from measured import Grown

source, place, columns, rows = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
ps.create("memory://warm", {"x": "int32"}).append({"x": [1]})
with Grown() as grown:
    values = np.memmap(source, np.int32, "r", shape=(rows, 1024, columns))
    ds = ps.create(place, {"volume": ps.Tensor((None, 1024, columns), "int32")})
    ds.append({"volume": [values]})
    rng = np.random.default_rng(0)
    for _ in range(50):
        low = int(rng.integers(0, rows - 8))
        found = ds["volume"][0, low:low + 8, 100:300]
        assert found.shape == (8, 200, columns) and np.array_equal(found, values[low:low + 8, 100:300])
    assert ds.verify()["problems"] == []
print(grown.peak)
"""


def beyond_memory(tmp_path, place, gib):
    """Append a memmap of `gib` GiB as one sample, and read it back. Return the peak growth of anonymous memory in bytes."""
    rows = int(gib * 1024)
    with (tmp_path / "values.bin").open("wb") as file:
        for row in range(rows):
            file.write((np.arange(1 << 18, dtype=np.int32) * 3 + row).tobytes())
    return int(measured.run(PROGRAM, tmp_path / "values.bin", place, 256, rows))


@pytest.mark.long
def test_a_sample_larger_than_the_budget(root, tmp_path):
    assert beyond_memory(tmp_path, root, 1) < 512 << 20


@pytest.mark.soak
@pytest.mark.local
def test_six_gibibytes_as_one_sample(tmp_path, bucket):
    for place in (tmp_path / "dataset", bucket):
        assert beyond_memory(tmp_path, place, 6) < 512 << 20


# Regressions


@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_nulls_after_tiles_in_one_transaction(root, codec):
    """Append large samples, small samples, nulls and omitted columns in random order, in transactions of two to five appends."""
    large = np.random.default_rng(0).integers(0, 99, (2048, 2048)).astype("int16")
    small = large[:3]
    pushes = {"L": [large], "s": [small], "N": [None], "sN": [small, None], "NL": [None, large], "out": None}
    order = np.random.default_rng(1)
    ds = ps.create(root, {"v": ps.Tensor((None, 2048), "int16", codec=codec), "n": "int32"})
    expected = []
    for length in (2, 3, 3, 4, 4, 5):
        with ds.transaction("mixed") as transaction:
            for name in ["L", *order.choice(list(pushes), length - 1)]:
                values = pushes[str(name)]
                transaction.append({"n": [1, 2]} if values is None else {"v": values, "n": [0] * len(values)})
                expected += [None, None] if values is None else values
    found = newest(ds, len(expected))["v"][:]
    assert len(ds) == len(expected) and not ds.verify()["problems"]
    for value, wanted in zip((found[index] for index in range(len(found))), expected, strict=True):
        assert (value is None) == (wanted is None)
        np.testing.assert_array_equal(value, wanted)


def test_fixed_tiles_and_left_out_columns(root):
    ds = ps.create(root, {"v": ps.Tensor((4, 4), "int16", tile=(2, 2)), "n": "int32"})
    with ds.transaction("x") as transaction:
        transaction.append({"v": np.ones((1, 4, 4), "int16"), "n": [1]})
        transaction.append({"n": [2]})
        transaction.append({"n": np.arange(70_000)})
        transaction.append({"v": np.full((1, 4, 4), 7, "int16"), "n": [3]})
    newest(ds, 70_003)
    assert ds["v"][0].sum() == 16 and ds["v"][1] is None and ds["v"][70_001] is None and ds["v"][70_002].sum() == 112


def test_masks_and_odd_indices_are_those_of_numpy(root):
    array = np.arange(3 * 4 * 5).reshape(3, 4, 5).astype("int32")
    ds = ps.create(root, {"v": ps.Tensor((3, 4, 5), "int32", tile=(2, 2, 2))})
    ds.append({"v": array[None]})
    mask = array[:, :, 0] % 3 == 0
    keys = [
        (mask, slice(0, 4)),
        (mask, slice(0, 2)),
        (mask, 2),
        (mask, 4),
        (mask, slice(0, 4, 2)),
        (Ellipsis, array[0, 0] % 2 == 0),
        (array % 2 == 0,),
    ]
    keys += [(slice(1, 2), mask[0], 1), (0, mask[0]), (True,), (False, 0), (np.True_, 1, 2), (None, mask), (Ellipsis, array[0] % 3 == 1)]
    keys += [(mask.tolist(), 1), ([], 0), ([True, False, True],), ([0, 2], [1, -1])]
    keys += [(np.array([2, -1], np.int8), np.array([1, 3], np.uint8)), (0, slice(None, None, 3)), ()]
    for key in keys:
        np.testing.assert_array_equal(ds["v"][(0, *key)], array[key], err_msg=str(key))
    np.testing.assert_array_equal(ds["v"][()], array[None])
    for key in [(0, mask, 5), (0, 0, 0, 0, 0), (0, mask, 0, 0)]:
        with pytest.raises(IndexError):
            ds["v"][key]
    for key in [(0, [1.5]), (0, np.array(["2026"], "datetime64[Y]"))]:
        with pytest.raises(ps.InvalidInputError, match="whole numbers"):
            ds["v"][key]
    long = ps.create(f"{root}-long", {"v": ps.Tensor((300,), "int16", tile=(100,))})
    long.append({"v": np.arange(300, dtype="int16")[None]})
    assert ds["v"][0, 0, 0, 0] == 0 and newest(long, 1)["v"][0, np.array([1, -1], np.int8)].tolist() == [1, 299]
    words = ps.create(f"{root}-words", {"t": ps.Text(), "j": ps.Json(), "b": ps.Bytes(), "n": "int32"})
    words.append({"t": ["abc"], "j": [{"a": 1}], "b": [b"xyz"], "n": [3]})
    for name, value in (("t", "abc"), ("j", {"a": 1}), ("b", b"xyz"), ("n", 3)):
        assert words[name][0,] == words[name][0] == value and len(words[name][:,]) == len(words[name][[0],]) == 1
        if name != "n":
            with pytest.raises(ps.InvalidInputError, match="cannot read a part of column"):
                words[name][0, 0]
    with pytest.raises(ps.InvalidInputError, match="tile=5"):
        ps.Tensor((3, 3), "int8", tile=5)


def test_a_few_elements_do_not_hold_on_to_their_window(root):
    ds = ps.create(root, {"v": ps.Tensor((512, 512, 8), "int16", tile=(16, 16, 8))})
    ds.append({"v": np.zeros((1, 512, 512, 8), "int16")})
    part = ds["v"][0, ::256, ::256]
    assert part.nbytes == 64 and part.base is None


class Masked:
    """A source that returns masked arrays, as netCDF does."""

    shape, dtype = (4, 64), np.dtype("int16")

    def __getitem__(self, key):
        values = np.ma.masked_equal(np.arange(256, dtype="int16").reshape(4, 64), 70)
        return values[key]


def test_masked_parts_of_a_source_are_refused(root):
    ds = ps.create(root, {"v": ps.Tensor((4, 64), "int16", tile=(2, 64)), "w": ps.Tensor((64,), "int16")})
    with pytest.raises(ps.InvalidInputError, match="partly masked"):
        ds.append({"v": [Masked()], "w": np.zeros((1, 64), "int16")})
    with pytest.raises(ps.InvalidInputError, match="partly masked"):
        ds.append({"v": [None] * 4, "w": Masked()})
    assert len(ds) == 0


@pytest.mark.local
@pytest.mark.parametrize("io", ["auto", "buffered", "direct"])
def test_many_damaged_places_of_a_large_sample_are_one_error(tmp_path, io):
    """Direct reads complete in any order, but corrupt ranges are reread in file order."""
    ds = ps.create(tmp_path / "ds", {"x": ps.Tensor((4096, 8192), "uint8")})
    ds.append({"x": np.random.default_rng(0).integers(0, 256, (1, 4096, 8192), dtype=np.uint8)})
    path = max((tmp_path / "ds" / "d").iterdir(), key=lambda path: path.stat().st_size)
    with path.open("r+b") as file:
        for place in range(100_000, path.stat().st_size - 100_000, 1_500_000):
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 1]))
    program = """
import sys
import penstock as ps
ps.configure(memory_bytes=16 << 20)
for _ in range(5):
    try:
        ps.open(sys.argv[1], io=sys.argv[2])["x"][0, :, 100:8000]
    except ps.CorruptError as error:
        print(error.code)
"""
    done = subprocess.run([sys.executable, "-c", program, ds.uri, io], capture_output=True, text=True)
    assert done.stdout.split() == ["block-checksum"] * 5, done.stdout + done.stderr


def test_a_dataset_may_begin_with_nulls_only(root):
    """A commit with only nulls writes no data file, so the folder for data files does not exist."""
    ds = ps.create(root, {"even": ps.Tensor((9, 9), "uint8", tile=(4, 4))})
    ds.append({"even": [None, None]})
    assert [value is None for value in (ps.open(root)[index]["even"] for index in range(2))] == [True, True] and not ds.verify()["problems"]


class Using:
    """A source that calls back into its own transaction while being read."""

    shape, dtype = (3, 2048, 2048), np.dtype("float32")

    def __init__(self, use):
        self.use = use

    def __getitem__(self, key):
        self.use()
        return np.zeros((2048, 2048), np.float32)[key[1:]]


@pytest.mark.parametrize("how", ["append", "abort", "commit"])
def test_a_value_cannot_use_the_transaction_that_reads_it(root, how):
    """If a value waited for its own transaction, it would deadlock and ignore Ctrl-C."""
    ds = ps.create(root, {"v": ps.Tensor((2048, 2048), "float32")})
    other = ps.create(f"{root}-other", {"n": "int64"})
    transaction = ds.transaction()
    uses = {"append": lambda: transaction.append({}), "abort": transaction.abort, "commit": transaction.commit}
    with pytest.raises(ps.ClosedError, match="is in progress" if how == "commit" else "while it is reading a value"):
        transaction.append({"v": Using(uses[how])})
    transaction.abort()
    ds.append({"v": Using(lambda: other.append({"n": [1]}))})  # A value may use another dataset's transaction.
    assert len(ds) == 3 and len(other) > 0


def test_errors_of_values_that_are_pulled_name_their_column(root):
    columns = {name: ps.Tensor((None, None), "float32", tile=(64, 64)) for name in "ab"}
    good, bad = [np.zeros((100, 100))] * 4, [np.zeros((100, 100))] * 4
    bad[2] = np.full((100, 100), 1e300)
    with pytest.raises(ps.InvalidInputError, match="cannot append to column `b`: row 2 has 1e") as caught:
        ps.create(root, columns).append({"a": good, "b": bad})
    assert caught.value.column == "b" and caught.value.rows == [2]


LOCAL = ["mapped", "buffered", "direct"]


@pytest.mark.local
@pytest.mark.parametrize("io", LOCAL)
@pytest.mark.parametrize("tile", [None, (2, 3, 5), (4, 8, 8)])
def test_windows_flat_in_some_dimensions(tmp_path, io, tile):
    """A window may cover all of a dimension, part of it, or a single index. Each result must equal NumPy's."""
    shape = (9, 10, 11)
    values = np.random.default_rng(1).integers(0, 1 << 15, (4, *shape)).astype(np.int16)
    free = ps.Tensor((None, None, None), "int16") if tile is None else ps.Tensor((None, None, None), "int16", tile=tile)
    ps.create(tmp_path / "set", {"v": free}).append({"v": list(values)})
    parts = [slice(None), slice(2, 3), slice(3, 9), slice(0, 0), 4, slice(None, None, 2)]
    for key in itertools.product(parts, parts, parts):
        ds = ps.open(tmp_path / "set", io=io)  # A fresh handle has no cached tiles.
        assert np.array_equal(ds["v"][(2, *key)], values[2][key]), key


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
def test_large_samples_with_tiles_cut_in_each_dimension_are_read_whole(tmp_path):
    """Samples too large for the cache are streamed. Tiles may be read straight into a sample only if their concatenation equals the
    bytes of the sample.
    """
    values = np.random.default_rng(0).integers(0, 1 << 16, (2, 32, 256, 256)).astype(np.uint16)
    tiles = {"first": (4, 256, 256), "second": (4, 64, 256), "third": (4, 256, 64), "one": (1, 64, 256), "all": (4, 64, 64)}
    schema = {name: ps.Tensor((None, None, None), "uint16", tile=tile) for name, tile in tiles.items()}
    schema["fixed"] = ps.Tensor((32, 256, 256), "uint16", tile=(4, 64, 256))
    ps.create(tmp_path / "set", schema).append({name: list(values) for name in schema})
    np.save(tmp_path / "values.npy", values)
    command = [sys.executable, "-c", FLAT, str(tmp_path / "values.npy"), str(tmp_path / "set")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

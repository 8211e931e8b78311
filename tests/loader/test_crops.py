"""Crops of tensors: a loader whose first transforms are crops reads only what they need, and gives what crops of whole samples give."""

import dataclasses
import itertools
import multiprocessing

import numpy as np
import penstock as ps
import pytest
from handles import spent
from penstock import transforms as T

# Kinds of tensors whose samples have blocks of their own: shape, shape of one sample, tile, codec.
KINDS = {
    "tiled": ((120, 110, 100), (120, 110, 100), (16, 32, 64), "none"),
    "tiled by size": ((None, None, None), (150, 120, 125), None, "none"),
    "ragged tiles": ((None, None, None), (90, 80, 70), (30, 20, 10), "none"),
    "compressed tiles": ((100, 80, 70), (100, 80, 70), (25, 40, 35), "lz4"),
    "large": ((100, 80, 70), (100, 80, 70), None, "none"),
    "ragged": ((None, None, 70), (100, 80, 70), None, "none"),
}


def stored(place, kind, samples=6):
    """Create a dataset of one kind. Returns its values."""
    shape, size, tile, codec = KINDS[kind]
    values = np.stack([np.arange(np.prod(size), dtype=np.int32).reshape(size)] * samples)
    ps.create(place, {"volume": ps.Tensor(shape, "int32", tile=tile, codec=codec), "number": "int32"}).append(
        {"volume": list(values), "number": range(samples)}
    )
    return values


def cost_of(place, crop, corners):
    """Read each sample's box, or load an epoch if `corners` is None. Returns the requests, the bytes, and the values. Call this in a fresh
    process, so that nothing is cached.
    """
    ds = ps.open(place, io="buffered")
    ds._view.shapes(np.arange(len(ds)), "volume")
    found = []
    if corners is None:
        loader = ds.loader(batch_size=3, seed=4, transform=[T.RandomCrop(crop, on="volume")])
        cost = spent(ds, lambda: found.extend(value for batch in loader for value in batch["volume"]))
    else:
        cost = {"ranges": 0, "range_bytes": 0}
        for row, corner in enumerate(corners):
            key = (row, *(slice(low, low + size) for low, size in zip(corner, crop, strict=True)))
            one = spent(ds, lambda key=key: found.append(ds["volume"][key]))
            cost = {name: cost[name] + one.get(name, 0) for name in cost}
    return cost["ranges"], cost["range_bytes"], found


@pytest.mark.local
@pytest.mark.parametrize("kind", KINDS)
def test_a_first_crop_reads_what_slices_read(tmp_path, kind):
    place, crop = tmp_path / "dataset", (12, 10, 8)
    values = stored(place, kind)
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        [(ranges, received, parts)] = pool.starmap(cost_of, [(place, crop, None)], chunksize=1)
        corners = []
        for value, part in zip(values, parts, strict=True):
            corners.append([int(low) for low in np.unravel_index(part[0, 0, 0], value.shape)])
            np.testing.assert_array_equal(part, value[tuple(slice(low, low + side) for low, side in zip(corners[-1], crop, strict=True))])
        assert len({tuple(corner) for corner in corners}) > 1
        [(slice_ranges, slice_bytes, _)] = pool.starmap(cost_of, [(place, crop, corners)], chunksize=1)
    assert received <= 1.5 * slice_bytes, (received, slice_bytes)
    assert ranges <= slice_ranges
    assert received <= values.nbytes / 4


def volumes(rng, samples):
    """Return a random schema of tensors that crops may share, and its values. Boxes follow `a`."""
    rank = int(rng.integers(2, 4))
    lead = rng.integers(8, 30 if rank == 2 else 16, rank)
    free = rng.random(rank) < 0.4
    columns, data = {}, {}
    sizes = [
        [int(rng.integers(6, int(lead.max()) + 3)) if open_ else int(size) for size, open_ in zip(lead, free, strict=True)]
        for _ in range(samples)
    ]
    for name in ("a", "b")[: int(rng.integers(1, 3))]:
        dtype = str(rng.choice(["uint8", "int16", "float32", "float64", "bool", "int64", "float16"]))
        more = int(rng.integers(20, 60)) if rng.random() < 0.5 else None  # Samples of more than 64 KiB, without tiles.
        tile = None if more else tuple(int(side) for side in rng.integers(2, 20, rank))
        shape = tuple(None if open_ else int(size) for size, open_ in zip(lead, free, strict=True)) + ((more,) if more else ())
        columns[name] = ps.Tensor(shape, dtype, tile=tile, codec=str(rng.choice(["none", "none", "lz4", "zstd"])))
        cells = [rng.integers(0, 2 if dtype == "bool" else 100, (*size, more) if more else size).astype(dtype) for size in sizes]
        data[name] = [None if rng.random() < 0.15 else cell for cell in cells]
    columns["boxes"], columns["number"] = ps.Boxes("xyxy"), "int32"
    data["boxes"] = [np.sort(rng.random((2, 2, 2)).astype(np.float32) * 20, axis=1).reshape(2, 4) for _ in range(samples)]
    data["number"] = list(range(samples))
    return columns, data, rank, lead


def chain(rng, names, rank, lead):
    """Return random transforms, most of which are crops, of one column or of several that share a draw."""
    made = []
    for _ in range(int(rng.integers(1, 5))):
        on = [str(name) for name in names if rng.random() < 0.6] or [str(rng.choice(names))]
        size = [int(size) for size in np.maximum(1, (lead * rng.uniform(0.2, 1.3, rank)).astype(int))][
            : max(2, int(rng.integers(1, rank + 1)))
        ]
        if len(size) == 2 and rng.random() < 0.5:
            on.append("boxes")
        pads = [int(pad) for pad in rng.integers(0, 5, 2 * max(2, min(rank, 2)))]
        fill = int(rng.integers(0, 2))
        made.append(
            rng.choice(
                [
                    T.CenterCrop(size, on=on),
                    T.RandomCrop(size, pad_if_needed=True, fill=fill, on=on),
                    T.RandomCrop(size[:2], padding=pads, pad_if_needed=True, fill=fill, on=on),
                    T.RandomCrop(size, on=on),
                    T.Pad(pads, fill=fill, on=on),
                    T.RandomHorizontalFlip(on=on),
                    T.RandomVerticalFlip(on=on),
                ]
            )
        )
    if rng.random() < 0.3:
        made.append(T.ToDtype("float32", on=str(rng.choice(names))))
    return made


def outcome(ds, outputs, options):
    """Return all values of two epochs in a comparable form, or the error."""
    try:
        loader = ds.loader(outputs=outputs, **options | {"nulls": {name: "mask" for name in outputs if name not in ("boxes", "number")}})
        return [
            {
                name: [(np.asarray(value).dtype, np.asarray(value).shape, np.asarray(value).tobytes()) for value in values]
                for name, values in batch.items()
                if not name.startswith("whole")
            }
            for batch in loader.stream(2)
        ]
    except ps.Error as error:
        return type(error), str(error)


def check_program(place, seed, io):
    rng = np.random.default_rng([17, seed])
    columns, data, rank, lead = volumes(rng, 7)
    ds = ps.create(place, columns)
    half = {name: values[:4] for name, values in data.items()}
    ds.append(half)
    ds.append({name: values[4:] for name, values in data.items()})
    names = [name for name in ("a", "b") if name in columns]
    if rng.random() < 0.4:
        with ds.transaction() as tx:
            row_ids = ds.take([0, 3], columns=["_row_id"])["_row_id"]
            tx.update({"a": [data["a"][3], data["a"][0]]}, row_ids=row_ids)
            tx.delete(row_ids=ds.take([1], columns=["_row_id"])["_row_id"])
    ds = ps.open(place, io=io)
    results = {**{name: name for name in names}, "boxes": "boxes", "number": "number"}
    options = {
        "batch_size": int(rng.integers(1, 5)), "shuffle": [True, False, ps.Window(bytes=1 << 16)][int(rng.integers(3))], "seed": seed,
        "transform": chain(rng, names, rank, lead),
    }  # fmt: skip
    # A result that needs whole samples makes the loader read them whole. It adds no transform, so all draws are the same.
    expected = outcome(ds, {**results, **{f"whole_{name}": name for name in names}}, options)
    found = outcome(ds, results, options)
    assert found == expected, (seed, io, options["transform"], columns)
    return isinstance(expected, list)


@pytest.mark.local
@pytest.mark.parametrize("io", ["mapped", "buffered", "direct"])
def test_crops_of_parts_equal_crops_of_whole_samples(tmp_path, io):
    good = [check_program(tmp_path / str(seed), seed, io) for seed in range(15)]
    assert sum(good) >= 4, "most programs succeed"


@pytest.mark.soak
@pytest.mark.parametrize("io", ["mapped", "buffered", "direct"])
def test_many_crops_of_parts_equal_crops_of_whole_samples(tmp_path, io):
    for seed in range(25, 1000):
        check_program(tmp_path / str(seed), seed, io)


# The transforms before and after the crop, or instead of either.
BEFORE = [
    [],
    [T.Pad([3, 2, 1, 0])],
    [T.RandomVerticalFlip(1)],
    [T.RandomHorizontalFlip(1)],
    [T.RandomVerticalFlip(0.5), T.RandomHorizontalFlip(0.5)],
]
CROPS = [T.CenterCrop((8, 12)), T.RandomCrop((8, 12)), T.RandomCrop((24, 12), pad_if_needed=True)]
AFTER = [
    *BEFORE, [T.RandomVerticalFlip(1), T.RandomVerticalFlip(1)], [T.RandomCrop((5, 7))], [T.CenterCrop((10, 20))],
    [T.RandomVerticalFlip(1), T.CenterCrop((4, 6))], [T.ToDtype("float64")], [T.RandomVerticalFlip(1), T.ToDtype("float64")],
]  # fmt: skip


def cropped(value, steps):
    """Return what transforms that draw nothing make of an array, or None if one of them draws."""
    for step in steps:
        if isinstance(step, T.RandomVerticalFlip | T.RandomHorizontalFlip) and step.p == 1:
            value = value[::-1] if isinstance(step, T.RandomVerticalFlip) else value[:, ::-1]
        elif isinstance(step, T.Pad):
            left, top, right, bottom = step.padding
            value = np.pad(value, [(top, bottom), (left, right), (0, 0)])
        elif isinstance(step, T.CenterCrop):
            gaps = [max(0, side - size) for side, size in zip(step.size, value.shape, strict=False)]
            value = np.pad(value, [*((gap // 2, gap - gap // 2) for gap in gaps), (0, 0)])
            low = [(size - side) // 2 for side, size in zip(step.size, value.shape, strict=False)]
            value = value[low[0] : low[0] + step.size[0], low[1] : low[1] + step.size[1]]
        elif isinstance(step, T.ToDtype):
            value = value.astype(step.dtype)
        else:
            return None
    return value


@pytest.mark.local
@pytest.mark.parametrize("nulls", [False, True])
@pytest.mark.parametrize("kind", ["fixed", "tiled", "ragged", "compressed"])
def test_what_surrounds_a_crop_is_applied_to_the_part_that_is_read(kind, nulls):
    size = (20, 30, 60)
    values = list(np.random.default_rng(1).random((4, *size), np.float32))
    shape = (None, None, 60) if kind == "ragged" else size
    tile, codec = (8, 16, 30) if kind == "tiled" else None, "lz4" if kind == "compressed" else "none"
    ds = ps.create(f"memory://around-{kind}-{nulls}", {"v": ps.Tensor(shape, "float32", tile=tile, codec=codec)})
    values = [None if nulls and row == 2 else value for row, value in enumerate(values)]
    ds.append({"v": values})
    known = 0
    for before, crop, after in itertools.product(BEFORE, CROPS, AFTER):
        steps = [*before, crop, *after]
        options = {"batch_size": 2, "seed": 5, "transform": [dataclasses.replace(step, on="v") for step in steps]}
        [parts, both] = (
            list(ds.loader(outputs=outputs, nulls=dict.fromkeys(outputs, "mask"), **options))
            for outputs in ({"v": "v"}, {"v": "v", "whole": "v"})
        )
        found, whole = ([value for batch in batches for value in batch["v"]] for batches in (parts, both))
        for value, untouched in zip(values, (value for batch in both for value in batch["whole"]), strict=True):
            assert value is None or np.array_equal(untouched, value), "the other result is not cropped"
        for row, (one, other) in enumerate(zip(found, whole, strict=True)):
            if values[row] is not None:
                np.testing.assert_array_equal(one, other, err_msg=str(steps))
                if (wanted := cropped(values[row], steps)) is not None:
                    known += 1
                    np.testing.assert_array_equal(one, wanted, err_msg=str(steps))
    assert known > 50


def test_crops_on_every_store(root):
    for seed in range(3):
        check_program(f"{root}/{seed}", seed, "mapped")


def test_crops_of_values_of_an_earlier_dtype(root):
    values = np.random.default_rng(3).integers(0, 99, (4, 60, 50, 40)).astype(np.int16)
    ds = ps.create(root, {"v": ps.Tensor((60, 50, 40), "int16", tile=(16, 16, 16))})
    ds.append({"v": values[:2]})
    with ds.transaction() as tx:
        tx.widen_column("v", "int32")
    ds.append({"v": values[2:].astype(np.int32)})
    [batch] = ds.loader(batch_size=4, transform=[T.CenterCrop((10, 8, 6), on="v")])
    np.testing.assert_array_equal(batch["v"], values[:, 25:35, 21:29, 17:23])
    assert batch["v"].dtype == np.int32


def test_a_fill_value_and_nulls_are_cropped(root):
    ds = ps.create(root, {"n": "int32"})
    ds.append({"n": [1, 2]})
    with ds.transaction() as tx:
        tx.add_column("v", ps.Tensor((40, 50, 60), "int16"), fill=np.full((40, 50, 60), 7, np.int16))
    ds.append({"n": [3, 4], "v": [None, np.arange(120_000, dtype=np.int16).reshape(40, 50, 60)]})
    [batch] = ds.loader(batch_size=4, transform=[T.CenterCrop((4, 4, 4), on="v")], nulls={"v": "mask"})
    assert batch["v_valid"].tolist() == [True, True, False, True]
    assert (batch["v"][:2] == 7).all() and (batch["v"][2] == 0).all()
    np.testing.assert_array_equal(batch["v"][3], ds["v"][3, 18:22, 23:27, 28:32])


@pytest.mark.local
@pytest.mark.parametrize("io", ["mapped", "buffered", "direct"])
def test_damage_beside_a_crop_is_not_noticed_and_damage_inside_is_replaced(tmp_path, io):
    place = tmp_path / "dataset"
    values = stored(place, "large", samples=3)
    [data] = [path for path in (place / "d").iterdir() if path.stat().st_size > values.nbytes]
    body = bytearray(data.read_bytes())
    begin = body.index(values[1].tobytes(), body.index(values[0].tobytes()) + 1)  # All samples are equal.
    body[begin + 10] ^= 1  # In the first plane.
    data.write_bytes(body)
    ds = ps.open(place, io=io)
    [batch] = ds.loader(batch_size=3, transform=[T.CenterCrop((10, 10, 10), on="volume")])
    np.testing.assert_array_equal(batch["volume"], values[:, 45:55, 35:45, 30:40])
    crop = T.CenterCrop((100, 10, 10), on="volume")
    with pytest.raises(ps.CorruptError, match=r"sample 1 of column `volume`"):
        list(ps.open(place, io=io).loader(batch_size=3, transform=[crop]))
    [batch] = ps.open(place, io=io).loader(batch_size=3, transform=[crop], on_corrupt="substitute")
    assert batch["number"].tolist() in ([0, 2, 2], [0, 0, 2])
    np.testing.assert_array_equal(batch["volume"], values[batch["number"]][:, :, 35:45, 30:40])


@pytest.mark.local
def test_crops_of_volumes_need_no_memory_for_volumes(tmp_path):
    """Volumes of 24 MB in a loader with a budget of 8 MB."""
    values = np.zeros((3, 300, 200, 200), np.int16)
    ps.create(tmp_path / "dataset", {"volume": ps.Tensor((300, 200, 200), "int16")}).append({"volume": values})
    for io in ("mapped", "buffered"):
        loader = ps.open(tmp_path / "dataset", io=io).loader(
            batch_size=3, memory_bytes=8 << 20, transform=[T.RandomCrop((16, 16, 16), on="volume")]
        )
        assert [batch["volume"].shape for batch in loader.stream(2)] == [(3, 16, 16, 16)] * 2
        assert loader.stats()["peak_bytes"] < 2 << 20

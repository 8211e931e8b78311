"""How loaders return results: nulls, ragged values, masks, and chained pads and resizes. Also covers unusual options and states."""

from __future__ import annotations

import io
import itertools

import numpy as np
import penstock as ps
import pytest
import torch
from penstock import transforms as T
from PIL import Image

pytestmark = pytest.mark.local  # These tests create their own datasets, so one store is enough.
PLACES = itertools.count()


def made(schema, **columns):
    ds = ps.create(f"memory://loader-forms-{next(PLACES)}", schema)
    ds.append(columns)
    return ds


def first(ds, **options):
    return next(iter(ds.loader(**{"batch_size": len(ds), **options})))


def picture(height, width, value=200):
    return np.full((height, width, 3), value, np.uint8)


@pytest.mark.parametrize("block", [32, 48, 256, None])
def test_a_mixture_of_everything_visits_everything_once_an_epoch(block):
    ds = made({"number": "int64"}, number=range(200))
    mixed = ps.mix({"a": ds.select(range(100)), "b": ds.select(range(100, 200))})
    loader = mixed.loader(batch_size=32, shuffle=True, columns=["number"], order_block_samples=block)
    for _ in range(3):
        assert sorted(number for batch in loader for number in batch["number"].tolist()) == list(range(200))
    small = ps.mix({"a": (ds.select(range(100)), 1), "b": (ds.select(range(100, 200)), 1)}, epoch_samples=10)
    for seed in range(5):
        sources = next(iter(small.loader(batch_size=10, shuffle=True, seed=seed, columns=["_source"], order_block_samples=64)))["_source"]
        assert sources.sum() == 5


def test_a_null_annotation_leaves_its_image_alone():
    ds = made({"image": ps.Image(), "boxes": ps.Boxes(of="image")}, image=[picture(20, 30)] * 2, boxes=[[[1, 2, 3, 4]], None])
    batch = first(
        ds, transform=[T.Resize((8, 8), on=("image", "boxes")), T.RandomHorizontalFlip(1, on=("image", "boxes"))], nulls={"boxes": "mask"}
    )
    assert (
        batch["boxes_valid"].tolist() == [True, False]
        and (batch["image"] == 200).all()
        and batch["boxes"][1] is None
        and batch["boxes"][0].shape == (1, 4)
    )


def test_what_was_cut_away_stays_away():
    white = made({"image": ps.Image()}, image=[picture(32, 32, 255)] * 20)
    images = first(white, transform=[T.RandomCrop(32, padding=4), T.Pad(4)])["image"]
    border = np.ones((40, 40), bool)
    border[4:36, 4:36] = False
    assert (images[:, border] == 0).all()
    wide = made({"image": ps.Image()}, image=[picture(120, 90)])
    image = first(wide, transform=[T.CenterCrop((49, 96)), T.CenterCrop((68, 57))])["image"][0]
    assert image[9:58].min() == 200 and image[:9].max() == 0 == image[58:].max()
    both = made(
        {"image": ps.Image(), "mask": ps.Mask(of="image")},
        image=[picture(61, 47), picture(200, 90)], mask=[np.ones((61, 47), np.uint8), np.ones((200, 90), np.uint8)],
    )  # fmt: skip
    on = ("image", "mask")
    chain = [T.RandomVerticalFlip(1, on=on), T.RandomCrop((30, 38), padding=2, pad_if_needed=True, on=on), T.CenterCrop((78, 73), on=on)]
    batch = first(both, transform=chain)
    assert ((batch["image"][..., 0] > 127) == (batch["mask"] > 0)).all()


def test_masks_of_nulls_are_there_in_every_batch_and_lists_are_filled():
    ds = made(
        {"f": "float32", "t": ps.Text(), "r": ps.Tensor((None,), "int64")},
        f=[None, 1, 2, 3], t=["a", None, "c", "d"], r=[[1], [2], None, []],
    )  # fmt: skip
    batches = list(ds.loader(batch_size=1, nulls={"f": "mask", "t": "", "r": "mask"}))
    assert [batch["f_valid"].tolist() for batch in batches] == [[False], [True], [True], [True]]
    assert [batch["t"] for batch in batches] == [["a"], [""], ["c"], ["d"]]
    assert [batch["r_valid"].tolist() for batch in batches] == [[True], [True], [False], [True]]
    for nulls, text in (
        ({"r": 0}, "the column is ragged"),
        ({"f": "x"}, "cannot become"),
        ({"f": [1, 2]}, "cannot become"),
        ({"f": None}, "cannot become"),
    ):
        with pytest.raises(ps.InvalidInputError, match=text):
            ds.loader(batch_size=1, nulls=nulls)
    small = made({"u": "uint8"}, u=[None, 1])
    for value in (-1, 300, 1.5):
        with pytest.raises(ps.InvalidInputError, match="cannot become"):
            small.loader(batch_size=1, nulls={"u": value})
    # A float column accepts a value that must be rounded, but refuses one outside its range.
    assert next(iter(ds.loader(batch_size=1, nulls={"f": 0.1, "t": ""})))["f"].tolist() == [np.float32(0.1)]
    with pytest.raises(ps.InvalidInputError, match="cannot become"):
        ds.loader(batch_size=1, nulls={"f": 1e300})
    assert next(iter(ds.loader(batch_size=1, nulls={"f": float("nan"), "t": ""})))["f"].tolist() != [0]


def test_ragged_values_have_the_form_of_the_schema():
    ds = made(
        {"free": ps.Tensor((None, None), "float32"), "fixed": ps.Tensor((3, None), "float32"), "rows": ps.Tensor((None, 2), "float32")},
        free=[np.ones((2, 3)), np.ones((5, 3))], fixed=[np.ones((3, 2)), np.ones((3, 5))], rows=[None, None],
    )  # fmt: skip
    batch = first(ds, nulls={"rows": "mask"})
    free = batch["free"].to_padded(multiple_of=4)
    assert free.values.shape == (2, 8, 4) and free.mask.shape == (2, 8, 4)
    fixed = batch["fixed"].to_padded(multiple_of=4)
    assert fixed.values.shape == (2, 3, 8) and fixed.mask.shape == (2, 8) and fixed.mask.sum() == 7
    rows = batch["rows"].to_padded()
    assert rows.values.shape == (2, 0, 2) and rows.mask.shape == (2, 0) and batch["rows"].values.shape == (0, 2)
    halves = made({"x": ps.Tensor((None,), "bfloat16")}, x=[np.ones(2), np.ones(3)])
    tensors = first(halves, output="torch")["x"]
    assert tensors.to_padded(2).values.tolist() == [[1, 1, 2], [1, 1, 1]] and tensors.to_padded().values.dtype == torch.bfloat16
    assert first(halves)["x"].to_nested().dtype == torch.bfloat16


@pytest.mark.parametrize("size", [(400, 600), (300, 500), (408, 608), (37, 91), (333, 500)])
def test_chains_of_pads_and_resizes_work_for_every_size(size):
    ds = made({"image": ps.Image()}, image=[picture(*size)])
    for chain in ([T.Pad(4), T.Resize(75)], [T.Resize(256), T.Resize(224)], [T.Resize(100), T.Resize((33, 77)), T.CenterCrop(20)]):
        assert first(ds, transform=chain)["image"][0].min() >= 0


def test_functions_keep_ragged_columns_and_lists():
    ds = made(
        {"r": ps.Tensor((None,), "int32"), "image": ps.Image(), "n": "int64"},
        r=[[1], [2, 3], [4]], image=[picture(4, 5), picture(6, 7), picture(4, 5)], n=range(3),
    )  # fmt: skip
    batch = first(ds, transform=[lambda sample, rng: sample], ragged=["image"])
    assert isinstance(batch["r"], ps.Ragged) and [item.tolist() for item in batch["r"]] == [[1], [2, 3], [4]]
    assert [image.shape for image in batch["image"]] == [(4, 5, 3), (6, 7, 3), (4, 5, 3)]
    stacked = first(ds, columns=["n"], transform=[lambda sample, rng: {"t": torch.full((2,), float(sample["n"]))}], output="torch")
    assert stacked["t"].shape == (3, 2)
    with pytest.raises(ps.InvalidInputError, match="`n` is missing"):
        first(ds, columns=["n"], transform=[lambda sample, rng: {} if sample["n"] == 0 else sample])
    words = first(ds, columns=["n"], transform=[lambda sample, rng: {"w": np.str_("x")}], output="torch")
    assert words["w"].tolist() == ["x"] * 3
    backwards = first(ds, columns=["n"], transform=[T.PerBatch(lambda batch: {"n": batch["n"][::-1]})], output="torch")
    assert backwards["n"].tolist() == [2, 1, 0]


def test_a_sampler_knows_where_it_is():
    ds = made({"n": "int64"}, n=range(20))
    sampler = ps.torch.Sampler(ds, batch_size=5)
    whole = [list(sampler), list(sampler)]
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["draw"]) == (2, 0)
    other = ps.torch.Sampler(ds, batch_size=5)
    list(other)
    resumed = ps.torch.Sampler(ds, batch_size=5)
    resumed.load_state_dict(other.state_dict())
    assert list(resumed) == whole[1]
    for batches in (-1, 1000, 1.5, "x"):
        with pytest.raises(ps.InvalidInputError, match="batches="):
            sampler.state_dict(batches=batches)


def test_states_that_cannot_be_are_refused():
    ds = made({"n": "int64"}, n=range(50))
    loader = ds.loader(batch_size=10, shuffle=True)
    next(iter(loader))
    state = loader.state_dict()
    source = state["sources"][0]
    for wrong in (
        {"draw": 10**6}, {"draw": 2**63}, {"draw": 1.5}, {"draw": -1}, {"epoch": "x"}, {"order_block_samples": 0}, {"seed": None}, {"sources": [None]},
        {"sources": [{**source, "order": None}]}, {"sources": [{**source, "name": "other"}]}, {"sources": [{**source, "order": {"kind": "x"}}]}, {"mix": 3},
    ):  # fmt: skip
        with pytest.raises(ps.InvalidInputError):
            loader.load_state_dict({**state, **wrong})
        assert loader.state_dict() == state
    few = ds.loader(batch_size=200, last_batch="drop")
    with pytest.raises(ps.InvalidInputError, match="no batches"):
        few.batch_at(0)
    empty = ds.select([]).loader(batch_size=3)
    assert empty.state_dict()["epoch"] == 0
    empty.set_epoch(3)
    assert empty.state_dict()["epoch"] == 3


@pytest.mark.parametrize(
    "options",
    [
        {"transform": None}, {"columns": 5}, {"outputs": ["a"]}, {"nulls": "x"}, {"transform": [T.CenterCrop(2, on=3)]}, {"decode": 3},
        {"transform": [T.RandomHorizontalFlip("x")]}, {"transform": [T.Pad(1, fill=None)]}, {"transform": [T.Pad(2**31)]}, {"transform": [T.Resize(2**31)]},
        {"transform": [T.CenterCrop(2**63)]}, {"transform": [T.Resize(b"x")]}, {"transform": [T.TokenChunks([1, 2], on="image")]},
        {"transform": [T.Pad(2, fill=float("-inf"))]}, {"transform": [T.Normalize([float("nan")], [1])]}, {"seed": 2**70}, {"transform": [T.Resize(True)]},
    ],
)  # fmt: skip
def test_odd_options_are_refused_in_our_words(options):
    ds = made({"image": ps.Image()}, image=[picture(8, 8)])
    with pytest.raises(ps.Error):
        ds.loader(batch_size=1, **options)


def test_numbers_of_numpy_are_numbers():
    out = io.BytesIO()
    Image.fromarray(picture(30, 40)).save(out, "JPEG")
    ds = made({"image": ps.Image()}, image=[out.getvalue()] * 2)
    batch = first(ds, transform=[T.Resize((np.int64(9), np.int32(7)), max_size=None), T.Pad(np.int64(1))])
    assert batch["image"].shape == (2, 11, 9, 3)
    assert first(ds, transform=[T.Resize(np.int64(15))])["image"][0].shape == (15, 20, 3)

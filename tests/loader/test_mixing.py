"""MixUp and CutMix, compared with torchvision."""

import numpy as np
import penstock as ps
import pytest
import torch
from penstock import transforms as T
from torchvision.transforms import v2


@pytest.fixture
def ds(tmp_path):
    made = ps.create(tmp_path / "set", {"image": ps.Tensor((24, 32, 3), "float32"), "label": ps.Label(["a", "b", "c"]), "n": "int64"})
    rng = np.random.default_rng(0)
    made.append({"image": rng.random((96, 24, 32, 3), dtype=np.float32), "label": rng.integers(0, 3, 96), "n": range(96)})
    return made


def _batches(ds, *transform, **options):
    return list(ds.loader(batch_size=8, transform=list(transform), **options))


def test_mixup_is_that_of_torchvision(ds):
    plain, shares = _batches(ds), []
    for before, after in zip(plain, _batches(ds, T.MixUp(alpha=0.4)), strict=True):
        theirs = v2.MixUp(num_classes=3)
        own = next(row for row in range(8) if before["label"][row] != before["label"][row - 1])
        share = float(after["label"][own, before["label"][own]])
        theirs._dist = type("Fixed", (), {"sample": lambda self, _, share=share: torch.tensor([share], dtype=torch.float64)})()
        images, labels = theirs(torch.from_numpy(before["image"]).permute(0, 3, 1, 2), torch.from_numpy(before["label"]))
        assert np.allclose(images.permute(0, 2, 3, 1).numpy(), after["image"], atol=2e-6)
        assert np.allclose(labels.numpy(), after["label"], atol=1e-6) and after["label"].dtype == np.float32
        shares.append(share)
    assert len(set(shares)) == len(shares) and after["image"].dtype == np.float32


def test_cutmix_replaces_one_box(ds):
    areas = []
    for before, after in zip(_batches(ds), _batches(ds, T.CutMix()), strict=True):
        other = np.roll(before["image"], 1, axis=0)
        changed = (after["image"] != before["image"]).any(axis=(0, 3))
        rows, columns = np.flatnonzero(changed.any(axis=1)), np.flatnonzero(changed.any(axis=0))
        area = 0.0
        if len(rows):
            box = np.s_[:, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
            assert (after["image"][box] == other[box]).all() and changed[box[1:]].all()
            area = changed.sum() / changed.size
        labels = np.eye(3)[before["label"]]
        assert np.allclose(after["label"], labels * (1 - area) + np.roll(labels, 1, axis=0) * area, atol=1e-6)
        areas.append(area)
    assert max(areas) > 0.3 and len(set(areas)) > 8


@pytest.mark.parametrize("make", [T.MixUp, T.CutMix])
def test_mixing_is_the_same_at_any_step_and_the_dataset_stays(ds, make):
    whole = _batches(ds, make(), shuffle=True, seed=4)
    loader = ds.loader(batch_size=8, transform=[make()], shuffle=True, seed=4)
    stream = loader.stream(5)
    [next(stream) for _ in range(5)]
    again = ds.loader(batch_size=8, transform=[make()], shuffle=True, seed=4)
    again.load_state_dict(loader.state_dict())
    for one, other in zip(whole[5:], again, strict=True):
        assert (one["image"] == other["image"]).all() and (one["label"] == other["label"]).all()
    assert all((one["image"] == other["image"]).all() for one, other in zip(_batches(ds), _batches(ds), strict=True))


def test_half_precision_torch_and_both_stages(ds):
    to_half = T.ToDtype("float16", on="image")
    [batch, *_] = ds.loader(batch_size=8, transform=[to_half, T.MixUp(), T.CutMix()], output="torch")
    assert batch["image"].dtype == torch.float16 and batch["label"].shape == (8, 3)
    assert torch.allclose(batch["label"].sum(dim=1), torch.ones(8), atol=1e-5)
    [batch] = ds.select([3]).loader(batch_size=8, transform=[T.MixUp()])
    assert np.allclose(batch["image"], ds.take([3])["image"], atol=1e-6), "one sample is mixed with itself"


def test_wrong_uses_are_refused(ds):
    for options in ({"alpha": 0}, {"alpha": float("nan")}, {"num_classes": 0}, {"num_classes": 2.5}, {"alpha": "x"}):
        with pytest.raises(ps.InvalidInputError, match="expected numbers above 0"):
            T.MixUp(**options)
    with pytest.raises(ps.InvalidInputError, match="not one number from 0 to 1"):
        _batches(ds, T.MixUp(num_classes=2))
    with pytest.raises(ps.InvalidInputError, match="num_classes is not given"):
        _batches(ds, T.MixUp(label="n"))
    with pytest.raises(ps.InvalidInputError, match="needs `pixels`"):
        _batches(ds, T.CutMix(image="pixels"))
    with pytest.raises(ps.InvalidInputError, match="floating-point images of one size") as caught:
        _batches(ds, T.ToDtype("int32", on="image"), T.MixUp())
    assert "T.Normalize" in caught.value.hint


def test_mixing_stages_draw_apart_and_samples_without_a_label_have_no_class():
    ds = ps.create("memory://mixing-apart", {"image": ps.Tensor((1, 1, 1), "float32"), "label": ps.Label(["a", "b"])})
    ds.append({"image": np.arange(4, dtype=np.float32).reshape(4, 1, 1, 1), "label": ["a", None, "b", "a"]})
    [batch] = ds.loader(batch_size=4, nulls={"label": "mask"}, transform=[T.MixUp()], seed=3)
    sums = batch["label"].sum(axis=1)
    assert sums[0] == pytest.approx(1) == sums[3] and sums[1] + sums[2] == pytest.approx(1) and 0 < sums[1] < 1
    [twice] = ds.loader(batch_size=4, nulls={"label": "mask"}, transform=[T.MixUp(), T.MixUp()], seed=3)
    assert twice["label"].sum() == pytest.approx(3), "three of four samples have a class, however often they are mixed"
    shares = []
    for seed in range(40):
        [one] = ds.select([0, 2]).loader(batch_size=2, transform=[T.MixUp()], seed=seed)
        [two] = ds.select([0, 2]).loader(batch_size=2, transform=[T.MixUp(), T.MixUp()], seed=seed)
        s = one["label"][0, 0]
        shares.append(abs(two["label"][0, 0] - (s * s + (1 - s) ** 2)) < 1e-4)
    assert sum(shares) < 5, "the second stage has a share of its own"


def test_classes_of_a_mixture_are_those_of_all_its_sources():
    one = ps.create("memory://mixing-one", {"image": ps.Tensor((1, 1, 1), "float32"), "label": ps.Label(["x", "y"])})
    two = ps.create("memory://mixing-two", {"image": ps.Tensor((1, 1, 1), "float32"), "label": ps.Label(["z", "x", "w"])})
    one.append({"image": np.zeros((4, 1, 1, 1), np.float32), "label": ["x", "y"] * 2})
    two.append({"image": np.zeros((4, 1, 1, 1), np.float32), "label": ["z", "w"] * 2})
    for source in (ps.mix({"one": one, "two": two}), ps.concat([one, two])):
        [batch] = source.loader(batch_size=8, shuffle=True, transform=[T.MixUp()])
        assert batch["label"].shape == (8, 4) and np.allclose(batch["label"].sum(axis=1), 1)
    [wide] = one.loader(batch_size=4, transform=[T.MixUp(200_000)])
    assert wide["label"].shape == (4, 200_000)

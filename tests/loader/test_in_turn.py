"""Several transforms after one another: torchvision's forms of boxes, conversions, memory, nulls, and what moves along."""

import numpy as np
import penstock as ps
import pytest
import torch
from penstock import transforms as T
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms._presets import ImageClassification

pytestmark = pytest.mark.local  # These tests create their own datasets, so one store is enough.


def boxed(name, images=((40, 60),)):
    ds = ps.create(f"memory://together-{name}", {"image": ps.Image(), "boxes": ps.Boxes(of="image"), "labels": ps.Labels(["a", "b"])})
    given = [None if size is None else np.full((*size, 3), 200, np.uint8) for size in images]
    ds.append({"image": given, "boxes": [[[10, 10, 30, 30], [1, 2, 3, 4]]] * len(images), "labels": [["a", "b"]] * len(images)})
    return ds


@pytest.mark.parametrize("between", [False, True])
def test_torchvision_keeps_the_form_of_boxes_between_transforms(between):
    """`v2.Compose` does the same with one transform."""
    stages = [v2.ConvertBoundingBoxFormat("CXCYWH"), v2.RandomHorizontalFlip(1.0), v2.ConvertBoundingBoxFormat("XYWH"), v2.Resize((20, 60))]
    given = [stages[0], *([lambda sample: sample] if between else []), *stages[1:]]
    [batch] = boxed(f"form-{between}").loader(batch_size=1, columns=["image", "boxes"], transform=given)
    boxes = tv_tensors.BoundingBoxes(torch.tensor([[10.0, 10, 30, 30], [1, 2, 3, 4]]), format="XYXY", canvas_size=(40, 60))
    wanted = v2.Compose(stages)({"image": tv_tensors.Image(torch.zeros(3, 40, 60, dtype=torch.uint8)), "boxes": boxes})["boxes"]
    assert batch["boxes"][0].tolist() == wanted.tolist()
    for step in boxed(f"again-{between}", [(40, 60)] * 3).loader(batch_size=1, columns=["image", "boxes"], transform=given):
        assert step["boxes"][0].tolist() == wanted.tolist(), "each sample begins with the form of its column"


CONVERSIONS = [
    ("float32", "uint8"), ("uint16",), ("float32", "uint16"), ("float64", "uint8"), ("int16",), ("float32", "float64"), ("float32",),
]  # fmt: skip


@pytest.mark.parametrize("dtypes", CONVERSIONS)
def test_conversions_scale_as_in_torchvision(dtypes):
    values = np.arange(256, dtype=np.uint8).reshape(16, 16, 1)
    ds = ps.create(f"memory://scaled-{'-'.join(dtypes)}", {"x": ps.Tensor((16, 16, 1), "uint8")})
    ds.append({"x": values[None]})
    [batch] = ds.loader(batch_size=1, transform=[T.ToDtype(dtype, scale=True, on="x") for dtype in dtypes])
    wanted = tv_tensors.Image(torch.from_numpy(values.transpose(2, 0, 1)))
    for dtype in dtypes:
        wanted = v2.ToDtype(getattr(torch, dtype), scale=True)(wanted)
    found = batch["x"][0].transpose(2, 0, 1)
    assert found.dtype == np.dtype(dtypes[-1])
    if dtypes == ("float32", "uint16"):  # float32 rounds torchvision's factor to 65,536, so its white becomes 0.
        assert np.array_equal(found, np.floor(values.transpose(2, 0, 1) / 255 * 65_535.999))
    elif found.dtype.kind == "f":
        assert np.abs(found - wanted.numpy()).max() < 1e-6
    else:
        assert np.array_equal(found, wanted.numpy())


def test_conversions_that_lose_values_are_refused():
    ds = ps.create("memory://refused-conversions", {"x": ps.Tensor((4, 4, 3), "uint8"), "y": ps.Tensor((4,), "int64")})
    for stages, match in (
        ([T.ToDtype("uint8", on="x"), T.ToDtype("float32", on="x")], "a conversion to whole numbers comes last"),
        ([T.ToDtype("uint8", scale=True, on="y")], "cannot scale int64 to uint8"),
        ([T.Normalize([0.5], [0.5], on="x"), T.RandomErasing(1.0, on="x"), T.ToDtype("float64", on="x")], "comes after RandomErasing"),
    ):
        with pytest.raises(ps.InvalidInputError, match=match):
            ds.loader(batch_size=1, transform=stages)


# Resize does not apply to tensors.
KINDS = {"tensor": ps.Tensor((None, None, 3), "uint8"), "image": ps.Image(), "mask": ps.Mask()}
LARGE = [
    [T.Pad(8000, fill=1, on="x"), T.Pad(1, fill=2, on="x"), T.CenterCrop(10, on="x")],
    [T.Pad(8000, on="x"), T.CenterCrop(9000, on="x"), T.Pad(8000, fill=3, on="x"), T.CenterCrop(10, on="x")],
    [T.Resize(12_000, interpolation="nearest", on="x"), T.RandomHorizontalFlip(1.0, on="x"), T.Resize(10, interpolation="nearest", on="x")],
]


@pytest.mark.parametrize(("kind", "place"), [(kind, place) for kind in KINDS for place in range(2 if kind == "tensor" else 3)])
def test_what_is_large_only_between_transforms_counts_against_the_budget(kind, place):
    stages = LARGE[place]
    ds = ps.create(f"memory://large-{kind}-{place}", {"x": KINDS[kind]})
    ds.append({"x": [np.zeros((100, 100) if kind == "mask" else (100, 100, 3), np.uint8)] * 4})
    with pytest.raises(ps.InvalidInputError, match="memory_bytes"):
        list(ds.loader(batch_size=2, memory_bytes=64 << 20, threads=2, transform=stages))


def test_boxes_of_a_null_image_are_lost():
    ds = boxed("nulls", [(40, 60), None])
    stages = [T.RandomHorizontalFlip(1.0), T.Resize((20, 30)), T.SanitizeBoundingBoxes(on=("boxes", "labels"))]
    for place in range(1, 4):
        [batch] = ds.loader(batch_size=2, nulls={"image": "mask"}, transform=stages[:place])
        assert [len(boxes) for boxes in batch["boxes"]] == [2, 0] and len(batch["labels"][0]) == 2
        assert len(batch["labels"][1]) == (0 if place == 3 else 2)


def test_modules_of_torch_get_what_their_forward_takes():
    class Doubled(torch.nn.Module):
        def forward(self, sample, target=None):
            assert target is None
            return {**sample, "n": sample["n"] * 2}

    class Drawn(torch.nn.Module):
        def forward(self, sample, rng):
            return {**sample, "n": sample["n"] + rng.integers(1, 2)}

    ds = ps.create("memory://modules", {"n": "int64"})
    ds.append({"n": range(4)})
    for stages, wanted in (
        ([Doubled()], [0, 2, 4, 6]),
        ([Drawn(), Doubled()], [2, 4, 6, 8]),
        ([torch.nn.Sequential(Doubled())], [0, 2, 4, 6]),
    ):
        [batch] = ds.loader(batch_size=4, transform=stages)
        assert batch["n"].tolist() == wanted


def test_what_belongs_to_no_image_is_named_when_something_moves():
    ds = ps.create("memory://loose", {"image": ps.Image(), "boxes": ps.Boxes()})
    ds.append({"image": [np.zeros((40, 60, 3), np.uint8)], "boxes": [[[10, 10, 30, 30]]]})
    for stage in (T.RandomHorizontalFlip(1.0), v2.RandomHorizontalFlip(1.0)):
        with pytest.raises(ps.InvalidInputError, match="whether `boxes` moves with it"):
            ds.loader(batch_size=1, transform=[stage])
    [batch] = ds.loader(batch_size=1, transform=[T.RandomHorizontalFlip(1.0, on=("image", "boxes")), T.ColorJitter(0.5)])
    assert batch["boxes"][0].tolist() == [[30, 10, 50, 30]]
    [batch] = ds.loader(batch_size=1, transform=[T.RandomHorizontalFlip(1.0, on="image")])
    assert batch["boxes"][0].tolist() == [[10, 10, 30, 30]]


def test_what_torchvision_offers_besides_transforms():
    """A Sequential of its transforms, the presets of its models, and its functions of one image."""
    ds = boxed("presets")
    [batch] = ds.loader(
        batch_size=1, columns=["image", "boxes"], transform=[torch.nn.Sequential(v2.Resize((8, 12)), v2.RandomHorizontalFlip(1.0))]
    )
    assert batch["image"].shape == (1, 8, 12, 3) and batch["boxes"][0].tolist()[0] == [6, 2, 10, 6]
    preset = ImageClassification(crop_size=16, resize_size=20)
    for stage, name in ((preset, "ImageClassification"), (v2.functional.hflip, "horizontal_flip")):
        with pytest.raises(ps.InvalidInputError, match=f"{name}.* takes one image, so `boxes` cannot follow it"):
            ds.loader(batch_size=1, columns=["image", "boxes"], transform=[stage])
        with pytest.raises(ps.InvalidInputError, match="takes one image"):
            ds.loader(batch_size=1, columns=["image", "boxes"], transform=[T.Torchvision(stage, on=("image", "boxes"))])
    [batch] = ds.loader(batch_size=1, columns=["image", "labels"], output="torch", transform=[preset])
    wanted = preset(torch.full((3, 40, 60), 200, dtype=torch.uint8))
    assert batch["image"].shape == (1, 3, 16, 16) and torch.allclose(batch["image"][0], wanted) and len(batch["labels"][0]) == 2
    [batch] = ds.loader(batch_size=1, columns=["image"], transform=[v2.functional.vertical_flip, T.Torchvision(v2.functional.invert)])
    assert (batch["image"] == 55).all()


class Inverted(v2.Transform):
    """A transform that a user derives from torchvision's."""

    def transform(self, value, params):
        return 255 - value if isinstance(value, tv_tensors.Image) else value


class Whole(torch.nn.Module):
    """A user's module that has a transform, and takes the whole sample."""

    def __init__(self):
        super().__init__()
        self.flip = v2.RandomHorizontalFlip(1.0)

    def forward(self, sample):
        return {**sample, "label": sample["label"] + 1}


def test_transforms_that_users_derive():
    ds = ps.create("memory://derived", {"image": ps.Image(), "label": "int64"})
    ds.append({"image": [np.full((8, 8, 3), 200, np.uint8)], "label": [4]})
    for stage in (Inverted(), torch.nn.Sequential(Inverted()), v2.Compose([Inverted()])):
        [batch] = ds.loader(batch_size=1, transform=[stage])
        assert (batch["image"] == 55).all() and batch["label"].tolist() == [4]
    [batch] = ds.loader(batch_size=1, transform=[Whole()])
    assert batch["label"].tolist() == [5] and (batch["image"] == 200).all()
    [batch] = ds.loader(batch_size=1, transform=[T.Torchvision(lambda sample: {"image": 255 - sample["image"]})])
    assert (batch["image"] == 55).all()

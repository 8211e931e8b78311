"""Per-sample functions, transforms of torchvision and tokenizers of Hugging Face, as they are."""

import functools

import numpy as np
import penstock as ps
import pytest
import torch
from penstock import transforms as T
from tokenizers import Tokenizer, models, pre_tokenizers
from torchvision import tv_tensors
from torchvision.transforms import v2


@pytest.fixture
def ds(tmp_path):
    rng = np.random.default_rng(0)
    schema = {
        "image": ps.Image(), "boxes": ps.Boxes("xywh", of="image"), "mask": ps.Mask(of="image"), "points": ps.Keypoints(2, of="image"),
        "labels": ps.Labels(["cat", "dog"]), "text": ps.Text(), "n": "int64",
    }  # fmt: skip
    made = ps.create(tmp_path / "dataset", schema)
    images = [rng.integers(0, 255, (40, 60, 3), dtype=np.uint8) for _ in range(8)]
    masks = [image[:, :, 0] // 64 for image in images]
    made.append({
        "image": images, "boxes": [[[10, 5, 20, 10]]] * 8, "mask": masks, "points": [[[[1, 2], [3, 4]]]] * 8,
        "labels": [["dog"]] * 8, "text": [f"word{row}" for row in range(8)], "n": range(8),
    })  # fmt: skip
    return made


def only_sample(sample):
    return {"n": sample["n"] + 1}


def with_rng(sample, rng):
    return {"n": sample["n"], "r": rng.integers(1 << 60)}


def with_default(sample, size=7):
    return {"n": sample["n"] + size}


def default_rng(sample, rng=None):
    return {"n": sample["n"], "r": rng.integers(1 << 60)}


class Method:
    def __call__(self, sample):
        return {"n": sample["n"] * 2}

    def other(self, sample, rng):
        return {"n": sample["n"] * 3}


@pytest.mark.parametrize(
    ("fn", "wanted"),
    [
        (only_sample, 1), (with_rng, 0), (with_default, 7), (default_rng, 0), (functools.partial(with_default, size=5), 5), (dict, 0),
        (lambda *arguments: {"n": arguments[0]["n"] + len(arguments)}, 2), (lambda sample, *, size=3: {"n": sample["n"] + size}, 3),
    ],
)  # fmt: skip
def test_functions_take_a_sample_or_also_its_random_numbers(ds, fn, wanted):
    [batch] = ds.loader(batch_size=8, columns=["n"], transform=[fn])
    assert batch["n"].tolist() == [n + wanted for n in range(8)]


def test_callable_objects_and_methods(ds):
    for fn, factor in ((Method(), 2), (Method().other, 3)):
        [batch] = ds.loader(batch_size=8, columns=["n"], transform=[fn])
        assert batch["n"].tolist() == [n * factor for n in range(8)]


@pytest.mark.parametrize("fn", [lambda: {}, lambda sample, rng, size: sample, lambda *, sample: sample])
def test_functions_with_other_parameters_are_refused(ds, fn):
    with pytest.raises(ps.InvalidInputError, match=r"expected a function of \(sample\) or \(sample, rng\)"):
        ds.loader(batch_size=8, columns=["n"], transform=[fn])


def test_an_error_in_a_function_names_the_sample_and_the_function(ds):
    def broken(sample):
        raise KeyError("of the user")

    with pytest.raises(KeyError) as caught:
        next(iter(ds.loader(batch_size=8, columns=["n"], transform=[broken])))
    assert "broken" in caught.value.__notes__[0] and "sample 0 in step 0" in caught.value.__notes__[0]


def test_torchvision_moves_everything_that_belongs_to_the_image(ds):
    [plain] = ds.loader(batch_size=8)
    [batch] = ds.loader(batch_size=8, transform=[v2.RandomHorizontalFlip(p=1.0)])
    assert (batch["image"] == plain["image"][:, :, ::-1]).all() and batch["image"].dtype == np.uint8
    assert (np.stack(batch["mask"]) == np.stack(plain["mask"])[:, :, ::-1]).all()
    assert batch["boxes"][0].tolist() == [[30, 5, 20, 10]] and batch["boxes"][0].dtype == np.float32
    assert batch["points"][0].tolist() == [[[58, 2], [56, 4]]]
    assert batch["labels"][0].tolist() == [1] and batch["text"] == plain["text"] and batch["n"].tolist() == list(range(8))


def test_torchvision_gets_tensors_of_its_own_kinds(ds):
    seen = []

    class Looks(v2.Transform):
        def forward(self, inputs):
            seen.append({name: (type(value), getattr(value, "format", None), tuple(value.shape)) for name, value in inputs.items()})
            return inputs

    next(iter(ds.loader(batch_size=1, transform=[T.Torchvision(Looks(), on=("boxes", "image", "mask", "labels"))])))
    assert seen[0] == {
        "image": (tv_tensors.Image, None, (3, 40, 60)),
        "boxes": (tv_tensors.BoundingBoxes, tv_tensors.BoundingBoxFormat.XYWH, (1, 4)),
        "mask": (tv_tensors.Mask, None, (40, 60)),
        "labels": (torch.Tensor, None, (1,)),
    }


def test_a_recipe_of_torchvision_is_the_same_at_any_step(ds):
    recipe = v2.Compose(
        [v2.RandomResizedCrop(16), v2.ColorJitter(0.4, 0.4, 0.4), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3)]
    )
    make = lambda **options: ds.loader(batch_size=2, columns=["image", "n"], transform=[recipe], shuffle=True, seed=3, **options)  # noqa: E731
    torch.manual_seed(1)
    before = torch.rand(1)
    torch.manual_seed(1)
    whole = list(make())
    assert torch.rand(1) == before, "the user's random numbers are left alone"
    assert whole[0]["image"].shape == (2, 16, 16, 3) and whole[0]["image"].dtype == np.float32 and whole[0]["image"].min() < 0
    loader = make()
    stream = loader.stream(4)
    next(stream), next(stream)
    state = loader.state_dict()
    again = make()
    again.load_state_dict(state)
    rest = list(again)
    assert [batch["n"].tolist() for batch in rest] == [batch["n"].tolist() for batch in whole[2:]]
    assert all((one["image"] == other["image"]).all() for one, other in zip(rest, whole[2:], strict=True))


def test_torchvision_says_what_it_needs(ds):
    with pytest.raises(ps.InvalidInputError, match="there are 0 images"):
        ds.loader(batch_size=2, columns=["n"], transform=[v2.RandomHorizontalFlip()])
    with pytest.raises(ps.InvalidInputError, match="applies to `none`, which the loader does not return"):
        ds.loader(batch_size=2, transform=[T.Torchvision(v2.RandomHorizontalFlip(), on=("image", "none"))])
    with pytest.raises(ps.InvalidInputError, match="boxes need their image"):
        next(iter(ds.loader(batch_size=2, transform=[T.Torchvision(v2.RandomHorizontalFlip(), on="boxes")])))
    with pytest.raises(Exception) as caught:
        next(iter(ds.loader(batch_size=2, transform=[v2.RandomCrop(99)])))
    assert any("RandomCrop" in note and "sample 0" in note for note in caught.value.__notes__)


def test_fast_tokenizers_of_hugging_face(ds):
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"word{row}": row + 1 for row in range(8)} | {"[UNK]": 0, "[PAD]": 9}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
    [batch] = ds.loader(batch_size=8, columns=["text"], transform=[T.Tokenize(fast, on="text", length=3)])
    assert batch["input_ids"].tolist() == [[row + 1, 9, 9] for row in range(8)] and batch["attention_mask"].tolist() == [[1, 0, 0]] * 8
    [batch] = ds.loader(batch_size=8, columns=["text"], transform=[T.Tokenize(fast, on="text", length=2, pad=0)])
    assert batch["input_ids"].tolist() == [[row + 1, 0] for row in range(8)]
    with pytest.raises(ps.InvalidInputError, match="has no encode_batch") as caught:
        T.Tokenize(object(), on="text")
    assert "use_fast=True" in caught.value.hint

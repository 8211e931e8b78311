"""The kind of each column is the same in every batch of a loader: a matrix of column type × transforms × read path × output."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import penstock as ps
import pytest
import torch
from penstock import transforms as T
from penstock.loader.results import kinds

pytestmark = pytest.mark.local
PLACES = itertools.count()
RNG = np.random.default_rng(3)
# Pairs of samples are equal in size, and neighbouring pairs differ, so that some batches of two would stack and others would not.
SIZES = [(40, 60), (40, 60), (50, 30), (40, 60), (50, 30), (50, 30), (44, 44), (44, 44)]


def pixels(height, width, *channels):
    return RNG.integers(0, 256, (height, width, *channels), dtype=np.uint8)


# For each kind of column: its type, values of unequal size, and its kind in a batch.
COLUMNS = {
    "image": (ps.Image(), [pixels(*size, 3) for size in SIZES], "array"),
    "grey": (ps.Image(mode="L"), [pixels(*size) for size in SIZES], "array"),
    "stored": (ps.Image(mode="stored"), [pixels(*size, 3) for size in SIZES], "array"),
    "mask": (ps.Mask(), [pixels(*size) for size in SIZES], "array"),
    "boxes": (ps.Boxes(), [np.ones((count, 4), np.float32) for count in (1, 1, 2, 0, 3, 3, 0, 0)], "ragged"),
    "points": (ps.Keypoints(2), [np.ones((count, 2, 2), np.float32) for count in (1, 1, 2, 0, 3, 3, 0, 0)], "ragged"),
    "free": (ps.Tensor((None, None), "float32"), [np.ones((a, b), np.float32) for a, b in ((1, 2), (3, 2), (1, 4), (2, 2), (2, 3), (5, 3), (0, 3), (0, 3))], "ragged"),
    "tags": (ps.Labels(["a", "b"]), [[0], [1], [0, 1], [], [1], [0], [], []], "ragged"),
    "fixed": (ps.Tensor((2, 3), "int16"), RNG.integers(0, 9, (8, 2, 3)).astype(np.int16), "array"),
    "number": ("float64", np.arange(8.0), "array"),
    "label": (ps.Label(["a", "b"]), [0, 1] * 4, "array"),
    "word": (ps.Category(), ["x", "y"] * 4, "array"),
    "text": (ps.Text(), ["a", "bc"] * 4, "list"),
    "json": (ps.Json(), [{"a": 1}, [2]] * 4, "list"),
    "bytes": (ps.Bytes(), [b"a", b"bc"] * 4, "list"),
}  # fmt: skip
UNEQUAL = [name for name, (_, values, kind) in COLUMNS.items() if kind == "array" and len({np.shape(value) for value in values}) > 1]


@functools.cache
def dataset():
    ds = ps.create(f"memory://kinds-{next(PLACES)}", {name: kind for name, (kind, _, _) in COLUMNS.items()})
    ds.append({name: values for name, (_, values, _) in COLUMNS.items()})
    return ds


def kind_of(values, output):
    """Return the kind of a column in a batch, as its user sees it."""
    if isinstance(values, ps.Ragged):
        return "ragged", len(values.form), values.form, str(values.values.dtype), type(values.values).__name__
    if isinstance(values, list):
        return ("list",)
    expected = {"numpy": np.ndarray, "torch": torch.Tensor}.get(output)
    assert expected is None or isinstance(values, expected), type(values)
    return "array", values.ndim, str(values.dtype)


def kinds_of(batches, name, output):
    found = {kind_of(batch[name], output) for batch in batches}
    assert len(found) == 1, (name, found)
    return found.pop()[0]


TO_ONE_SIZE = {"image": T.Resize((20, 30), on="image"), "grey": T.CenterCrop(20, on="grey"), "stored": T.RandomCrop(20, on="stored"), "mask": T.Resize((8, 8), on="mask")}  # fmt: skip


def same(sample):
    return sample


def read(path, name, output, options):
    """Yield batches of two samples, from each read path that makes batches."""
    ds = dataset()
    if path == "loader":
        return list(ds.loader(batch_size=2, columns=[name], output=output, **options))
    if path == "shuffled":
        return list(ds.loader(batch_size=2, columns=[name], shuffle=True, seed=5, output=output, **options).stream(3))
    if path == "batch_at":
        loader = ds.loader(batch_size=2, columns=[name], output=output, **options)
        return [loader.batch_at(step) for step in (3, 1, 0)]
    if path == "concat":
        return list(ps.concat([ds, ds.head(2)]).loader(batch_size=2, columns=[name], output=output, **options))
    if path == "mix":
        return list(ps.mix({"a": ds, "b": ds.head(3)}).loader(batch_size=2, columns=[name], output=output, **options))
    assert path == "function"
    options = {**options, "transform": [*options.get("transform", []), same]}
    return list(ds.loader(batch_size=2, columns=[name], output=output, **options))


# JAX narrows 64-bit numbers.
CASES = [(name, output) for name in COLUMNS for output in ("numpy", "torch", "jax") if (name, output) != ("number", "jax")]


@pytest.mark.parametrize("path", ["loader", "shuffled", "batch_at", "concat", "mix", "function"])
@pytest.mark.parametrize(("name", "output"), CASES)
def test_a_column_has_one_kind_in_all_batches(name, path, output):
    if name in UNEQUAL:
        with pytest.raises(ps.InvalidInputError, match=rf"`{name}` of sample \d.*(shape|after your functions)") as caught:
            read(path, name, output, {})
        assert f'ragged=["{name}"]' in str(caught.value)
        assert kinds_of(read(path, name, output, {"transform": [TO_ONE_SIZE[name]]}), name, output) == "array"
    else:
        assert kinds_of(read(path, name, output, {}), name, output) == COLUMNS[name][2]
    transform = {"transform": [TO_ONE_SIZE[name]]} if name in UNEQUAL else {}
    for more in ({}, transform):  # Also if all samples have one size.
        listed = read(path, name, output, {"ragged": [name], **more})
        assert kinds_of(listed, name, output) == "list"
        assert all(len(batch[name]) in (1, 2) for batch in listed)


@pytest.mark.parametrize("name", list(COLUMNS))
@pytest.mark.parametrize("how", ["whole batches", "sample by sample", "to_torch"])
def test_a_dataloader_gets_one_kind_in_all_batches(name, how):
    ds = dataset()

    def batches(**options):
        if how == "to_torch":
            return [part.to_torch([name], **options) for part in (ds.head(2), ds.head(8), ds.select([6, 7]))]
        view = ds.torch([name])
        collate = functools.partial(ps.torch.collate, **options)
        if how == "whole batches":
            return list(torch.utils.data.DataLoader(view, batch_size=2, collate_fn=collate))
        return [collate([view[i] for i in range(begin, begin + 2)]) for begin in range(0, 8, 2)]

    if name in UNEQUAL:
        with pytest.raises(ps.InvalidInputError, match=rf"cannot make a tensor of column `{name}`: sample 1|2 of the batch has"):
            batches()
        listed = batches(ragged=[name])
        assert kinds_of(listed, name, "torch") == "list"
        if COLUMNS[name][1][0].ndim == 3:
            assert all(image.shape[0] == 3 for batch in listed for image in batch[name])
        return
    kind = COLUMNS[name][2]
    assert kinds_of(batches(), name, "torch") == ("list" if kind == "ragged" else kind), "collate has always made lists of ragged values"
    assert kinds_of(batches(ragged=[name]), name, "torch") == "list"


def test_random_crops_of_torchvision_are_stacked_in_every_batch():
    """Of 500 batches, 476 were lists, because `collate` looked at the images before the crop."""
    v2 = pytest.importorskip("torchvision.transforms.v2")
    loader = dataset().loader(batch_size=2, columns=["image"], shuffle=True, transform=[v2.RandomResizedCrop(16)], output="torch")
    shapes = [batch["image"].shape for batch in loader.stream(4)]
    assert shapes == [(2, 3, 16, 16)] * 16


def test_an_unequal_result_of_a_function_names_the_sample():
    def crops(sample):
        return {"image": sample["image"][: 10 + int(sample["number"] == 5)]}

    options = {"batch_size": 4, "columns": ["image", "number"], "transform": [T.Resize((30, 30), on="image"), crops]}
    batches = iter(dataset().loader(**options))
    assert next(batches)["image"].shape == (4, 10, 30, 3)
    with pytest.raises(
        ps.InvalidInputError,
        match=r"`image` of sample 5 is \(11, 30, 3\) uint8 after your functions, but that of sample 4 is \(10, 30, 3\)",
    ) as caught:
        next(batches)
    assert 'ragged=["image"]' in caught.value.hint
    listed = list(dataset().loader(**options, ragged=["image"], output="torch"))
    assert [[tuple(image.shape) for image in batch["image"]] for batch in listed] == [
        [(3, 10, 30)] * 4,
        [(3, 10, 30), (3, 11, 30), (3, 10, 30), (3, 10, 30)],
    ]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (lambda n: np.full((2, 2), n), "array"), (lambda n: torch.full((2,), n), "array"), (lambda n: n, "array"), (lambda n: float(n), "array"), (lambda n: n > 3, "array"), (lambda n: np.float32(n), "array"),
        (lambda n: np.ma.MaskedArray([n, 1], [n > 5, False]), "array"),
        (lambda n: f"word {n}", "list"), (lambda n: {"n": n}, "list"), (lambda n: [n] * n, "list"), (lambda n: None, "list"), (lambda n: b"x" * n, "list"),
    ],
    ids=["array", "tensor", "int", "float", "bool", "scalar", "masked", "str", "dict", "list of numbers", "None", "bytes"],
)  # fmt: skip
def test_new_keys_of_functions_have_one_kind(value, kind):
    def adds(sample):
        return {"number": sample["number"], "new": value(int(sample["number"]))}

    options = {"batch_size": 3, "columns": ["number"], "transform": [adds]}
    assert {"list" if isinstance(batch["new"], list) else "array" for batch in dataset().loader(**options)} == {kind}
    assert all(isinstance(batch["new"], list) for batch in dataset().loader(**options, ragged=["new"]))


@pytest.mark.parametrize(
    ("one", "other"),
    [(np.zeros(2), np.zeros(3)), (np.zeros(2), np.zeros(2, np.float32)), (np.zeros(2), torch.zeros(2)), (np.zeros(2), None), (None, np.zeros(2)), (np.zeros(2), [0, 0]), ([0, 0], np.zeros(2)), (1, 1.5), (True, 1), (1, "x"), ("x", 1), (torch.zeros(2), torch.zeros(2, 1)), (np.int8(1), np.int16(1))],
)  # fmt: skip
def test_values_that_differ_in_kind_are_refused_unless_they_are_a_list(one, other):
    def gives(sample):
        return {"new": other if sample["number"] == 5 else one}

    options = {"batch_size": 4, "columns": ["number"], "transform": [gives]}
    with pytest.raises(ps.InvalidInputError, match="`new` of sample 5 is") as caught:
        list(dataset().loader(**options))
    assert 'ragged=["new"]' in caught.value.hint
    assert [len(batch["new"]) for batch in dataset().loader(**options, ragged=["new"])] == [4, 4]


def test_ragged_results_of_functions_stay_ragged():
    def filtered(sample):
        return {"boxes": torch.from_numpy(sample["boxes"][:1]) if sample["number"] % 2 else sample["boxes"], "free": sample["free"]}

    for batch_size in (1, 2, 3):
        loader = dataset().loader(batch_size=batch_size, columns=["boxes", "free", "number"], transform=[filtered])
        batches = list(loader)
        assert kinds_of(batches, "boxes", "numpy") == kinds_of(batches, "free", "numpy") == "ragged"

    def wrong(sample):
        return {"boxes": np.zeros(0) if sample["number"] == 3 else sample["boxes"]}

    with pytest.raises(ps.InvalidInputError, match="`boxes` of sample 3 has 1 dimensions of float64 after your functions") as caught:
        list(dataset().loader(batch_size=2, columns=["boxes", "number"], transform=[wrong]))
    assert 'ragged=["boxes"]' in caught.value.hint


def test_nulls_do_not_change_the_kind_of_a_column():
    ds = ps.create(f"memory://kinds-{next(PLACES)}", {"image": ps.Image(), "boxes": ps.Boxes(), "mask": ps.Mask(), "text": ps.Text()})
    image, mask = pixels(20, 20, 3), pixels(20, 20)
    ds.append(
        {
            "image": [image, image, None, image],
            "boxes": [[[0, 0, 1, 1]], [], None, [[0, 0, 1, 1]]],
            "mask": [mask, mask, mask, None],
            "text": ["a", "b", "c", None],
        }
    )
    masks = dict.fromkeys(["image", "boxes", "mask", "text"], "mask")
    for functions in ([], [same]):
        for batch_size in (1, 2):
            batches = list(ds.loader(batch_size=batch_size, nulls=masks, transform=functions))
            assert {name: kinds_of(batches, name, "numpy") for name in masks} == {
                "image": "list",
                "boxes": "ragged",
                "mask": "list",
                "text": "list",
            }
            fills = {"image": np.zeros((20, 20, 3), np.uint8), "boxes": "mask", "mask": np.zeros((20, 20), np.uint8), "text": ""}
            batches = list(ds.loader(batch_size=batch_size, nulls=fills, transform=functions))
            assert {name: kinds_of(batches, name, "numpy") for name in masks} == {
                "image": "array",
                "boxes": "ragged",
                "mask": "array",
                "text": "list",
            }
            crop = [T.CenterCrop(8, on=["image", "mask"]), *functions]
            batches = list(ds.loader(batch_size=batch_size, nulls=masks, transform=crop))
            assert kinds_of(batches, "image", "numpy") == kinds_of(batches, "mask", "numpy") == "array", "their size is known"
    with pytest.raises(ps.InvalidInputError, match="column `image` has 1 nulls"):
        list(ds.loader(batch_size=2, columns=["image"]))


def test_every_resume_finds_the_kinds_of_the_first_run():
    options = {"batch_size": 2, "shuffle": True, "columns": ["image", "boxes", "free", "text"], "ragged": ["image"], "transform": [same]}
    loader = dataset().loader(**options)
    whole = [{name: kind_of(batch[name], "numpy") for name in options["columns"]} for batch in loader]
    for step in range(4):
        loader.load_state_dict(loader.state_dict(step=step))
        assert [{name: kind_of(batch[name], "numpy") for name in options["columns"]} for batch in loader] == whole[step:]


def test_python_workers_keep_the_kinds(tmp_path):
    ds = ps.create(tmp_path / "ds", {"image": ps.Image(), "boxes": ps.Boxes()})
    ds.append({name: COLUMNS[name][1] for name in ("image", "boxes")})
    # A lambda is sent with its code, so that workers need not import this module and torch.
    loader = ds.loader(batch_size=2, python_workers=1, ragged=["image"], transform=[lambda sample: sample])
    batches = list(loader.stream(1))
    assert kinds_of(batches, "image", "numpy") == "list" and kinds_of(batches, "boxes", "numpy") == "ragged"


def test_explain_says_the_kind_of_each_column():
    columns = ["image", "boxes", "number", "text"]
    text = dataset().loader(batch_size=2, columns=columns).explain()
    assert "one array: `image`, `number`; ps.Ragged: `boxes`; a list: `text`" in text
    assert "samples of `image` that differ in size are an error" in text and 'ragged=["image"] makes a list' in text
    text = dataset().loader(batch_size=2, columns=columns, ragged=["image", "number"]).explain()
    assert "ps.Ragged: `boxes`; a list: `image`, `number`, `text`" in text and "differ in size" not in text
    text = dataset().loader(batch_size=2, columns=columns, transform=[T.Resize((8, 8), on="image")]).explain()
    assert "differ in size" not in text
    assert (
        "functions return are one array, and unequal ones are an error"
        in dataset().loader(batch_size=2, columns=columns, transform=[same]).explain()
    )


def test_wrong_names_in_ragged_are_refused():
    with pytest.raises(ps.InvalidInputError, match="ragged= names `images`, which the loader does not return"):
        dataset().loader(batch_size=1, columns=["image"], ragged=["images"])
    with pytest.raises(ps.InvalidInputError, match="ragged='image', expected a list of names"):
        dataset().loader(batch_size=1, ragged="image")
    with pytest.raises(ps.InvalidInputError, match="ragged= names `images`, which your functions did not return"):
        list(dataset().loader(batch_size=1, columns=["image"], transform=[same], ragged=["images"]))


def numbered(count=8, folder=None):
    ds = ps.create(f"memory://kinds-{next(PLACES)}" if folder is None else folder / f"kinds-{next(PLACES)}", {"n": "int64"})
    ds.append({"n": range(count)})
    return ds


@pytest.mark.parametrize("output", ["numpy", "torch"])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (None, 3.0),
        ("text", np.zeros(2)),
        (1, 2.0),
        (np.zeros(2), np.zeros(2, np.float32)),
        (np.zeros(2), torch.zeros(2, dtype=torch.float64)),
    ],
)
def test_a_result_whose_kind_changes_between_batches_is_refused(one, other, output):
    """Each batch alone could be stacked, or is a list. The next one differs."""
    options = {"batch_size": 2, "output": output}
    for first, second in ((one, other), (other, one)):

        def made(sample, first=first, second=second):
            return {"x": first if sample["n"] < 4 else second}

        seen = 0
        with (
            numbered().loader(**options, transform=[made]) as loader,
            pytest.raises(ps.InvalidInputError, match=r"`x` in step 2 is .*first batch") as caught,
        ):
            for _ in loader:
                seen += 1
        assert seen == 2 and 'ragged=["x"]' in caught.value.hint
        with numbered().loader(**options, transform=[made], ragged=["x"]) as loader:
            assert [type(batch["x"]) for batch in loader] == [list] * 4


def refused(loader, text):
    with loader, pytest.raises(ps.InvalidInputError, match=text):
        list(loader)


def test_results_of_python_workers_are_compared(tmp_path):
    """Each worker makes batches of one kind."""
    ds = numbered(folder=tmp_path)
    loader = ds.loader(batch_size=2, transform=[lambda sample: {"x": None if sample["n"] % 4 < 2 else 1.0}], python_workers=2)
    refused(loader, "`x` in step 1 is one array of float64, but in the first batch, it was a list")


def test_batches_of_functions_have_the_same_columns():
    refused(numbered().loader(batch_size=2, transform=[lambda sample: {"x" if sample["n"] < 4 else "y": 1}]), "`x` in step 2 is missing")
    odd = T.PerBatch(lambda batch: {"x": batch["n"] if batch["n"][0] < 4 else [1, 2]})
    refused(numbered().loader(batch_size=2, transform=[odd]), "`x` in step 2 is a list, but in the first batch, it was one array of int64")


def test_whole_numbers_of_more_than_64_bits_are_refused():
    loader = numbered().loader(batch_size=2, transform=[lambda sample: {"x": 2**70}])
    refused(loader, "samples 0 to 1 has whole numbers that do not fit 64 bits")


ALIKE = [np.zeros(2), np.ones(2), np.zeros(2, ">f8"), np.zeros(2, "f4"), np.zeros((1, 2)), np.ma.zeros(2), np.array("ab"), np.array(["ab", "c"]), np.array(["ab", "cde"]),
         np.array(["2020"] * 2, "M8[s]"), np.array(["2020"] * 2, "M8[D]"), np.zeros(2, [("a", "i1"), ("b", "i4")]), np.zeros(2, np.dtype([("a", "i1"), ("b", "i4")], align=True)),
         torch.zeros(2), torch.ones(2), torch.nn.Parameter(torch.ones(2)), torch.zeros(2, dtype=torch.float64), torch.zeros(1, 2), np.float64(1), np.float64(2), np.float32(1), 1.0, 1, 2, True, np.True_,
         np.int64(1), np.uint64(1), 2**63, -1, np.str_("a"), np.str_("abc"), np.datetime64("2020"), np.datetime64("2020-01-01"), None, "a", [1], object()]  # fmt: skip


@pytest.mark.parametrize("one", range(len(ALIKE)))
def test_results_are_stacked_that_are_described_alike(one):
    """Equal shapes and dtypes are not described, which takes long. What is accepted or refused depends only on the descriptions."""
    for other in ALIKE:
        values = [ALIKE[one], ALIKE[one], other]
        same = kinds._form_of(other) == kinds._form_of(values[0]) and kinds._described(other) == kinds._described(values[0])
        try:
            kinds._check_equal("x", values, np.arange(3), "now")
            accepted = True
        except ps.InvalidInputError:
            accepted = False
        assert accepted == same, values

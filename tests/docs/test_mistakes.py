"""Usual mistakes of the first hour: each error says what was given, what is wanted, and a line to type."""

import pathlib

import numpy as np
import pandas as pd
import penstock as ps
import polars as pl
import pyarrow as pa
import pytest
import torch
from penstock import transforms as T
from torchvision import transforms as v1
from torchvision.transforms import v2

PNG = bytes(ps._core.encode_png((4, 4, 3), np.zeros(48, np.uint8)))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """What a user has: a dataset with images, boxes, labels, text and numbers, and a few files."""
    folder = tmp_path_factory.mktemp("mistakes")
    ds = ps.create(
        folder / "set",
        {
            "image": ps.Image(),
            "boxes": ps.Boxes(of="image"),
            "label": ps.Label(["cat", "dog"]),
            "tags": ps.Labels(["a", "b"]),
            "text": ps.Text(),
            "n": "int64",
            "x": ps.Tensor((3,), "float32"),
            "ragged": ps.Tensor((None,), "float32"),
            "when": "timestamp",
        },
    )
    ds.append({
        "image": [PNG] * 6, "boxes": [[[0, 0, 1, 1]]] * 6, "label": ["cat", "dog"] * 3, "tags": [["a"]] * 6, "text": list("abcdef"),
        "n": range(6), "x": np.zeros((6, 3), np.float32), "ragged": [[1.0]] * 6, "when": np.array(["2024-01-01"] * 6, "datetime64[us]"),
    })  # fmt: skip
    (folder / "rows.csv").write_text("n,file\n1,a.png\n")
    (folder / "empty").mkdir()
    (folder / "photos").mkdir()
    (folder / "photos" / "1.png").write_bytes(PNG)
    loose = ps.create(folder / "loose", {"image": ps.Image(), "boxes": ps.Boxes()})
    small = ps.create(folder / "small", {"n": "int64"})
    small.append({"n": [1, 2, 3]})
    return {
        "ps": ps, "np": np, "pd": pd, "pa": pa, "torch": torch, "T": T, "v2": v2, "v1": v1, "pl": pl, "loose": loose, "pathlib": pathlib, "ds": ds, "small": small,
        "folder": folder, "PNG": PNG, "imports": ps.importers.import_data, "again": ps.open(folder / "set", snapshot=ds.log()[1].snapshot),
    }  # fmt: skip


# Each line is a mistake, and a part of the message or of its hint.
MISTAKES = r"""
next(iter(ds.loader(batch_size=2, columns=["image"], transform=[v2.RandomHorizontalFlip])))   | RandomHorizontalFlip(…)
next(iter(ds.loader(batch_size=2, columns=["image"], transform=[v1.RandomHorizontalFlip(1.0)]))) | torchvision.transforms.v2.RandomHorizontalFlip(…)
ds.loader(batch_size=2, transform=[v2.SanitizeBoundingBoxes()])         | T.SanitizeBoundingBoxes(on=("boxes", "labels"))
ds.loader(batch_size=2, columns=["image", "label"], transform=[v2.MixUp(num_classes=2)]) | T.MixUp(…)
next(iter(ds.loader(batch_size=2, columns=["image"], transform=[v2.ToPILImage(), v2.RandomHorizontalFlip()]))) | ToPILImage
next(iter(ds.loader(batch_size=2, columns=["image"], decode=False, transform=[v2.RandomHorizontalFlip()]))) | decode=False
"emu" in ds["label"]                                                    | labels: cat, dog
ds["label"] == 5                                                        | compare with a word: cat, dog
ds["n"].mean()                                                          | ds["n"][:]
ps.concat(ds, ds)                                                       | ps.concat([one, other])
ds.take(2)                                                              | [2]
ps.import_data("x", "y")                                                | ps.importers.import_data(
ds["label"] == -1                                                       | compare with a word: cat, dog
ps.concat([ds, ds]).sample(3)                                           | ps.concat([one.sample(50)
T.PerBatch(v2.CutMix(num_classes=2))                                    | T.CutMix(…)
ds.loader(batch_size=2, transform=[v2.Compose([v2.Resize(2), v2.SanitizeBoundingBoxes()])]) | T.SanitizeBoundingBoxes
ps.create(folder / "z", {"a": "label:cat,dog"})                         | ps.Label
ps.create(folder / "z", {"a": "tensor:float32:3x?"})                    | ps.Tensor
ds.save()                                                               | store data immediately
ds.loader(batch_size=2, columns=["image"], transform=[T.Pad(2, fill=(1, 2, 3))]) | fill=0
ps.load_dataset("x")                                                    | ps.open(uri)
imports(pl.DataFrame({"n": pl.Series([1], dtype=pl.Int128)}), folder / "z") | cast
imports(pl.DataFrame({"o": pl.Series([{1}], dtype=pl.Object)}), folder / "z") | to_dict(as_series=False)
small.append(pl.DataFrame({"n": pl.Series([{1}], dtype=pl.Object)}))    | to_dict(as_series=False)
ds.loader(batch_size=2, columns=["image"], transform=[T.Pad(2, fill=300)]) | fill=300
ds.loader(batch_size=2, columns=["image"], transform=[T.RandomCrop(2, fill=.5)]) | fill=0.5
ds.loader(batch_size=2, columns=["image"], transform=[T.ToDtype("float32", scale=True), T.RandomErasing(1.0), T.Normalize([.5], [.5])]) | put RandomErasing last
loose.loader(batch_size=2, transform=[T.RandomHorizontalFlip()])        | on=("image", "boxes")
loose.loader(batch_size=2, transform=[v2.RandomHorizontalFlip()])       | on=("image", "boxes")
imports(folder / "rows.csv", folder / "z", key="id")                    | columns: n, file
ds.map(lambda sample: sample)                                           | transform=
ds.shuffle(seed=0)                                                      | shuffle=True
ds.train_test_split(test_size=0.2)                                      | ds.split({"train": 0.8, "test": 0.2}, seed=0)
ds.features                                                             | ds.schema
ds.column_names                                                         | ds.columns
ds.to_csv("a.csv")                                                      | ds.to_pandas
ds.iloc[3]                                                              | ds.select([0, 1])
ds.checkout("v1")                                                       | ps.open(uri
ds.rename_class("label", "cat", "feline")                                | tx.rename_class
ps.concat([ds, ds]).map(len)                                            | transform=
T.Compose([T.Resize(3)])                                                | transform=[…]
T.ToTensor()                                                            | T.ToDtype
T.Rotate(30)                                                            | T.RandomRotation
T.RandAugment()                                                         | T.Torchvision(v2.RandAugment
ds["image", "boxes"]                                                    | ds[["image", "boxes"]]
ds.select("n > 3")                                                      | filter
imports({"train": pd.DataFrame({"n": [1]}), "test": pd.DataFrame({"n": [1]})}, folder / "z")  | source['train']
imports(pd.DataFrame({"n": [1]}), folder / "z", mode="skip-existing")   | key=
ps.concat([ds, ds])["label"] == "bird"                                  | labels: cat, dog
ps.concat([ds, ds])["image"] == 3                                       | cannot compare
ps.create(folder / "a", {"n": "string"})                                | ps.Text()
ps.create(folder / "a", {"n": "str"})                                   | ps.Text()
ps.create(folder / "a", {"n": str})                                     | ps.Text()
ps.create(folder / "a", {"n": "image"})                                 | ps.Image()
ps.create(folder / "a", {"n": "category"})                              | ps.Category()
ps.create(folder / "a", {"n": "labels"})                                | ps.Labels([names])
ps.create(folder / "a", {"n": "list"})                                  | ps.Tensor
ps.create(folder / "a", {"n": "datetime"})                              | "timestamp"
ps.create(folder / "a", {"n": ps.Image})                                | write ps.Image()
ps.create(folder / "a", {"n": None})                                    | valid dtypes
ps.create(folder / "a", {"n": ps.Tensor(3, "float32")})                 | (3,)
ps.create(folder / "a", {"n": ps.Tensor((3, -1), "float32")})           | None
ps.create(folder / "a", {"n": ps.Label("cat")})                         | ps.Label(["cat", "dog"])
ps.create(folder / "a", {"n": ps.Labels("cat")})                        | ps.Labels(["cat", "dog"])
ps.create(folder / "a", {"n": ps.Label(["cat", "cat"])})                | twice
ps.create(folder / "a", {"n": ps.Label([0, 1])})                        | list of str
ps.create(folder / "a", {"b": ps.Boxes(of="image")})                    | image
ps.create(folder / "a", {"b": ps.Boxes("yxyx")})                        | xywh
ps.create(folder / "a", ["n"])                                          | dict
ps.create(folder / "a", "n")                                            | dict
ps.create(folder / "a", {1: "int64"})                                   | str
ps.create(folder / "a", {"_n": "int64"})                                | _
ps.create(folder / "a", {"": "int64"})                                  | 1 to 255
ps.create(folder / "set", {"n": "int64"})                               | open
ps.create(folder / "photos", {"n": "int64"})                            | new folder
ps.create(folder / "rows.csv", {"n": "int64"})                          | new folder
ps.create("https://example.org/a", {"n": "int64"})                      | read
ps.create("ftp://example.org/a", {"n": "int64"})                        | s3://
ps.create(5, {"n": "int64"})                                            | write a path
ps.open(folder / "none")                                                | create
ps.open(folder / "photos")                                              | create
ps.open(folder / "rows.csv")                                            | create
ps.open("")                                                             | path
ps.open(None)                                                           | write a path
ps.open(folder / "set", branch="none")                                  | branch
ps.open(folder / "set", tag="none")                                     | tag
ps.open(folder / "set", snapshot="none")                                | snapshot
ps.open(folder / "set", snapshot=99)                                    | snapshot
ps.open(folder / "set", as_of="yesterday")                              | write 20
ps.open(folder / "set", tag="a", snapshot="b")                          | one of
ps.open(folder / "set", io="fast")                                      | direct
ds.append({"n": 5})                                                     | write [5]
ds.append({"text": "a"})                                                | write ['a']
ds.append({"n": {"a": 1}})                                              | write [{'a': 1}]
ds.append([1, 2])                                                       | dict
ds.append(5)                                                            | dict
ds.append("rows.csv")                                                   | import
ds.append({"m": [1]})                                                   | columns:
ds.append({"n": [1], "text": ["a", "b"]})                               | same number
ds.append({"n": ["a"]})                                                 | int64
ds.append({"n": [1.5]})                                                 | int64
ds.append({"n": [2**70]})                                               | int64
ds.append({"label": ["bird"]})                                          | labels: cat, dog
ds.append({"label": [7]})                                               | labels: cat, dog
ds.append({"label": "cat"})                                             | write ['cat']
ds.append({"tags": ["a"]})                                              | ps.Label
ds.append({"tags": [["c"]]})                                            | labels: a, b
ds.append({"x": [1, 2, 3]})                                             | shape
ds.append({"x": np.zeros((2, 4), np.float32)})                          | shape
ds.append({"x": [[1, 2, "3"]]})                                         | float32
ds.append({"x": np.zeros((1, 3), np.complex64)})                        | float32
ds.append({"boxes": [[1, 2, 3, 4]]})                                    | shape
ds.append({"image": ["1.png"]})                                         | Path
ds.append({"image": [pathlib.Path("none.png")]})                        | none.png
ds.append({"image": [b"not an image"]})                                 | JPEG
ds.append({"image": [np.zeros((4, 4, 2), np.uint8)]})                   | with C 1, 3 or 4
ds.append({"image": [np.zeros((4, 4, 3), np.float32)]})                 | 255 *
ds.append({"image": [torch.zeros(3, 40, 40, dtype=torch.uint8)]})       | image.permute(1, 2, 0)
ds.append({"text": [5]})                                                | str
ds.append({"when": ["tomorrow"]})                                       | such as 20
ds.append({"when": [5.5]})                                              | timestamp
ds.append(pd.DataFrame({"m": [1]}))                                     | columns:
ds.append({"n": None})                                                  | write [None]
ds.append({"n": [[1]]})                                                 | int64
again.append({"n": [1]})                                                | refresh
ds["none"]                                                              | columns:
ds[99]                                                                  | there are
ds[1.5]                                                                 | position
ds[None]                                                                | position
ds[["image", "none"]]                                                   | columns:
ds[[True, False]]                                                       | 6
ds["n"] == "cat"                                                        | int64
ds["label"] == "bird"                                                   | labels: cat, dog
ds["image"] == 3                                                        | one by one
ds["n"] == None                                                         | is None
ds["x"] > 1                                                             | one by one
ds.take([99])                                                           | 0 to 5
ds.take(["a"])                                                          | position
ds.take([0], columns="none")                                            | columns=['none']
ds.take([0], on_corrupt="skip")                                         | null
ds.select([99])                                                         | 0 to 5
ds.select("n > 3")                                                      | position
ds.select_columns("none")                                               | columns=['none']
ds.head(-1)                                                             | count
ds.head("5")                                                            | count
ds.sample(99, seed=0)                                                   | 6
ds.sample(2, seed="x")                                                  | seed
ds.split({"train": 0.8, "test": 0.5})                                   | 1
ds.split([0.8, 0.2])                                                    | {"train"
ds.split(0.8)                                                           | {"train"
ds.split({"train": 0.8, "test": 0.2}, by="none")                        | columns:
ds.split({"train": 0.8, "test": 0.2}, by="image")                       | label
ds.filter(3)                                                             | lambda
ds.batches(0)                                                           | batch_size
ds.scan("none")                                                         | columns=['none']
ds.scan(batch_size=0)                                                   | batch_size
ps.concat(ds)                                                           | ps.concat([one, other])
ps.concat([])                                                           | ps.concat([one, other])
ps.concat([ds, small])                                                  | ds.select_columns
ps.mix([ds, small])                                                     | dict
ps.mix({"a": (small, -1)})                                              | weight
ps.mix({"a": small}, exhausted="loop")                                  | repeat
ds.loader()                                                             | batch_size
ds.loader(batch_size=32, num_workers=4)                                 | threads
ds.loader(batch_size=32, drop_last=True)                                | last_batch
ds.loader(batch_size=32, pin_memory=True)                               | pin
ds.loader(batch_size=32, collate_fn=len)                                | T.PerBatch
ds.loader(batch_size=32, sampler=[1])                                   | shuffle
ds.loader(batch_size=32, prefetch_factor=2)                             | memory_bytes
ds.loader(batch_size=0)                                                 | batch_size
ds.loader(batch_size=2.5)                                               | batch_size
ds.loader(batch_size=32, shuffle="yes")                                 | ps.Window
ds.loader(batch_size=32, columns=["none"])                              | columns:
ds.loader(batch_size=32, columns="image")                               | columns=['image']
ds.loader(batch_size=32, output="tf")                                   | numpy
ds.loader(batch_size=32, transform=T.Resize(8))                         | transform=[
ds.loader(batch_size=32, transform=[T.Resize])                          | T.Resize(
ds.loader(batch_size=32, transform=["resize"])                          | penstock.transforms
ds.loader(batch_size=32, transform=[T.Resize(8, on="none")])            | the loader returns
ds.loader(batch_size=32, transform=[T.Resize(8, on="text")])            | text
ds.loader(batch_size=32, transform=[T.Resize(0)])                       | whole numbers
ds.loader(batch_size=32, transform=[T.Normalize([0.5], [0])])           | std
ds.loader(batch_size=32, transform=[lambda: 1])                         | (sample)
ds.loader(batch_size=32, transform=[T.PerBatch(len), len])              | last
ds.loader(batch_size=32, transform=[v2.Resize(8), T.Resize(8)])         | functions last
ds.loader(batch_size=32, rank=2, world_size=2)                          | rank
ds.loader(batch_size=32, last_batch="keep")                             | short
ds.loader(batch_size=32, on_corrupt="skip")                             | substitute
ds.loader(batch_size=32).load_state_dict({})                            | state
ds.loader(batch_size=32).load_state_dict("x")                           | state
ds.create_branch("main")                                                | use another name
ds.create_branch("")                                                    | 1 to 255
ds.merge("none")                                                        | branch
ds.reset("none")                                                        | ds.tags()
ds.create_tag("")                                                       | 1 to 255
list(ds.diff("none"))                                                   | ds.tags()
ds.transaction(isolation="none")                                        | snapshot
ds.transaction(5)                                                       | message
imports(folder / "none.csv", folder / "b")                              | no such file
imports(folder / "empty", folder / "b")                                 | no files
imports(folder / "rows.csv", folder / "b", format="excel")              | csv
imports(folder / "rows.csv", folder / "b", types={"m": "int64"})        | columns:
imports(folder / "rows.csv", folder / "b", types={"file": ps.Boxes()})  | Text
imports(folder / "rows.csv", folder / "b", types={"file": ps.Image()})  | a.png
imports(folder / "rows.csv", folder / "b", types={"n": "timestamp"})    | timestamp
imports(folder / "rows.csv", folder / "b", delimiter=";;")              | a single ASCII character
imports(folder / "rows.csv", folder / "b", sep=";")                     | delimiter
imports(folder / "rows.csv", folder / "b", encoding="utf9")             | encoding
imports(folder / "rows.csv", folder / "b", on_error="ignore")           | skip
imports(folder / "rows.csv", folder / "b", mode="w")                    | append
imports(folder / "rows.csv", folder / "b", limit=0)                     | limit
imports("https://example.org/a.csv", folder / "b")                      | download
imports(5, folder / "b")                                                | {"column": values}
imports([], folder / "b")                                               | no rows
imports([5], folder / "b")                                              | named values
imports(folder / "photos", folder / "small")                            | columns: n
"""
LINES = [tuple(part.strip() for part in line.rsplit("|", 1)) for line in MISTAKES.strip().splitlines()]


@pytest.mark.parametrize(("line", "says"), LINES, ids=[line for line, _ in LINES])
def test_a_mistake_is_answered(world, line, says):
    with pytest.raises((ps.Error, AttributeError)) as caught:  # AttributeError: hasattr must return False.
        eval(line, dict(world))
    assert says in str(caught.value), str(caught.value)
    assert len(world["ds"]) == 6 and not (world["folder"] / "a").exists() and not (world["folder"] / "b").exists()


def test_there_are_at_least_140():
    assert len(set(LINES)) >= 140

"""Test labels whose names are not given: an import takes them from the data, and adds those that a dataset lacks."""

import io
import json
import pathlib
import subprocess
import sys

import numpy as np
import pandas as pd
import penstock as ps
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from penstock.importers import import_data
from PIL import Image as Pillow

WORDS = ["cat", "dog", None, 'ünï, "x"', "cat", "", "emu"]
LISTS = [["cat"], [], None, ["dog", "cat"], ["ünï"], ["emu", "emu"], ["cat"]]
OPEN = {"label": ps.Label([]), "labels": ps.Labels([])}


def csv(folder):
    pd.DataFrame({"label": WORDS}).to_csv(folder / "a.csv", index=False, na_rep="NA")
    text = (folder / "a.csv").read_text()
    (folder / "a.csv").write_text(text.replace("NA", ""))
    return folder / "a.csv"


def jsonl(folder):
    rows = [json.dumps({"label": label, "labels": labels}) for label, labels in zip(WORDS, LISTS, strict=True)]
    (folder / "a.jsonl").write_text("\n".join(rows))
    return folder / "a.jsonl"


def table():
    return pa.table({"label": pa.array(WORDS), "labels": pa.array(LISTS)})


def parquet(folder):
    pq.write_table(table(), folder / "a.parquet", row_group_size=2)
    return folder / "a.parquet"


def dictionary(folder):
    coded = pa.table({"label": pa.array(WORDS).dictionary_encode(), "labels": pa.array(LISTS, pa.list_(pa.string()))})
    pq.write_table(coded, folder / "a.parquet", row_group_size=3)
    return folder / "a.parquet"


def frame(_):
    return pd.DataFrame({"label": pd.Series(WORDS, dtype="string"), "labels": LISTS})


def rows(_):
    return ({"label": label, "labels": labels} for label, labels in zip(WORDS, LISTS, strict=True))


@pytest.mark.parametrize("source", [csv, jsonl, parquet, dictionary, frame, rows, lambda _: table()])
def test_names_come_from_the_data(root, tmp_path, source):
    given = source(tmp_path)
    types = {name: kind for name, kind in OPEN.items() if source is not csv or name == "label"}
    import_data(given, root, types=types)
    ds = ps.open(root)
    # An empty cell of a CSV file is a null.
    words = [word or None for word in WORDS] if source is csv else WORDS
    assert ds.to_arrow()["label"].to_pylist() == words and set(ds.schema["label"].names) == {word for word in words if word is not None}
    if source is not csv:
        assert ds.to_arrow()["labels"].to_pylist() == LISTS and sorted(ds.schema["labels"].names) == ["cat", "dog", "emu", "ünï"]
    assert [commit.samples_added for commit in ds.log()] == [7, 0] and not ds.verify()["problems"]


def test_an_import_adds_the_names_that_a_dataset_lacks(root, tmp_path):
    ds = ps.create(root, {"label": ps.Label(["emu", "gnu"]), "labels": ps.Labels(["gnu"])})
    ds.append({"label": ["gnu"], "labels": [["gnu"]]})
    with pytest.raises(ps.InvalidInputError, match="is not a label"):
        import_data(parquet(tmp_path), root)
    import_data(parquet(tmp_path), root, types=OPEN)
    ds.refresh()
    assert ds.schema["label"].names[:2] == ("emu", "gnu") and ds["label"][:2].tolist()[0] == 1 and len(ds) == 8
    assert ds.to_arrow()["label"].to_pylist() == ["gnu", *WORDS] and ds.to_arrow()["labels"].to_pylist() == [["gnu"], *LISTS]


def test_a_folder_of_images_has_a_new_class(root, tmp_path):
    def picture(place):
        out = io.BytesIO()
        Pillow.fromarray(np.full((4, 5, 3), place, np.uint8)).save(out, "PNG")
        path = tmp_path / "images" / f"{place % 3} kind" / f"{place}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(out.getvalue())

    for place in (0, 1, 3):
        picture(place)
    import_data(tmp_path / "images", root)
    for place in (2, 4, 5):
        picture(place)
    report = import_data(tmp_path / "images", root, types={"label": ps.Label([])}, mode="skip-existing")
    ds = ps.open(root)
    assert report.samples == 3 and ds.schema["label"].names == ("0 kind", "1 kind", "2 kind")
    assert sorted(zip(ds["path"][:], ds["label"][:].tolist(), strict=True)) == [
        ("0 kind/0.png", 0), ("0 kind/3.png", 0), ("1 kind/1.png", 1), ("1 kind/4.png", 1), ("2 kind/2.png", 2), ("2 kind/5.png", 2)
    ]  # fmt: skip


@pytest.mark.local
def test_the_command_line_takes_a_label_without_names(root, tmp_path):
    command = [sys.executable, "-m", "penstock", "import", csv(tmp_path), root, "-t", "label=label"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert ps.open(root).to_arrow()["label"].to_pylist() == [word or None for word in WORDS]
    assert pathlib.Path(root).exists()


def test_rows_that_are_refused_leave_the_others(root):
    given = [{"label": "a", "n": 1}, {"label": 7, "n": 2}, {"label": "b", "n": "x"}, {"label": "c", "n": 3}]
    report = import_data(iter(given), root, types={"label": ps.Label([]), "n": "int32"}, on_error="skip")
    ds = ps.open(root)
    assert report.samples == 2 and len(report.refused) == 2
    assert ds.to_arrow()["label"].to_pylist() == ["a", "c"] and {"a", "c"} <= set(ds.schema["label"].names)

"""Rows in memory that are imported again, and datasets given as the source of an import."""

import numpy as np
import pandas as pd
import penstock as ps
import pyarrow as pa
import pytest
import torch
from penstock.cli import app
from penstock.importers import import_data
from PIL import Image as Pillow
from typer.testing import CliRunner

ROWS = [{"n": row, "text": f"row {row}"} for row in range(1200)]
FORMS = {
    "list": lambda: ROWS,
    "generator": lambda: (row for row in ROWS),
    "columns": lambda: {"n": np.arange(1200), "text": [row["text"] for row in ROWS]},
    "frame": lambda: pd.DataFrame(ROWS),
    "arrow": lambda: pa.Table.from_pylist(ROWS),
    "reader": lambda: pa.Table.from_pylist(ROWS).to_reader(),
    "stream": lambda: iter([pd.DataFrame(ROWS[:600]), pd.DataFrame(ROWS[600:])]),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_same_rows_again_ask_for_a_key_or_a_name(root, form):
    made = FORMS[form]
    first = import_data(made(), root)
    with pytest.raises(ps.AlreadyExistsError, match=f"commit {first.snapshot} .* imported rows that begin with the same ones") as caught:
        import_data(made(), root)
    assert caught.value.code == "already-imported" and 'key="id"' in caught.value.hint and 'name="' in caught.value.hint
    assert len(ps.open(root)) == 1200
    with pytest.raises(ps.AlreadyExistsError, match="the dataset already has a sample with this n"):
        import_data(made(), root, key="n")
    assert import_data(made(), root, key="n", mode="skip-existing").skipped == 1200
    assert import_data(made(), root, name="part 2").samples == 1200
    with pytest.raises(ps.AlreadyExistsError, match="imported rows named 'part 2'"):
        import_data(made(), root, name="part 2")
    assert import_data(made(), root, name="part 2", mode="skip-existing").skipped == 1200
    assert import_data(made(), root, mode="append").samples == 1200
    with pytest.raises(ps.InvalidInputError, match="it is unknown whether it was already imported"):
        import_data(made(), root, mode="skip-existing")


def test_other_rows_are_imported(root):
    import_data(ROWS, root)
    changed = [{**ROWS[0], "text": "another"}, *ROWS[1:]]
    for rows in (changed, list(reversed(ROWS)), ROWS[1:]):
        assert import_data(rows, root).samples == len(rows)


@pytest.mark.parametrize("count", [1, 3, 999, 1200])
@pytest.mark.parametrize("form", ["list", "generator", "columns", "frame", "arrow"])
def test_rows_that_grew_are_not_doubled(root, form, count):
    def made(rows):
        return {
            "list": lambda: rows, "generator": lambda: iter(rows), "frame": lambda: pd.DataFrame(rows), "arrow": lambda: pa.Table.from_pylist(rows),
            "columns": lambda: {"n": np.array([row["n"] for row in rows]), "text": [row["text"] for row in rows]},
        }[form]()  # fmt: skip

    import_data(made(ROWS[:count]), root)
    grown = [*ROWS[:count], {"n": 5000, "text": "x"}]
    with pytest.raises(ps.AlreadyExistsError, match="imported rows that begin with the same ones"):
        import_data(made(grown), root)
    assert import_data(made(grown), root, key="n", mode="skip-existing").samples == 1
    assert ps.open(root)["n"][:].tolist() == [*range(count), 5000]


def test_values_of_every_kind_are_compared(root):
    rows = [
        {
            "array": np.arange(3.0) + row, "tensor": torch.arange(4) + row, "image": Pillow.new("RGB", (4, 3), (row, 0, 0)),
            "bytes": bytes([row]), "deep": {"list": [row, None, True]}, "when": np.datetime64("2026-01-01") + row,
        }
        for row in range(3)
    ]  # fmt: skip
    pictures = [{**row, "image": np.asarray(row["image"])} for row in rows]
    types = {"image": ps.Image()}
    import_data(pictures, root, types=types)
    with pytest.raises(ps.AlreadyExistsError):
        import_data([{**row, "array": row["array"].copy()} for row in pictures], root, types=types)
    for name, value in {
        "array": np.arange(3.0) - 1,
        "tensor": torch.zeros(4, dtype=torch.int64),
        "bytes": b"x",
        "deep": {},
        "image": np.zeros((3, 4, 3), np.uint8),
    }.items():
        assert import_data([*pictures[:2], {**pictures[2], name: value}], root, types=types).samples == 3, name


@pytest.mark.parametrize("dtype", ["object", "string", "Int64", "category", "boolean", "datetime64[us, UTC]"])
def test_frames_that_differ_in_a_row_between_are_other_rows(root, dtype):
    def frame(middle):
        values = pd.Series([row % 2 for row in range(400)])
        values[200] = middle
        names = values.astype(str) if dtype in ("object", "string", "category") else values
        return pd.DataFrame({"n": range(400), "v": names.astype(dtype)})

    assert import_data(frame(0), root).samples == 400 and import_data(frame(1), root).samples == 400
    with pytest.raises(ps.AlreadyExistsError, match="imported rows that begin with the same ones"):
        import_data(frame(1), root)


def test_texts_with_an_address_are_recognised(root):
    rows = [{"n": row, "log": f"object at 0x{row:x} failed"} for row in range(10)]
    import_data(rows, root)
    with pytest.raises(ps.AlreadyExistsError, match="imported rows that begin with the same ones"):
        import_data(rows, root)


def test_arrays_of_other_libraries_are_told_apart(root):
    class Lazy:
        """An array whose text does not show its values."""

        shape, dtype, nbytes = (3,), np.dtype("f8"), 24

        def __init__(self, first):
            self.values = np.array([first, 1.0, 2.0])

        def __array__(self, dtype=None, copy=None):
            return self.values.astype(dtype or "f8")

        def __repr__(self):
            return "<an array of shape (3,)>"

    types = {"v": ps.Tensor((3,), "float64")}
    assert [import_data([{"v": Lazy(first)}], root, types=types).samples for first in (0.0, 5.0)] == [1, 1]
    with pytest.raises(ps.AlreadyExistsError, match="imported rows that begin with the same ones"):
        import_data([{"v": Lazy(5.0)}], root, types=types)


def test_a_dataset_as_the_source_says_what_to_do_instead(tmp_path, root):
    ps.create(tmp_path / "one", {"n": "int64"}).append({"n": [1, 2]})
    with pytest.raises(ps.InvalidInputError, match="is already a dataset") as caught:
        import_data(tmp_path / "one", root)
    assert "copy its folder or bucket" in caught.value.hint and "append" in caught.value.hint
    done = CliRunner().invoke(app, ["import", str(tmp_path / "one"), str(tmp_path / "two")])
    assert done.exit_code == 1 and "is already a dataset" in str(done.exception)
    with pytest.raises(ps.InvalidInputError) as caught:
        import_data("s3://bucket/dataset", root)
    assert "append" in caught.value.hint
    # What the hint says.
    ps.create(root, {"n": "int64"}).append(ps.open(tmp_path / "one"))
    assert ps.open(root)["n"][:].tolist() == [1, 2]

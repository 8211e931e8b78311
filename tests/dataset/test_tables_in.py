"""What `append` and `import_data` accept as a table: dicts, frames, Arrow, Hugging Face datasets, rows, and streams of these."""

import uuid

import datasets
import numpy as np
import pandas as pd
import penstock as ps
import polars as pl
import pyarrow as pa
import pytest
import torch
from PIL import Image

SCHEMA = {
    "n": "int64",
    "t": ps.Text(),
    "label": ps.Label(["a", "b"]),
    "v": ps.Tensor((2,), "float32"),
    "b": ps.Boxes(),
    "j": ps.Json(),
    "i": ps.Image(),
}
ROWS = [
    {"n": 1, "t": "x", "label": "a", "v": [1.0, 2.0], "b": [[1.0, 2.0, 3.0, 4.0]], "j": {"q": 1}},
    {"n": None, "t": None, "label": "b", "v": None, "b": [], "j": None},
]
COLUMNS = {name: [row[name] for row in ROWS] for name in ROWS[0]}
ARROW = pa.table({name: values for name, values in COLUMNS.items() if name != "j"})


def own():
    ds = ps.create(f"memory://own-table-{uuid.uuid4()}", SCHEMA)
    ds.append(COLUMNS)
    return ds


TABLES = {
    "columns": lambda: COLUMNS,
    "rows": lambda: ROWS,
    "generator of rows": lambda: iter(ROWS),
    "generator of columns": lambda: iter(
        [{name: values[:1] for name, values in COLUMNS.items()}, {name: values[1:] for name, values in COLUMNS.items()}]
    ),
    "pandas": lambda: pd.DataFrame({**COLUMNS, "n": pd.array([1, None], "Int64"), "label": pd.Categorical(["a", "b"])}),
    "generator of pandas": lambda: (pd.DataFrame([row]) for row in ROWS),
    "polars": lambda: pl.DataFrame({name: values for name, values in COLUMNS.items() if name != "j"}),
    "arrow": lambda: ARROW,
    "record batch": lambda: ARROW.to_batches()[0],
    "chunks": lambda: pa.concat_tables([ARROW.slice(0, 1), ARROW.slice(1)]),
    "reader": ARROW.to_reader,
    "hugging face": lambda: datasets.Dataset.from_list([{name: value for name, value in row.items() if name not in "bj"} for row in ROWS]),
    "hugging face stream": lambda: datasets.Dataset.from_list(
        [{name: value for name, value in row.items() if name not in "bj"} for row in ROWS]
    ).to_iterable_dataset(),
    "our view": own,
    "our scan": lambda: own().scan(),
    "our table": lambda: own().to_arrow(),
    "our frame": lambda: own().to_pandas(),
}


@pytest.mark.parametrize("form", TABLES)
def test_a_table_of_any_kind_is_appended_as_one_commit(form):
    for verb in ("append", "transaction"):
        ds = ps.create(f"memory://{verb}-{form}", SCHEMA)
        if verb == "append":
            ids = ds.append(TABLES[form]()).row_ids
        else:
            with ds.transaction() as tx:
                tx.append(TABLES[form]())
            ids = tx.receipt.row_ids
        assert ids.tolist() == [0, 1] and len(ds.log()) == 2
        assert ds["n"][:].tolist() == [1, None] and ds["t"][:] == ["x", None] and ds["label"][:].tolist() == [0, 1]
        assert ds["v"][0].tolist() == [1, 2] and ds["v"][1] is None and ds["i"][:] == [None, None]
        if "face" not in form:
            assert ds["b"][0].tolist() == [[1, 2, 3, 4]] and ds["b"][1].shape == (0, 4)
        if form in ("columns", "rows", "generator of rows", "pandas", "our view", "our scan", "our table", "our frame"):
            assert ds["j"][:] == [{"q": 1}, None]


@pytest.mark.parametrize("form", TABLES)
def test_a_table_of_any_kind_is_imported(form):
    report = ps.importers.import_data(TABLES[form](), f"memory://imported-{form}")
    ds = ps.open(f"memory://imported-{form}")
    if form == "generator of columns":
        assert report.samples == 2 and set(map(str, ds.schema.values())) == {"Json(codec='none')"}, "there, a dict is a row"
        return
    assert report.samples == 2 and ds["n"][:].tolist() == [1, None] and ds["t"][:] == ["x", None]
    assert ds.scan(["label"]).read_all()["label"].to_pylist() == ["a", "b"]
    if form in ("our view", "our scan", "our table"):
        assert ds.schema == own().schema


def test_torch_tensors_are_columns_values_and_rows():
    ds = ps.create("memory://torch-in", SCHEMA)
    ds.append({"n": torch.tensor([1, 2]), "v": torch.ones(2, 2), "label": [torch.tensor(0), torch.tensor(1)]})
    ds.append({"n": torch.tensor(number), "v": torch.ones(2), "label": torch.tensor(1)} for number in range(3))
    ds.append({"n": torch.arange(2), "v": torch.ones(2, 2), "label": torch.tensor([1, 0])} for _ in range(2))
    assert ds["n"][:].tolist() == [1, 2, 0, 1, 2, 0, 1, 0, 1] and ds["label"][:].tolist() == [0, 1, 1, 1, 1, 1, 0, 1, 0]
    ps.importers.import_data([{"x": torch.tensor(3), "y": torch.ones(4)}], "memory://torch-imported")
    assert ps.open("memory://torch-imported").schema == {"x": ps.Scalar("int64"), "y": ps.Tensor((4,), "float32")}


def test_images_in_rows_and_batches_are_told_apart(tmp_path):
    ds = ps.create("memory://image-rows", SCHEMA)
    ds.append({"i": np.full((4, 5, 3), number, np.uint8), "n": number} for number in range(3))
    ds.append({"i": np.full((2, 4, 5, 3), 9, np.uint8), "n": [7, 8]} for _ in range(2))
    ds.append({"i": Image.new("L", (5, 4), number), "n": number} for number in range(2))
    assert ds["n"][:].tolist() == [0, 1, 2, 7, 8, 7, 8, 0, 1] and [image.shape[2] for image in ds["i"]] == [3] * 9
    Image.new("RGB", (3, 3)).save(tmp_path / "a.png")
    features = datasets.Features({"i": datasets.Image(), "n": datasets.Value("int8")})
    ds.append(
        datasets.Dataset.from_dict({"i": [Image.new("RGB", (6, 4)), str(tmp_path / "a.png"), None], "n": [1, 2, 3]}, features=features)
    )
    assert [None if image is None else image.shape for image in ds["i"][-3:]] == [(4, 6, 3), (3, 3, 3), None]


def test_hugging_face_classes_become_labels(tmp_path):
    features = datasets.Features({"label": datasets.ClassLabel(names=["cat", "dog"]), "image": datasets.Image()})
    given = datasets.Dataset.from_dict({"label": [0, 1, -1], "image": [Image.new("RGB", (4, 4))] * 3}, features=features)
    given.to_parquet(tmp_path / "data.parquet")
    for number, source in enumerate([given, tmp_path / "data.parquet", given.select([2, 1, 0]).select([2, 1, 0])]):
        ps.importers.import_data(source, f"memory://classes-{number}")
        ds = ps.open(f"memory://classes-{number}")
        assert ds.schema == {"label": ps.Label(["cat", "dog"]), "image": ps.Image()} and ds["label"][:].tolist() == [0, 1, None]
    with pytest.raises(ps.InvalidInputError, match="a dict of datasets: train"):
        ds.append(datasets.DatasetDict({"train": given}))


def test_a_frame_with_images_and_arrays_is_imported():
    frame = pd.DataFrame(
        {"image": [Image.new("RGB", (3, 3))] * 2, "matrix": [np.zeros((2, 2)), np.ones((2, 2))], "word": pd.Categorical(["a", None])}
    )
    ps.importers.import_data(frame, "memory://frame-images")
    assert ps.open("memory://frame-images").schema == {"image": ps.Image(), "matrix": ps.Tensor((2, 2), "float64"), "word": ps.Category()}
    with pytest.raises(ps.InvalidInputError, match="later table has the column `b`"):
        ps.importers.import_data((pd.DataFrame({name: [1]}) for name in "ab"), "memory://frames-differ")
    for empty in (pd.DataFrame(), pa.table({}), {}):
        with pytest.raises(ps.InvalidInputError, match="has no columns"):
            ps.importers.import_data(empty, "memory://frame-empty")


def test_a_bad_tensor_of_a_later_table_is_named_by_its_row_in_the_stream():
    ds, good = ps.create("memory://later-table", {"x": ps.Tensor((2,), "float32")}), torch.zeros(2)
    with pytest.raises(ps.InvalidInputError, match="column `x`: row 4 is a torch tensor") as caught:
        ds.append({"x": values} for values in ([good] * 3, [good, good.to_sparse()]))
    assert caught.value.rows == [4] and len(ds) == 0


def test_a_stream_that_fails_leaves_nothing():
    ds = ps.create("memory://stream-fails", SCHEMA)

    def rows(error):
        yield from ({"n": number} for number in range(3000))
        raise error

    for error in (RuntimeError("user"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            ds.append(rows(error))
    with pytest.raises(ps.InvalidInputError, match="row 1500"):
        ds.append({"n": number if number != 1500 else "x"} for number in range(3000))
    assert len(ds) == 0 and len(ds.log()) == 1 and len(ds.append(iter([])).row_ids) == 0


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (3, "write {"),
        ("rows.csv", "import_data reads files"),
        (None, "a pandas, Polars or Arrow table"),
        ({"n": 3}, "write [3]"),
        ({"n": {"a": 1}}, "write [{"),
        ({"t": "abc"}, "write ["),
        ({"n": torch.tensor(3)}, "wrap it in a list"),
        ({"i": np.zeros((4, 5, 3), np.uint8)}, "write [array]"),
        ([1, 2], "row 0 of the list is a int"),
        ([{"n": 1}, 3], "row 1 of the list is a int"),
        (pd.Series([1]), "write {"),
        (pl.Series([1]), "write {"),
        (pl.LazyFrame({"n": [1]}), "collect()"),
        (np.zeros(3), "write {"),
        (torch.zeros(3), "write {"),
        (pa.array([1]), "write {"),
        (iter([1, 2]), "cannot append a int"),
        (pd.DataFrame([[1, 2]]), "rename them"),
        (pa.table([[1], [2]], names=["n", "n"]), "rename one"),
        ({"m": [1]}, "no such column"),
        ({"n": [1], "t": ["a", "b"]}, "differ in length"),
    ],
    ids=str,
)
def test_what_is_not_a_table_is_refused_with_the_line_to_write(wrong, text):
    ds = ps.create(f"memory://not-a-table-{uuid.uuid4()}", SCHEMA)
    with pytest.raises(ps.Error) as caught:
        ds.append(wrong)
    assert text in str(caught.value) and len(ds) == 0


def test_classes_of_hugging_face_are_appended_by_name():
    """The codes of another dataset have another meaning."""
    datasets = pytest.importorskip("datasets")
    names = datasets.ClassLabel(names=["cat", "dog", "emu"])
    features = datasets.Features({"label": names, "tags": datasets.Sequence(names), "n": names})
    given = datasets.Dataset.from_dict({"label": [0, 1, -1], "tags": [[0, 1], [], [1]], "n": [0, 1, 2]}, features=features)
    kinds = {"label": ps.Label(["dog", "cat"]), "tags": ps.Labels(["dog", "cat"]), "n": "int64"}
    for number, source in enumerate((given, given.to_iterable_dataset())):
        ds = ps.create(f"memory://append-hf-{number}", kinds)
        ds.append(source)
        found = ds.to_arrow()
        assert found["label"].to_pylist() == ["cat", "dog", None] and found["tags"].to_pylist() == [["cat", "dog"], [], ["dog"]]
        assert found["n"].to_pylist() == [0, 1, 2]
    more = datasets.Dataset.from_dict({"label": [2], "tags": [[]], "n": [0]}, features=features)
    with pytest.raises(ps.InvalidInputError, match="emu"):
        ds.append(more)


def test_codes_that_mean_no_class_are_refused():
    datasets = pytest.importorskip("datasets")
    names = datasets.ClassLabel(names=["cat", "dog"])
    ds = ps.create("memory://odd-codes", {"label": ps.Label(["dog", "cat"]), "tags": ps.Labels(["dog", "cat"])})
    features = datasets.Features({"label": names, "tags": datasets.Sequence(names)})
    for label, tags, match in ((-2, [], "none of the 2 classes has code -2"), (0, [-1], "a list contains -1")):
        table = pa.table({"label": [label], "tags": pa.array([tags], pa.list_(pa.int64()))})
        with pytest.raises(ps.InvalidInputError, match=match):
            ds.append(datasets.Dataset(table.cast(features.arrow_schema)).cast(features))
    given = datasets.Dataset.from_dict({"label": [0], "tags": [[]]}, features=features)
    with pytest.raises(ps.InvalidInputError, match="with a transform"):
        ds.append(given.with_transform(lambda rows: rows))
    ds.append([given, given])
    assert ds.to_arrow()["label"].to_pylist() == ["cat", "cat"]


def test_lists_of_tables_keep_the_types_of_each(tmp_path):
    ds = ps.create("memory://typed-tables", {"label": ps.Label(["a", "b"]), "image": ps.Image(), "j": ps.Json()})
    ds.append({"label": ["b", "a"], "image": [np.zeros((4, 4, 3), np.uint8)] * 2, "j": [{"x": 1}, None]})
    ps.importers.import_data([ds.to_arrow(), ds.to_arrow()], tmp_path / "set")
    again = ps.open(tmp_path / "set")
    assert again.schema == ds.schema and again.to_arrow()["label"].to_pylist() == ["b", "a"] * 2 and again[2]["j"] == {"x": 1}
    rows = datasets.Dataset.from_dict({"n": [2]})
    for number, source in enumerate(([pa.table({"n": [1]}), rows], [rows, pd.DataFrame({"n": [1]})], iter([pa.table({"n": [1]}), rows]))):
        ps.importers.import_data(source, tmp_path / str(number))
        assert sorted(ps.open(tmp_path / str(number))["n"][:].tolist()) == [1, 2]
    with pytest.raises(ps.InvalidInputError, match="cannot import a int"):
        ps.importers.import_data([pa.table({"n": [1]}), 5], tmp_path / "none")


def test_a_list_of_tables_is_a_stream_of_them():
    batches = pa.table({"n": [1, 2, 3]}).to_batches(max_chunksize=2)
    ds = ps.create("memory://list-of-tables", {"n": "int64"})
    ds.append(batches)
    ps.importers.import_data(batches, "memory://imported-list-of-tables")
    assert ds["n"][:].tolist() == [1, 2, 3] == ps.open("memory://imported-list-of-tables")["n"][:].tolist()


class Counted(dict):
    """A row that counts how often its values are asked for."""

    asked = 0

    def get(self, name, default=None):
        Counted.asked += 1
        return super().get(name, default)


@pytest.mark.parametrize("into", ["dataset", "transaction"])
def test_rows_are_converted_once(into):
    ds, Counted.asked = own(), 0
    rows = [Counted(row) for row in ROWS]
    if into == "dataset":
        ds.append(rows)
    else:
        with ds.transaction() as tx:
            tx.append(rows)
    assert Counted.asked == len(ROWS) * len(COLUMNS)
    assert ds["t"][:] == ["x", None] * 2 and ds["j"][:] == [{"q": 1}, None] * 2

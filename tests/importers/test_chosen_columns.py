"""Columns of tables: which are imported, under which names, and the forms of tables that differ in small ways."""

import gzip
import json
import random

import numpy as np
import pandas as pd
import penstock as ps
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from anything import SEEDS
from penstock.cli import app
from penstock.importers import import_data
from penstock.importers import json as json_importer
from penstock.importers import parquet as parquet_importer
from servers import left_empty
from test_manifests import png, write
from typer.testing import CliRunner

FRAME = pd.DataFrame({"a": [1, 2, 3], "b": ["x", "y", "z"], "c": [0.5, 1.5, 2.5], "secret": ["p", "q", "r"]})
FORMS = ["csv", "jsonl", "json", "parquet", "arrow", "frame", "rows", "table"]


def source(folder, form, frame=FRAME):
    path = folder / f"t.{form}"
    if form == "csv":
        frame.to_csv(path, index=False)
    elif form == "jsonl":
        frame.to_json(path, orient="records", lines=True)
    elif form == "json":
        frame.to_json(path, orient="records")
    elif form == "parquet":
        frame.to_parquet(path, index=False)
    elif form == "arrow":
        table = pa.Table.from_pandas(frame, preserve_index=False)
        with pa.ipc.new_file(str(path), table.schema) as out:
            out.write_table(table)
    else:
        return {"frame": frame, "rows": frame.to_dict("records"), "table": pa.Table.from_pandas(frame, preserve_index=False)}[form]
    return path


def rows_of(root):
    ds = ps.open(root)
    return list(ds.schema), [{name: getattr(value, "item", lambda value=value: value)() for name, value in sample.items()} for sample in ds]


@pytest.mark.parametrize("form", FORMS)
def test_columns_are_chosen_left_out_and_renamed(tmp_path, root, form):
    given = source(tmp_path, form)
    report = import_data(given, root, columns=["c", "a"], rename={"a": "number"}, types={"number": "int32"}, key="number")
    assert report.samples == 3 and report.renamed == {}
    assert rows_of(root) == (["c", "number"], [{"c": row + 0.5, "number": row + 1} for row in range(3)])
    assert ps.open(root).schema["number"] == ps.Scalar("int32")
    again = import_data(given, root, columns=["c", "a"], rename={"a": "number"}, key="number", mode="skip-existing")
    assert (again.samples, again.skipped) == (0, 3)
    import_data(given, root.with_name("less"), drop=["secret", "b"])
    assert rows_of(root.with_name("less"))[0] == ["a", "c"]
    import_data(given, root.with_name("swapped"), rename={"a": "b", "b": "a"})
    assert rows_of(root.with_name("swapped"))[1][0] == {"b": 1, "a": "x", "c": 0.5, "secret": "p"}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"columns": ["a", "z"]}, "columns names `z`"), ({"drop": ["z"]}, "drop names `z`"), ({"rename": {"z": "y"}}, "rename names `z`"),
        ({"drop": ["a", "b", "c", "secret"]}, "none of its 4 columns is left"), ({"rename": {"a": "b"}}, "`a` and `b` get the same name, `b`"),
        ({"rename": {"a": "_a"}}, "no leading `_`"),
    ],
)  # fmt: skip
def test_wrong_choices_are_refused(tmp_path, root, form, options, says):
    with pytest.raises(ps.InvalidInputError, match=says):
        import_data(source(tmp_path, form), root, **options)
    assert left_empty(root)


@pytest.mark.parametrize("form", FORMS)
def test_a_type_by_the_old_name_of_a_renamed_column_is_refused(tmp_path, root, form):
    given = source(tmp_path, form)
    with pytest.raises(ps.InvalidInputError, match="types has `a`, which is named `number` in the dataset") as caught:
        import_data(given, root, rename={"a": "number"}, types={"a": "int32"})
    assert 'types={"number": …}' in caught.value.hint and left_empty(root)
    import_data(given, root, rename={"a": "c", "c": "a"}, types={"a": "float32"})
    assert ps.open(root).schema["a"] == ps.Scalar("float32"), "a new name may be an old one"
    odd = source(tmp_path, form, FRAME.rename(columns={"a": "_a"}))
    with pytest.raises(ps.InvalidInputError, match="types has `_a`, which is named `a` in the dataset"):
        import_data(odd, root.with_name("odd"), types={"_a": "int32"})


@pytest.mark.parametrize("form", ["csv", "parquet", "arrow"])
def test_a_type_of_a_column_that_a_file_lacks_is_refused(tmp_path, root, form):
    with pytest.raises(ps.InvalidInputError, match="it has no column `z`"):
        import_data(source(tmp_path, form), root, types={"z": "int32"})
    assert left_empty(root)


NAMES = ["", "_id", "id", "__index_level_0__", "a\tb", "é" * 200, "plain"]
USABLE = ["column_0", "id_2", "id", "index_level_0", "a b", "é" * 127, "plain"]


@pytest.mark.parametrize("form", FORMS)
def test_names_that_a_dataset_cannot_have_are_changed_and_reported(tmp_path, root, form):
    given = source(tmp_path, form, pd.DataFrame([range(7), range(7, 14)], columns=NAMES))
    report = import_data(given, root)
    assert report.renamed == {old: new for old, new in zip(NAMES, USABLE, strict=True) if old != new}
    assert rows_of(root) == (USABLE, [dict(zip(USABLE, range(first, first + 7), strict=True)) for first in (0, 7)])
    assert import_data(given, root, mode="append").samples == 2, "the destination has the changed names"
    report = import_data(given, root.with_name("other"), rename={"": "row"}, drop=["é" * 200], types={"id_2": "int8"})
    assert list(report.renamed) == ["_id", "__index_level_0__", "a\tb"] and ps.open(root.with_name("other")).schema["id_2"] == ps.Scalar(
        "int8"
    )


# Names that a dataset accepts, and names that become one of these.
PLAIN = ["id", "id_2", "a b", "column_0", "column_1", "é" * 127, "b"]
ODD = ["_id", "__id__", "_id_2", "a\tb", "a\nb", "", "_", "é" * 128, "_b"]


def test_choices_and_odd_names_meet():
    """Each column gets the name that the user gave or that the source has, if a dataset accepts it; others get a name that no other one has."""
    refused = renamed = 0
    for seed in SEEDS:
        rng = random.Random(seed)
        found = rng.sample(PLAIN + ODD, rng.randint(2, 9))
        drop = [name for name in found if rng.random() < 0.15]
        columns = rng.sample(found, rng.randint(1, len(found))) if rng.random() < 0.3 else []
        rename = {name: rng.choice([*PLAIN, "new", "other"]) for name in found if rng.random() < 0.3}
        left = [name for name in columns or found if name not in drop]
        given = {name: rename.get(name, name) for name in left if name in rename or name in PLAIN}
        table = pa.table([pa.array([place]) for place in range(len(found))], names=found)
        call = lambda: import_data(table, f"memory://choices-{seed}", columns=columns, drop=drop, rename=rename)  # noqa: B023, E731
        if not left or len(set(given.values())) < len(given):
            refused += 1
            with pytest.raises(ps.InvalidInputError, match=r"get the same name|columns is left"):
                call()
            continue
        report = call()
        ds = ps.open(f"memory://choices-{seed}")
        names = given | report.renamed
        renamed += bool(rename) and bool(report.renamed)
        assert names.keys() == set(left) and report.renamed.keys() == set(left) - given.keys(), seed
        assert sorted(ds.schema) == sorted(names.values()), seed
        assert {new: ds[new][0] for new in ds.schema} == {names[name]: found.index(name) for name in left}, seed
    assert refused > 3 and renamed > 3


def test_a_frame_that_pandas_wrote_with_its_index(tmp_path, root):
    FRAME.to_csv(tmp_path / "t.csv")
    run = lambda *words: CliRunner().invoke(app, ["import", str(tmp_path / "t.csv"), *map(str, words)])  # noqa: E731
    made = run(tmp_path / "one")
    assert made.exit_code == 0 and "column `` is named `column_0`" in made.output and "--rename" in made.output
    assert list(ps.open(tmp_path / "one").schema) == ["column_0", "a", "b", "c", "secret"]
    made = run(tmp_path / "two", "--rename", "=row", "--drop", "secret", "--json")
    assert json.loads(made.output)["renamed"] == {} and list(ps.open(tmp_path / "two").schema) == ["row", "a", "b", "c"]
    made = run(tmp_path / "three", "--columns", "b,a", "--json")
    assert made.exit_code == 0 and list(ps.open(tmp_path / "three").schema) == ["b", "a"]
    assert run(tmp_path / "four", "--rename", "a").exit_code == 2


def test_columns_of_images_are_chosen_and_renamed(tmp_path, root):
    folder = write(tmp_path / "photos", {"cat/1.png": png(1), "dog/2.png": png(2)})
    import_data(folder, root, drop=["label"], rename={"image": "picture"})
    assert list(ps.open(root).schema) == ["picture", "path"]
    assert import_data(folder, root, drop=["label"], rename={"image": "picture"}, mode="skip-existing").skipped == 2
    files = {"images/a.png": png(1), "labels/a.txt": "0 0.5 0.5 0.1 0.1\n", "classes.txt": "cat\n"}
    import_data(write(tmp_path / "boxes", files), root.with_name("set"), rename={"image": "picture", "boxes": "places"}, columns=["image", "boxes", "labels"], types={"places": ps.Boxes("xyxy", of="picture")})  # fmt: skip
    ds = ps.open(root.with_name("set"))
    assert ds.schema["places"] == ps.Boxes("xyxy", of="picture") and ds.schema["labels"].of == "places" and "path" not in ds.schema
    import_data(tmp_path / "boxes", root.with_name("alone"), drop=["image", "boxes"])
    assert ps.open(root.with_name("alone")).schema["labels"].of is None
    with pytest.raises(ps.InvalidInputError, match="types has `image`, which is named `picture` in the dataset"):
        import_data(folder, root.with_name("old"), rename={"image": "picture"}, types={"image": ps.Image()})


def test_two_columns_of_one_name_are_named_with_their_places(tmp_path, root):
    (tmp_path / "t.csv").write_text("a,b,a\n1,2,3\n")
    with pytest.raises(ps.InvalidInputError, match=r"t\.csv.*columns 1 and 3 have the same name, `a`"):
        import_data(tmp_path / "t.csv", root)


def test_a_dropped_column_may_have_any_type(tmp_path, root):
    table = pa.table({"n": [1], "odd": pa.array([(1, 2, 3)], pa.month_day_nano_interval()), "b": pa.array([{"x": b"1"}])})
    with pytest.raises(ps.UnsupportedError):
        import_data(table, root)
    assert import_data(table, root, drop=["odd", "b"]).samples == 1
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"n": row, "x": "text" if row > 1500 else row}) + "\n" for row in range(3000)))
    assert import_data(tmp_path / "t.jsonl", root.with_name("lines"), drop=["x"]).samples == 3000
    (tmp_path / "u.jsonl").write_text(
        "".join(json.dumps({"n": row, "x": 1, **({"late": 1} if row > 2000 else {})}) + "\n" for row in range(3000))
    )
    with pytest.raises(ps.InvalidInputError, match=r"line 2002.*`late`"):
        import_data(tmp_path / "u.jsonl", root.with_name("late"), drop=["x"])
    assert import_data(tmp_path / "u.jsonl", root.with_name("late"), columns=["n"]).samples == 3000


DEEP = {
    "lists": "[" * 200_000 + "]" * 200_000, "objects": '{"a": ' * 50_000 + '"]}\\"{["' + "}" * 50_000, "beside a key twice": '{"a": 1, "a": ' + "[" * 5000 + "]" * 5000 + "}",
    "with text": '["\\\\", "ü[", ' * 20_000 + '"' + "x{" * 5000 + '"' + "]" * 20_000,
}  # fmt: skip


@pytest.mark.parametrize("piece", [1 << 20, 300, 4097])
@pytest.mark.parametrize("what", DEEP)
def test_an_element_that_is_nested_too_deeply_is_refused_alone(tmp_path, monkeypatch, what, piece):
    lines = ['{"n": 1}', f'{{"n": {DEEP[what]}}}', '{"n": 2}', DEEP[what], '{"n": 3}']
    (tmp_path / "a.json").write_text("[" + ", ".join(lines) + "]")
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(json_importer, "PIECE_BYTES", piece)
    for name, places in (("a.json", ["element 1", "element 3"]), ("a.jsonl", ["line 2", "line 4"])):
        report = import_data(tmp_path / name, tmp_path / f"{name}.set", on_error="skip")
        assert ps.open(tmp_path / f"{name}.set")["n"][:].tolist() == [1, 2, 3]
        assert [refusal.path.rpartition(": ")[2] for refusal in report.refused] == places
        assert all("not JSON" in refusal.message for refusal in report.refused)
    (tmp_path / "cut.json").write_text("[" + ", ".join(lines)[:-2000])
    with pytest.raises(ps.InvalidInputError, match="element 3 is not JSON: Unterminated value"):
        import_data(tmp_path / "cut.json", tmp_path / "cut", on_error="skip")


ARRAY = [{"n": row, "text": "ü" * (row % 7) + '\u2028\\"]}', "deep": {"list": [1, {"x": [row]}]}} for row in range(300)]


@pytest.mark.parametrize("piece", [1, 7, 1000, 1 << 20])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_array_is_read_an_element_at_a_time(tmp_path, root, monkeypatch, piece, indent):
    monkeypatch.setattr(json_importer, "PIECE_BYTES", piece)
    path = tmp_path / "t.json"
    path.write_bytes(
        b"\xef\xbb\xbf \n" + json.dumps(ARRAY[: 30 if piece == 1 else 300], indent=indent, ensure_ascii=False).encode() + b"\n"
    )
    report = import_data(path, root)
    assert report.samples == (30 if piece == 1 else 300) and list(ps.open(root)[:].values())[1] == [
        row["text"] for row in ARRAY[: report.samples]
    ]
    assert ps.open(root)["deep"][:] == [row["deep"] for row in ARRAY[: report.samples]]


def test_other_forms_of_json_arrays(tmp_path, root):
    (tmp_path / "t.json.gz").write_bytes(gzip.compress(json.dumps(ARRAY).encode()))
    (tmp_path / "t.jsonl").write_text(json.dumps(ARRAY))
    (tmp_path / "u.json").write_bytes(json.dumps(ARRAY).encode("utf-16"))
    for place, (name, options) in enumerate({"t.json.gz": {}, "t.jsonl": {}, "u.json": {"encoding": "utf-16", "format": "json"}}.items()):
        assert import_data(tmp_path / name, root.with_name(str(place)), **options).samples == 300
    assert import_data(tmp_path / "u.json", root.with_name("told"), format="jsonl", encoding="utf-16").samples == 300
    (tmp_path / "odd.json").write_text('[{"n": 1}, 5, {"n": 2}, [], {"n": "x"}]')
    report = import_data(tmp_path / "odd.json", root.with_name("odd"), on_error="skip", types={"n": "int64"})
    assert report.samples == 2 and [refusal.path.rpartition(": ")[2] for refusal in report.refused] == [
        "element 1",
        "element 3",
        "element 4",
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "there are no rows"), ('[{"a": 1}', "element 0 is followed by ''"), ('[{"a": 1} {"a": 2}]', "element 0 is followed by '{'"), ('[{"a": 1},]', "element 1 is not JSON"),
        ('[{"a": 1}, {"a": ]', "element 1 is not JSON"), ('[{"a": 1}] x', "text follows the end"), ('[{"a": 3}, {"a": 1, "a": 2}]', "two values have the name"), ('[{"a": 3}, {"a": 1e999}]', "outside the range"),
        ('[{"a": "\xff"}]', "not UTF-8"), ("[" * 100_000, "is not JSON"),
    ],
)  # fmt: skip
def test_broken_json_arrays_are_refused(tmp_path, root, text, says):
    (tmp_path / "t.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ps.InvalidInputError, match=says) as caught:
        import_data(tmp_path / "t.json", root)
    assert "t.json" in str(caught.value) or says == "there are no rows"
    assert left_empty(root)


@pytest.mark.parametrize("form", ["jsonl", "json"])
@pytest.mark.parametrize("piece", [1, 5, 1 << 20])
def test_a_row_of_json_that_would_lose_information_is_refused_alone(tmp_path, root, monkeypatch, form, piece):
    monkeypatch.setattr(json_importer, "PIECE_BYTES", piece)
    lines = ['{"a": 1}', '{"a": 1e999}', '{"a": {"b": 1, "b": 2}, "c": "]"}', '{"a": ' + "1" * 5000 + "}", "1e999", '{"a": 2}']
    (tmp_path / f"t.{form}").write_text("\n".join(lines) if form == "jsonl" else f"[{', '.join(lines)}]")
    report = import_data(tmp_path / f"t.{form}", root, on_error="skip", types={"a": "int64"})
    assert ps.open(root)["a"][:].tolist() == [1, 2] and len(report.refused) == 4
    for refusal, says in zip(report.refused, ["outside the range", "two values have the name 'b'", "4300 digits", "outside"], strict=True):
        assert says in refusal.message


def test_a_syntax_error_is_named_before_the_rest_is_read(tmp_path, root, monkeypatch):
    monkeypatch.setattr(json_importer, "PIECE_BYTES", 100)
    monkeypatch.setattr(json_importer, "LONGEST_ELEMENT", 1000)
    (tmp_path / "t.json").write_text('[{"a": 1}, {"a": oops' + " " * 5000 + "}]")
    with pytest.raises(ps.InvalidInputError, match="element 1 is not JSON: Expecting value"):
        import_data(tmp_path / "t.json", root)
    (tmp_path / "t.json").write_text('[{"a": 1}, {"a": "' + "x" * 5000)
    with pytest.raises(ps.InvalidInputError, match="an element is longer than 1000 characters"):
        import_data(tmp_path / "t.json", root)


@pytest.mark.parametrize("form", ["jsonl", "json", "parquet", "arrow", "table", "rows"])
@pytest.mark.parametrize("lists", [[[1, None], [2], None], [[1.5], [None, 2.0], []], [[True, None], [False], []]])
def test_lists_with_nulls_become_json_in_every_form(tmp_path, root, form, lists):
    table = pa.table({"v": lists, "n": range(3)})
    path = tmp_path / f"t.{form}"
    if form == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    elif form == "json":
        path.write_text(json.dumps(table.to_pylist()))
    elif form == "parquet":
        pq.write_table(table, path, row_group_size=1)
    elif form == "arrow":
        with pa.ipc.new_file(str(path), table.schema) as out:
            out.write_table(table, max_chunksize=1)
    import_data({"table": table, "rows": table.to_pylist()}.get(form, path), root)
    assert ps.open(root).schema["v"] == ps.Json() and ps.open(root)["v"][:] == lists


def test_lists_without_nulls_remain_tensors(tmp_path, root):
    pq.write_table(pa.table({"v": [[1, 2], None, []]}), tmp_path / "t.parquet")
    import_data(tmp_path / "t.parquet", root)
    assert ps.open(root).schema["v"] == ps.Tensor((None,), "int64") and np.array_equal(ps.open(root)["v"][0], [1, 2])


def test_lists_with_nulls_beside_tensors_of_arrow_become_json(tmp_path, root):
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(4, dtype=np.int64).reshape(2, 2))
    pq.write_table(pa.table({"v": tensors}), tmp_path / "1.parquet", store_schema=True)
    pq.write_table(pa.table({"v": pa.array([[1, None]], pa.list_(pa.int64(), 2))}), tmp_path / "2.parquet")
    import_data(tmp_path, root)
    assert ps.open(root).schema["v"] == ps.Json() and ps.open(root)["v"][:] == [[0, 1], [2, 3], [1, None]]


def test_types_are_inferred_from_their_own_column_only(tmp_path, root, monkeypatch):
    """Tensors of Arrow have no nulls within, and media take their type from the first value that is not null."""
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(6, dtype=np.float32).reshape(3, 2))
    picture = {"bytes": png(2, 2), "path": "a.png"}
    media = pa.array([None, {"bytes": None, "path": None}, picture], pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    table = pa.table({"t": tensors, "m": media, "n": range(3)})
    pq.write_table(table.slice(0, 2), tmp_path / "1.parquet")
    pq.write_table(table, tmp_path / "2.parquet")
    read, batches = [], parquet_importer._batches
    monkeypatch.setattr(parquet_importer, "_batches", lambda file, columns=None: read.append(columns) or batches(file, columns))
    import_data(tmp_path, root)
    ds = ps.open(root)
    assert ds.schema["t"] == ps.Tensor((2,), "float32") and ds.schema["m"] == ps.Image() and ds["n"][:].tolist() == [0, 1, 0, 1, 2]
    assert read == [["m"], ["m"], None, None]

"""Columns with a list of labels per sample."""

import crafted_runner
import numpy as np
import penstock as ps
import pyarrow as pa
import pytest

NAMES = ["cat", "dog", "emu"]


def _dataset(name, lists, names=NAMES):
    ds = ps.create(name, {"classes": ps.Labels(names), "n": "int32"})
    ds.append({"classes": lists, "n": range(len(lists))})
    return ds


def _lists(values):
    return [None if value is None else value.tolist() for value in values]


WORDS = [["dog", "cat"], [], None, ["emu"], ["cat", "cat", "dog"]]
CODES = [[1, 0], [], None, [2], [0, 0, 1]]
FORMS = {
    "words": WORDS,
    "codes": CODES,
    "tuples": [None if words is None else tuple(words) for words in WORDS],
    "arrays": [None if codes is None else np.array(codes, "uint8") for codes in CODES],
    "arrow words": pa.array(WORDS),
    "large arrow words": pa.array(WORDS, pa.large_list(pa.large_string())),
    "arrow codes": pa.array(CODES),
    "arrow categories": pa.array(WORDS).cast(pa.list_(pa.dictionary(pa.int32(), pa.string()))),
    "chunks": pa.chunked_array([pa.array(WORDS[:2]), pa.array(WORDS[2:])]),
    "a slice": pa.array([["emu", "emu"], *WORDS, ["cat"]])[1:-1],
}


@pytest.mark.parametrize("form", FORMS)
def test_lists_of_labels_are_read_as_codes(form):
    ds = _dataset(f"memory://labels-{form}", FORMS[form])
    assert _lists(ds["classes"][:]) == CODES and ds["classes"][:].values.dtype == np.int64
    assert ds.to_arrow()["classes"].to_pylist() == WORDS
    assert [ds[row]["classes"].tolist() for row in (0, 1, 3)] == [CODES[0], CODES[1], CODES[3]] and ds[2]["classes"] is None
    assert ds.schema["classes"] == ps.Labels(NAMES) and ds.vocabulary("classes") == NAMES


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([["cat"], ["bird"]], "row 1 contains 'bird', which is not a label"),
        ([["cat"], [3]], "row 1 contains code 3, which is not a label"),
        ([[0], [-1]], "row 1 contains code -1, which is not a label"),
        ([["cat"], ["cat", 1]], "row 1 contains '1', which is not a label"),
        ([["cat"], ["cat", None]], "row 1 contains 'None', which is not a label"),
        ([["cat"], "dog"], "row 1 is 'dog', expected a list of labels"),
        ([[0], [0.5]], "row 1 values are float64"),
        ([[0], [[0, 1]]], r"row 1 has the shape \(1, 2\)"),
        (pa.array([["cat"], ["bird"]]), "row 1 contains 'bird', which is not a label"),
        (pa.array([["cat"], ["cat", None]]), "row 1 contains 'None', which is not a label"),
    ],
)
def test_other_values_are_refused(value, says):
    ds = _dataset(f"memory://labels-refused-{id(value)}", [["cat"]])
    with pytest.raises(ps.InvalidInputError, match=f"cannot append to column `classes`: {says}"):
        ds.append({"classes": value, "n": [1, 2]})
    assert len(ds) == 1


@pytest.mark.parametrize("names", ["cat", [1], ["cat", "cat"]])
def test_wrong_names_are_refused(names):
    with pytest.raises(ps.InvalidInputError, match="label"):
        ps.create("memory://labels-names", {"classes": ps.Labels(names)})


def test_updates_and_new_columns():
    ds = _dataset("memory://labels-updates", WORDS)
    ids = ds.take(range(5), columns=["_row_id"])["_row_id"]
    with ds.transaction() as tx:
        tx.update({"classes": [["emu", "dog"], None]}, row_ids=ids[[4, 0]])
        assert _lists(tx.take(range(5))["classes"]) == [None, [], None, [2], [2, 1]]
        tx.add_column("tags", ps.Labels(["new"]), fill=["new", "new"])
        tx.delete(row_ids=ids[1:2])
    assert _lists(ds["classes"][:]) == [None, None, [2], [2, 1]] and _lists(ds["tags"][:]) == [[0, 0]] * 4
    assert not ds.verify()["problems"]


def test_datasets_are_joined_and_mixed_by_name():
    one, two = (
        _dataset("memory://labels-one", WORDS),
        _dataset("memory://labels-two", [["bee", "dog"], None, ["cat"]], ["dog", "bee", "cat"]),
    )
    both = ps.concat([one, two])
    wanted = [*WORDS, ["bee", "dog"], None, ["cat"]]
    words = both.vocabulary("classes")
    named = lambda values: [None if codes is None else [words[code] for code in codes] for codes in values]  # noqa: E731
    assert words == [*NAMES, "bee"] and both.schema["classes"].names == tuple(words)
    assert named(both["classes"]) == wanted and named(both[[6, 5, 0]]["classes"]) == [None, ["bee", "dog"], ["dog", "cat"]]
    [batch] = both.loader(batch_size=8, nulls={"classes": "mask"})
    assert named(batch["classes"]) == wanted
    mixed = ps.mix({"one": one, "two": two}, epoch_samples=8).loader(
        batch_size=8, columns=["classes", "n", "_source"], nulls={"classes": "mask"}
    )
    [batch] = mixed
    assert mixed.vocabulary("classes") == words
    for codes, row, source in zip(named(batch["classes"]), batch["n"], batch["_source"], strict=True):
        assert codes == (wanted[:5], wanted[5:])[source][row]
    other = ps.create("memory://labels-other", {"classes": ps.Label(NAMES), "n": "int32"})
    with pytest.raises(ps.InvalidInputError, match="column `classes`"):
        ps.concat([one, other])
    with pytest.raises(ps.InvalidInputError, match="column `classes` differs"):
        ps.mix({"one": one, "other": other}).loader(batch_size=2)


def test_labels_follow_their_boxes():
    ds = ps.create("memory://labels-boxes", {"image": ps.Image(), "boxes": ps.Boxes(of="image"), "classes": ps.Labels(NAMES)})
    ds.append({"image": [np.zeros((60, 80, 3), np.uint8)], "boxes": [[[0, 0, 0, 5], [1, 1, 9, 9]]], "classes": [["cat", "emu"]]})
    from penstock import transforms as T

    [batch] = ds.loader(batch_size=1, transform=[T.SanitizeBoundingBoxes(on=("boxes", "classes"))])
    assert batch["classes"][0].tolist() == [2] and batch["boxes"][0].tolist() == [[1, 1, 9, 9]]


def test_parquet_and_duckdb_have_the_names(tmp_path):
    import duckdb

    ds = _dataset("memory://labels-parquet", WORDS)
    ds.to_parquet(tmp_path / "rows.parquet")
    ps.importers.import_data(tmp_path / "rows.parquet", tmp_path / "again")
    again = ps.open(tmp_path / "again")
    assert again.schema == ds.schema and _lists(again["classes"][:]) == CODES
    rows = ds.to_arrow_dataset()  # noqa: F841
    assert duckdb.sql("select n from rows where list_contains(classes, 'dog') order by n").fetchall() == [(0,), (4,)]
    assert "dog, cat" in ds._repr_html_()


@pytest.mark.local
def test_an_unknown_code_is_damage_of_its_sample(tmp_path):
    """Recompute the checksum, as if a faulty writer had stored the code."""
    ds = ps.create(tmp_path / "set", {"classes": ps.Labels(NAMES)})
    ds.append({"classes": [["cat"], ["dog", "emu"], ["emu"], *[["cat"]] * 500]})
    code = lambda number: number.to_bytes(8, "little")  # noqa: E731
    crafted_runner.resealed(tmp_path / "set", lambda block: block.replace(code(1) + code(2), code(1) + code(77)))
    ds = ps.open(tmp_path / "set")
    with pytest.raises(ps.CorruptError, match="sample 1 of column `classes`: it has code 77") as caught:
        ds.take([1, 2])
    assert caught.value.rows == [0] and ds.verify()["problems"]
    assert _lists(ds.take(range(3), on_corrupt="null")["classes"]) == [[0], None, [2]]
    batch = next(iter(ds.loader(batch_size=3, columns=["classes", "_valid"], on_corrupt="mask")))
    assert batch["_valid"].tolist() == [True, False, True]

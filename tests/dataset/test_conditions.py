"""Samples chosen by a condition: SQL in `filter`, masks of columns, and the row ids and positions of Arrow datasets."""

import duckdb
import numpy as np
import penstock as ps
import pyarrow.dataset as pads
import pytest

WORDS = ["cat", "dog", "emu"]


@pytest.fixture(scope="module")
def ds():
    ds = ps.create(
        "memory://conditions",
        {
            "n": "int32", "f": "float32", "h": "float16", "label": ps.Label(WORDS), "word": ps.Category(), "text": ps.Text(), "time": "timestamp",
            "labels": ps.Labels(WORDS), "list": ps.Tensor((None,), "float32"), "image": ps.Bytes(), "fixed": ps.Tensor((2,), "int8"),
        },
    )  # fmt: skip
    for first in range(0, 300, 100):  # Three fragments.
        rows = range(first, first + 100)
        ds.append(
            {
                "n": rows, "f": [n / 10 if n % 10 else None for n in rows], "h": [n / 2 for n in rows],
                "label": [WORDS[n % 3] if n % 7 else None for n in rows], "word": [f"w{n % 5}" if n % 11 else None for n in rows],
                "text": [f"text {n}" for n in rows], "time": [np.datetime64(n, "D") for n in rows],
                "labels": [[WORDS[at] for at in range(n % 4)] if n % 13 else None for n in rows],
                "list": [np.arange(n % 5, dtype=np.float32) if n % 17 else None for n in rows], "image": [b"x"] * 100,
                "fixed": [[n % 3, 1] for n in rows],
            }
        )  # fmt: skip
    with ds.transaction() as tx:
        tx.delete(row_ids=ds.take([3, 150], columns=["_row_id"])["_row_id"])
        tx.update({"n": [1000]}, row_ids=ds.take([5], columns=["_row_id"])["_row_id"])
    return ds


CONDITIONS = [
    ("label = 'cat'", lambda s: s["label"] == 0),
    ("label IN ('cat', 'emu') AND n >= 40", lambda s: s["label"] in (0, 2) and s["n"] >= 40),
    (
        "word = 'w1' OR f < 1",
        lambda s: (s["text"] is not None and (s["n"] % 5 == 1 and s["n"] % 11 and s["n"] < 1000)) or (s["f"] is not None and s["f"] < 1),
    ),
    ("label IS NULL", lambda s: s["label"] is None),
    ("h > 20.5", lambda s: s["h"] > 20.5),
    ("text LIKE '%9'", lambda s: s["text"].endswith("9")),
    ("list_contains(labels, 'emu')", lambda s: s["labels"] is not None and 2 in s["labels"]),
    ("time < '1970-01-11'", lambda s: s["time"] < np.datetime64("1970-01-11")),
    ("false", lambda s: False),
]


@pytest.mark.parametrize(("condition", "function"), CONDITIONS, ids=[condition for condition, _ in CONDITIONS])
def test_sql_selects_what_a_function_selects(ds, condition, function):
    shuffled = ds.select(np.random.default_rng(0).integers(0, len(ds), 500))
    for view in (ds, shuffled, ds.select(slice(None, None, -2)), ps.concat([ds.head(100), shuffled.head(150)])):
        found, wanted = view.filter(condition), view.filter(function)
        for column in ("n", "_row_id"):
            assert found.take(slice(None), columns=[column])[column].tolist() == wanted.take(slice(None), columns=[column])[column].tolist()


def test_conditions_name_row_ids_and_positions(ds):
    """A position is that in the dataset, as in `take`, and in joined views the place among all samples."""
    row_ids = ds.take(slice(None), columns=["_row_id"])["_row_id"]
    assert ds.filter("_position BETWEEN 90 AND 210")["n"][:].tolist() == ds["n"][90:211].tolist()
    assert ds.filter(f"_row_id = {row_ids[70]}")["n"][:].tolist() == [ds["n"][70]]
    back = ds.select(slice(None, None, -1))
    assert back.filter("_position < 3")["n"][:].tolist() == [2, 1, 0]
    joined = ps.concat([ds.head(50), ds.head(20)])
    assert joined.filter("_position >= 49")["n"][:].tolist() == joined["n"][49:].tolist()


def test_filter_reads_only_the_columns_of_its_condition(tmp_path):
    ds = ps.create(tmp_path / "set", {"t": ps.Text(), "image": ps.Bytes()})
    ds.append({"t": [f"text {n}" for n in range(64)], "image": [bytes(100_000)] * 64})
    ds = ps.open(tmp_path / "set", io="buffered")
    assert len(ds.filter("t LIKE '%3'")) == 7 and ds.stats()["range_bytes"] < 20_000


@pytest.mark.parametrize(
    ("condition", "error", "why"),
    [
        ("label", ps.InvalidInputError, "is not a condition"),
        ("nothing = 1", ps.NotFoundError, "has no column `nothing`"),
        ("count(*) > 1", ps.InvalidInputError, "filter"),
        ("1) OR (1 = 1", ps.InvalidInputError, "not a condition on single samples"),
        ("n IN (SELECT 1)", ps.InvalidInputError, "not allowed"),
        ("n > ", ps.InvalidInputError, "syntax error"),
    ],
)
def test_what_is_not_a_condition_is_refused(ds, condition, error, why):
    with pytest.raises(error, match=why) as caught:
        ds.filter(condition)
    assert str(caught.value).startswith("cannot filter")
    with pytest.raises(ps.InvalidInputError, match="leave them out"):
        ds.filter("n > 1", columns=["n"])


def test_masks_of_columns_select_what_functions_select(ds):
    view = ds.select(np.arange(0, 290, 2))
    for mask, function in [
        (view["label"].isin(["cat", "emu"]), lambda s: s["label"] in (0, 2)),
        (view["label"].isin([0, 2]), lambda s: s["label"] in (0, 2)),
        (view["word"].isin(["w1", "never seen"]), lambda s: s["n"] % 5 == 1 and s["n"] % 11 != 0),
        (view["n"].isin([4, 6.0, 7]), lambda s: s["n"] in (4, 6, 7)),
        (view["f"].isin([0.4, float("nan")]), lambda s: s["n"] == 4),
        (view["text"].isin(("text 8",)), lambda s: s["n"] == 8),
        (view["time"].isin(["1970-01-09"]), lambda s: s["n"] == 8),
        (view["n"].isin([]), lambda s: False),
        (view["label"] == "cat", lambda s: s["label"] == 0),
        (view["labels"].contains("emu"), lambda s: s["labels"] is not None and 2 in s["labels"]),
        (view["labels"].contains(2), lambda s: s["labels"] is not None and 2 in s["labels"]),
        (view["list"].contains(3), lambda s: s["list"] is not None and 3 in s["list"]),
    ]:
        assert view[mask]["n"].tolist() == view.filter(function)["n"][:].tolist()


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda ds: ds["label"].isin("cat"), r"write isin\(\[…\]\)"),
        (lambda ds: ds["label"].isin(["cow"]), "not one of its labels"),
        (lambda ds: ds["label"].isin([None]), "for nulls"),
        (lambda ds: ds["label"].isin([7]), "not the code of a label"),
        (lambda ds: ds["n"].isin(["a"]), "isin"),
        (lambda ds: ds["n"].isin([1, "a"]), "isin"),
        (lambda ds: ds["image"].isin([b"x"]), "cannot compare column `image`"),
        (lambda ds: ds["labels"].contains("cow"), "not one of its labels"),
        (lambda ds: ds["labels"].contains(["cat"]), "expected one of its values"),
        (lambda ds: ds["text"].contains("a"), "LIKE"),
        (lambda ds: ds["fixed"].contains(1), "expected lists"),
    ],
)
def test_masks_that_cannot_be_are_refused(ds, call, why):
    with pytest.raises(ps.InvalidInputError) as caught:
        call(ds)
    import re

    assert re.search(why, f"{caught.value}\n{caught.value.hint}"), caught.value


def test_arrow_datasets_have_row_ids_and_positions_on_request(ds):
    view = ds.select(np.arange(len(ds))[::-1])
    rows = view.to_arrow_dataset(["_row_id", "_position", "n", "image"])
    assert rows.schema.names == ["_row_id", "_position", "n", "image"] and "_row_id" not in view.to_arrow_dataset().schema.names
    found = duckdb.sql("SELECT _row_id, _position, image FROM rows WHERE n BETWEEN 10 AND 12 ORDER BY n").fetchall()
    assert ds.select([row[1] for row in found])["n"][:].tolist() == [10, 11, 12]
    assert ds.take(row_ids=[row[0] for row in found], columns=["n"])["n"].tolist() == [10, 11, 12] and found[0][2] == b"x"
    assert rows.to_table(["_position"], filter=pads.field("_row_id") == found[1][0])["_position"].to_pylist() == [found[1][1]]
    assert rows.filter(pads.field("_position") < 2).to_table()["n"].to_pylist() == [1, 0]
    assert rows.take([5])["_position"].to_pylist() == [len(ds) - 6] and rows.count_rows() == len(ds)

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


def test_a_filter_with_a_subquery_says_how_to_write_it(ds):
    for where in ("n = (SELECT max(n) FROM samples)", "row_number() OVER () = 1"):
        with pytest.raises(ps.InvalidInputError, match="not a condition on single samples") as caught:
            ds.filter(where)
        assert "delete" not in caught.value.hint and 'ds.to_arrow_dataset(["_position", …])' in caught.value.hint
    rows = ds.to_arrow_dataset(["_position", "n"])
    found = duckdb.sql("SELECT _position FROM rows WHERE n = (SELECT max(n) FROM rows)").fetchall()
    assert rows.count_rows() == len(ds) and ds.select([place for (place,) in found])["n"][:].tolist() == [1000]
    with ds.transaction() as tx, pytest.raises(ps.InvalidInputError) as caught:
        tx.delete(where="row_number() OVER () = 1")
    assert "row ids" in caught.value.hint and "delete" in caught.value.hint
    tx.abort()


def test_conditions_name_tensors_of_float16():
    ds = ps.create("memory://halves", {"v": ps.Tensor((2,), "float16"), "list": ps.Tensor((None,), "float16")})
    ds.append({"v": np.arange(6).reshape(3, 2), "list": [[1], None, [2, 3]]})
    for view in (ds, ps.concat([ds, ds])):
        assert view.filter("v[1] > 1")["v"][:2].tolist() == [[2, 3], [4, 5]] and view.filter("(list).data[1] = 2")["v"][:1].tolist() == [
            [4, 5]
        ]
    with ds.transaction() as tx:
        assert tx.delete(where="v[2] = 3") == 1
    assert ds["v"][:].tolist() == [[0, 1], [4, 5]]


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


LISTS = {
    "float64": [[np.nan, 1.0], [-0.0], [], None, [np.inf, 0.1], [2.0, 2.0]],
    "float16": [[0.1], None, [], [-0.0, 2.0]],
    "bfloat16": [[0.1, 2.0], [], None, [np.inf]],
    "int8": [[-1, 1], [], [0], None, [2, 0]],
    "uint64": [[2**64 - 1], [], None, [0, 2]],
    "bool": [[True], [False], None, []],
    "complex64": [[1j, 2], None, [], [0]],
    "timestamp": [np.array(["2020-01-01", "1970-01-01"], "M8[us]"), None, np.array([], "M8[us]")],
    "duration": [np.array([2, 0], "m8[us]"), np.array([], "m8[us]"), None],
}
SOUGHT = (0, 1, -1, 2, 0.1, -0.0, 1j, np.nan, np.inf, 300, 2**63, 2**64 - 1, True, np.False_, np.float32(0.1), np.timedelta64(2, "us"))


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("dtype", LISTS)
def test_lists_contain_what_their_values_equal(dtype, joined):
    """Lists are compared many at once, across the bounds of reads, and nulls and empty lists at either end have nothing."""
    lists, kind = LISTS[dtype], ps.Tensor((None,), dtype)
    ds = ps.create(f"memory://contains-{dtype}-{joined}", {"v": kind, "n": "int64"})
    for values in ([None], [lists[at % len(lists)] for at in range(600)], lists[::-1], [None, None]):
        ds.append({"v": values, "n": range(len(values))})
    ds.append({"n": [1]})
    ds.update({"v": [None, lists[0]]}, row_ids=[3, 5])
    view = ps.concat([ds.select([4, 1, 1]), ds, ds.head(0)]) if joined else ds
    for value in SOUGHT:
        try:
            expected = [each is not None and bool(np.any(each == value)) for each in view["v"]]
        except (OverflowError, TypeError):  # NumPy does not compare some dtypes with large numbers.
            continue
        assert view["v"].contains(value).tolist() == expected, value
    assert ds.head(0)["v"].contains(1).tolist() == [] and ds[[0]]["v"].nulls.all() and not ds.select([0])["v"].contains(0).any()


def test_lists_of_joined_views_contain_the_words_of_all_views():
    one = ps.create("memory://contains-one", {"labels": ps.Labels(["cat", "dog"])})
    two = ps.create("memory://contains-two", {"labels": ps.Labels(["emu", "dog"])})
    one.append({"labels": [["dog"], [], None, ["cat", "dog"]]})
    two.append({"labels": [None, ["emu"], ["dog", "emu"], []]})
    joined = ps.concat([one, two])
    for word, rows in (("cat", [3]), ("dog", [0, 3, 6]), ("emu", [5, 6])):
        assert np.flatnonzero(joined["labels"].contains(word)).tolist() == rows


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


def test_positions_of_joined_views_are_places_in_the_join_however_they_are_read(ds):
    other = ds.select(np.arange(60)[::-1])
    for joined in (ps.concat([ds.select(slice(40, 70)), other, ds.head(0), ds.head(20)]), ps.concat([other])):
        places = list(range(len(joined)))
        assert joined.take(slice(None), columns=["_position"])["_position"].tolist() == places == joined["_position"][:].tolist()
        assert [n for batch in joined.scan(["_position"], batch_size=7) for n in batch["_position"].to_pylist()] == places
        table = joined.to_arrow(["n", "_position", "_row_id"])
        assert table["_position"].to_pylist() == places and table["n"].to_pylist() == joined["n"][:].tolist()
        rows = joined.to_arrow_dataset(["_position", "n", "image"])
        found = duckdb.sql("SELECT _position, n, image FROM rows WHERE n % 3 = 1").fetchall()  # Reads images only of these samples.
        assert sorted(row[0] for row in found) == [place for place, n in enumerate(joined["n"]) if n % 3 == 1]
        assert all(joined["n"][place] == n for place, n, _ in found)
        chosen = rows.to_table(filter=(pads.field("n") < 9) & (pads.field("_position") > 25))
        assert chosen.num_rows and joined.select(chosen["_position"].to_numpy())["n"][:].tolist() == chosen["n"].to_pylist()
        assert rows.take([50, 3, -1])["_position"].to_pylist() == [50, 3, len(joined) - 1]
        assert joined.filter("_position % 7 = 3")["n"][:].tolist() == joined["n"][3::7].tolist()

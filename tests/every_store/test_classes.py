"""Test classes of labels on every store: added and renamed ones, several writers at once, branches that merge, and a model of all of them."""

import random

import numpy as np
import penstock as ps
import pytest
from handles import newest

pytestmark = pytest.mark.processes

SCHEMA = {"label": ps.Label(["cat", "dog"]), "labels": ps.Labels(["cat", "dog"]), "n": "int32"}


def make(root):
    ds = ps.create(root, SCHEMA)
    ds.append({"label": ["dog", None, "cat"], "labels": [["cat", "dog"], None, []], "n": [0, 1, 2]})
    return ds


def add(tx, *names):
    for column in ("label", "labels"):
        tx.add_classes(column, names)


def by_name(ds, columns=("label", "labels")):
    """Return the names of the classes of each sample, as codes and names lead to them."""
    found = {column: [] for column in columns}
    for column in columns:
        names = ds.schema[column].names
        for value in ds[column][:]:
            one = value is None or value is np.ma.masked
            found[column].append(None if one else names[value] if column == "label" else [names[code] for code in value])
    table = ds.to_arrow()
    assert all(table[column].to_pylist() == values for column, values in found.items())
    return found


def test_an_added_class_is_read_and_written_in_every_way(root):
    ds = make(root)
    with ds.transaction("foxes") as tx:
        ids = tx.append({"label": ["cat"], "labels": [["dog"]], "n": [3]})
        add(tx, "fox", "dog", "owl", "fox")
        more = tx.append({"label": ["fox", None, "owl"], "labels": [["owl", "cat"], [], [2, 3]], "n": [4, 5, 6]})
        tx.update({"label": ["owl"], "labels": [["fox", "fox"]]}, row_ids=ids)
        inside = tx.take([0, 1, 2, *ids, *more], columns=["label", "labels"])
        assert [np.ma.filled(inside["label"], -1).tolist(), list(map(list_of, inside["labels"]))] == [
            [1, -1, 0, 3, 2, -1, 3],
            [[0, 1], None, [], [2, 2], [3, 0], [], [2, 3]],
        ]
    assert ds.log()[0].kind == "schema" and ds.schema["labels"].names == ds.schema["label"].names == ("cat", "dog", "fox", "owl")
    for handle in (ds, newest(ps.open(root), 7)):
        assert by_name(handle) == {
            "label": ["dog", None, "cat", "owl", "fox", None, "owl"],
            "labels": [["cat", "dog"], None, [], ["fox", "fox"], ["owl", "cat"], [], ["fox", "owl"]],
        }
        assert (handle[4]["label"], handle[4]["labels"].tolist(), handle["label"][6]) == (2, [3, 0], 3)
        assert not handle.verify()["problems"] and len(handle.filter(lambda sample: sample["label"] == 3)) == 2
        assert sorted(handle.to_pandas()["label"].cat.categories) == ["cat", "dog", "fox", "owl"]
        batch = next(iter(handle.select([0, 2, 3, 4, 6]).loader(batch_size=5, columns=["label", "labels"])))
        assert batch["label"].tolist() == [1, 0, 3, 2, 3]
        assert [list_of(codes) for codes in batch["labels"]] == [[0, 1], [], [2, 2], [3, 0], [2, 3]]
    ds.append({"label": ["fox"], "labels": [["owl"]], "n": [7]})
    assert by_name(ds)["label"][-1] == "fox" and ps.open(root, snapshot=ds.log()[-2].snapshot).schema["label"].names == ("cat", "dog")


def list_of(value):
    return None if value is None else np.asarray(value).tolist()


def test_classes_added_at_once_are_merged_by_name(root):
    """Four transactions begin at one snapshot. None of them knows the classes of another one, and all are committed."""
    ds = make(root)
    handles = [newest(ps.open(root), 3) for _ in range(5)]
    one, other, renaming, plain, dropping = [handle.transaction(str(place)) for place, handle in enumerate(handles)]
    add(one, "fox", "owl")
    one.append({"label": ["owl"], "labels": [["fox", "dog"]], "n": [10]})
    add(other, "emu", "owl")
    other.append({"label": ["emu", "owl", "emu"], "labels": [["emu"], ["owl", "cat"], [3]], "n": [11, 12, 13]})
    renaming.rename_column("n", "number")
    renaming.rename_class("label", "cat", "lynx")
    renaming.add_classes("labels", ["gnu"])
    plain.append({"label": ["cat"], "labels": [["dog"]], "n": [14]})
    plain.update({"label": ["dog"]}, row_ids=[1])
    dropping.add_column("more", "int8", fill=3)
    for tx in (one, other, renaming, plain):
        tx.commit()
    with pytest.raises(ps.ConflictError, match="changed the schema"):
        dropping.commit()
    ds.refresh()
    assert ds.schema["label"].names == ("lynx", "dog", "fox", "owl", "emu")
    assert ds.schema["labels"].names == ("cat", "dog", "fox", "owl", "emu", "gnu") and list(ds.schema) == ["label", "labels", "number"]
    assert by_name(ds) == {
        "label": ["dog", "dog", "lynx", "owl", "emu", "owl", "emu", "lynx"],
        "labels": [["cat", "dog"], None, [], ["fox", "dog"], ["emu"], ["owl", "cat"], ["owl"], ["dog"]],
    }
    assert not ds.verify()["problems"]


def test_classes_beside_a_drop_and_a_reset(root):
    ds = make(root)
    one, other = (newest(ps.open(root), 3).transaction() for _ in range(2))
    one.drop_column("labels", force=True)
    add(other, "fox")
    one.commit()
    other.commit()
    ds.refresh()
    assert list(ds.schema) == ["label", "n"] and ds.schema["label"].names == ("cat", "dog", "fox")
    late = newest(ps.open(root), 3).transaction()
    late.add_classes("label", ["owl"])
    ds.append({"label": ["fox"], "n": [9]})
    ds.reset(ds.log()[-1].snapshot)
    with pytest.raises(ps.ConflictError, match="replaced the whole state"):
        late.commit()


def test_branches_that_added_classes_merge_both_ways(root):
    ds = make(root)
    side = ds.create_branch("side")
    with ds.transaction() as tx:
        add(tx, "owl")
        tx.append({"label": ["owl", "dog"], "labels": [["owl"], ["cat", "owl"]], "n": [10, 11]})
    with side.transaction() as tx:
        add(tx, "fox", "owl")
        tx.append({"label": ["fox", "owl"], "labels": [["fox", "owl"], ["owl"]], "n": [20, 21]})
        tx.update({"label": ["fox"]}, row_ids=[0])
        tx.rename_class("labels", "dog", "wolf")
    ds.merge("side")
    side.merge("main")
    assert ds.schema["label"].names == ("cat", "dog", "owl", "fox") and side.schema["label"].names == ("cat", "dog", "fox", "owl")
    assert ds.schema["labels"].names == ("cat", "wolf", "owl", "fox")
    expected = {
        0: ("fox", ["cat", "wolf"]), 1: (None, None), 2: ("cat", []), 10: ("owl", ["owl"]), 11: ("dog", ["cat", "owl"]),
        20: ("fox", ["fox", "owl"]), 21: ("owl", ["owl"]),
    }  # fmt: skip
    for handle in (ds, side):
        found = by_name(handle)
        assert dict(zip(handle["n"][:].tolist(), zip(found["label"], found["labels"], strict=True), strict=True)) == expected
        assert not handle.verify()["problems"]
    ds.merge("side")
    assert ds.schema["label"].names == ("cat", "dog", "owl", "fox"), "a branch that gets the state of the other one keeps its codes"
    assert by_name(ds) == by_name(newest(ps.open(root), 7)) and not ds.verify()["problems"]


def test_sides_that_name_classes_differently_are_a_conflict(root):
    ds = make(root)
    side = ds.create_branch("side")
    for handle, name in ((ds, "lynx"), (side, "puma")):
        with handle.transaction() as tx:
            tx.rename_class("label", "cat", name)
    with pytest.raises(ps.ConflictError, match="theirs calls class `lynx` `puma`"):
        ds.merge("side")
    with side.transaction() as tx:
        tx.rename_class("label", "puma", "lynx")
        tx.add_classes("label", ["fox"])
    with ds.transaction() as tx:
        tx.rename_class("label", "dog", "fox")
    with pytest.raises(ps.ConflictError, match="each side has a different class `fox`"):
        ds.merge("side")
    one, other = (newest(ps.open(root), 3).transaction() for _ in range(2))
    one.rename_class("label", "lynx", "cat")
    other.rename_class("label", "lynx", "tiger")
    one.commit()
    with pytest.raises(ps.ConflictError, match="changed the schema"):
        other.commit()


def test_hundreds_of_classes_in_a_column_that_began_without_any(root):
    ds = ps.create(root, {"label": ps.Label([]), "labels": ps.Labels([])})
    names = [f"class {number}" for number in range(300)]
    ds.append({"label": [None], "labels": [[]]})
    for begin in range(0, 300, 100):
        with ds.transaction() as tx:
            add(tx, *names[begin : begin + 100])
            tx.append({"label": names[: begin + 100], "labels": [[name] * (place % 3) for place, name in enumerate(names[: begin + 100])]})
    labels = [None, *names[:100], *names[:200], *names]
    lists = [[], *([name] * (place % 3) for end in (100, 200, 300) for place, name in enumerate(names[:end]))]
    assert by_name(newest(ps.open(root), 601)) == {"label": labels, "labels": lists}
    old = ps.create(f"{root}-old", {"label": ps.Label([f"old {number}" for number in range(256)])})
    old.append({"label": [255, 0]})
    with old.transaction() as tx:
        tx.add_classes("label", ["new"])
        tx.append({"label": ["new", "old 255"]})
    assert old["label"][:].tolist() == [255, 0, 256, 255] and not old.verify()["problems"]


def test_what_cannot_be_added_or_renamed_is_refused(root):
    ds = make(root)
    for call, code, text in [
        (lambda tx: tx.add_classes("n", ["a"]), "invalid-schema", "cannot add classes to column `n`: it is a column of type scalar"),
        (lambda tx: tx.add_classes("m", ["a"]), "column-not-found", "cannot add classes to column `m`"),
        (lambda tx: tx.add_classes("label", "fox"), "invalid-argument", "names='fox', expected a list of str"),
        (lambda tx: tx.add_classes("label", [3]), "invalid-argument", "the class is a int, expected str"),
        (lambda tx: tx.add_classes("label", ["\ud800"]), "invalid-argument", "not UTF-8"),
        (lambda tx: tx.rename_class("label", "fox", "owl"), "class-not-found", "the column has no such class"),
        (lambda tx: tx.rename_class("label", "cat", "dog"), "invalid-schema", "label `dog` is given twice"),
    ]:
        with pytest.raises(ps.Error, match=text) as caught, ds.transaction() as tx:
            call(tx)
        assert caught.value.code == code
    before = ds.snapshot
    with ds.transaction() as tx:
        add(tx, "cat")
        tx.append({"label": ["cat"], "labels": [[]], "n": [3]})
    assert ds.log()[0].kind == "data" and ds.log()[1].snapshot == before, "nothing was added, so the schema is the same"
    tx = newest(ps.open(root), 4).transaction()
    tx.upsert({"label": ["dog"], "n": [5]}, key="label")
    with pytest.raises(ps.InvalidInputError, match="used it as a key"):
        tx.add_classes("label", ["fox"])
    with ds.transaction() as other:
        other.add_classes("label", ["fox"])
        other.append({"label": ["fox"], "n": [7]})
    with pytest.raises(ps.ConflictError, match="changed the dtype of the key column"):
        tx.commit()


class Side:
    """A branch of the model: what its samples and classes are called. A class is known by the name under which it was added."""

    def __init__(self, samples, classes):
        self.samples, self.classes = dict(samples), dict(classes)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_branches_with_classes_are_those_of_a_model(root, seed):
    """Random programs on two branches: classes are added under few names, renamed on main, and used by name; both merge now and then."""
    rng = random.Random(seed)
    ds = ps.create(root, {"label": ps.Label(["a", "b"]), "labels": ps.Labels(["a", "b"]), "n": "int64"})
    handles = [ds, ds.create_branch("side")]
    sides = [Side({}, {"a": (0, "a"), "b": (0, "b")}) for _ in range(2)]
    number, places = 0, [["a", "b"], ["a", "b"]]
    for step in range(40):
        here = rng.randrange(2)
        handle, side = handles[here], sides[here]
        verb = rng.choice(["add", "append", "append", "update", "rename", "merge"])
        if verb == "merge":
            handle.merge(["side", "main"][here])
            other = sides[1 - here]
            side.samples |= {row: value for row, value in other.samples.items() if row % 2 != here}
            side.classes = {
                key: max(side.classes.get(key, (-1, "")), other.classes.get(key, (-1, ""))) for key in side.classes | other.classes
            }
        else:
            # Another writer may add classes between the beginning and the commit.
            late = newest(ps.open(root, branch=["main", "side"][here]), len(handle)).transaction()
            tx = handle.transaction()
            writers = [tx, late] if verb == "add" and rng.random() < 0.5 else [tx]
            added = [f"new {rng.randrange(12)}" for _ in range(rng.randrange(1, 4))]
            for writer in writers:
                if verb != "rename":
                    free = [name for name in added if name not in {shown for _, shown in side.classes.values()}]
                    free = [name for name in free if name not in side.classes]
                    add(writer, *free)
                    side.classes |= {name: (0, name) for name in free}
            names = {key: shown for key, (_, shown) in side.classes.items()}
            keys = list(names)
            if verb == "rename" and here == 0:
                key = rng.choice(["a", "b"])  # Both sides know it, so its new name wins a merge.
                for column in ("label", "labels"):
                    tx.rename_class(column, names[key], f"renamed {step}")
                side.classes[key] = (step + 1, f"renamed {step}")
            rows = [row for row in side.samples if row % 2 == here]
            if verb in ("append", "add"):
                number += 1
                row, value = 2 * number + here, (rng.choice(keys), [rng.choice(keys) for _ in range(rng.randrange(3))])
                values = {"label": [names[value[0]]], "labels": [[names[key] for key in value[1]]]}
                tx.append({**values, "n": [row]})
                side.samples[row] = value
            elif verb == "update" and rows:
                row, key = rng.choice(rows), rng.choice(keys)
                place = handle["n"][:].tolist().index(row)
                tx.update({"label": [names[key]]}, row_ids=handle.take([place], columns=["_row_id"])["_row_id"])
                side.samples[row] = (key, side.samples[row][1])
            for writer in rng.sample(writers, len(writers)):
                writer.commit()
            handle.refresh()
        found, names = by_name(handle), {key: shown for key, (_, shown) in side.classes.items()}
        expected = {row: (names[label], [names[key] for key in labels]) for row, (label, labels) in side.samples.items()}
        assert dict(zip(handle["n"][:].tolist(), zip(found["label"], found["labels"], strict=True), strict=True)) == expected, (seed, step)
        for column in ("label", "labels"):
            shown = {name: key for key, name in names.items()}
            order = [shown[name] for name in handle.schema[column].names]
            assert set(order) == set(names) and order[: len(places[here])] == places[here], "codes never change"
            places[here] = order
    assert not any(handle.verify()["problems"] for handle in handles)


@pytest.mark.parametrize("wider", [True, False])
@pytest.mark.parametrize(("key", "kind", "fill"), [("label", ps.Label(["cat", "dog"]), "dog"), ("k", "int16", -3)])
def test_the_fill_value_of_a_new_column_is_a_key_in_the_dtype_that_the_column_gets(root, key, kind, fill, wider):
    """A commit in the meantime appends a sample without the column, so that it has the fill value too."""
    ds = ps.create(root, {"n": "int32"})
    ds.append({"n": [1]})
    tx, other = ps.open(root).transaction(), ps.open(root)
    tx.add_column(key, kind, fill=fill)
    if wider and key == "label":
        tx.add_classes("label", ["fox"])
    elif wider:
        tx.widen_column("k", "int64")
    tx.upsert({key: [fill], "n": [2]}, key=key)
    other.append({"n": [3]})
    with pytest.raises(ps.ConflictError):
        tx.commit()
    assert sorted(newest(ds, 2)["n"][:].tolist()) == [1, 3]

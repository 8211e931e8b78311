"""Two transactions from one snapshot, each with 0 to 12 updates of different columns and rows. A model says cell by cell whether they conflict.

Each side changes cells that are its own, so that most pairs commit. Then one call touches a cell of the other side, in half of the programs.
"""

import random

import numpy as np
import penstock as ps
import pytest
from anything import SEEDS

pytestmark = pytest.mark.local

# Values of tiled columns are written by each call, so each of its updates is a change of its own.
SCHEMA = {
    "a": "int32", "b": ps.Text(), "c": ps.Category(), "d": ps.Tensor((3,), "float32"), "e": ps.Tensor((4, 4), "int16", tile=(2, 3)),
    "f": ps.Tensor((None, 2), "int16"), "g": "int8", "h": "float64",
}  # fmt: skip
# Sets of more than 16 runs are objects.
ROWS = 120


def made(name, number):
    """Return a value that is different for each number below 100."""
    return {
        "a": lambda: number, "b": lambda: "é" * number, "c": lambda: f"w{number}", "d": lambda: np.full(3, number, np.float32),
        "e": lambda: np.full((4, 4), number, np.int16), "f": lambda: np.full((number % 3, 2), number, np.int16), "g": lambda: number,
        "h": lambda: float(number),
    }[name]()  # fmt: skip


def plain(value):
    return (value.shape, value.tolist()) if isinstance(value, np.ndarray) and value.ndim else value


class Side:
    """One transaction: its calls, and the cells that it read and changed."""

    def __init__(self, rng, side):
        self.rng, self.side = rng, side
        self.calls, self.written, self.read, self.deleted, self.appended = [], {}, set(), set(), []

    def update(self, columns, rows):
        """Give values to some columns of rows, which may be new ones, as pairs."""
        numbers = {name: [self.rng.choice([None, *range(1, 100)]) for _ in rows] for name in columns}
        self.calls.append(("update", numbers, rows))
        for name in columns:
            self.written.update({(row, name): number for row, number in zip(rows, numbers[name], strict=True)})

    def choose(self, own):
        """Choose a few calls. `own` says whether a cell is this side's."""
        rng = self.rng
        for _ in range(rng.choice([0, 1, 2, 3, 4, 5, 6, 8, 12])):
            row = rng.choice([row for row in range(ROWS) if row not in self.deleted])
            columns = rng.sample(columns := [name for name in SCHEMA if own(row, name)], min(rng.choice([1, 1, 1, 2, 4]), len(columns)))
            rows = [row for row in range(ROWS) if row not in self.deleted and all(own(row, name) for name in columns)]
            if not columns or not rows:
                continue
            rows = rows[: rng.randint(1, len(rows))] if rng.random() < 0.3 else rng.sample(rows, min(rng.choice([1, 2, 5, 50]), len(rows)))
            rng.shuffle(rows)
            self.update(columns, rows + [row for row in self.appended if rng.random() < 0.5])
            if rng.random() < 0.15:
                self.calls.append(("append", 2, None))
                self.appended += [("new", self.side, len(self.appended) + place) for place in range(2)]
            if rng.random() < 0.15:
                self.look(rng.sample(rows, 1), columns)
            if rng.random() < 0.1:
                self.delete([row for row in rng.sample(range(ROWS), 3) if all(own(row, name) for name in SCHEMA)])

    def look(self, rows, columns):
        self.calls.append(("take", columns, rows))
        self.read |= {(row, name) for row in rows for name in columns}

    def delete(self, rows):
        rows = [row for row in rows if row not in self.deleted]
        self.calls.append(("delete", None, rows))
        self.deleted |= set(rows)

    def clash(self, other):
        """Touch one cell that the other side changed."""
        cells = [(row, name) for row, name in sorted(other.written, key=str) if isinstance(row, int) and row not in self.deleted]
        gone = sorted(other.deleted - self.deleted)
        if not cells and not gone:
            return
        row, name = self.rng.choice(cells) if cells and (not gone or self.rng.random() < 0.8) else (gone[0], "a")
        how = self.rng.choice(["update", "update", "update", "take", "delete"])
        {"update": lambda: self.update([name], [row]), "take": lambda: self.look([row], [name]), "delete": lambda: self.delete([row])}[
            how
        ]()
        if self.calls and how != "delete" and self.rng.random() < 0.5:  # Not always in the last call.
            self.calls.insert(self.rng.randrange(len(self.calls)), self.calls.pop())

    def run(self, tx):
        new = []
        at = lambda row: new[row[2]] if isinstance(row, tuple) else row  # noqa: E731
        calls = sorted(self.calls, key=lambda call: (call[0] != "append", call[0] == "delete"))
        for what, given, rows in calls:
            ids = rows and [at(row) for row in rows]
            if what == "append":
                new += tx.append({"a": [0] * given}).tolist()
            elif what == "take":
                tx.take(ids, columns=given)
            elif what == "delete":
                tx.delete(row_ids=rows)
            elif ids:
                columns = {name: [None if number is None else made(name, number) for number in numbers] for name, numbers in given.items()}
                tx.update(columns, row_ids=ids)
        # The calls were sorted, so the last value of each cell is that of the last update.
        self.written = {}
        for what, given, rows in calls:
            for name, numbers in given.items() if what == "update" else ():
                self.written.update({(row, name): number for row, number in zip(rows, numbers, strict=True)})


def conflicts(first, second, isolation):
    """Return the rows for which the second transaction may not follow the first one."""
    rows = lambda cells: {row for row, _ in cells}  # noqa: E731
    found = rows(first.written.keys() & second.written.keys())
    found |= first.deleted & (second.deleted | rows(second.written)) | second.deleted & rows(first.written)
    if isolation == "serializable":
        found |= rows(second.read & first.written.keys()) | rows(second.read) & first.deleted
    return {row for row in found if isinstance(row, int)}


def program(rng, ds):
    sides = Side(rng, 0), Side(rng, 1)
    # Whose a cell is depends on its row, its column, or both.
    rule = rng.choice([lambda row, at: row % 2, lambda row, at: at % 2, lambda row, at: row // 7 % 2, lambda row, at: (row + at) % 2])
    order = list(SCHEMA)
    rng.shuffle(order)
    for side in sides:
        side.choose(lambda row, name, side=side: rule(row, order.index(name)) == side.side)
    first, second = sides
    if rng.random() < 0.6:
        first.clash(second) if rng.random() < 0.5 else second.clash(first)
    isolation = rng.choice(["serializable", "serializable", "snapshot"])
    base = ds.refresh().snapshot
    one, other = (ps.open(ds.uri).transaction(name, isolation=isolation) for name in ("first", "second"))
    first.run(one)
    second.run(other)
    expected = conflicts(first, second, isolation)
    done = [(first, one.commit())]
    if expected:
        with pytest.raises(ps.ConflictError) as caught:
            other.commit()
        assert caught.value.code == "conflict" and set(caught.value.row_ids) <= expected, (base, caught.value)
    else:
        done.append((second, other.commit()))
    return done, bool(expected)


def test_two_transactions_conflict_if_a_cell_is_touched_by_both():
    verdicts, many = [], 0
    for seed in SEEDS:
        rng = random.Random(seed)
        ds = ps.create(f"memory://conflict-cells-{seed}", SCHEMA)
        ds.append({"a": [0] * ROWS})
        done, clash = program(rng, ds)
        verdicts.append(clash)
        many += not clash and all(len(side.calls) > 4 for side, _ in done)
        cells, ids = {(row, "a"): 0 for row in range(ROWS)}, list(range(ROWS))
        for side, receipt in done:
            final = dict(zip(side.appended, receipt.row_ids.tolist(), strict=True))
            cells.update({(row, "a"): 0 for row in final.values()})
            cells.update({(final.get(row, row), name): number for (row, name), number in side.written.items()})
            ids = [row for row in [*ids, *final.values()] if row not in side.deleted]
        ds.refresh()
        batch = ds.take(range(len(ds)), columns=[*SCHEMA, "_row_id"])
        assert batch["_row_id"].tolist() == ids, seed
        words = ds.vocabulary("c")
        for name in SCHEMA:
            for place, row in enumerate(ids):
                number = cells.get((row, name))
                found = batch[name][place] if isinstance(batch[name], list) else ps.views.sample.unwrap(batch[name], place)
                if name == "c" and found is not None:
                    found = words[int(found)]
                assert plain(found) == plain(None if number is None else made(name, number)), (seed, name, row)
        assert not ds.verify()["problems"], seed
    assert {True, False} <= set(verdicts) and many, "programs of both kinds, some with many changes on both sides"


WIDE = 80


def rival(verb, column, count):
    """Return what the other transaction does with one column, and what this one does first with `count` columns."""
    many = [f"c{place}" for place in range(count)]
    change = lambda tx: tx.update({name: [1] for name in many}, row_ids=[0])  # noqa: E731
    append = lambda tx: tx.append({name: [7] for name in many})  # noqa: E731
    return {
        "update": (change, lambda tx: tx.update({column: [2]}, row_ids=[0])),
        "take": (change, lambda tx: (tx.take([0], columns=[column]), tx.update({"other": [1]}, row_ids=[1]))),
        "scan": (change, lambda tx: (list(tx.scan([column])), tx.update({"other": [1]}, row_ids=[1]))),
        "drop of changed": (change, lambda tx: tx.drop_column(column, force=True)),
        "drop of appended": (append, lambda tx: tx.drop_column(column, force=True)),
        "key of changed": (change, lambda tx: tx.upsert({column: [1]}, key=column)),
        "key of appended": (append, lambda tx: tx.upsert({column: [7]}, key=column)),
    }[verb]


# A change set lists up to 64 columns.
@pytest.mark.parametrize("count", [1, 63, 64, 65, 66, 79])
@pytest.mark.parametrize("verb", ["update", "take", "scan", "drop of changed", "drop of appended", "key of changed", "key of appended"])
def test_a_change_of_many_columns_conflicts_in_each_of_them(verb, count):
    for place in sorted({0, count // 2, count - 1, count}):
        ds = ps.create(f"memory://wide-{verb}-{count}-{place}", {**{f"c{place}": "int32" for place in range(WIDE)}, "other": "int32"})
        ds.append({"c0": [0, 0, 0]})
        first, second = (ps.open(ds.uri).transaction(name) for name in ("many", "one"))
        do, other = rival(verb, f"c{place}", count)
        do(first)
        other(second)
        # Longer lists than 64 mean all columns, so that the commit may be refused for one that was not changed.
        meets = place < count
        first.commit()
        if meets:
            with pytest.raises(ps.ConflictError):
                second.commit()
        elif count <= 64:
            second.commit()
        else:
            second.abort()


@pytest.mark.parametrize("compacts", [False, True])
def test_values_of_a_sample_that_only_one_ancestor_shows_as_deleted_are_not_read(tmp_path, compacts):
    ds = ps.create(tmp_path / "set", {"v": "int32", "w": "int32"})
    ds.append({"v": range(4), "w": [0] * 4})
    source = ds.create_branch("source")
    ids = source.append({"v": [10, 11], "w": [0, 0]}).row_ids
    branch = source.create_branch("branch")
    source.update({"v": [50, 51]}, row_ids=[0, ids[1]])
    with source.transaction() as tx:
        tx.delete(row_ids=ids[1:])
    ds.update({"w": [5]}, row_ids=[1])
    branch.reset("main")
    branch.merge("source", on_conflict="ours")
    if compacts:
        source.compact()
    ds.merge("source", on_conflict="theirs")
    branch.merge("main", on_conflict="theirs")
    assert branch["v"][:].tolist() == ds["v"][:].tolist() == [50, 1, 2, 3, 10] and not branch.verify()["problems"]

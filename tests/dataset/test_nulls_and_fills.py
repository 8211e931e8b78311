"""A null that was given, a value, and a value that was left out are three things. This holds in every layout, however samples get values.

A column that is left out has its fill value, or is null without one. An explicit None is a null.
"""

import functools
import itertools
import random
import shutil

import numpy as np
import penstock as ps
import pytest
from anything import SCHEMA, SEEDS, values

pytestmark = pytest.mark.local

# `even` is tiled with a fixed shape, and `tiled` with a free one. `huge` is tiled because of its size.
LAYOUTS = {**SCHEMA, "huge": ps.Tensor((8, 1 << 20), "uint8"), "wide": ps.Tensor((2, 3), "float64"), "flat": "int8"}
SMALL = [name for name in LAYOUTS if name != "huge"]
FILLS = [True, False]
NUMBERS = itertools.count()
LEFT_OUT = "left out"


def pool_of(name):
    """Return three values of a column that are not null."""
    if name == "huge":
        return [np.full((8, 1 << 20), number, np.uint8) for number in (1, 2, 3)]
    if name in ("wide", "flat"):
        return [np.full((2, 3), number, np.float64) if name == "wide" else number for number in (1, 2, 3)]
    found = [value for value in values(np.random.default_rng(3), name, LAYOUTS[name], 60) if value is not None]
    return found[:1] + [value for value in found[1:] if repr(value) != repr(found[0])][:2]


def form(view, name, value):
    """Return a value that was read in a form that can be compared."""
    if value is None or isinstance(value, str | bytes | dict):
        return value
    if name in ("label", "word", "other"):
        return view.vocabulary(name)[int(value)]
    value = np.asarray(value)
    return value.shape, str(value.dtype), value.tobytes()


@functools.cache
def forms_of(name):
    """Return the values in the form in which they are read."""
    reference = ps.create(f"memory://nulls-reference-{name}", {name: LAYOUTS[name]})
    reference.append({name: pool_of(name)})
    forms = [form(reference, name, sample[name]) for sample in reference]
    assert None not in forms and len(forms) == 3
    return forms


class Table:
    """A dataset with one column of this layout beside others, and a model of it: for each sample the place of its value among three, or None."""

    def __init__(self, name, filled, rng, uri=None):
        self.name, self.filled, self.rng, self.pool = name, filled, rng, pool_of(name)
        self.ds, self.forms = ps.create(uri or f"memory://nulls-{next(NUMBERS)}", {"n": "int64"}), forms_of(name)
        # The samples that were appended with a value, or got one or a null from an update.
        self.given, self.count = set(), 2
        self.ds.append({"n": [0, 1]})
        with self.ds.transaction() as tx:
            # Samples that give one of these columns and not the other are in different fragments.
            tx.add_column("beside", "int16", fill=7)
            tx.add_column(name, LAYOUTS[name], fill=self.pool[0] if filled else None)
        self.default = 0 if filled else None
        self.cells = {0: self.default, 1: self.default}

    def columns(self, cells, numbers):
        """Return columns with these cells, of which all or none are left out."""
        given = {"n": numbers} if self.rng.random() < 0.7 else {"n": numbers, "beside": [None] * len(numbers)}
        if LEFT_OUT not in cells:
            given[self.name] = [None if cell is None else self.pool[cell] for cell in cells]
        return given

    def new(self, cells):
        numbers = list(range(self.count, self.count + len(cells)))
        self.count += len(cells)
        self.cells.update({number: self.default if cell is LEFT_OUT else cell for number, cell in zip(numbers, cells, strict=True)})
        self.given |= {number for number, cell in zip(numbers, cells, strict=True) if cell not in (LEFT_OUT, None)}
        return self.columns(cells, numbers)

    def changed(self, numbers, cells):
        self.cells.update(zip(numbers, cells, strict=True))
        self.given |= set(numbers)
        return {self.name: [None if cell is None else self.pool[cell] for cell in cells]}

    def check(self, view, where):
        batch = view.take(range(len(view)), columns=["n", self.name])
        found = [value if isinstance(batch[self.name], list) else ps.views.sample.unwrap(batch[self.name], place)
                 for place, value in enumerate(batch[self.name])]  # fmt: skip
        found = {int(n): form(view, self.name, value) for n, value in zip(batch["n"], found, strict=True)}
        expected = {number: None if cell is None else self.forms[cell] for number, cell in self.cells.items()}
        wrong = {number: (cell, found[number] and "a value") for number, cell in self.cells.items() if found[number] != expected[number]}
        assert found.keys() == expected.keys() and not wrong, (*where, wrong)

    def check_all(self, where):
        """Compare the dataset with the model, by several kinds of reads."""
        ds = ps.open(self.ds.uri)
        self.check(ds, where)
        scanned = ds.scan(["n", self.name]).read_all()
        nulls = set(scanned["n"].filter(scanned[self.name].is_null()).to_pylist())
        assert nulls == {number for number, cell in self.cells.items() if cell is None}, (*where, "scan")


# Each way gives cells to new or known samples. All of them may be left out.
def append(table, tx, cells):
    tx.append(table.new(cells))


def append_one_by_one(table, tx, cells):
    for cell in cells:
        tx.append(table.new([cell]))


def append_among_others(table, tx, cells):
    tx.append(table.new([1]))
    tx.append(table.new([LEFT_OUT]))
    tx.append(table.new(cells))
    tx.append(table.new([LEFT_OUT]))


def upsert_new(table, tx, cells):
    tx.upsert(table.new(cells), key="n")


def stage(table, tx, cells):
    tx.add(table.ds.stage(table.new(cells)))


def overwrite(table, tx, cells):
    table.cells, table.given = {}, set()
    tx.overwrite(table.new(cells))


def update_new(table, tx, cells):
    ids = tx.append(table.new([LEFT_OUT] * len(cells)))
    if LEFT_OUT not in cells:
        tx.update(table.changed(list(table.cells)[-len(cells) :], cells), row_ids=ids)


def update(table, tx, cells):
    if LEFT_OUT not in cells:
        chosen = table.rng.sample(list(table.cells), min(len(cells), len(table.cells)))
        batch = tx._view().take(range(len(tx)), columns=["n", "_row_id"])
        of = dict(zip(batch["n"].tolist(), tx._mark.outward(batch["_row_id"]).tolist(), strict=True))
        tx.update(table.changed(chosen, cells[: len(chosen)]), row_ids=[of[number] for number in chosen])


def update_by_key(table, tx, cells):
    if LEFT_OUT not in cells:
        chosen = table.rng.sample(list(table.cells), min(len(cells), len(table.cells)))
        assert tx.update({"n": chosen, **table.changed(chosen, cells[: len(chosen)])}, on="n") == []


def upsert_known(table, tx, cells):
    chosen = table.rng.sample(list(table.cells), min(len(cells), len(table.cells)))
    if LEFT_OUT in cells:
        tx.upsert({"n": chosen, "beside": [1] * len(chosen)}, key="n")
    else:
        tx.upsert({"n": chosen, **table.changed(chosen, cells[: len(chosen)])}, key="n")


WAYS = [append, append_one_by_one, append_among_others, upsert_new, stage, overwrite, update_new, update, update_by_key, upsert_known]
CELLS = {"nulls": [None, None], "mixed": [None, 1, None, 2], "left out": [LEFT_OUT, LEFT_OUT]}


def check_way(table, way, cells, where):
    with table.ds.transaction() as tx:
        way(table, tx, cells)
        table.check(tx._view(), (*where, "inside"))
    table.check_all(where)


@pytest.mark.parametrize("filled", FILLS)
@pytest.mark.parametrize("name", SMALL)
def test_nulls_fills_and_values_are_told_apart_by_every_way(name, filled):
    for way, (pattern, cells) in itertools.product(WAYS, CELLS.items()):
        check_way(Table(name, filled, random.Random(1)), way, cells, (name, filled, way.__name__, pattern))


@pytest.mark.parametrize("filled", FILLS)
@pytest.mark.parametrize("way", [append, stage, update, upsert_known], ids=lambda way: way.__name__)
def test_nulls_and_fills_of_values_that_are_tiled_because_of_their_size(tmp_path, way, filled):
    for pattern in ("nulls", "left out", "one value"):
        place = tmp_path / pattern
        check_way(Table("huge", filled, random.Random(1), place), way, CELLS.get(pattern, [1]), (filled, way.__name__, pattern))
        shutil.rmtree(place)


@pytest.mark.parametrize("filled", FILLS)
@pytest.mark.parametrize("name", SMALL)
def test_a_backfill_computes_what_no_update_gave(name, filled):
    table = Table(name, filled, random.Random(2))
    for way, cells in itertools.product([append, upsert_new, stage, update, update_new], CELLS.values()):
        with table.ds.transaction() as tx:
            way(table, tx, cells)
    chosen = {number: table.rng.choice([None, 1, 2]) for number in table.cells}

    def compute(batch):
        return [None if chosen[int(number)] is None else table.pool[chosen[int(number)]] for number in batch["n"]]

    # A value is missing if it was left out or null, and no update gave it. A fill value is missing as well.
    missing = [number for number in table.cells if number not in table.given]
    assert table.ds.backfill(name, compute, columns=["n"], batch_size=3, commit_samples=5) == len(missing) > 5
    table.cells.update({number: chosen[number] for number in missing})
    table.check_all((name, filled, "backfill"))
    assert table.ds.backfill(name, compute, columns=["n"]) == 0


@pytest.mark.parametrize("part", range(2))
def test_random_calls_keep_nulls_fills_and_values_apart(part):
    for seed in SEEDS[part::2]:
        rng = random.Random(seed)
        table, where = Table(rng.choice(SMALL), rng.random() < 0.7, rng), []
        for _ in range(rng.randint(1, 3)):
            with table.ds.transaction() as tx:
                for _ in range(rng.randint(1, 5)):
                    way = rng.choice([way for way in WAYS if way is not overwrite])
                    cells = (
                        [LEFT_OUT] * 2 if rng.random() < 0.3 else [rng.choice([None, None, 0, 1, 2]) for _ in range(rng.choice([1, 2, 5]))]
                    )
                    where.append((way.__name__, cells))
                    way(table, tx, cells)
                table.check(tx._view(), (seed, table.name, where, "inside"))
            if rng.random() < 0.3:  # A new root.
                with table.ds.transaction() as tx:
                    tx.rename_column("beside", "aside")
                    tx.rename_column("aside", "beside")
            table.check_all((seed, table.name, where))
        assert not table.ds.verify()["problems"], seed

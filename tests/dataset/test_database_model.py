"""Random programs on several handles, compared with a model in plain Python. Other files test single calls; this file tests combinations.

Handles in every access mode append samples in transactions, some of which are aborted or contain refused appends. The handles also read
in every possible way, refresh, open old snapshots and are reopened. The model records all samples and how many are visible to each handle.
"""

import io
import json
import pickle
import random

import numpy as np
import penstock as ps
import pyarrow as pa
import pytest
from anything import SCHEMA, SEEDS, values
from PIL import Image

ACCESS = ["mapped", "buffered", "direct", "auto"]
# Values that these columns refuse after earlier columns of the same append have been accepted.
UNFIT = {
    "number": [1 << 40],
    "half": ["x"],
    "fixed": [np.zeros(3)],
    "text": [3],
    "label": ["none of them"],
    "image": [b"no image"],
    "cloud": [np.zeros((2, 2))],
}
pytestmark = pytest.mark.local


def expected(name, value):
    """Return an appended value as a read would return it."""
    if value is None or name in ("text", "lz4", "meta", "blob", "label", "word", "other", "flag", "number"):
        return value
    if name == "time":
        return np.datetime64(value, "us")
    return np.asarray(value, np.float16) if name == "half" else np.asarray(value)


def scanned(ds, name, value):
    """Convert a value from an Arrow array to the form that `take` returns."""
    if not value.is_valid:
        return None
    if name in ("label", "word", "other"):
        return ds.vocabulary(name).index(value.as_py())
    if name == "time":
        return np.datetime64(value.value, "us")
    if name == "meta":
        return json.loads(value.as_py())
    if isinstance(value, pa.ExtensionScalar | pa.StructScalar):
        elements, shape = (
            (value.value, value.type.shape) if isinstance(value, pa.ExtensionScalar) else (value["data"], value["shape"].as_py())
        )
        assert elements.values.null_count == 0, name
        return elements.values.to_numpy(zero_copy_only=False).reshape(shape)
    return np.float16(value.as_py()) if name == "half" else value.as_py()


def pixels(body):
    return np.asarray(Image.open(io.BytesIO(body))) if isinstance(body, bytes) else body


class Program:
    def __init__(self, seed, root):
        self.rng, self.numbers, self.root = random.Random(seed), np.random.default_rng(seed), root
        self.kinds = {name: SCHEMA[name] for name in self.rng.sample(list(SCHEMA), self.rng.randint(1, 7))}
        self.rows, self.ids, self.commits = [], [], []
        ds = ps.create(root, self.kinds)
        self.handles = [ds, *(ps.open(root, io=access) for access in self.rng.sample(ACCESS, 2))]
        self.seen = [0, 0, 0]
        self.kept = [(ds.snapshot, 0)]

    def some(self, count):
        """Make random values for some columns. Return the values as an argument for `append` and as rows for the model."""
        names = [name for name in self.kinds if self.rng.random() < 0.85] or list(self.kinds)[:1]
        columns = {name: values(self.numbers, name, self.kinds[name], count) for name in names}
        rows = [{name: columns[name][row] if name in columns else None for name in self.kinds} for row in range(count)]
        for name in columns:
            # If every value is present and all shapes are equal, sometimes pass one array instead of a list.
            if (
                name in ("fixed", "page", "packed", "even")
                and count
                and all(value is not None for value in columns[name])
                and self.rng.random() < 0.5
            ):
                columns[name] = np.stack(columns[name])
        return columns, rows

    def transact(self, at):
        ds, added, gives_up = self.handles[at], [], self.rng.random() < 0.15
        before = ds.snapshot
        try:
            with ds.transaction(f"commit {len(self.commits)}") as tx:
                for _ in range(self.rng.randint(1, 4)):
                    columns, rows = self.some(self.rng.choice([0, 1, 2, 5, 12]))
                    unfit = next((name for name in reversed(columns) if name in UNFIT), None)
                    if unfit and rows and self.rng.random() < 0.2:
                        wrong = {**columns, unfit: [*list(columns[unfit])[:-1], *UNFIT[unfit]]}
                        with pytest.raises((ps.InvalidInputError, ps.CorruptError)):
                            tx.append(wrong)
                    tx.append(columns)
                    added += rows
                if gives_up:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            assert gives_up and ds.snapshot == before and len(ds) == self.seen[at]
            return
        receipt = tx.receipt
        assert len(receipt.row_ids) == len(added) and not set(receipt.row_ids.tolist()) & set(self.ids)
        self.rows += added
        self.ids += receipt.row_ids.tolist()
        self.commits.append(f"commit {len(self.commits)}")
        self.seen[at] = len(self.rows)
        self.kept.append((receipt.snapshot, len(self.rows)))

    def same(self, ds, name, found, row, where):
        value = expected(name, self.rows[row][name])
        if name in ("label", "word", "other") and found is not None:
            found = ds.vocabulary(name)[int(found)]
        if value is None or isinstance(value, str | bytes | dict):
            assert type(found) is type(value) and found == value, where
        else:
            found = np.asarray(pixels(found))
            assert found.shape == np.shape(value) and found.dtype == getattr(value, "dtype", found.dtype), where
            assert np.array_equal(found, value, equal_nan=found.dtype.kind == "f"), where

    def check(self, ds, seen, where):
        """Read samples through this handle in a randomly chosen way, and compare them with the model."""
        assert len(ds) == seen, where
        rng, names = self.rng, self.rng.sample(list(self.kinds), self.rng.randint(1, len(self.kinds)))
        rows = [rng.randrange(seen) for _ in range(rng.choice([1, 3, 40]))] if seen else []
        way = rng.choice(["take", "row ids", "slice", "one", "column", "scan", "select", "nested", "iterate"])
        where = (*where, way)
        if way == "take":
            batch = ds.take([row - seen if rng.random() < 0.3 else row for row in rows], columns=[*names, "_position", "_row_id"])
            assert batch["_position"].tolist() == rows and batch["_row_id"].tolist() == [self.ids[row] for row in rows], where
        elif way == "row ids":
            batch = ds.take(row_ids=[self.ids[row] for row in rows], columns=names)
        elif way == "slice":
            key = slice(*(rng.choice([None, rng.randint(-seen - 2, seen + 2)]) for _ in range(2)), rng.choice([None, 1, 2, -1, -3]))
            rows, batch = list(range(seen))[key], ds[key]
        elif way == "select":
            view = ds.select(rows)
            batch = view.take(list(range(len(rows)))[::-1], columns=names)
            rows = rows[::-1]
        elif way == "nested":
            view, rows = ds.select(rows).select(list(range(len(rows)))[::2]), rows[::2]
            batch = view[:]
        elif way == "scan":
            many = list(ds.select(rows).scan(names, batch_size=rng.choice([1, 7, 1000])))
            assert sum(batch.num_rows for batch in many) == len(rows), where
            for name in names:
                found = [scanned(ds, name, value) for batch in many for value in batch.column(name)]
                for row, value in zip(rows, found, strict=True):
                    self.same(ds, name, value, row, (*where, name, row))
            return
        elif way == "iterate":
            rows, samples = list(range(seen))[:20], []
            for sample, _ in zip(ds, rows, strict=False):
                samples.append(sample)
            batch = {name: [sample[name] for sample in samples] for name in names}
        else:
            for row in rows[:5]:
                sample = ds[row] if way == "one" else {name: ds[name][row] for name in names}
                for name in names:
                    self.same(ds, name, sample[name], row, (*where, name, row))
            return
        for name in names:
            assert len(batch[name]) == len(rows), (*where, name)
            for place, row in enumerate(rows):
                found = batch[name][place] if isinstance(batch[name], list) else ps.view.unwrap(batch[name], place)
                self.same(ds, name, found, row, (*where, name, row))

    def step(self, where):
        at, what = self.rng.randrange(3), self.rng.choice(["transact"] * 4 + ["check"] * 6 + ["refresh", "open", "past", "pickle", "log"])
        ds, where = self.handles[at], (*where, what)
        if what == "transact":
            self.transact(at)
        elif what == "refresh":
            ds.refresh()
            self.seen[at] = len(self.rows)
        elif what == "open":
            self.handles[at], self.seen[at] = ps.open(self.root, io=self.rng.choice(ACCESS)), len(self.rows)
        elif what == "past":
            snapshot, count = self.rng.choice(self.kept)
            self.check(ps.open(self.root, snapshot=snapshot, io=self.rng.choice(ACCESS)), count, where)
            return
        elif what == "pickle":
            self.check(pickle.loads(pickle.dumps(ds)), self.seen[at], where)
        elif what == "log":
            newest = ps.open(self.root)
            assert [commit.message for commit in newest.log()][: len(self.commits)] == self.commits[::-1], where
            assert not ds.verify()["problems"], where
        self.check(self.handles[at], self.seen[at], where)


@pytest.mark.parametrize("part", range(6))
def test_programs_of_several_handles(tmp_path, part):
    for seed in SEEDS[part::6]:
        program = Program(seed, tmp_path / f"set {seed}")
        for number in range(25):
            program.step((seed, number))
        newest = ps.open(tmp_path / f"set {seed}")
        program.check(newest, len(program.rows), (seed, "end"))
        assert not newest.verify()["problems"] and len(newest.log()) == len(program.commits) + 1
        for words in (newest.vocabulary(name) for name in program.kinds if name in ("word", "other")):
            assert len(set(words)) == len(words), seed

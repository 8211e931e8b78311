"""Random programs on several handles, compared with a model in plain Python. Other files test single calls; this file tests combinations.

Handles in every access mode append, update and delete samples in transactions, some of which are aborted, contain refused calls, or
conflict with other commits. Some transactions add samples that were staged by any handle, some have a journal and are continued after a crash. The
handles also read in every possible way, refresh, open old snapshots and are reopened. The model records
the cells of every sample at every commit, and the commit that each handle sees.
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
    if name == "classes":
        return np.array([ds.vocabulary(name).index(word) for word in value.as_py()], np.int64)
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


class Version:
    """What a snapshot contains: its row ids in order of position, and the cells of each sample. Also what its commit changed."""

    def __init__(self, order, cells, snapshot):
        self.order, self.cells, self.snapshot = order, cells, snapshot
        self.changed, self.deleted, self.appended = set(), set(), False

    def after(self, added, cells, deleted):
        """Return the version after a commit. `cells` maps row ids and column names to new values."""
        version = Version([*(row for row in self.order if row not in deleted), *(row for row in added if row not in deleted)], {}, None)
        version.cells = {row: {**self.cells.get(row, {}), **added.get(row, {}), **cells.get(row, {})} for row in version.order}
        version.changed, version.deleted, version.appended = {(row, name) for row in cells for name in cells[row]}, deleted, bool(added)
        return version

    def conflicts(self, cells, deleted, reads, scanned):
        """Whether a transaction with these changes and reads may not follow this commit. `scanned` names columns that were read whole."""
        changed = {row for row, _ in self.changed}
        values = any((row, name) in self.changed for row in cells for name in cells[row])
        read = reads & self.changed or self.deleted & {row for row, _ in reads}
        if scanned:
            read = read or self.appended or self.deleted or any(name in scanned for _, name in self.changed)
        return bool(values or deleted & (self.deleted | changed) or self.deleted & cells.keys() or read)


class Program:
    def __init__(self, seed, root):
        self.rng, self.numbers, self.root = random.Random(seed), np.random.default_rng(seed), root
        self.kinds = {name: SCHEMA[name] for name in self.rng.sample(list(SCHEMA), self.rng.randint(1, 7))}
        ds = ps.create(root, self.kinds)
        self.versions, self.messages, self.removed = [Version([], {}, ds.snapshot)], [], []
        self.stages, self.journal = [], root.with_name(f"{root.name} journal")
        self.handles = [ds, *(ps.open(root, io=access) for access in self.rng.sample(ACCESS, 2))]
        self.seen = [0, 0, 0]

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

    def append(self, tx, added):
        columns, rows = self.some(self.rng.choice([0, 1, 2, 5, 12]))
        unfit = next((name for name in reversed(columns) if name in UNFIT), None)
        if unfit and rows and self.rng.random() < 0.2:
            wrong = {**columns, unfit: [*list(columns[unfit])[:-1], *UNFIT[unfit]]}
            with pytest.raises((ps.InvalidInputError, ps.CorruptError)):
                tx.append(wrong)
        ids = tx.append(columns)
        assert (ids < 0).all() and len(ids) == len(rows)
        added.update(zip(ids.tolist(), rows, strict=True))

    def update(self, tx, known, cells):
        ids = [self.rng.choice(known) for _ in range(self.rng.choice([1, 2, 30]))]
        columns, rows = self.some(len(ids))
        unfit = next((name for name in reversed(columns) if name in UNFIT), None)
        if unfit and self.rng.random() < 0.2:
            wrong = {**columns, unfit: [*list(columns[unfit])[:-1], *UNFIT[unfit]]}
            with pytest.raises((ps.InvalidInputError, ps.CorruptError)):
                tx.update(wrong, row_ids=ids)
        tx.update(columns, row_ids=ids)
        for row, values_of_row in zip(ids, rows, strict=True):
            cells.setdefault(row, {}).update({name: values_of_row[name] for name in columns})

    def add(self, tx, ds, added, staged):
        """Add a new stage, or one that may have been added before."""
        if self.rng.random() < 0.6 or not self.stages:
            columns, rows = self.some(self.rng.choice([1, 3]))
            maker = self.handles[self.rng.randrange(3)]
            try:
                stage = maker.stage(columns)
            except ps.InvalidInputError as error:  # Nulls of tiled columns have no file.
                assert "has only nulls" in error.message and all(value is None for row in rows for value in row.values())
                return
            self.stages.append({"stage": pickle.loads(pickle.dumps(stage)), "rows": rows, "commit": None, "ids": None})
        entry = self.rng.choice(self.stages[-3:])
        ids = tx.add([entry["stage"]] * self.rng.choice([1, 2])).tolist()[: len(entry["rows"])]
        seen = self.seen[self.handles.index(ds)]
        if entry["commit"] is not None and entry["commit"] <= seen:
            assert ids == entry["ids"]
        elif any(entry is other for other, _ in staged):
            assert ids == next(known for other, known in staged if other is entry)
        else:
            added.update(zip(ids, entry["rows"], strict=True))
            staged.append((entry, ids))

    def read(self, tx, ds, known, current, reads):
        """Read samples inside a transaction."""
        ids, names = [self.rng.choice(known) for _ in range(self.rng.choice([1, 3, 20]))], self.rng.sample(list(self.kinds), 1)
        batch = tx.take(ids, columns=[*names, "_row_id"])
        assert batch["_row_id"].tolist() == ids
        for name in names:
            for place, row in enumerate(ids):
                found = batch[name][place] if isinstance(batch[name], list) else ps.views.sample.unwrap(batch[name], place)
                self.same(tx._view(), name, found, current(row)[name], ("inside", name, row))
        reads |= {(row, name) for row in ids for name in names}

    def transact(self, at):
        ds, gives_up, base = self.handles[at], self.rng.random() < 0.15, self.versions[self.seen[at]]
        before, message = ds.snapshot, f"commit {len(self.versions)}"
        added, cells, deleted, reads, scanned, staged = {}, {}, set(), set(), set(), []
        # Values of tiled columns do not go into journals.
        tiled = any(getattr(kind, "tile", None) for kind in self.kinds.values())
        journal = self.journal if not tiled and self.rng.random() < 0.35 else None
        theirs, isolation = self.versions[self.seen[at] + 1 :], self.rng.choice(["serializable", "snapshot"])
        current = lambda row: {**(base.cells.get(row) or added[row]), **cells.get(row, {})}  # noqa: E731

        def collides():
            counted = (reads, scanned) if isolation == "serializable" else (set(), set())
            again = any(entry["commit"] is not None for entry, _ in staged)
            return again or any(version.conflicts(cells, deleted, *counted) for version in theirs)

        tx, kept = ds.transaction(message, isolation=isolation, journal=journal), (set(), set())
        try:
            for _ in range(self.rng.randint(1, 4)):
                if journal and self.rng.random() < 0.4:
                    tx._core.abort(
                        True
                    )  # What a crash leaves is the journal. It has the reads before each change, and none after the last one.
                    reads, scanned = set(kept[0]), set(kept[1])
                    tx = self.reopened(at).transaction(message, isolation=isolation, journal=journal)
                known = [row for row in (*base.order, *added) if row not in deleted]
                ways = ["append"] * 3 + ["update"] * 3 + ["delete", "read", "where"] if known else ["append"]
                what = self.rng.choice(ways if journal else [*ways, "add"])
                if self.rng.random() < 0.1:
                    assert len(tx) == len(known)
                    scanned.add("")  # No column, but the number of samples.
                if what == "append":
                    self.append(tx, added)
                elif what == "add":
                    self.add(tx, ds, added, staged)
                elif what == "update":
                    self.update(tx, known, cells)
                elif what == "read":
                    self.read(tx, ds, known, current, reads)
                elif what == "where":
                    column = next((name for name in ("number", "text", "word") if name in self.kinds), None)
                    if column:
                        found = {row for row in known if (value := current(row)[column]) is not None and value in (3, "", "w7")}
                        condition = {"number": "Number = 3", "text": "\"text\" = ''", "word": "word = 'w7'"}[column]
                        assert tx.delete(where=condition) == len(found)
                        deleted |= found
                        scanned.add(column)
                else:
                    rows = [self.rng.choice(known) for _ in range(self.rng.choice([1, 2, len(known) // 3 + 1]))]
                    tx.delete(row_ids=rows)
                    deleted |= set(rows)
                if what != "read" and not (what == "where" and not column):
                    kept = set(reads), set(scanned)
                gone = [*deleted, *self.removed] if theirs == [] else list(deleted)
                if gone and self.rng.random() < 0.1:
                    with pytest.raises(ps.NotFoundError, match="row id"):
                        tx.delete(row_ids=[self.rng.choice(gone)])
            if gives_up:
                raise ZeroDivisionError
            tx.commit()
        except (ZeroDivisionError, ps.ConflictError) as error:
            assert gives_up if isinstance(error, ZeroDivisionError) else collides(), message
            tx.abort()
            self.journal.unlink(missing_ok=True)
            assert ds.snapshot == before and len(ds) == len(base.order)
            return
        assert not collides(), message
        receipt = tx.receipt
        final = dict(zip(added, receipt.row_ids.tolist(), strict=True))
        assert not set(final.values()) & {row for version in self.versions for row in version.order}
        of = lambda row: final.get(row, row)  # noqa: E731
        version = self.versions[-1].after(
            {of(row): values_of_row for row, values_of_row in added.items()},
            {of(row): new for row, new in cells.items()},
            {of(row) for row in deleted},
        )
        version.snapshot = receipt.snapshot
        self.removed += version.deleted
        self.versions.append(version)
        self.messages.append(message)
        self.seen[at] = len(self.versions) - 1
        for entry, ids in staged:
            entry["commit"], entry["ids"] = self.seen[at], [of(row) for row in ids]
        if journal:
            assert not journal.exists()
            ds.refresh()  # The handle of the last part of the transaction made the commit.

    def reopened(self, at):
        """Return a handle that another process would open."""
        return ps.open(self.root, snapshot=self.versions[self.rng.randrange(len(self.versions))].snapshot)

    def same(self, ds, name, found, value, where):
        value = expected(name, value)
        if name in ("label", "word", "other") and found is not None:
            found = ds.vocabulary(name)[int(found)]
        if value is None or isinstance(value, str | bytes | dict):
            assert type(found) is type(value) and found == value, where
        else:
            found = np.asarray(pixels(found))
            assert found.shape == np.shape(value) and found.dtype == getattr(value, "dtype", found.dtype), where
            assert np.array_equal(found, value, equal_nan=found.dtype.kind == "f"), where

    def check(self, ds, version, where):
        """Read samples through this handle in a randomly chosen way, and compare them with the model."""
        seen, ids = len(version.order), version.order
        assert len(ds) == seen, where
        cell = lambda row, name: version.cells[ids[row]][name]  # noqa: E731
        rng, names = self.rng, self.rng.sample(list(self.kinds), self.rng.randint(1, len(self.kinds)))
        rows = [rng.randrange(seen) for _ in range(rng.choice([1, 3, 40]))] if seen else []
        way = rng.choice(["take", "row ids", "slice", "one", "column", "scan", "select", "nested", "iterate"])
        where = (*where, way)
        if way == "take":
            batch = ds.take([row - seen if rng.random() < 0.3 else row for row in rows], columns=[*names, "_position", "_row_id"])
            assert batch["_position"].tolist() == rows and batch["_row_id"].tolist() == [ids[row] for row in rows], where
        elif way == "row ids":
            batch = ds.take(row_ids=[ids[row] for row in rows], columns=names)
            if version.deleted:
                with pytest.raises(ps.NotFoundError, match="was deleted"):
                    ds.take(row_ids=[*ids[:3], rng.choice(list(version.deleted))])
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
                    self.same(ds, name, value, cell(row, name), (*where, name, row))
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
                    self.same(ds, name, sample[name], cell(row, name), (*where, name, row))
            return
        for name in names:
            assert len(batch[name]) == len(rows), (*where, name)
            for place, row in enumerate(rows):
                found = batch[name][place] if isinstance(batch[name], list) else ps.views.sample.unwrap(batch[name], place)
                self.same(ds, name, found, cell(row, name), (*where, name, row))

    def step(self, where):
        at, what = (
            self.rng.randrange(3),
            self.rng.choice(["transact"] * 4 + ["check"] * 6 + ["refresh", "open", "past", "pickle", "log", "compact"]),
        )
        ds, where = self.handles[at], (*where, what)
        newest = len(self.versions) - 1
        if what == "transact":
            self.transact(at)
        elif what == "compact":
            # The handle may be old. Its samples are then those of the newest commit.
            before = self.versions[-1]
            if ds.compact().snapshot != before.snapshot:
                self.versions.append(Version(before.order, before.cells, ds.snapshot))
                self.messages.append("compact")
                newest += 1
            self.seen[at] = newest
        elif what == "refresh":
            ds.refresh()
            self.seen[at] = newest
        elif what == "open":
            self.handles[at], self.seen[at] = ps.open(self.root, io=self.rng.choice(ACCESS)), newest
        elif what == "past":
            version = self.rng.choice(self.versions)
            self.check(ps.open(self.root, snapshot=version.snapshot, io=self.rng.choice(ACCESS)), version, where)
            return
        elif what == "pickle":
            self.check(pickle.loads(pickle.dumps(ds)), self.versions[self.seen[at]], where)
        elif what == "log":
            ds = ps.open(self.root)
            assert [commit.message for commit in ds.log()][: len(self.messages)] == self.messages[::-1], where
            assert not ds.verify()["problems"], where
        self.check(self.handles[at], self.versions[self.seen[at]], where)


@pytest.mark.parametrize("part", range(6))
def test_programs_of_several_handles(tmp_path, part):
    for seed in SEEDS[part::6]:
        program = Program(seed, tmp_path / f"set {seed}")
        for number in range(25):
            program.step((seed, number))
        newest = ps.open(tmp_path / f"set {seed}")
        program.check(newest, program.versions[-1], (seed, "end"))
        assert not newest.verify()["problems"] and len(newest.log()) == len(program.messages) + 1
        for words in (newest.vocabulary(name) for name in program.kinds if name in ("word", "other")):
            assert len(set(words)) == len(words), seed

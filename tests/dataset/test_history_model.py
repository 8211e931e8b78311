"""Random histories, compared with a model at the level of samples: which branch knows a sample, and which one deleted it.

The model follows one sentence of section 10 of the spec: a sample that never lived on a branch has not been deleted there. It knows neither
fragments nor overlays. Per snapshot, a sample is alive, deleted or unknown; a merge compares these three and the cells of live samples.
"""

import contextlib
import os
import random
import shutil

import penstock as ps
import pytest
from anything import ROTATION, SEEDS

pytestmark = pytest.mark.local
DTYPES = ["int16", "int32", "int64"]
ALIVE, DELETED, UNKNOWN = "alive", "deleted", "unknown"


class Refused(Exception):
    """A merge is a conflict."""


class State:
    """What a snapshot has and knows: columns by id, and the state and the cells of each sample that it knows, by row id."""

    def __init__(self, columns, rows, dropped=()):
        self.columns, self.rows = dict(columns), {row: (state, dict(cells)) for row, (state, cells) in rows.items()}
        # Deleted samples whose values a compaction dropped.
        self.dropped = {row for row in dropped if self.what(row) == DELETED}

    def copy(self):
        return State(self.columns, self.rows, self.dropped)

    def what(self, row):
        return self.rows[row][0] if row in self.rows else UNKNOWN

    def alive(self):
        return [row for row in self.rows if self.what(row) == ALIVE]

    def cell(self, row, column):
        return self.rows[row][1].get(column, FILLS[column])

    def seen(self):
        """Return what a reader sees: names and dtypes of columns, and the cells of live samples."""
        names = {name: (dtype, column) for column, (name, dtype) in self.columns.items()}
        return names, {row: {column: self.cell(row, column) for column in self.columns} for row in self.alive()}


class Commit:
    def __init__(self, state, parents, snapshot):
        self.state, self.parents, self.snapshot = state, parents, snapshot
        self.ancestors = {self}.union(*(parent.ancestors for parent in parents))


# The value of each column, by id, where a sample has none. The values that each sample was appended with, by column.
FILLS, APPENDED = {}, {}


def merge_bases(one, other):
    common = one.ancestors & other.ancestors
    return [commit for commit in common if not any(commit in later.ancestors for later in common - {commit})]


def merged_columns(base, ours, theirs, policy):
    """Merge the columns of both sides. A column is dropped if one side dropped it, unless its new values would be lost."""
    for column in base.columns:
        for kept, dropper, word in ((ours, theirs, "theirs"), (theirs, ours, "ours")):
            if column in kept.columns and column not in dropper.columns and policy(column) != word:
                for row in kept.alive():
                    is_new = base.what(row) != ALIVE and column in APPENDED[row]
                    if is_new or (base.what(row) == ALIVE and base.cell(row, column) != kept.cell(row, column)):
                        raise Refused("values of a dropped column", column)
    columns = {}
    for column, (name, dtype) in ours.columns.items():
        if column in base.columns and column not in theirs.columns:
            continue
        if column in theirs.columns:
            before, other = base.columns.get(column), theirs.columns[column]
            if before and before[0] == name:
                name = other[0]
            elif not (before and before[0] == other[0]) and name != other[0]:
                raise Refused("two names", column)
            dtype = DTYPES[max(DTYPES.index(known[1]) for known in (before, other, (name, dtype)) if known)]
        columns[column] = (name, dtype)
    columns |= {column: spec for column, spec in theirs.columns.items() if column not in ours.columns and column not in base.columns}
    if len({name for name, _ in columns.values()}) < len(columns):
        raise Refused("one name twice")
    return columns


def changed(one, other, row, columns, policy):
    """Return whose values count in a sample that one side changed and the other one lacks: None if nothing was changed."""
    first = lambda column: APPENDED[row].get(column, FILLS[column])  # noqa: E731
    before = lambda column: one.cell(row, column) if column in one.columns else first(column)  # noqa: E731
    chosen = {policy(column) for column in columns if before(column) != other.cell(row, column)}
    if "fail" in chosen or len(chosen) == 2:
        raise Refused("changed and deleted", row)
    return chosen.pop() if chosen else None


def three_way(base, ours, theirs, policy, copied):
    """Merge two states, or copy the difference between `base` and `theirs` to `ours`."""
    columns = merged_columns(base, ours, theirs, policy)
    result = State(columns, ours.rows)
    shared = [column for column in columns if column in ours.columns and column in theirs.columns]
    new = [column for column in columns if column not in ours.columns]

    def take(row):
        """Give `ours` the sample of `theirs`. Columns that only `ours` has keep the value that the sample had there."""
        cells = {column: theirs.cell(row, column) for column in columns if column in theirs.columns}
        own = {column: ours.cell(row, column) for column in columns if column not in theirs.columns and row in ours.rows}
        result.rows[row] = (ALIVE, {**cells, **own})

    def cells(row):
        """Merge the cells of a sample that both sides have. Without an ancestor, both sides have changed a cell in which they differ."""
        for column in new:
            result.rows[row][1][column] = theirs.cell(row, column)
        for column in shared:
            mine, other = ours.cell(row, column), theirs.cell(row, column)
            if base.what(row) == ALIVE and column in base.columns:
                before = base.cell(row, column)
                is_mine, is_other = mine != before, other != before
            else:
                is_mine = is_other = mine != other
            if is_other and (not is_mine or mine != other):
                if is_mine and policy(column) == "fail":
                    raise Refused("changed by both", row, column)
                if not is_mine or policy(column) == "theirs":
                    result.rows[row][1][column] = other

    for row in [*ours.rows, *(row for row in theirs.rows if row not in ours.rows)]:
        before, mine, other = base.what(row), ours.what(row), theirs.what(row)
        if mine == other == ALIVE:
            cells(row)
        elif before == ALIVE and other == ALIVE:
            if changed(base, theirs, row, [column for column in columns if column in theirs.columns], policy) == "theirs":
                take(row)
        elif before == ALIVE and mine == ALIVE:
            if changed(base, ours, row, [column for column in columns if column in ours.columns], policy) != "ours":
                result.rows[row] = (DELETED, ours.rows[row][1])
        elif other == ALIVE and (mine == UNKNOWN or before == DELETED):
            take(row)
        elif before == UNKNOWN and not copied:
            if (mine, other) == (DELETED, ALIVE):
                if changed(ours, theirs, row, [column for column in columns if column in theirs.columns], policy) == "theirs":
                    take(row)
            elif (mine, other) == (ALIVE, DELETED):
                if changed(theirs, ours, row, [column for column in columns if column in ours.columns], policy) != "ours":
                    result.rows[row] = (DELETED, ours.rows[row][1])
            elif (mine, other) == (UNKNOWN, DELETED):
                result.rows[row] = (DELETED, dict(theirs.rows[row][1]))
    return State(result.columns, result.rows, ours.dropped | theirs.dropped)


class Program:
    def __init__(self, seed, root):
        FILLS.clear()
        APPENDED.clear()
        self.rng, self.root, self.seed, self.columns, self.tags = random.Random(seed), root, seed, 0, {}
        ds = ps.create(root, {"key": "int64", "a": "int16"})
        first = Commit(State({self.column(None): ("key", "int64"), self.column(None): ("a", "int16")}, {}), [], ds.snapshot)
        self.commits, self.heads, self.handles = [first], {"main": first}, {"main": ds}
        self.counts = dict.fromkeys(["merged", "refused", "copied", "crossed", "compacted", "dropped"], 0)

    def column(self, fill):
        """Return the id of a new column."""
        self.columns += 1
        FILLS[self.columns] = fill
        return self.columns

    def value(self):
        return self.rng.choice([None, 0, 1, 2, 3])

    def made(self, name, state, parents, snapshot):
        commit = Commit(state, parents, snapshot)
        self.commits.append(commit)
        self.heads[name] = commit

    def transact(self, name):
        """Append, update, upsert and delete in one transaction. Sometimes a commit is copied or merged while it is open."""
        head, ds, rng = self.heads[name], self.handles[name], self.rng
        state, new, own = head.state.copy(), [], {}
        if not state.columns:  # Merges have dropped them all.
            return
        names = {column: text for column, (text, _) in state.columns.items()}
        before = {column: dtype for column, (_, dtype) in state.columns.items()}
        only_appends = rng.random() < 0.3
        tx = ds.transaction(f"commit {len(self.commits)}")
        # A merge with a side that was reset may drop columns, and narrow dtypes.
        kept = lambda: {column: dtype for column, (_, dtype) in self.heads[name].state.columns.items()}  # noqa: E731
        lost = lambda: any(DTYPES.index(kept().get(column, "int16")) < DTYPES.index(dtype) for column, dtype in before.items())  # noqa: E731
        dropped = lambda: names.keys() - kept().keys() or lost()  # noqa: E731
        with contextlib.ExitStack() as stack:
            stack.push(lambda kind, error, _: bool(kind and issubclass(kind, ps.ConflictError) and dropped()))
            stack.enter_context(tx)
            for _ in range(rng.randint(1, 3)):
                known = [*state.alive(), *(row for row in own if own[row] is not None)]
                what = "append" if only_appends or not known else rng.choice(["append", "update", "update", "delete", "upsert"])
                if what == "append":
                    given = [{column: self.value() for column in state.columns} for _ in range(rng.choice([1, 2, 4]))]
                    rows = tx.append({names[column]: [cells[column] for cells in given] for column in names}).tolist()
                    new += rows
                    own.update(zip(rows, given, strict=True))
                elif what == "delete":
                    # Whether the last value counts of a sample that one transaction changes and deletes, no sentence says.
                    same = [row for row in known if row in own or state.rows[row][1] == head.state.rows[row][1]]
                    for row in rng.sample(same, min(len(same), rng.choice([1, 2]))):
                        tx.delete(row_ids=[row])
                        if row in own:
                            own[row] = None
                        else:
                            state.rows[row] = (DELETED, state.rows[row][1])
                else:
                    chosen = rng.sample(known, min(len(known), rng.choice([1, 1, 3])))
                    columns = rng.sample(list(names), rng.randint(1, len(names)))
                    values = {column: [self.value() for _ in chosen] for column in columns}
                    if what == "upsert":
                        rows, values = self.upsert(tx, state, own, names, values)
                        if rows is None:
                            continue
                        new += [row for row in rows if row not in own and row not in state.rows]
                        chosen = rows
                    else:
                        tx.update({names[column]: values[column] for column in columns}, row_ids=chosen)
                    for place, row in enumerate(chosen):
                        cells = own.setdefault(row, {}) if row not in state.rows else state.rows[row][1]
                        cells.update({column: of[place] for column, of in values.items()})
            if only_appends and rng.random() < 0.5:
                self.combine(name, rng.random() < 0.5, ps.open(self.root, branch=name))
        if dropped():  # A merge or a copy changed the columns in the meantime, so the transaction was refused.
            assert only_appends and ds.refresh().snapshot == self.heads[name].snapshot
            return
        head, later = self.heads[name], self.heads[name].state.copy() if only_appends else state
        final = dict(zip(new, tx.receipt.row_ids.tolist(), strict=True))
        for row in new:
            APPENDED[final[row]] = dict(own[row] or dict.fromkeys(names))
            cells = {column: value for column, value in (own[row] or {}).items() if column in later.columns}
            if own[row] is not None:
                later.rows[final[row]] = (ALIVE, cells)
        self.made(name, later, [head], tx.receipt.snapshot)

    def upsert(self, tx, state, own, names, values):
        """Upsert a sample or two by column `key`, if each key has at most one sample. Returns their row ids and values."""
        key = next((column for column, name in names.items() if name == "key"), None)
        alive = {
            **{row: cells for row, (what, cells) in state.rows.items() if what == ALIVE},
            **{r: c for r, c in own.items() if c is not None},
        }
        keys = [cells.get(key, FILLS.get(key)) for cells in alive.values()]
        if key is None or len(set(keys)) < len(keys) or None in keys:
            return None, None
        wanted = self.rng.sample(range(8), self.rng.choice([1, 2]))
        values = {column: [self.value() for _ in wanted] for column in names} | {key: wanted}
        rows = tx.upsert({names[column]: of for column, of in values.items()}, key="key").tolist()
        by_key = {cells.get(key, FILLS.get(key)): row for row, cells in alive.items()}
        assert [row for row, of in zip(rows, wanted, strict=True) if of in by_key] == [by_key[of] for of in wanted if of in by_key]
        return rows, values

    def alter(self, name):
        """Add, drop, rename or widen a column in a commit of its own."""
        head, ds, rng = self.heads[name], self.handles[name], self.rng
        state, what = head.state.copy(), rng.choice(["add", "add", "drop", "rename", "widen"])
        column = rng.choice(list(state.columns) or [0])
        text, dtype = state.columns.get(column, ("", "int64"))
        what = what if state.columns else "add"
        with ds.transaction(f"alter {len(self.commits)}") as tx:
            if what == "add":
                fill = rng.choice([None, 7])
                text = f"c{rng.randint(0, 5)}" if rng.random() < 0.3 else f"c{self.columns}"
                if text in [known for known, _ in state.columns.values()]:
                    text = f"new {self.columns}"
                tx.add_column(text, "int16", fill=fill)
                state.columns[self.column(fill)] = (text, "int16")
            elif what == "drop" and len(state.columns) > 1:
                tx.drop_column(text, force=True)
                del state.columns[column]
            elif what == "widen" and dtype != "int64":
                wider = rng.choice(DTYPES[DTYPES.index(dtype) + 1 :])
                tx.widen_column(text, wider)
                state.columns[column] = (text, wider)
            else:
                fresh = f"r{len(self.commits)}"
                tx.rename_column(text, fresh)
                state.columns[column] = (fresh, dtype)
        self.made(name, state, [head], tx.receipt.snapshot)

    def policy(self, ours, theirs):
        """Return a random argument for `on_conflict`, and the policy of each column by id."""
        others = self.rng.choice(["fail", "ours", "theirs"])
        if self.rng.random() < 0.6:
            return others, lambda _: others
        chosen = {name: self.rng.choice(["fail", "ours", "theirs"]) for name, _ in ours.columns.values() if self.rng.random() < 0.6}
        ids = {column: chosen[name] for column, (name, _) in ours.columns.items() if name in chosen}
        ids |= {column: chosen[name] for column, (name, _) in theirs.columns.items() if name in chosen and column not in ours.columns}
        return {**chosen, "*": others}, lambda column: ids.get(column, others)

    def would_come_back(self, ours, given, bases):
        """Return whether a column that was dropped, or that a reset brought back, meets its older values. No sentence says what then counts."""
        past = lambda commit: {column for one in commit.ancestors for column in one.state.columns} - set(commit.state.columns)  # noqa: E731
        for one, other in ((ours, given), (given, ours)):
            back = past(one) & set(other.state.columns)
            if back and not all(back <= set(base.state.columns) for base in bases):
                return True
        return any(past(base) & {*ours.state.columns, *given.state.columns} for base in bases)

    def needs_dropped(self, ours, given, bases):
        """Return whether values count that a compaction may have dropped. No sentence says what they were."""
        one, other = ours.state, given.state
        for row in {*one.dropped, *other.dropped}:
            if DELETED in (one.what(row), other.what(row)) and ALIVE in (one.what(row), other.what(row)):
                new = any(base.state.what(row) == UNKNOWN for base in bases)
                if new or (row in one.dropped and set(one.columns) - set(other.columns)):
                    return True
        return False

    def compact(self, name):
        head, ds = self.heads[name], self.handles[name]
        done = ds.compact()
        assert ds.snapshot == done.snapshot
        if done.snapshot != head.snapshot:
            deleted = {row for row, (state, _) in head.state.rows.items() if state == DELETED}
            state = State(head.state.columns, head.state.rows, deleted)
            self.made(name, state, [head], done.snapshot)
            self.counts["compacted"] += 1
            self.counts["dropped"] += done.dropped_samples
            again = ds.compact()
            assert again.snapshot == done.snapshot, (self.seed, name, again)

    def combine(self, name, pick, handle=None):
        """Merge another branch or an older snapshot, or copy a commit."""
        ours, rng = self.heads[name], self.rng
        given = rng.choice(self.commits[1:] or self.commits)
        label = given.snapshot
        if not pick and rng.random() < 0.6:
            label = rng.choice(list(self.heads))
            given = self.heads[label]
        if pick and not given.parents:
            return
        bases = given.parents[:1] if pick else merge_bases(ours, given)
        argument, policy = self.policy(ours.state, given.state)
        if len(bases) > 1:
            argument, policy = "fail", lambda _: "fail"
            self.counts["crossed"] += 1
        if self.would_come_back(ours, given, bases) or self.needs_dropped(ours, given, bases):
            return
        handle, where = handle or self.handles[name], (self.seed, len(self.commits), "pick" if pick else "merge", name, label, argument)
        call = handle.cherry_pick if pick else handle.merge
        try:
            expected = self.expected(ours, given, bases, policy, pick)
        except Refused as error:
            with pytest.raises(ps.ConflictError):
                call(label, on_conflict=argument)
                pytest.fail(f"{where}: expected a conflict: {error.args}")
            self.counts["refused"] += 1
            assert ps.open(self.root, branch=name).snapshot == ours.snapshot, where
            return
        try:
            receipt = call(label, on_conflict=argument)
        except ps.ConflictError as error:
            # Files that a copied commit brought may have values of a column that the branch lacks. Of a dropped column, the values count that
            # samples have which the ancestor lacks, also those that an update wrote as they were.
            apart = {*ours.state.columns} ^ {*given.state.columns}
            new = [row for row in {*ours.state.alive(), *given.state.alive()} if any(base.state.what(row) != ALIVE for base in bases)]
            found = "would come back with old values" in str(error) or (new and "changed or added" in str(error))
            assert apart and found, (*where, str(error))
            return
        self.counts["copied" if pick else "merged"] += 1
        gained = {row for row in expected.alive() if ours.state.what(row) != ALIVE}
        assert set(receipt.row_ids.tolist()) == gained, where
        if receipt.snapshot == ours.snapshot:
            assert expected.seen() == ours.state.seen(), where
            assert pick or given in ours.ancestors, where
            return
        assert not pick or expected.seen() != ours.state.seen(), (*where, "a copy without changes")
        self.made(name, expected, [ours] if pick else [ours, given], receipt.snapshot)
        self.handles[name].refresh()
        self.check(self.handles[name], expected, where)

    def expected(self, ours, given, bases, policy, pick):
        if not pick and given in ours.ancestors:
            return ours.state
        if not pick and ours in bases:
            return given.state.copy()
        # The latest ancestor decides on names.
        bases = sorted(bases, key=self.commits.index, reverse=True)
        states = [three_way(base.state, ours.state, given.state, policy, pick) for base in bases]
        samples = lambda state: (state.columns.keys(), state.seen()[1])  # noqa: E731
        if any(samples(state) != samples(states[0]) for state in states):
            raise Refused("the ancestors disagree")
        # A branch learns of a deletion if it is one in the eyes of all ancestors.
        known = {row: of for row, of in states[0].rows.items() if all(row in state.rows for state in states)}
        return State(states[0].columns, known, states[0].dropped)

    def reset(self, name):
        head, target = self.heads[name], self.rng.choice(self.commits)
        if target is not head:
            receipt = self.handles[name].reset(target.snapshot)
            self.made(name, target.state.copy(), [head, target], receipt.snapshot)

    def branch(self):
        name, at = f"branch {len(self.commits)}", self.rng.choice(self.commits)
        self.handles[name] = self.handles["main"].create_branch(name, at.snapshot)
        self.made(name, at.state.copy(), [at], self.handles[name].snapshot)

    def delete(self, name):
        handle = self.handles.pop(name)
        self.handles["main"].delete_branch(name)
        del self.heads[name]
        with pytest.raises(ps.NotFoundError, match="was deleted"):
            handle.refresh()

    def tag(self):
        ds = self.handles["main"]
        if self.tags and self.rng.random() < 0.4:
            name, commit = self.tags.popitem()
            self.check(ps.open(self.root, tag=name), commit.state, (self.seed, name))
            ds.delete_tag(name)
            return
        name, commit = f"tag {len(self.commits)} {len(self.tags)}", self.rng.choice(self.commits)
        ds.create_tag(name, commit.snapshot)
        self.tags[name] = commit

    def check(self, ds, state, where):
        names, rows = state.seen()
        assert set(ds.schema) == set(names), where
        found = ds.take(range(len(ds)), columns=[*names, "_row_id"])
        ids = found["_row_id"].tolist()
        assert sorted(ids) == sorted(rows), where
        for name, (dtype, column) in names.items():
            assert str(found[name].dtype) == dtype, (*where, name)
            values = dict(zip(ids, found[name].tolist(), strict=True))
            assert values == {row: cells[column] for row, cells in rows.items()}, (*where, name)

    def step(self, number):
        name = self.rng.choice(list(self.heads))
        what = self.rng.choice(
            ["transact"] * 6
            + ["merge"] * 5
            + ["pick"] * 5
            + ["alter"] * 2
            + ["branch"] * 2
            + ["compact"] * 2
            + ["reset", "delete", "tag", "past"]
        )
        if what in ("merge", "pick"):
            self.combine(name, what == "pick")
        elif what == "branch":
            if len(self.heads) < 4:
                self.branch()
        elif what == "delete":
            if name != "main":
                self.delete(name)
        elif what == "tag":
            self.tag()
        elif what == "past":
            commit = self.rng.choice(self.commits)
            self.check(ps.open(self.root, snapshot=commit.snapshot), commit.state, (self.seed, number, "past"))
        else:
            getattr(self, what)(name)
        if name in self.heads:
            self.check(self.handles[name], self.heads[name].state, (self.seed, number, what, name))


def run(seeds, folder):
    counts = {}
    for seed in seeds:
        program = Program(seed, folder / f"set {seed}")
        for number in range(30):
            program.step(number)
        for name, head in program.heads.items():
            ds = ps.open(program.root, branch=name)
            program.check(ds, head.state, (seed, "end", name))
            assert not ds.verify()["problems"], seed
        for what, count in program.counts.items():
            counts[what] = counts.get(what, 0) + count
        shutil.rmtree(program.root)
    print(counts)
    assert len(seeds) < 1000 or all(counts.values()), counts
    assert counts["merged"] and counts["copied"], counts


@pytest.mark.parametrize("part", range(2))
def test_a_sample_that_never_lived_on_a_branch_is_not_deleted_there(tmp_path, part):
    run(SEEDS[part::4], tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("part", range(10))
def test_twenty_thousand_histories(tmp_path, part):
    count = int(os.environ.get("PENSTOCK_HISTORIES", "20000")) // 10
    run(range(10**6 * (ROTATION + 1) + part * count, 10**6 * (ROTATION + 1) + (part + 1) * count), tmp_path)

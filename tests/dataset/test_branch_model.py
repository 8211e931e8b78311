"""Random programs on several branches, compared with a model in plain Python: commits, schema changes, merges with every policy, copied commits
and resets.

The model keeps the samples and cells of each commit, and does each merge cell by cell. It predicts exactly which merges are conflicts.
"""

import random

import numpy as np
import penstock as ps
import pytest
from anything import SEEDS

KINDS = {
    "number": "int32",
    "text": ps.Text(),
    "label": ps.Label(["a", "b", "c"]),
    "word": ps.Category(),
    "cloud": ps.Tensor((None, 2), "int16"),
    "large": ps.Tensor((None,), "uint8", tile=(512,)),
}
pytestmark = pytest.mark.local


# The value of each column where a sample has none: that of the column's creation.
FILLS = {}


class State:
    """The samples of a commit: all of them in physical order, those that are alive, the values of all of them, and those that never lived on the
    branch. Also the columns."""

    def __init__(self, columns, physical=(), alive=(), cells=None, absent=(), late=()):
        self.columns, self.absent = list(columns), set(absent)
        # The cells that an update gave a value.
        self.late = set(late)
        self.physical, self.alive, self.cells = list(physical), set(alive), {row: dict(of) for row, of in (cells or {}).items()}

    def copy(self):
        return State(self.columns, self.physical, self.alive, self.cells, self.absent, self.late)

    def known(self):
        return set(self.physical) - self.absent

    def dead(self):
        return self.known() - self.alive

    def cell(self, row, name):
        return self.cells[row].get(name, FILLS.get(name))

    def seen(self):
        """Return what a reader sees."""
        return self.columns, self.order(), [[self.cell(row, name) for name in self.columns] for row in self.order()]

    def order(self):
        return [row for row in self.physical if row in self.alive]


class Commit:
    def __init__(self, state, parents, number):
        self.state, self.parents, self.number, self.snapshot = state, parents, number, None
        self.ancestors = {self}.union(*(parent.ancestors for parent in parents))


def merge_bases(ours, theirs):
    """Return the common ancestors that are not ancestors of another one."""
    common = ours.ancestors & theirs.ancestors
    return [commit for commit in common if not any(commit in other.ancestors for other in common - {commit})]


class Refused(Exception):
    pass


def three_way(base, ours, theirs, fragments, policy, bases, pick):
    """Merge states cell by cell. `fragments` are groups of samples that were appended together. Raises Refused for a conflict."""
    physical = {row for one in bases for row in one.physical}
    learned = set() if pick else theirs.dead() - ours.known() - {row for one in bases for row in one.known()}
    merged, refused, revived = ours.copy(), [], set()
    differs = lambda one, other, row, name: one.cell(row, name) != other.cell(row, name)  # noqa: E731
    for name in base.columns:
        for kept, dropper, policy_of_dropper in ((ours, theirs, "theirs"), (theirs, ours, "ours")):
            if name in kept.columns and name not in dropper.columns and policy(name) != policy_of_dropper:
                refused += [(row, name) for row in base.alive & kept.alive if differs(base, kept, row, name)]
                new = kept.alive - base.alive
                refused += [(row, name) for rows, listed in fragments.items() if name in listed for row in new & set(rows)]
                refused += [(row, name) for row in new - set(base.physical) if (row, name) in kept.late]
    if refused:
        raise Refused(refused)
    merged.late |= theirs.late
    merged.columns = [name for name in ours.columns if name in theirs.columns or name not in base.columns]
    merged.columns += [name for name in theirs.columns if name not in ours.columns and name not in base.columns]
    columns = merged.columns
    of_theirs = [name for name in columns if name not in ours.columns]
    of_both = [name for name in columns if name in ours.columns and name in theirs.columns]
    added = theirs.alive - base.alive
    for row in base.alive & theirs.alive - ours.alive:
        chosen = {policy(name) for name in columns if name in theirs.columns and differs(base, theirs, row, name)}
        if "fail" in chosen or len(chosen) == 2:
            refused.append((row, "deleted by ours"))
        elif chosen == {"theirs"}:
            (revived if row in ours.physical else added).add(row)
    for fragment in fragments:
        gone = not (added | physical | theirs.alive) & set(fragment)  # It may be a stage, so it is not forgotten.
        if (gone or (added | learned) & set(fragment)) and not set(fragment) & set(ours.physical) and set(fragment) <= set(theirs.physical):
            merged.cells.update({row: dict(theirs.cells[row]) for row in fragment})
            merged.alive |= added & set(fragment)
            merged.absent |= set(fragment) - added - learned
    # The new fragments follow in their order in `theirs`.
    merged.physical += [row for row in theirs.physical if row in merged.cells and row not in ours.physical]
    for row in sorted(added & set(ours.physical)):
        if row in ours.alive:
            merged.cells[row].update({name: theirs.cell(row, name) for name in of_theirs})
            for name in of_both:
                if differs(ours, theirs, row, name):
                    if policy(name) == "fail":
                        refused.append((row, name))
                    elif policy(name) == "theirs":
                        merged.cells[row][name] = theirs.cell(row, name)
        elif row in ours.absent or row in base.known():
            revived.add(row)
        elif not pick:
            chosen = {policy(name) for name in columns if differs(ours, theirs, row, name)}
            if "fail" in chosen or len(chosen) == 2:
                refused.append((row, "deleted by ours, without an ancestor"))
            elif chosen == {"theirs"}:
                revived.add(row)
    for row in set() if pick else (ours.alive & theirs.dead()) - base.known():
        chosen = {policy(name) for name in columns if differs(theirs, ours, row, name)}
        if "fail" in chosen or len(chosen) == 2:
            refused.append((row, "deleted by theirs, without an ancestor"))
        elif chosen != {"ours"}:
            merged.alive.discard(row)
    for row in base.alive & theirs.alive & ours.alive:
        merged.cells[row].update({name: theirs.cell(row, name) for name in of_theirs})
        for name in of_both:
            if name not in base.columns:
                if differs(ours, theirs, row, name):
                    if policy(name) == "fail":
                        refused.append((row, name))
                    elif policy(name) == "theirs":
                        merged.cells[row][name] = theirs.cell(row, name)
            elif differs(base, theirs, row, name):
                if not differs(base, ours, row, name) or policy(name) == "theirs":
                    merged.cells[row][name] = theirs.cell(row, name)
                elif differs(ours, theirs, row, name) and policy(name) == "fail":
                    refused.append((row, name))
    for row in base.alive & ours.alive - theirs.alive:
        chosen = {policy(name) for name in columns if name in ours.columns and differs(base, ours, row, name)}
        if "fail" in chosen or len(chosen) == 2:
            refused.append((row, "deleted by theirs"))
        elif chosen != {"ours"}:
            merged.alive.discard(row)
    if refused:
        raise Refused(refused)
    merged.alive |= revived
    merged.absent -= revived | learned
    for row in revived:
        own = {name: ours.cell(row, name) for name in columns if name not in theirs.columns}
        merged.cells[row] = {**theirs.cells[row], **own}
    return merged


class Program:
    def __init__(self, seed, root):
        self.rng, self.root, self.seed = random.Random(seed), root, seed
        self.names = self.rng.sample(list(KINDS), self.rng.randint(2, len(KINDS)))
        for name in ("number",):
            self.names = list(dict.fromkeys([name, *self.names]))
        ds = ps.create(root, {name: KINDS[name] for name in self.names})
        first = Commit(State(self.names), [], 0)
        first.snapshot = ds.snapshot
        self.commits, self.heads, self.handles, self.fragments, self.crossed = [first], {"main": first}, {"main": ds}, {}, 0

    def value(self, name):
        rng = self.rng
        if rng.random() < 0.15:
            return None
        return {
            "number": lambda: rng.randint(0, 3),
            "text": lambda: "ü" * rng.choice([0, 1, 2, 3000]),
            "label": lambda: rng.choice("abc"),
            "word": lambda: f"w{rng.randint(0, 20)}",
            "cloud": lambda: np.full((rng.choice([0, 1, 3]), 2), rng.randint(0, 2), np.int16),
            "large": lambda: np.full(rng.choice([0, 700, 1200]), rng.randint(0, 2), np.uint8),
        }[name.split()[0]]()

    def plain(self, value):
        """Return a value in a form that can be compared."""
        return (value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value

    def made(self, state, parents, snapshot):
        commit = Commit(state, parents, len(self.commits))
        commit.snapshot = snapshot
        self.commits.append(commit)
        return commit

    def alter(self, tx, state):
        """Add a column, with a value for samples without one, or drop a column."""
        kind = self.rng.choice(list(KINDS))
        name = f"{kind} {len(FILLS)}"
        if self.rng.random() < 0.7:
            fill = self.value(name)
            tx.add_column(name, KINDS[kind], fill=fill)
            FILLS[name] = self.plain(fill)
            state.columns = [*state.columns, name]
        elif len(state.columns) > 2:
            gone = self.rng.choice([name for name in state.columns if name != "number"])
            tx.drop_column(gone, force=True)
            state.columns = [name for name in state.columns if name != gone]

    def transact(self, name):
        """Change samples in one transaction."""
        head, ds = self.heads[name], self.handles[name]
        state, rng, added, groups, filled = head.state.copy(), self.rng, [], [([], set())], []
        with ds.transaction(f"commit {len(self.commits)}") as tx:
            for _ in range(rng.randint(1, 4)):
                known = [row for row in (*head.state.order(), *added) if row in state.alive]
                what = rng.choice(["append", "append", "update", "update", "delete"]) if known else "append"
                if rng.random() < 0.05:
                    self.alter(tx, state)
                    groups.append(([], set()))
                elif what == "append":
                    count = rng.choice([1, 2, 5])
                    given = [name for name in state.columns if name not in FILLS or rng.random() < 0.7]
                    columns = {column: [self.value(column) for _ in range(count)] for column in given}
                    rows = tx.append(columns).tolist()
                    added += rows
                    # Samples with and without a value in a column with a fill value are in different fragments.
                    given = [name for name in given if FILLS.get(name) is not None]
                    if given != filled:
                        groups.append(([], set()))
                    filled = given
                    groups[-1][0].extend(rows)
                    groups[-1][1].update(columns)
                    state.alive |= set(rows)
                    for place, row in enumerate(rows):
                        state.cells[row] = {column: self.plain(columns[column][place]) for column in columns}
                elif what == "update":
                    rows = [rng.choice(known) for _ in range(rng.choice([1, 3, 40]))]
                    columns = {column: [self.value(column) for _ in rows] for column in rng.sample(state.columns, rng.randint(1, 2))}
                    tx.update(columns, row_ids=rows)
                    state.late |= {(row, column) for row in rows for column in columns}
                    for place, row in enumerate(rows):
                        state.cells[row].update({column: self.plain(columns[column][place]) for column in columns})
                else:
                    rows = rng.sample(known, rng.choice([1, len(known) // 4 + 1]))
                    tx.delete(row_ids=rows)
                    state.alive -= set(rows)
        final = dict(zip(added, tx.receipt.row_ids.tolist(), strict=True))
        of = lambda row: final.get(row, row)  # noqa: E731
        state = State(
            state.columns,
            [*state.physical, *map(of, added)],
            map(of, state.alive),
            {of(row): cells for row, cells in state.cells.items()},
            state.absent,
            {(of(row), column) for row, column in state.late},
        )
        self.fragments.update({tuple(of(row) for row in rows): listed for rows, listed in groups if rows})
        self.heads[name] = self.made(state, [head], tx.receipt.snapshot)

    def policy(self, columns):
        """Return a random argument for `on_conflict`, and the policy of each column."""
        if self.rng.random() < 0.4:
            one = self.rng.choice(["fail", "ours", "theirs"])
            return one, lambda _: one
        chosen = {name: self.rng.choice(["ours", "theirs", "fail"]) for name in columns if self.rng.random() < 0.7}
        others = self.rng.choice(["fail", "ours", "theirs"])
        return ({**chosen, "*": others} if others != "fail" else chosen), lambda name: chosen.get(name, others)

    def combine(self, name, pick):
        """Merge another branch or an old snapshot, or copy a commit."""
        ours, given = self.heads[name], self.rng.choice(self.commits[1:] or self.commits)
        label = given.snapshot
        if not pick and self.rng.random() < 0.7:
            label = self.rng.choice(list(self.heads))
            given = self.heads[label]
        if pick and not given.parents:
            return
        argument, policy = self.policy(ours.state.columns)
        handle = self.handles[name]
        if self.rng.random() < 0.3:
            handle = ps.open(
                self.root,
                snapshot=self.rng.choice(
                    [one for one in self.commits if one.snapshot.split("-")[0] == ours.snapshot.split("-")[0]]
                ).snapshot,
            )
        call = handle.cherry_pick if pick else handle.merge
        bases = given.parents[:1] if pick else merge_bases(ours, given)
        if len(bases) > 1:
            self.crossed += 1
            argument, policy = "fail", lambda _: "fail"
        where = (self.seed, len(self.commits), "pick" if pick else "merge", label)
        for one, other in ((ours, given), (given, ours)):
            past = {column for commit in one.ancestors for column in commit.state.columns} - set(one.state.columns)
            if past & set(other.state.columns) and not all(past & set(other.state.columns) <= set(base.state.columns) for base in bases):
                return  # A column that one side dropped would come back.
        for base in bases:
            past = {column for commit in base.ancestors for column in commit.state.columns} - set(base.state.columns)
            if past & {*ours.state.columns, *given.state.columns}:
                return  # A reset brought back a dropped column. Which of its older values remain is not specified.
        try:
            if not pick and ours in bases and given is not ours:
                state = given.state.copy()
            else:
                past = [base.state for base in bases]
                states = [three_way(base, ours.state, given.state, self.fragments, policy, past, pick) for base in past]
                state = states[0]
                if any(set(other.columns) != set(state.columns) for other in states):
                    raise Refused([(row, "columns") for row in ours.state.physical])
                if any(other.order() != state.order() or other.seen() != state.seen() for other in states):
                    raise Refused([(row, "") for row in {*ours.state.physical, *given.state.physical}])
        except Refused as error:
            with pytest.raises(ps.ConflictError) as caught:
                call(label, on_conflict=argument)
            named = set(caught.value.row_ids) <= {row for row, _ in error.args[0]}
            # In a dropped column, values count that an update wrote again as they were.
            assert caught.value.hint and (len(bases) > 1 or named or "changed or added" in str(caught.value)), where
            assert ps.open(self.root, branch=name).snapshot == ours.snapshot, where
            return
        try:
            receipt = call(label, on_conflict=argument)
        except ps.ConflictError as error:
            # A policy may have left values in files of a column that the branch lacks. A merge that would bring them back is refused. A sample
            # that came back counts as changed in a dropped column if it had another value before its deletion.
            leftover = {error.column} & ({*ours.state.columns} ^ {*given.state.columns})
            back = any(base.state.dead() & (ours.state.alive | given.state.alive) for base in bases)
            assert leftover and ("would come back with old values" in str(error) or (back and "changed or added" in str(error))), where
            assert ps.open(self.root, branch=name).snapshot == ours.snapshot, where
            return
        self.handles[name].refresh()
        assert handle.snapshot == receipt.snapshot == self.handles[name].snapshot
        assert set(receipt.row_ids.tolist()) == state.alive - ours.state.alive, where
        if receipt.snapshot == ours.snapshot:
            assert (given in ours.ancestors) if not pick else state.seen() == ours.state.seen(), where
            return
        parents = [ours] if pick else [ours, given]
        assert [commit.snapshot for commit in parents] == list(self.handles[name].log()[0].parents), where
        self.heads[name] = self.made(state, parents, receipt.snapshot)

    def reset(self, name):
        head, target = self.heads[name], self.rng.choice(self.commits)
        if target is head:
            with pytest.raises(ps.InvalidInputError):
                self.handles[name].reset(target.snapshot)
            return
        receipt = self.handles[name].reset(target.snapshot)
        self.heads[name] = self.made(target.state.copy(), [head, target], receipt.snapshot)

    def create(self):
        name, at = f"branch {len(self.commits)}", self.rng.choice(self.commits)
        self.handles[name] = self.handles["main"].create_branch(name, at.snapshot)
        self.heads[name] = self.made(at.state.copy(), [at], self.handles[name].snapshot)

    def delete(self, name):
        handle = self.handles.pop(name)
        self.handles["main"].delete_branch(name)
        del self.heads[name]
        with pytest.raises(ps.NotFoundError, match="was deleted"):
            handle.append({"number": [1]})

    def check(self, ds, state, where):
        order = state.order()
        assert list(ds.schema) == state.columns, where
        batch = ds.take(range(len(ds)), columns=[*state.columns, "_row_id"])
        assert batch["_row_id"].tolist() == order, where
        for name in state.columns:
            words = ds.vocabulary(name) if name.startswith(("label", "word")) else None
            for place, row in enumerate(order):
                found = batch[name][place] if isinstance(batch[name], list) else ps.views.sample.unwrap(batch[name], place)
                if words and found is not None:
                    found = words[int(found)]
                found = self.plain(found) if isinstance(found, np.ndarray) else found
                assert found == state.cell(row, name), (*where, name, row)

    def compare(self, where):
        """Compare the differences of two snapshots with the model."""
        one, other = self.rng.choice(self.commits), self.rng.choice(self.commits)
        found = {}
        for entry in self.handles["main"].diff(one.snapshot, other.snapshot):
            found.setdefault((entry.kind, entry.column), set()).update(entry.row_ids.tolist())
        expected = {("added", None): other.state.alive - one.state.alive, ("deleted", None): one.state.alive - other.state.alive}
        before, after = one.state, other.state
        for name in set(before.columns) & set(after.columns):
            expected["changed", name] = {row for row in before.alive & after.alive if before.cell(row, name) != after.cell(row, name)}
        changed = {("column added", name) for name in set(after.columns) - set(before.columns)}
        changed |= {("column dropped", name) for name in set(before.columns) - set(after.columns)}
        assert {key: rows for key, rows in found.items() if rows} == {key: rows for key, rows in expected.items() if rows}, where
        assert {key for key, rows in found.items() if not rows} == changed, where

    def step(self, number):
        name, where = self.rng.choice(list(self.heads)), (self.seed, number)
        what = self.rng.choice(["transact"] * 6 + ["merge"] * 4 + ["pick", "reset", "create", "create", "delete", "past", "diff"])
        if self.rng.random() < 0.02:
            what = "burst"
        if what == "transact":
            self.transact(name)
        elif what in ("merge", "pick"):
            self.combine(name, what == "pick")
        elif what == "burst":
            for _ in range(self.rng.choice([20, 70])):  # Enough commits for roots and pages.
                self.transact(name)
        elif what == "reset" and self.rng.random() < 0.5:
            self.reset(name)
        elif what == "create" and len(self.heads) < 4:
            self.create()
        elif what == "delete" and name != "main":
            self.delete(name)
            return
        elif what == "past":
            commit = self.rng.choice(self.commits)
            self.check(ps.open(self.root, snapshot=commit.snapshot), commit.state, (*where, "past"))
        elif what == "diff":
            self.compare(where)
        if name in self.heads:
            self.check(self.handles[name], self.heads[name].state, (*where, what, name))


@pytest.mark.long
@pytest.mark.parametrize("part", range(4))
def test_programs_on_several_branches(tmp_path, part):
    for seed in SEEDS[part::4]:
        FILLS.clear()
        program = Program(seed, tmp_path / f"set {seed}")
        for number in range(40):
            program.step(number)
        for name, head in program.heads.items():
            ds = ps.open(program.root, branch=name)
            assert ds.branch == name and ds.snapshot == head.snapshot
            program.check(ds, head.state, (seed, "end", name))
            assert not ds.verify()["problems"], seed
            assert {commit.snapshot for commit in ds.log()} == {commit.snapshot for commit in head.ancestors}, seed
        assert program.handles["main"].branches() == {name: head.snapshot for name, head in program.heads.items()}

"""Run a job on a dataset, kill it before each file call or make that call fail, and check the state that remains.

test_faults.py runs this file with the shim preloaded. Each attempt runs in a forked child that works on a copy of the same initial state.
The exit status is the outcome. The script prints one JSON object with the number of calls, the number of attempts and the wrong outcomes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import pathlib
import shutil
import signal
import sys

import numpy as np
import penstock as ps
from penstock.importers import import_data

SHIM = ctypes.CDLL(os.environ.get("LD_PRELOAD"))
DONE, REFUSED, UNKNOWN, FOREIGN = 0, 1, 2, 3
ROWS = 5


def wide(columns: int) -> dict[str, str]:
    return {f"column_{index}": "int32" for index in range(columns)}


def values(schema) -> dict[str, object]:
    made = {"n": np.arange(ROWS), "word": [f"w{index}" for index in range(ROWS)], "text": ["x" * 10] * ROWS}
    return {name: made.get(name, np.arange(ROWS)) for name in schema}


class Job:
    """A job to test: `prepare` creates the initial state, `run` does the job, and `held` counts the resulting rows, pins or datasets."""

    def __init__(self, columns: int = 0, commits: int = 1) -> None:
        self.schema = {"n": "int64", "word": ps.Category(), "text": ps.Text(), **wide(columns)}
        self.commits = commits

    def prepare(self, place: pathlib.Path) -> None:
        ds = ps.create(place, self.schema)
        for _ in range(self.commits):
            ds.append({"n": np.arange(ROWS), "word": ["old"] * ROWS})

    def begin(self, place: pathlib.Path):
        return ps.open(place)

    def run(self, place: pathlib.Path, ds) -> None:
        ds.append(values(self.schema))

    def held(self, place: pathlib.Path) -> int:
        ds = ps.open(place)
        problems = ds.verify()["problems"]
        assert not problems, problems
        read = ds.take(range(len(ds)))
        assert read["n"].tolist() == list(range(ROWS)) * (len(ds) // ROWS)
        return len(ds)

    step = ROWS


class Create(Job):
    def prepare(self, place: pathlib.Path) -> None:
        pass

    def begin(self, place: pathlib.Path):
        return None

    def run(self, place: pathlib.Path, ds) -> None:
        ps.create(place / "deeper", self.schema)

    def held(self, place: pathlib.Path) -> int:
        try:
            ds = ps.open(place / "deeper")
        except ps.NotFoundError as error:
            assert error.code == "dataset-not-found", error
            return 0
        assert list(ds.schema) == list(self.schema) and not ds.verify()["problems"]
        return 1

    step = 1


class Import(Create):
    """An import into a new dataset. After a kill, an empty dataset may remain, and another import then appends to it."""

    def run(self, place: pathlib.Path, ds) -> None:
        import_data([{"n": index, "text": "x"} for index in range(ROWS)], place / "deeper")

    def held(self, place: pathlib.Path) -> int:
        try:
            ds = ps.open(place / "deeper")
        except ps.NotFoundError as error:
            assert error.code == "dataset-not-found", error
            return 0
        assert not ds.verify()["problems"]
        return len(ds)

    step = ROWS


class Pin(Job):
    def run(self, place: pathlib.Path, ds) -> None:
        ds._snapshot.pin("kept")

    def held(self, place: pathlib.Path) -> int:
        return len(ps.open(place).pins())

    step = 1


class Branch(Job):
    """The creation of a branch. A branch that has no name does not exist."""

    def run(self, place: pathlib.Path, ds) -> None:
        ds.create_branch("exp")

    def held(self, place: pathlib.Path) -> int:
        ds = ps.open(place)
        for name in ds.branches():
            branch = ps.open(place, branch=name)
            assert len(branch) == len(ds) and not branch.verify()["problems"]
        return len(ds.branches()) - 1

    step = 1


class Unbranch(Branch):
    """The deletion of a branch: its log ends, then its name is removed."""

    def prepare(self, place: pathlib.Path) -> None:
        super().prepare(place)
        ps.open(place).create_branch("exp").append({"n": [1]})

    def run(self, place: pathlib.Path, ds) -> None:
        ds.delete_branch("exp")

    def held(self, place: pathlib.Path) -> int:
        ds = ps.open(place)
        try:
            ps.open(place, branch="exp").append({"n": [2]})
        except ps.NotFoundError:
            assert "exp" not in ds.branches()
            return 1
        return 0

    step = 1


class Merge(Job):
    """A merge of a branch with new, changed and deleted samples and new words. `rows` of them are new."""

    def __init__(self, rows: int, **keywords: int) -> None:
        super().__init__(**keywords)
        self.rows = rows

    def prepare(self, place: pathlib.Path) -> None:
        super().prepare(place)
        ds = ps.open(place)
        exp = ds.create_branch("exp")
        for number in range(self.rows // ROWS):
            with exp.transaction() as tx:
                tx.append({**values(self.schema), "word": [f"new {number}"] * ROWS})
                tx.update({"n": [0], "text": [f"changed {number}"]}, row_ids=[0])
        ds.append(values(self.schema))

    def run(self, place: pathlib.Path, ds) -> None:
        ds.merge("exp")

    # An attribute in the other jobs. The step of this one depends on its arguments.
    @property
    def step(self) -> int:  # type: ignore[override]
        return self.rows


class Reset(Job):
    """A reset to the state before the last of two appends."""

    def prepare(self, place: pathlib.Path) -> None:
        super().prepare(place)
        ps.open(place).append(values(self.schema))

    def run(self, place: pathlib.Path, ds) -> None:
        ds.reset(ds.log()[1].snapshot)

    step = -ROWS


class AddColumn(Job):
    """A new column with a fill value, and a changed value. The job counts columns."""

    def run(self, place: pathlib.Path, ds) -> None:
        with ds.transaction() as tx:
            tx.add_column(f"added {len(ds.schema)}", ps.Category(), fill="filled")
            tx.update({f"added {len(ds.schema)}": ["given"]}, row_ids=[0])

    def held(self, place: pathlib.Path) -> int:
        super().held(place)
        ds = ps.open(place)
        for name in list(ds.schema)[len(self.schema) :]:
            words = ds.vocabulary(name)
            assert [words[code] for code in ds[name][:]] == ["given", *["filled"] * (len(ds) - 1)]
        return len(ds.schema)

    step = 1


JOBS = {
    "add-column": AddColumn(),
    "branch": Branch(),
    "delete-branch": Unbranch(),
    "merge": Merge(rows=ROWS),
    "merge-root": Merge(rows=25 * ROWS),
    "reset": Reset(),
    "create": Create(),
    "append": Job(),
    "append-pages": Job(columns=200),
    "append-root": Job(commits=64),
    "import": Import(),
    "pin": Pin(),
}


def attempt(job: Job, place: pathlib.Path, first: int, error: int, last: int) -> int:
    """Run the job in a child, and make its file calls `first` to `last` fail. Return its exit status, or the negated signal number."""
    child = os.fork()
    if child == 0:
        status = FOREIGN
        try:
            ds = job.begin(place)
            SHIM.faults_arm(first, error, last)
            job.run(place, ds)
            status = DONE
        except ps.Error as raised:
            status = UNKNOWN if raised.code == "commit-state-unknown" else REFUSED if raised.code != "internal" else FOREIGN
        except BaseException as raised:
            os.write(2, f"{type(raised).__name__}: {raised}\n".encode())
        finally:
            SHIM.faults_disarm()
            os._exit(status)
    _, status = os.waitpid(child, 0)
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def count_calls(job: Job, place: pathlib.Path) -> int:
    reader, writer = os.pipe()
    if os.fork() == 0:
        with contextlib.suppress(BaseException):
            ds = job.begin(place)
            SHIM.faults_arm(1 << 40, 0, 1 << 40)
            job.run(place, ds)
            os.write(writer, str(SHIM.faults_disarm()).encode())
        os._exit(0)
    os.close(writer)
    os.wait()
    return int(os.read(reader, 100))


def main() -> None:
    SHIM.faults_arm.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_long]
    name, kinds, folder, (stride, first) = sys.argv[1], sys.argv[2].split(","), pathlib.Path(sys.argv[3]), map(int, sys.argv[4:])
    job, beginning = JOBS[name], folder / "beginning"
    beginning.mkdir(parents=True)
    job.prepare(beginning / "dataset")
    wrong: list[str] = []

    def copied(label: str) -> pathlib.Path:
        place = folder / label
        shutil.copytree(beginning, place)
        return place / "dataset"

    place = copied("warm")
    before = job.held(place)
    job.run(place, job.begin(place))  # One-time imports and lookups must not be counted.
    calls = count_calls(job, copied("count"))
    tries = 0
    for kind in kinds:
        code, _, length = kind.partition(":")
        error = 0 if code == "kill" else getattr(errno, code)
        for number in range(1 + (first + tries) % stride, calls + 1, stride):
            label = f"{code}-{length}-{number}"
            place = copied(label)
            status = attempt(job, place, number, error, number + int(length or 1) - 1)
            tries += 1
            try:
                added = job.held(place) - before
                allowed = {DONE: (job.step,), REFUSED: (0,), UNKNOWN: (0, job.step), -signal.SIGKILL: (0, job.step)}.get(status, ())
                if name == "delete-branch" and status == REFUSED:
                    allowed = (0, job.step)  # Another call removes the name of a branch whose log has ended.
                if added not in allowed:
                    wrong.append(f"{label}: status {status}, {added} added")
                    continue
                if added == 0 or name in ("append", "append-pages", "append-root", "add-column"):
                    job.run(place, job.begin(place))
                    again = job.held(place) - before - added
                    if again != job.step:
                        wrong.append(f"{label}: the repeated call added {again}")
            except Exception as raised:
                wrong.append(f"{label}: status {status}, {type(raised).__name__}: {raised}")
            shutil.rmtree(folder / label)
    print(json.dumps({"calls": calls, "tries": tries, "wrong": wrong}))


if __name__ == "__main__":
    main()

"""Many processes and threads commit to one branch while some of them are killed. The log is then replayed as one history."""

import collections
import json
import pathlib
import random
import subprocess
import sys
import time

import penstock as ps
import pytest
from storm_runner import COUNTERS

RUNNER = pathlib.Path(__file__).parent.parent / "storm_runner.py"


def storm(root, folder, processes, commits, threads, kills, seed):
    ds = ps.create(root, {"token": ps.Text(), "n": "int64", "pad": ps.Text()})
    rows = COUNTERS + processes
    ds.append({"token": [f"counter {row}" for row in range(rows)], "n": [0] * rows}, message="counters")
    notes, rng, started = folder / "notes", random.Random(seed), iter(range(10**6))

    def start(name):
        number = seed * 1000 + next(started)
        arguments = [str(root), str(name), str(commits), str(notes), str(number), str(threads)]
        return subprocess.Popen([sys.executable, RUNNER, *arguments])

    running = {name: start(name) for name in range(processes)}
    while running:
        time.sleep(rng.uniform(0.02, 0.2))  # Let the writers commit before the next one is killed.
        for name, process in list(running.items()):
            if process.poll() is not None:
                assert process.returncode == 0
                del running[name]
        if kills and running:
            name = rng.choice(list(running))
            running[name].kill()
            running[name].wait()
            running[name] = start(name)
            kills -= 1
    return check(root, [json.loads(line) for line in notes.read_text().splitlines()], rows)


def check(root, notes, rows):
    """Replay the log. Each commit must have read what the commits before it wrote, and the dataset must be the result."""
    begun = {note["begin"] for note in notes if "begin" in note}
    outcomes = {note["end"]: note["outcome"] for note in notes if "end" in note}
    for _ in range(20):  # A listing may be stale.
        ds = ps.open(root)
    history = [part for commit in reversed(list(ds.log())) for part in commit.transactions][2:]
    times = collections.Counter(part.message for part in history)
    assert not [token for token, count in times.items() if count > 1], "a commit was made twice"
    assert times.keys() <= begun
    assert {token for token, outcome in outcomes.items() if outcome == "done"} <= times.keys(), "an acknowledged commit is lost"
    refused = {token for token, outcome in outcomes.items() if outcome in ("conflict", "skipped")}
    assert not refused & times.keys(), "a refused commit was made"
    values, present = [0] * rows, set()
    for part in history:
        told = part.properties
        if told["op"] == "append":
            present.add(part.message)
        elif told["op"] == "delete":
            present.remove(told["target"])
        else:
            assert values[told["row"]] == told["read"], f"{part.message} read {told['read']}, but it follows {values[told['row']]}"
            values[told["row"]] += 1
    found = ds[:]
    assert found["n"][:rows].tolist() == values and sorted(found["token"][rows:]) == sorted(present)
    assert ds.verify()["problems"] == []
    return {"begun": len(begun), "made": len(history), "outcomes": collections.Counter(outcomes.values())}


@pytest.mark.processes
def test_a_storm(root, tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir()
    report = storm(root, folder, processes=3, commits=8, threads=2, kills=2, seed=1)
    assert report["made"] > 10 and report["outcomes"]["done"] > 10


@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.parametrize("threads", [1, 3])
def test_eight_processes_of_two_hundred_commits(root, tmp_path, threads):
    folder = tmp_path / "notes"
    folder.mkdir()
    report = storm(root, folder, processes=8, commits=200 // threads, threads=threads, kills=40, seed=threads)
    print(json.dumps(report))
    assert report["made"] > 800

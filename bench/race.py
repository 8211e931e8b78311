"""Let systems take turns at one workload, each in a process of its own, pinned to the same processor cores."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import select
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import harness

HERE = pathlib.Path(__file__).parent
ADAPTERS, RIVALS = HERE / "adapters", HERE.parent / ".tools" / "rivals"
# A system that does not answer for so long has failed.
ANSWER_SECONDS = 600
CORES = sorted(os.sched_getaffinity(0))


@dataclasses.dataclass(frozen=True)
class Entry:
    """A system in a race: a file of bench/adapters, and what its function for the workload gets."""

    name: str
    adapter: str
    workload: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    cores: int = 2
    # Systems are compared within a group, for example of those with two threads.
    group: str = ""
    # Whether this is a rival: not a limit of the machine, nor a system that does other work.
    rival: bool = True
    # Whether each turn needs a new process, because the system keeps what it has read.
    fresh: bool = False


class Missing(Exception):
    """A system that cannot run here. Its row says why, and the others run."""


class System:
    """A running system. `turn` runs the workload once. `first` is the answer of its first turn, which is not timed."""

    first: dict[str, Any]

    def __init__(self, entry: Entry) -> None:
        path, name = ADAPTERS / f"{entry.adapter}.py", pathlib.PurePath(entry.adapter).name
        own = RIVALS / name / "bin" / "python"
        if (RIVALS / f"{name}.failed").exists():
            raise Missing(f"not installed: {(RIVALS / f'{name}.failed').read_text()}")
        python = own if own.exists() else pathlib.Path(sys.executable)
        if python != own and "# /// script" in path.read_text():
            raise Missing("not installed: run tools/rivals.py")
        self.entry, self.errors = entry, tempfile.TemporaryFile("w+")  # noqa: SIM115
        cores = set(CORES[: entry.cores])
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}  # Workers start faster.
        environment |= {"OMP_NUM_THREADS": str(entry.cores), "OPENBLAS_NUM_THREADS": str(entry.cores), "PYTHONHASHSEED": "0"}
        environment["PYTHONPATH"] = str(ADAPTERS / "common")
        if python != own and os.environ.get("PYTHONPATH"):  # For example a build of Penstock that is not installed.
            environment["PYTHONPATH"] += os.pathsep + os.environ["PYTHONPATH"]
        command = [str(python), "-P", str(path), entry.workload, json.dumps(entry.options, default=str)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True, env=environment, start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )  # fmt: skip
        try:
            harness.VERSIONS.update(self._answer()["ready"])
        except BaseException:
            self.close()
            raise

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout
        if not select.select([self.process.stdout], [], [], ANSWER_SECONDS)[0]:
            raise Missing(f"no answer in {ANSWER_SECONDS} seconds")
        line = self.process.stdout.readline()
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(3)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.errors.seek(0)
            lines = [one for one in self.errors.read().splitlines() if one.strip()]
            named = [one for one in lines if re.match(r"[\w.]+(Error|Exception)\b", one)] or lines or ["without a message"]
            raise Missing(f"failed with exit code {self.process.returncode}: {named[-1][:300]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def turn(self, request: str = "go") -> dict[str, Any]:
        """Run once. `go N` reads the first N batches, and `check` all values."""
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):  # The answer says why.
            self.process.stdin.write(request + "\n")
            self.process.stdin.flush()
        return self._answer()

    def restart(self) -> None:
        self.close()
        self.__init__(self.entry)  # type: ignore[misc]

    def close(self) -> None:
        """Let the process end, which removes its shared memory, and end what is left of it and its workers."""
        assert self.process.stdin
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(3)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.errors.close()


def once(entry: Entry) -> dict[str, Any]:
    """Run a workload once, for example to write a rival's files."""
    system = System(entry)
    try:
        return system.turn()
    finally:
        system.close()


def written(entries: list[Entry], missing: dict[str, str], *names: str) -> bool:
    """Run workloads that write files, untimed. If one fails, note it for `names`, or for the entry, and return False."""
    for entry in entries:
        try:
            once(entry)
        except Missing as reason:
            missing |= dict.fromkeys(names or (entry.name,), str(reason))
            print(f"  {entry.name}: {reason}", flush=True)
            return False
    return True


def nothing(_system: System) -> None:
    """Do nothing before a turn."""


def start(entries: list[Entry], missing: dict[str, str], settle: Callable[[System], None] = nothing, request: str = "go") -> list[System]:
    """Start systems, and let each run once, untimed, to compile, start workers and fill caches. Those that cannot run are noted."""
    systems = []
    for entry in entries:
        try:
            system = System(entry)
            try:
                settle(system)
                if not entry.fresh:
                    system.first = system.turn(request)
            except Missing:
                system.close()
                raise
            systems.append(system)
        except Missing as reason:
            missing[entry.name] = str(reason)
            print(f"  {entry.name}: {reason}", flush=True)
    return systems


def fastest(choices: list[Entry], missing: dict[str, str], batches: int = 0, settle: Callable[[System], None] = nothing) -> Entry | None:
    """Return the fastest choice, for example of a number of workers: the best of two turns after a first, or of their first batches.

    A quick run takes the first. The system is missing only if no choice runs.
    """
    if harness.QUICK or len(choices) == 1:
        return choices[0]
    found, failed, request = [], {}, f"go {batches}" if batches else "go"
    for choice in choices:
        for system in start([choice], failed, settle, request):
            try:
                spent = []
                for _ in range(2):
                    settle(system)
                    spent.append(system.turn(request)["seconds"])
                found.append((min(spent), len(found), choice))
            except Missing as reason:
                failed[choice.name] = str(reason)
            finally:
                system.close()
    if not found:
        missing |= failed
    return min(found)[2] if found else None


def race(
    systems: list[System], missing: dict[str, str], rounds: int = 5, settle: Callable[[System], None] = nothing
) -> dict[str, dict[str, Any]]:
    """Let systems take turns, in an order that rotates. Return rates and more for each. `settle` runs untimed before each turn.

    After two rounds, systems slower than half of the best rival of their group stop. A system that fails is noted, and its turns are left out.
    """
    turns: dict[str, list[dict[str, Any]]] = {system.entry.name: [] for system in systems}
    running = list(systems)
    try:
        for number in range(harness.rounds(rounds)):
            if number == 2:
                running = _contenders(running, turns)
            shift = number % max(len(running), 1)
            for system in [*running[shift:], *running[:shift]]:
                name = system.entry.name
                try:
                    if system.entry.fresh and turns[name]:
                        system.restart()
                    settle(system)
                    turns[name].append(system.turn())
                except Missing as reason:
                    missing[name] = f"in round {number + 1}: {reason}"
                    print(f"  {name}: {missing[name]}", flush=True)
                    running.remove(system)
                    turns[name] = []
    finally:
        for system in systems:
            system.close()
    return {name: summary(all) for name, all in turns.items() if all}


def _contenders(running: list[System], turns: dict[str, list[dict[str, Any]]]) -> list[System]:
    """Return the systems that continue: Penstock, limits, and rivals that are at least half as fast as the best rival of their group."""
    best: dict[str, float] = {}
    spent = {system.entry.name: min(turn["seconds"] for turn in turns[system.entry.name]) for system in running}
    own = lambda entry: entry.name.startswith("penstock")  # noqa: E731
    for system in running:
        entry = system.entry
        if entry.rival and not own(entry):
            best[entry.group] = min(best.get(entry.group, float("inf")), spent[entry.name])
    return [one for one in running if own(one.entry) or spent[one.entry.name] <= 2 * best.get(one.entry.group, float("inf"))]


def summary(turns: list[dict[str, Any]]) -> dict[str, Any]:
    rates = [turn["samples"] / turn["seconds"] for turn in turns]
    return {
        "per_second": statistics.median(rates), "rates": rates, "seconds": statistics.median(turn["seconds"] for turn in turns),
        "cores_used": statistics.median(turn["cpu_seconds"] / turn["seconds"] for turn in turns),
        "cpu_seconds_per_1000": statistics.median(1000 * turn["cpu_seconds"] / max(turn["samples"], 1) for turn in turns),
        "device_bytes": max(turn["device_bytes"] for turn in turns), "peak_bytes": max(turn["peak_bytes"] for turn in turns),
        "digests": [turn["digest"] for turn in turns], "samples": turns[0]["samples"], "kind": turns[0]["kind"], "rested": all(turn["rested"] for turn in turns),
    }  # fmt: skip


def told(rows: dict[str, dict[str, Any]], what: str = "") -> list[str]:
    """Return a line for each system."""
    return [
        f"{what}{name}: {row['per_second']:,.0f}/s ({min(row['rates']):,.0f}–{max(row['rates']):,.0f}), {row['cores_used']:.2f} cores"
        for name, row in sorted(rows.items(), key=lambda one: -one[1]["per_second"])
    ]

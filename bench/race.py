"""Let systems take turns at one workload, each in a process of its own, pinned to the same processor cores."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import harness
import serving

HERE = pathlib.Path(__file__).parent
ADAPTERS, RIVALS = HERE / "adapters", HERE.parent / ".tools" / "rivals"
# A system that does not answer for so long has failed.
ANSWER_SECONDS = 300
# A turn so long is not slow because of one disturbance.
LONG_TURN_SECONDS = 2.0
# How often memory is measured in a turn that is not timed. A measurement takes the kernel about 10 ms per GiB.
WATCH_SECONDS = 0.05
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
    """A running system. `turn` runs the workload once. `first` is the answer of its first turn, which is not timed.

    `peak_bytes` is the largest memory of the process and its workers that was seen: in the first turn, and after each turn.
    """

    first: dict[str, Any]
    peak_bytes = 0

    def __init__(self, entry: Entry) -> None:
        path, name = ADAPTERS / f"{entry.adapter}.py", pathlib.PurePath(entry.adapter).name
        own = RIVALS / name / "bin" / "python"
        if (RIVALS / f"{name}.failed").exists():
            raise Missing(f"not installed: {(RIVALS / f'{name}.failed').read_text()}")
        python = own if own.exists() else pathlib.Path(sys.executable)
        if python != own and "# /// script" in path.read_text():
            raise Missing("not installed: run tools/rivals.py")
        if python == own and (RIVALS / name / "made-from").read_text() != serving.digest(path):
            raise Missing("its pins have changed: run tools/rivals.py")
        self.entry, self.errors = entry, tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        cores = set(CORES[: entry.cores])
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}  # Workers start faster.
        environment |= {"OMP_NUM_THREADS": str(entry.cores), "OPENBLAS_NUM_THREADS": str(entry.cores), "PYTHONHASHSEED": "0"}
        environment["PYTHONPATH"] = str(ADAPTERS / "common")
        if python != own and os.environ.get("PYTHONPATH"):  # For example a build of Penstock that is not installed.
            environment["PYTHONPATH"] += os.pathsep + os.environ["PYTHONPATH"]
        program = "import serving; serving.serve()"
        command = [str(python), "-P", "-c", program, str(path), entry.workload, json.dumps(entry.options, default=str)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True, env=environment, start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )  # fmt: skip
        try:
            harness.note_versions(name, self._answer()["ready"])
        except BaseException:
            self.close()
            raise

    def _answer(self, watch: bool = False) -> dict[str, Any]:
        assert self.process.stdout
        end = time.monotonic() + ANSWER_SECONDS
        while not select.select([self.process.stdout], [], [], WATCH_SECONDS if watch else ANSWER_SECONDS)[0]:
            if time.monotonic() >= end:
                raise Missing(f"no answer in {ANSWER_SECONDS} seconds")
            self._measure()
        line = self.process.stdout.readline()
        try:
            return dict(json.loads(line))
        except ValueError:
            if line:
                raise Missing(f"it printed `{line.strip()[:100]}`, which is not an answer") from None
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(3)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.errors.seek(0)
            lines = [one for one in self.errors.read().splitlines() if one.strip()]
            named = [one for one in lines if re.match(r"[\w.]+(Error|Exception)\b", one)] or lines or ["without a message"]
            raise Missing(f"failed with exit code {self.process.returncode}: {named[-1][:300]}") from None

    def _measure(self) -> None:
        self.peak_bytes = max(self.peak_bytes, serving.resident_bytes(self.process.pid))

    def turn(self, request: str = "go", watch: bool = False) -> dict[str, Any]:
        """Run once. `go N` reads the first N batches, and `check` all values. `watch` measures memory meanwhile, which disturbs."""
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):  # The answer says why.
            self.process.stdin.write(request + "\n")
            self.process.stdin.flush()
        answer = self._answer(watch)
        self._measure()
        return answer

    def restart(self) -> None:
        self.close()
        self.__init__(self.entry)  # type: ignore[misc]  # `peak_bytes` is kept.

    def close(self) -> None:
        """Let the process end, which removes its shared memory, and end what is left of it and its workers."""
        assert self.process.stdin
        if self.errors.closed:
            return
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(3)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.errors.close()


def nothing(_system: System) -> None:
    """Do nothing before a turn."""


def empty_place(system: System) -> None:
    """Remove the output of the last turn, and let the disk come to rest."""
    place = pathlib.Path(system.entry.options["place"])
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    os.sync()


def once(entry: Entry, settle: Callable[[System], None] = nothing) -> dict[str, Any]:
    """Run a workload once, for example to write a rival's files. `settle` runs before the turn."""
    system = System(entry)
    try:
        settle(system)
        return system.turn()
    finally:
        system.close()


def written(entries: list[Entry], missing: dict[str, str], *names: str) -> bool:
    """Run workloads that write files, untimed. If one fails, note it for `names`, or for the entry, and return False."""
    for entry in entries:
        try:
            once(entry)
        except Missing as reason:
            for name in names or (entry.name,):
                failed(dataclasses.replace(entry, name=name), missing, str(reason))
            return False
    return True


def start(entries: list[Entry], missing: dict[str, str], settle: Callable[[System], None] = nothing, request: str = "go") -> list[System]:
    """Start systems, and let each run once, untimed, to compile, start workers and fill caches. Those that cannot run are noted."""
    systems: list[System] = []
    with closed_on_failure(systems):
        for entry in entries:
            try:
                system = System(entry)
                systems.append(system)
                settle(system)
                if not entry.fresh:
                    system.first = system.turn(request, watch=True)
            except Missing as reason:
                if systems and systems[-1].entry is entry:
                    systems.pop().close()
                failed(entry, missing, str(reason))
    return systems


@contextlib.contextmanager
def closed_on_failure(systems: list[System]) -> Iterator[None]:
    """Close systems if something else fails, for example after Ctrl-C."""
    try:
        yield
    except BaseException:
        for system in systems:
            system.close()
        raise


def failed(entry: Entry, missing: dict[str, str], reason: str) -> None:
    """Note a rival that failed. Without Penstock, there is nothing to compare, so the benchmark fails."""
    missing[entry.name] = reason
    print(f"  {entry.name}: {reason}", flush=True)
    if entry.adapter.endswith("/penstock"):
        raise RuntimeError(f"{entry.name}: {reason}")


def fastest(choices: list[Entry], missing: dict[str, str], batches: int = 0, settle: Callable[[System], None] = nothing) -> Entry | None:
    """Return the fastest choice, for example of a number of workers: by the median of three turns, or of the first batches of each.

    Choices take turns. A quick run takes the first. The system is missing only if no choice runs.
    """
    if harness.QUICK or len(choices) == 1:
        return choices[0]
    lost: dict[str, str] = {}
    request = f"go {batches}" if batches else "go"
    systems = start(choices, lost, settle, request)
    spent: list[list[float]] = [[] for _ in systems]
    try:
        for number in range(3):
            for index in [*range(number, len(systems)), *range(min(number, len(systems)))]:
                if len(spent[index]) == number:  # It has not failed.
                    try:
                        if systems[index].entry.fresh and number:
                            systems[index].restart()
                        settle(systems[index])
                        spent[index].append(systems[index].turn(request)["seconds"])
                    except Missing as reason:
                        systems[index].close()
                        failed(systems[index].entry, lost, str(reason))
    finally:
        for system in systems:
            system.close()
    found = [(statistics.median(each), index) for index, each in enumerate(spent) if len(each) == 3]
    if not found:
        missing |= lost
        return None
    return systems[min(found)[1]].entry


def race(
    systems: list[System], missing: dict[str, str], rounds: int = 5, settle: Callable[[System], None] = nothing
) -> dict[str, dict[str, Any]]:
    """Let systems take turns, in an order that rotates. Return rates and more for each. `settle` runs untimed before each turn.

    Systems that cannot become the best rival of their group stop: those slower than half of it after two rounds, and after one round
    those slower than a quarter, if their turn took seconds. A system that fails is noted, and its turns are left out. Systems of which each
    turn is a first one have another turn at the end, in which their memory is measured.
    """
    turns: dict[str, list[dict[str, Any]]] = {system.entry.name: [] for system in systems}
    running = list(systems)
    try:
        for number in range(harness.rounds(rounds)):
            if number in (1, 2):
                running = _contenders(running, turns, {1: 4, 2: 2}[number])
            shift = number % max(len(running), 1)
            for system in [*running[shift:], *running[:shift]]:
                name = system.entry.name
                try:
                    if system.entry.fresh and turns[name]:
                        system.restart()
                    settle(system)
                    turns[name].append(system.turn())
                except Missing as reason:
                    system.close()
                    running.remove(system)
                    turns[name] = []
                    failed(system.entry, missing, f"in round {number + 1}: {reason}")
        for system in running:
            if system.entry.fresh:
                with contextlib.suppress(Missing):  # Its turns count, and its memory is what was seen after them.
                    system.restart()
                    settle(system)
                    system.turn(watch=True)
    finally:
        for system in systems:
            system.close()
    peaks = {system.entry.name: system.peak_bytes for system in systems}
    return {name: {**summary(all), "peak_bytes": peaks[name]} for name, all in turns.items() if all}


def _contenders(running: list[System], turns: dict[str, list[dict[str, Any]]], times: float) -> list[System]:
    """Return the systems that continue: Penstock, and others that take less than `times` as long as the best rival of their group.

    After a single round, short turns do not count: something else may have slowed them down.
    """
    best: dict[str, float] = {}
    spent = {system.entry.name: min(turn["seconds"] for turn in turns[system.entry.name]) for system in running}
    own = lambda entry: entry.name.startswith("penstock")  # noqa: E731
    for system in running:
        entry = system.entry
        if entry.rival and not own(entry):
            best[entry.group] = min(best.get(entry.group, float("inf")), spent[entry.name])

    def continues(system: System) -> bool:
        name = system.entry.name
        short = len(turns[name]) == 1 and spent[name] < LONG_TURN_SECONDS
        return own(system.entry) or short or spent[name] <= times * best.get(system.entry.group, float("inf"))

    return [system for system in running if continues(system)]


def summary(turns: list[dict[str, Any]]) -> dict[str, Any]:
    rates = [turn["samples"] / turn["seconds"] for turn in turns]
    return {
        "per_second": statistics.median(rates), "rates": rates, "seconds": statistics.median(turn["seconds"] for turn in turns),
        "cores_used": statistics.median(turn["cpu_seconds"] / turn["seconds"] for turn in turns),
        "cpu_seconds_per_1000": statistics.median(1000 * turn["cpu_seconds"] / max(turn["samples"], 1) for turn in turns),
        "device_bytes": max(turn["device_bytes"] for turn in turns),
        "digests": [turn["digest"] for turn in turns], "samples": turns[0]["samples"], "kind": turns[0]["kind"], "rested": all(turn["rested"] for turn in turns),
    }  # fmt: skip


def told(rows: dict[str, dict[str, Any]], what: str = "") -> list[str]:
    """Return a line for each system."""
    return [
        f"{what}{name}: {row['per_second']:,.0f}/s ({min(row['rates']):,.0f}–{max(row['rates']):,.0f}), {row['cores_used']:.2f} cores"
        + ("" if row["rested"] else ", still busy after its turns")
        for name, row in sorted(rows.items(), key=lambda one: -one[1]["per_second"])
    ]

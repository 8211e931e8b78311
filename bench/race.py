"""Let systems take turns at one workload, each in a process of its own, pinned to the same processor cores."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import harness

HERE = pathlib.Path(__file__).parent
ADAPTERS, RIVALS = HERE / "adapters", HERE.parent / ".tools" / "rivals"
CORES = sorted(os.sched_getaffinity(0))


@dataclasses.dataclass(frozen=True)
class Entry:
    """A system in a race: a file of bench/adapters, and what its function for the workload gets."""

    name: str
    adapter: str
    workload: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    cores: int = 2
    # Whether each turn needs a new process, because the system keeps what it has read.
    fresh: bool = False


class Missing(Exception):
    """A system that cannot run here. Its row says why, and the others run."""


class System:
    """A running system. `turn` runs the workload once."""

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
        environment |= {"OMP_NUM_THREADS": str(entry.cores), "OPENBLAS_NUM_THREADS": str(entry.cores)}
        environment["PYTHONPATH"] = os.pathsep.join([str(ADAPTERS / "common"), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [str(python), "-P", str(path), entry.workload, json.dumps(entry.options, default=str)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True, env=environment, start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )  # fmt: skip
        self.versions: dict[str, str] = self._answer()["ready"]
        harness.VERSIONS.update(self.versions)

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.errors.seek(0)
            lines = [one for one in self.errors.read().splitlines() if one.strip()]
            named = [one for one in lines if re.match(r"[\w.]+(Error|Exception)\b", one)] or lines or ["without a message"]
            raise Missing(f"failed with exit code {self.process.returncode}: {named[-1][:300]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def turn(self) -> dict[str, Any]:
        assert self.process.stdin
        try:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # The answer says why.
        return self._answer()

    def restart(self) -> None:
        self.close()
        self.__init__(self.entry)  # type: ignore[misc]

    def close(self) -> None:
        """End the process and its workers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        self.process.wait()
        self.errors.close()


def once(entry: Entry) -> dict[str, Any]:
    """Run a workload once, for example to write a rival's files."""
    system = System(entry)
    try:
        return system.turn()
    finally:
        system.close()


def nothing(_system: System) -> None:
    """Do nothing before a turn."""


def start(entries: list[Entry], missing: dict[str, str], settle: Callable[[System], None] = nothing) -> list[System]:
    """Start systems, and let each run once, untimed, to compile, start workers and fill caches. Those that cannot run are noted."""
    systems = []
    for entry in entries:
        try:
            system = System(entry)
            try:
                settle(system)
                if not entry.fresh:
                    system.turn()
            except Missing:
                system.close()
                raise
            systems.append(system)
        except Missing as reason:
            missing[entry.name] = str(reason)
            print(f"  {entry.name}: {reason}", flush=True)
    return systems


def fastest(choices: list[Entry], missing: dict[str, str]) -> Entry | None:
    """Return the choice, for example of a number of workers, whose second turn is the shortest. A quick run takes the first."""
    if harness.QUICK:
        return choices[0]
    found = []
    for choice in choices:
        for system in start([choice], missing):
            found.append((system.turn()["seconds"], len(found), choice))
            system.close()
    return min(found)[2] if found else None


def race(systems: list[System], rounds: int = 5, settle: Callable[[System], None] = nothing) -> dict[str, dict[str, Any]]:
    """Let systems take turns. Return rates and more for each. After two rounds, systems slower than half of the best rival stop.

    `settle` runs untimed before each turn.
    """
    turns: dict[str, list[dict[str, Any]]] = {system.entry.name: [] for system in systems}
    running = list(systems)
    for number in range(harness.rounds(rounds)):
        if number == 2:
            best = {name: min(turn["seconds"] / max(turn["samples"], 1) for turn in all) for name, all in turns.items() if all}
            rivals = [seconds for name, seconds in best.items() if not name.startswith("penstock")]
            running = [
                one
                for one in running
                if not rivals or one.entry.name.startswith("penstock") or best.get(one.entry.name, 0) <= 2 * min(rivals)
            ]
        for system in list(running):
            try:
                if system.entry.fresh and turns[system.entry.name]:
                    system.restart()
                settle(system)
                turns[system.entry.name].append(system.turn())
            except Missing as reason:
                print(f"  {system.entry.name}: {reason}", flush=True)
                running.remove(system)
    for system in systems:
        system.close()
    return {name: summary(all) for name, all in turns.items() if all}


def summary(turns: list[dict[str, Any]]) -> dict[str, Any]:
    rates = [turn["samples"] / turn["seconds"] for turn in turns]
    return {
        "per_second": statistics.median(rates), "rates": rates, "seconds": statistics.median(turn["seconds"] for turn in turns),
        "cores_used": statistics.median(turn["cpu_seconds"] / turn["seconds"] for turn in turns),
        "cpu_seconds_per_1000": statistics.median(1000 * turn["cpu_seconds"] / max(turn["samples"], 1) for turn in turns),
        "device_bytes": max(turn["device_bytes"] for turn in turns), "peak_bytes": max(turn["peak_bytes"] for turn in turns),
        "digests": sorted({turn["digest"] for turn in turns}),
    }  # fmt: skip


def told(rows: dict[str, dict[str, Any]], what: str = "") -> list[str]:
    """Return a line for each system."""
    return [
        f"{what}{name}: {row['per_second']:,.0f}/s ({min(row['rates']):,.0f}–{max(row['rates']):,.0f}), {row['cores_used']:.2f} cores"
        for name, row in sorted(rows.items(), key=lambda one: -one[1]["per_second"])
    ]

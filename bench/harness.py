"""Helpers for the benchmarks: a machine card, interleaved rounds with medians, cache eviction, and JSON results."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import math
import os
import pathlib
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from importlib import metadata
from typing import Any

ROUNDS = 5
ROOT = pathlib.Path(__file__).parent.parent
# Versions of the packages that ran in this benchmark, ours and the rivals'.
VERSIONS: dict[str, str] = {}
# A quick run has one round and a tenth of the data: it shows that everything runs, and its figures mean nothing.
QUICK = False


def note_versions(system: str, found: dict[str, str]) -> None:
    """Note the versions of the packages of a system. If another system has another version, the name of this one is added."""
    for package, version in found.items():
        if VERSIONS.setdefault(package, version) != version:
            VERSIONS[f"{package} ({system})"] = version


def start() -> None:
    """Note our own versions, before those of rivals."""
    VERSIONS.clear()
    for package in ("penstock", "numpy", "pyarrow", "pillow", "scikit-learn"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            VERSIONS[package] = metadata.version(package)


def rounds(wanted: int = ROUNDS) -> int:
    return 1 if QUICK else wanted


def fewer(wanted: int, least: int = 1) -> int:
    """Return how many samples to use of those that a full run has."""
    return max(wanted // 10, least) if QUICK else wanted


def _disk(place: pathlib.Path) -> dict[str, Any]:
    """Describe the device that holds a folder: its name, model, and read-ahead."""
    number = os.stat(place).st_dev
    device = pathlib.Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not device.exists():
        return {"device": "not a block device"}
    device = device.resolve()
    whole = device if (device / "queue").exists() else device.parent
    text = lambda path: path.read_text().strip() if path.exists() else None  # noqa: E731
    return {
        "device": whole.name, "model": text(whole / "device" / "model"), "read_ahead_kib": text(whole / "queue" / "read_ahead_kb"),
        "scheduler": text(whole / "queue" / "scheduler"),
        "file_system": subprocess.run(["stat", "-f", "-c", "%T", str(place)], capture_output=True, text=True).stdout.strip(),
    }  # fmt: skip


@functools.cache
def commit() -> str:
    """Return the commit that a run began with, and whether files differed from it."""
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    changed = subprocess.run(
        ["git", "status", "--porcelain", "--", "crates", "python", "bench/*.py", "bench/workloads", "bench/adapters"],
        cwd=ROOT, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    return head + ("+changes" if changed else "")


def machine(scratch: pathlib.Path) -> dict[str, Any]:
    """Describe the machine, and the versions of the packages that ran."""
    model = next(
        (line.split(":")[1].strip() for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")),
        platform.processor(),
    )
    memory = (
        int(next(line.split()[1] for line in pathlib.Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))) >> 20
    )
    return {
        "cpu": model, "cores": len(os.sched_getaffinity(0)), "memory_gib": memory, "disk": _disk(scratch), "kernel": platform.release(),
        "python": platform.python_version(), "commit": commit(), "date": time.strftime("%Y-%m-%d"),
        "versions": dict(sorted(VERSIONS.items())), "quick": QUICK,
    }  # fmt: skip


def interleaved(
    systems: dict[str, Callable[[], Any]], rounds: int | None = None, settle: Callable[[], None] | None = None
) -> dict[str, dict[str, Any]]:
    """Time each system once per round, all in one process. Return the median, minimum and maximum seconds for each, and all of them.

    `settle` runs untimed before each turn.
    """
    times: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(1 if QUICK else rounds or ROUNDS):
        for name, work in systems.items():
            gc.collect()
            if settle:
                settle()
            begin = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - begin)
    return {
        name: {"median_seconds": statistics.median(spent), "min_seconds": min(spent), "max_seconds": max(spent), "seconds": spent}
        for name, spent in times.items()
    }


def comparison(what: str, unit: str, values: dict[str, Iterable[float]], best: str = "highest", notes: str = "") -> dict[str, Any]:
    """Describe a race: the values of all rounds for each system. `best` is highest or lowest.

    Our name begins with penstock, and that of a limit of the machine, which is not a rival, with `limit`. A system whose name is in brackets is
    reported, but does other work.
    """
    return {"what": what, "unit": unit, "best": best, "systems": {name: list(found) for name, found in values.items()}, "notes": notes}


def bar(what: str, value: float, **limit: float) -> dict[str, Any]:
    """Describe a bar: what is measured, its value, and its limit, which is `at_least` or `at_most`."""
    return {"what": what, "value": value, **limit}


def rivals(compared: dict[str, Any]) -> dict[str, list[float]]:
    """Return the values of the rivals: not of Penstock, of limits, or of systems in brackets, which do other work."""
    return {name: values for name, values in compared["systems"].items() if values and not name.startswith(("penstock", "limit", "("))}


def against_best(compared: dict[str, Any], limit: float = 1.0, ours: str = "penstock", what: str = "") -> list[dict[str, Any]]:
    """Return a bar for our median divided by the best rival's, or no bar without rivals."""
    medians = {name: statistics.median(values) for name, values in rivals(compared).items()}
    if not medians:
        return []
    highest = compared["best"] == "highest"
    best = (max if highest else min)(medians, key=lambda name: medians[name])
    value = statistics.median(compared["systems"][ours]) / (medians[best] or math.nan)
    return [
        {"what": f"{what or compared['what']}: {ours} / best rival ({best})", "value": value, "at_least" if highest else "at_most": limit}
    ]


def evict(path: pathlib.Path) -> None:
    """Drop a folder's files from the page cache."""
    for file in path.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def stored_bytes(place: pathlib.Path) -> int:
    """Return the size of all files in a folder."""
    return sum(path.stat().st_size for path in place.rglob("*") if path.is_file())


def synced_file(path: pathlib.Path, size: int) -> None:
    """Write a new file, sync it, and sync its folder: the least that a durable commit needs."""
    with path.open("xb", buffering=0) as out:
        out.write(bytes(size))
        os.fsync(out.fileno())
    where = os.open(path.parent, os.O_RDONLY)
    os.fsync(where)
    os.close(where)


def rate(count: int, times: dict[str, Any]) -> float:
    return count / float(times["median_seconds"])


def save(results: pathlib.Path, name: str, result: dict[str, Any], card: dict[str, Any]) -> None:
    """Write one benchmark's result, with the machine card."""
    results.mkdir(exist_ok=True, parents=True)
    path = results / f"{name}.json"
    beside = path.with_suffix(".new")
    try:
        beside.write_text(json.dumps({"benchmark": name, "machine": card, **result}, indent=1) + "\n")
        beside.replace(path)  # A full disk leaves no half of a result.
    finally:
        beside.unlink(missing_ok=True)

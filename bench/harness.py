"""Helpers for the benchmarks: a machine card, interleaved rounds with medians, cache eviction, and JSON results."""

from __future__ import annotations

import gc
import json
import os
import pathlib
import platform
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

import numpy as np

RESULTS = pathlib.Path(__file__).parent / "results"
ROUNDS = 5


def machine() -> dict[str, Any]:
    """Describe the machine and the versions of the measured packages."""
    model = next(
        (line.split(":")[1].strip() for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")),
        platform.processor(),
    )
    memory = (
        int(next(line.split()[1] for line in pathlib.Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))) >> 20
    )
    versions = {}
    for package in ("numpy", "pyarrow", "pylance", "rocksdict", "torch", "pillow"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    root = pathlib.Path(__file__).parent.parent
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True).stdout.strip()
    return {
        "cpu": model, "cores": len(os.sched_getaffinity(0)), "memory_gib": memory, "kernel": platform.release(), "python": platform.python_version(),
        "commit": commit, "date": time.strftime("%Y-%m-%d"), "versions": versions,
    }  # fmt: skip


def touch(array: Any) -> int:
    """Read every 64th byte, which loads every cache line, as a real consumer would."""
    if isinstance(array, bytes):
        array = np.frombuffer(array, np.uint8)
    return int(np.bitwise_xor.reduce(array.reshape(-1).view(np.uint8)[::64]))  # A sum would first convert the bytes to a wider type.


def interleaved(
    systems: dict[str, Callable[[], Any]], rounds: int = ROUNDS, settle: Callable[[], None] | None = None
) -> dict[str, dict[str, float]]:
    """Time each system once per round, all in one process. Return the median, minimum and maximum seconds for each.

    `settle` runs untimed before each turn.
    """
    times: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(rounds):
        for name, work in systems.items():
            gc.collect()
            if settle:
                settle()
            begin = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - begin)
    return {
        name: {"median_seconds": statistics.median(spent), "min_seconds": min(spent), "max_seconds": max(spent)}
        for name, spent in times.items()
    }


def evict(path: pathlib.Path) -> None:
    """Drop a folder's files from the page cache."""
    for file in path.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def synced_file(path: pathlib.Path, size: int) -> None:
    """Write a new file, sync it, and sync its folder: the least that a durable commit needs."""
    with path.open("xb", buffering=0) as out:
        out.write(bytes(size))
        os.fsync(out.fileno())
    where = os.open(path.parent, os.O_RDONLY)
    os.fsync(where)
    os.close(where)


def save(name: str, result: dict[str, Any]) -> None:
    """Write one benchmark's result, with the machine card."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps({"benchmark": name, "machine": machine(), **result}, indent=1) + "\n")


def rate(count: int, times: dict[str, float]) -> float:
    return count / times["median_seconds"]


def in_two_threads(work: Callable[[np.ndarray[Any, Any]], None], order: np.ndarray[Any, Any]) -> None:
    threads = [threading.Thread(target=work, args=(part,)) for part in np.array_split(order, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

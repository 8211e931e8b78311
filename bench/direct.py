"""Benchmarks reads without the page cache, against fio with the same request size, depth and files, and against a buffered NumPy reader."""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import json
import os
import pathlib
import resource
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import penstock as ps
from harness import evict, touch

BIG_BYTES, BIG_SAMPLES = 140_000_000, 8
SMALL_BYTES, SMALL_SAMPLES, TAKE = 128 << 10, 8192, 256
DEPTH, READERS, ROUNDS = 32, 2, 5
Consumer = Callable[[list[Callable[[], Any]]], None]


def device_bytes() -> int:
    """Return the number of bytes that this process has read from devices."""
    return int(next(line for line in pathlib.Path("/proc/self/io").read_text().splitlines() if line.startswith("read_bytes")).split()[1])


def fio(folder: pathlib.Path, pattern: str, size: int, loops: int) -> float:
    """Read a dataset's data files `loops` times with fio, using io_uring, O_DIRECT and registered buffers. Return bytes per second.

    fio runs as many jobs as we have threads. Each job reads its own files one after another. Jobs that share files, or switch files
    at every request, are up to a third slower.
    """
    files = sorted(str(path) for path in (folder / "d").iterdir() if path.stat().st_size > size)
    assert len(files) % READERS == 0, f"cannot divide {len(files)} files equally among {READERS} jobs"
    command = [
        "fio", "--name=global", "--readonly", f"--rw={pattern}", f"--bs={size}", "--ioengine=io_uring", f"--iodepth={DEPTH}", "--direct=1", "--fixedbufs",
        f"--loops={loops}", f"--file_service_type={'sequential' if pattern == 'read' else 'random'}", "--group_reporting", "--output-format=json",
        *(option for job in range(READERS) for option in (f"--name=job{job}", f"--filename={':'.join(files[job::READERS])}")),
    ]  # fmt: skip
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"])


def measured(work: Callable[[], int]) -> tuple[float, float, int]:
    """Run `work`, and return bytes per second, CPU seconds per GB, and bytes read from the device."""
    before, device, began = resource.getrusage(resource.RUSAGE_SELF), device_bytes(), time.perf_counter()
    total = work()
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return total / seconds, spent / (total / 1e9), device_bytes() - device


def one_thread(reads: list[Callable[[], Any]]) -> None:
    """Read and touch each array in turn in one thread, so that other threads do not affect the measured CPU seconds."""
    for read in reads:
        touch(read())


def readers(reads: list[Callable[[], Any]]) -> None:
    """Read in two threads and touch the results in order in the calling thread. As in a loader, the consumer does not stall the device."""
    waiting: collections.deque[concurrent.futures.Future[Any]] = collections.deque()
    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        for read in reads:
            waiting.append(pool.submit(read))
            if len(waiting) > READERS:
                touch(waiting.popleft().result())
        while waiting:
            touch(waiting.popleft().result())


def direct(folder: pathlib.Path) -> dict[str, Any]:
    """Read raw tensors of 140 MB one by one, and take 256 random samples of 128 KiB at a time."""
    if shutil.which("fio") is None:
        return {"what": "fio is missing", "lines": ["install fio to run this benchmark"], "bars": []}
    rng = np.random.default_rng(0)
    big = ps.create(folder / "big", {"x": ps.Tensor((None,), "uint8")})
    with big.transaction() as tx:
        for number in range(BIG_SAMPLES):
            value = rng.integers(0, 256, BIG_BYTES, dtype=np.uint8)
            np.save(folder / f"{number}.npy", value)
            tx.append({"x": [value]})
    small = ps.create(folder / "small", {"x": ps.Tensor((SMALL_BYTES,), "uint8")})
    with small.transaction() as tx:
        for _ in range(0, SMALL_SAMPLES, 512):
            tx.append({"x": rng.integers(0, 256, (512, SMALL_BYTES), dtype=np.uint8)})
    os.sync()
    ps.configure(threads=2)
    small_file = max((folder / "small" / "d").iterdir(), key=lambda path: path.stat().st_size)

    def ours_big(consume: Consumer) -> int:
        ds = ps.open(folder / "big", io="direct")
        consume([lambda position=position: ds.take([position])["x"][0] for position in range(BIG_SAMPLES)])
        return BIG_BYTES * BIG_SAMPLES

    def numpy_big(consume: Consumer) -> int:
        consume([lambda number=number: np.load(folder / f"{number}.npy") for number in range(BIG_SAMPLES)])
        return BIG_BYTES * BIG_SAMPLES

    def ours_small(consume: Consumer) -> int:
        ds = ps.open(folder / "small", io="direct")
        order = rng.permutation(SMALL_SAMPLES)
        consume([lambda start=start: ds.take(order[start : start + TAKE])["x"] for start in range(0, SMALL_SAMPLES, TAKE)])
        return SMALL_BYTES * SMALL_SAMPLES

    def numpy_small(consume: Consumer) -> int:
        fixed = np.memmap(small_file, np.uint8, "r", offset=0, shape=(small_file.stat().st_size // SMALL_BYTES * SMALL_BYTES,))
        rows = fixed.reshape(-1, SMALL_BYTES)
        order = rng.permutation(len(rows))
        consume([lambda start=start: rows[order[start : start + TAKE]] for start in range(0, len(rows), TAKE)])
        return rows.size

    results: dict[str, Any] = {}
    for name, ours, buffered, pattern, size, place in (
        ("140 MB tensors", ours_big, numpy_big, "read", 1 << 20, folder / "big"),
        ("128 KiB random samples", ours_small, numpy_small, "randread", SMALL_BYTES, folder / "small"),
    ):
        rates: dict[str, list[Any]] = {"fio": []}
        for _ in range(ROUNDS):
            rates["fio"].append(fio(place, pattern, size, 1))
            for way in (one_thread, readers):
                for system, read in (("penstock", ours), ("numpy", buffered)):
                    evict(folder)
                    rates.setdefault(f"{system}, {way.__name__}", []).append(measured(functools.partial(read, way)))
        results[name] = rates
    lines, bars = [], []
    for name, rates in results.items():
        limit = statistics.median(rates.pop("fio"))
        rate = {system: statistics.median(row[0] for row in rows) for system, rows in rates.items()}
        spent = {system: statistics.median(row[1] for row in rows) for system, rows in rates.items()}
        read = min(row[2] for system, rows in rates.items() if system.startswith("penstock") for row in rows)
        lines.append(f"{name}: fio {limit / 1e9:.2f} GB/s; ours read {read / 1e9:.2f} GB per round from the device")
        lines += [f"{name}: {system} {rate[system] / 1e9:.2f} GB/s, {spent[system]:.3f} CPU seconds per GB" for system in rates]
        ratio = spent["penstock, one_thread"] / spent["numpy, one_thread"]
        bars.append({"what": f"penstock / fio: {name}", "value": rate["penstock, readers"] / limit, "at_least": 0.95})
        bars.append({"what": f"CPU seconds per GB, penstock / NumPy, one thread: {name}", "value": ratio, "at_most": 0.5})
    return {"what": "O_DIRECT and io_uring on local disk", "rates": results, "lines": lines, "bars": bars}

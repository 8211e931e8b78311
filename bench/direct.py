"""Reading past the page cache, against fio at the same size and depth on the very same file, and a buffered NumPy reader."""

from __future__ import annotations

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
DEPTH, ROUNDS = 32, 5


def device_bytes() -> int:
    """Bytes this process has had read from devices."""
    return int(next(line for line in pathlib.Path("/proc/self/io").read_text().splitlines() if line.startswith("read_bytes")).split()[1])


def fio(file: pathlib.Path, pattern: str, size: int, total: int) -> float:
    """Bytes a second of fio with io_uring and O_DIRECT."""
    command = [
        "fio", "--name=read", f"--filename={file}", "--readonly", f"--rw={pattern}", f"--bs={size}", "--ioengine=io_uring", f"--iodepth={DEPTH}",
        "--direct=1", f"--io_size={total}", f"--size={file.stat().st_size // size * size}", "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"])


def measured(work: Callable[[], int]) -> tuple[float, float, int]:
    """Bytes a second, processor seconds per GB, bytes from the device."""
    before, device, began = resource.getrusage(resource.RUSAGE_SELF), device_bytes(), time.perf_counter()
    total = work()
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return total / seconds, spent / (total / 1e9), device_bytes() - device


def direct(folder: pathlib.Path) -> dict[str, Any]:
    """140 MB raw tensors one by one, and takes of 256 random samples of 128 KiB."""
    if shutil.which("fio") is None:
        return {"what": "fio is missing", "lines": ["install fio to run this"], "bars": []}
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
    ps.configure(memory_bytes=16 << 20, threads=2)
    big_file = max((folder / "big" / "d").iterdir(), key=lambda path: path.stat().st_size)
    small_file = max((folder / "small" / "d").iterdir(), key=lambda path: path.stat().st_size)

    def ours_big() -> int:
        ds = ps.open(folder / "big", io="direct")
        for position in range(BIG_SAMPLES):
            touch(ds.take([position])["x"][0])
        return BIG_BYTES * BIG_SAMPLES

    def numpy_big() -> int:
        for number in range(BIG_SAMPLES):
            touch(np.load(folder / f"{number}.npy"))
        return BIG_BYTES * BIG_SAMPLES

    def ours_small() -> int:
        ds = ps.open(folder / "small", io="direct")
        order = rng.permutation(SMALL_SAMPLES)
        for start in range(0, SMALL_SAMPLES, TAKE):
            touch(ds.take(order[start : start + TAKE])["x"])
        return SMALL_BYTES * SMALL_SAMPLES

    def numpy_small() -> int:
        fixed = np.memmap(small_file, np.uint8, "r", offset=0, shape=(small_file.stat().st_size // SMALL_BYTES * SMALL_BYTES,))
        rows = fixed.reshape(-1, SMALL_BYTES)
        order = rng.permutation(len(rows))
        for start in range(0, len(rows), TAKE):
            touch(rows[order[start : start + TAKE]])
        return rows.size

    results: dict[str, Any] = {}
    for name, ours, buffered, pattern, size, file in (
        ("140 MB tensors", ours_big, numpy_big, "read", 1 << 20, big_file),
        ("128 KiB random samples", ours_small, numpy_small, "randread", SMALL_BYTES, small_file),
    ):
        rates: dict[str, list[Any]] = {"penstock": [], "fio": [], "numpy": []}
        for _ in range(ROUNDS):
            rates["fio"].append(fio(file, pattern, size, 1_000_000_000))
            rates["penstock"].append(measured(ours))
            evict(folder)
            rates["numpy"].append(measured(buffered))
            evict(folder)
        results[name] = rates
    lines, bars = [], []
    for name, rates in results.items():
        rate, limit = statistics.median(row[0] for row in rates["penstock"]), statistics.median(rates["fio"])
        cpu, numpy_cpu = (statistics.median(row[1] for row in rates[system]) for system in ("penstock", "numpy"))
        read = min(row[2] for row in rates["penstock"])
        numpy_rate = statistics.median(row[0] for row in rates["numpy"])
        lines.append(f"{name}: penstock {rate / 1e9:.2f} GB/s, fio {limit / 1e9:.2f}, NumPy buffered {numpy_rate / 1e9:.2f}")
        lines.append(
            f"{name}: processor seconds per GB: penstock {cpu:.3f}, NumPy {numpy_cpu:.3f}; from the device {read / 1e9:.2f} GB a round"
        )
        bars.append({"what": f"penstock / fio: {name}", "value": rate / limit, "at_least": 0.95})
        bars.append({"what": f"processor seconds per GB, penstock / NumPy: {name}", "value": cpu / numpy_cpu, "at_most": 0.5})
    return {"what": "O_DIRECT and io_uring on local disk", "rates": results, "lines": lines, "bars": bars}

"""Memory: its peak while importing, reads of data larger than it; and what block codecs cost and save."""

from __future__ import annotations

import contextlib
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import penstock as ps
from harness import against_best, bar, comparison, evict, fewer, rounds

Result = dict[str, Any]
LIMIT = 256 << 20


def memory(folder: pathlib.Path, _photos: pathlib.Path | None) -> Result:
    """Measure the peak memory while importing 2 GB at the default budget, excluding the interpreter and its libraries."""
    source = folder / "files"
    source.mkdir()
    body = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8).tobytes()
    (source / "first").write_bytes(body)
    for number in range(2047):
        os.link(source / "first", source / f"{number:05d}")
    script = """
import sys, pathlib, time, penstock as ps
from penstock import importers
from penstock.frameworks import arrow
peak = lambda: int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) * 1024
ds = ps.create(sys.argv[2] + "-warm", {"file": ps.Bytes()}); ds.append({"file": [b"x"]}); ds[0]
before, begin = peak(), time.perf_counter()
files = ({"file": path} for path in sorted(pathlib.Path(sys.argv[1]).iterdir()))
report = importers.import_data(files, sys.argv[2], types={"file": ps.Bytes()})
print(report.samples, peak() - before, time.perf_counter() - begin, ps.configure()["memory_bytes"])
"""
    samples, peak, seconds, budget = subprocess.run(
        [sys.executable, "-c", script, str(source), str(folder / "d")], capture_output=True, text=True, check=True
    ).stdout.split()
    return {
        "what": "2,048 files of 1 MiB imported as one commit", "peak_bytes": int(peak), "seconds": float(seconds), "budget_bytes": int(budget),
        "lines": [f"{samples} files, peak {int(peak) >> 20} MiB excluding the interpreter, {float(seconds):.1f} s"],
        "bars": [bar("peak memory / budget", int(peak) / int(budget), at_most=1.0)],
    }  # fmt: skip


GROUPED = """
import mmap, os, sys, time, numpy as np
which, path, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
order = np.random.default_rng(int(sys.argv[4])).permutation(count)[:int(sys.argv[5])]
if which == "penstock":
    import penstock as ps
    ps.configure(threads=1); ds = ps.open(path); read = lambda rows: ds.take(rows)["image"]
elif "preadv" in which:
    file = os.open(path, os.O_RDONLY); os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
    def read(rows):
        out = np.empty((len(rows), 32, 32, 3), np.uint8)
        if "WILLNEED" in which:
            for row in rows.tolist(): os.posix_fadvise(file, row * 3072, 3072, os.POSIX_FADV_WILLNEED)
        for place, row in enumerate(rows.tolist()): os.preadv(file, [out[place]], row * 3072)
        return out
else:
    file = open(path, "rb"); mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    if which == "numpy, MADV_RANDOM": mapped.madvise(mmap.MADV_RANDOM)
    flat = np.frombuffer(mapped, np.uint8).reshape(count, 32, 32, 3); read = lambda rows: flat[rows]
io = lambda: int(next(l for l in open("/proc/self/io") if l.startswith("read_bytes")).split()[1])
before, begin = io(), time.perf_counter()
digest = 0
for start in range(0, len(order), 512): digest ^= int(np.bitwise_xor.reduce(read(order[start:start + 512]).reshape(-1).view(np.uint64)[::8]))
print(len(order) / (time.perf_counter() - begin), io() - before, digest)
"""


def _group() -> pathlib.Path:
    """Make a cgroup of 256 MiB."""
    places = (pathlib.Path(path) for path in ("/sys/fs/cgroup/memory", "/sys/fs/cgroup") if pathlib.Path(path, "cgroup.procs").exists())
    group = next(places) / "penstock-bench"
    group.mkdir(exist_ok=True)
    knob = next(name for name in ("memory.max", "memory.limit_in_bytes") if (group / name).exists())
    (group / knob).write_text(str(LIMIT))
    return group


def larger_than_memory(folder: pathlib.Path, _photos: pathlib.Path | None) -> Result:
    """Take CIFAR-shaped samples from data 4 times as large as memory: 1 GiB of samples in a cgroup of 256 MiB, in turns."""
    count, drawn = fewer(350_000), fewer(120_000)
    rng = np.random.default_rng(0)
    ds = ps.create(folder / "penstock", {"image": ps.Tensor((32, 32, 3), "uint8")})
    with ds.transaction() as tx, (folder / "flat").open("wb") as flat:
        for _ in range(7):
            part = rng.integers(0, 256, (count // 7, 32, 32, 3), dtype=np.uint8)
            tx.append({"image": part})
            flat.write(part.tobytes())
    try:
        group = _group()
    except (OSError, StopIteration) as error:
        return {
            "what": "data 4 x memory",
            "lines": [f"not measured: {error}"],
            "missing": {"penstock and numpy": f"cannot create a cgroup: {error}"},
        }
    systems = {
        "penstock": folder / "penstock", "numpy, MADV_RANDOM": folder / "flat", "numpy, preadv": folder / "flat",
        "numpy, WILLNEED and preadv": folder / "flat",
    }  # fmt: skip
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in systems}
    try:
        for turn in range(rounds(3)):
            digests = set()
            for which, path in [*systems.items()][turn:] + [*systems.items()][:turn]:
                evict(folder)
                command = [sys.executable, "-c", GROUPED, which, str(path), str(count), str(turn), str(drawn)]
                joining = f'echo $$ > {group}/cgroup.procs; exec "$@"'
                out = subprocess.run(["bash", "-c", joining, "bash", *command], capture_output=True, text=True, check=True).stdout.split()
                found[which].append((float(out[0]), float(out[1]) / drawn))
                digests.add(out[2])
            assert len(digests) == 1, "systems read other values"
    finally:
        time.sleep(0.5)  # The kernel removes processes that have ended a little later.
        with contextlib.suppress(OSError):  # It must not hide an interrupt.
            group.rmdir()
    rates = {name: [rate for rate, _ in all] for name, all in found.items()}
    read = {name: [size for _, size in all] for name, all in found.items()}
    compared = comparison("random takes", "samples/s", rates)
    return {
        "what": f"{count:,} samples of 3,072 B in a cgroup of {LIMIT >> 20} MiB, random takes of 512, cold",
        "lines": [f"{name}: {statistics.median(all):,.0f} samples/s, {statistics.median(read[name]):,.0f} bytes read from the device per sample" for name, all in rates.items()],
        "comparisons": [compared, comparison("read from the device", "bytes/sample", read, "lowest")],
        "bars": against_best(compared),
    }  # fmt: skip


def codecs(folder: pathlib.Path, photos: pathlib.Path | None) -> Result:
    """Measure the size and speed of each block codec for each kind of column. The results justify the default codec."""
    rng = np.random.default_rng(0)
    words = np.array([f"word{number}" for number in range(2000)])
    data: dict[str, tuple[Callable[[str], Any], Any]] = {
        "text": (lambda codec: ps.Text(codec=codec), [" ".join(words[rng.zipf(1.4, 18) % 2000]) for _ in range(100_000)]),
        "vectors float32": (lambda codec: ps.Tensor((256,), "float32", codec=codec), rng.standard_normal((20_000, 256), dtype=np.float32)),
        "pixels uint8": (lambda codec: ps.Tensor((32, 32, 3), "uint8", codec=codec), _natural_tiles()),
        "counters int64": (lambda codec: ps.Scalar("int64", codec=codec), np.sort(rng.integers(0, 10**6, 500_000))),
    }
    rows, lines = [], []
    for kind, (column, values) in data.items():
        for codec in ("none", "lz4", "zstd"):
            root = folder / f"{kind}-{codec}".replace(" ", "-")
            begin = time.perf_counter()
            ps.create(root, {"x": column(codec)}).append({"x": values})
            written = time.perf_counter() - begin
            stored = sum(file.stat().st_size for file in root.glob("d/*"))
            order = rng.permutation(len(values))[:20_480]
            reads = []
            for _ in range(3):
                ds = ps.open(root)
                begin = time.perf_counter()
                for start in range(0, len(order), 512):
                    ds.take(order[start : start + 512])
                reads.append(time.perf_counter() - begin)
            row = {
                "kind": kind,
                "codec": codec,
                "stored_bytes": stored,
                "write_seconds": written,
                "random_samples_per_second": len(order) / sorted(reads)[1],
            }
            rows.append(row)
            lines.append(
                f"{kind:16} {codec:5} {stored / 1e6:7.1f} MB, write {written:5.2f} s, random {row['random_samples_per_second'] / 1e3:8,.0f} k/s"
            )
    return {"what": "fresh handle, 20,480 random samples in takes of 512", "rows": rows, "lines": lines}


def _natural_tiles() -> np.ndarray[Any, Any]:
    from sklearn.datasets import load_sample_images

    rng, tiles = np.random.default_rng(0), []
    for photo in load_sample_images().images:
        for _ in range(10_000):
            y, x = rng.integers(0, photo.shape[0] - 32), rng.integers(0, photo.shape[1] - 32)
            tiles.append(photo[y : y + 32, x : x + 32])
    return np.stack(tiles)

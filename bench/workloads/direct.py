"""Reads without the page cache, against fio at its fastest settings on the same files, and against buffered NumPy readers."""

from __future__ import annotations

import collections
import concurrent.futures
import itertools
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
from harness import bar, comparison, evict, fewer, note_versions, rounds
from serving import device_bytes, touch

BIG_BYTES, BIG_SAMPLES = 140_000_000, 8
SMALL_BYTES, SMALL_SAMPLES, TAKE = 128 << 10, 8192, 256
PAGE = 4096
READERS, DEPTHS, JOBS = 2, (4, 16, 64), (1, 2, 4)


def fio(files: list[pathlib.Path], pattern: str, setting: tuple[int, int, int], seconds: float) -> float:
    """Read files with fio for some seconds, using io_uring, O_DIRECT, registered buffers and files, and huge pages. Return bytes per second.

    Each job reads its own files.
    """
    size, depth, jobs = setting
    names = [str(path) for path in sorted(files)]
    command = [
        "fio", "--name=global", "--readonly", f"--rw={pattern}", f"--bs={size}", "--ioengine=io_uring", f"--iodepth={depth}", "--direct=1", "--fixedbufs",
        "--registerfiles", "--nonvectored=1", "--randrepeat=0", "--time_based", f"--runtime={1000 * seconds:.0f}ms",
        f"--file_service_type={'sequential' if pattern == 'read' else 'random'}", "--group_reporting", "--output-format=json",
        *(option for job in range(jobs) for option in (f"--name=job{job}", f"--filename={':'.join(names[job::jobs])}")),
    ]  # fmt: skip
    pages = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}  # Penstock's buffers have huge pages, too.
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=pages)
    return float(json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"])


class Limit:
    """fio at the fastest of many settings, on the files that are to be read: the best four are measured three times, and their medians count.

    `tried` holds all that was measured to choose, `values` what `turn` measured afterwards.
    """

    def __init__(self, folder: pathlib.Path, pattern: str, sizes: tuple[int, ...], depths: tuple[int, ...] = DEPTHS) -> None:
        self.files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > max(sizes)]
        self.pattern, self.values = pattern, []
        settings = [one for one in itertools.product(sizes, depths, JOBS) if len(self.files) % one[2] == 0]
        self.tried = {setting: [fio(self.files, pattern, setting, 0.5)] for setting in settings}
        best = sorted(settings, key=lambda setting: -self.tried[setting][0])[:4]
        for _ in range(rounds(3)):
            for setting in best:
                self.tried[setting].append(fio(self.files, pattern, setting, 1))
        self.best = max(best, key=lambda setting: statistics.median(self.tried[setting][1:]))

    def turn(self) -> float:
        """Measure the fastest setting again."""
        self.values.append(fio(self.files, self.pattern, self.best, 1.5))
        return self.values[-1]

    def name(self, setting: tuple[int, int, int]) -> str:
        size, depth, jobs = setting
        return f"{size >> 10} KiB, depth {depth}, {jobs} jobs"


def measured(work: Callable[[], int]) -> tuple[float, float, int]:
    """Run `work`, and return bytes per second, CPU seconds per GB, and bytes read from the device."""
    before, device, began = resource.getrusage(resource.RUSAGE_SELF), device_bytes(), time.perf_counter()
    total = work()
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return total / seconds, spent / (total / 1e9), device_bytes() - device


def one_reader(reads: list[Callable[[], Any]]) -> int:
    """Read and touch one array after another. A read may have many requests in flight."""
    total = 0
    for read in reads:
        value = read()
        touch(value)
        total += value.nbytes
    return total


def readers(reads: list[Callable[[], Any]]) -> int:
    """Read in two threads and touch the results in order in the calling thread. As in a loader, the consumer does not stall the device."""
    waiting: collections.deque[concurrent.futures.Future[Any]] = collections.deque()
    total = 0
    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        for read in reads:
            waiting.append(pool.submit(read))
            if len(waiting) > READERS:
                total += one_reader([waiting.popleft().result])
        while waiting:
            total += one_reader([waiting.popleft().result])
    return total


def _into(path: pathlib.Path, rows: np.ndarray[Any, Any], size: int, begin: int) -> np.ndarray[Any, Any]:
    """Read samples of a file with preadv. Several samples are announced to the kernel, which then reads them at the same time."""
    file, out = os.open(path, os.O_RDONLY), np.empty((len(rows), size), np.uint8)
    if len(rows) > 1:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
        for row in rows.tolist():
            os.posix_fadvise(file, begin + row * size, size, os.POSIX_FADV_WILLNEED)
    else:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    for place, row in enumerate(rows.tolist()):
        _fill(file, memoryview(out[place]), begin + row * size)
    os.close(file)
    return out


def _fill(file: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        read = os.preadv(file, [view[done:]], offset + done)
        if not read:
            break  # A direct read past the end of the file.
        done += read


class DirectReader:
    """Reads samples of a file with preadv and O_DIRECT: whole pages into aligned memory, of which a view is returned.

    As many requests are in flight as there are threads. Memory is used again after four more reads, because new memory costs a third of the time.
    """

    def __init__(self, threads: int) -> None:
        self.threads, self.pool = threads, concurrent.futures.ThreadPoolExecutor(threads)
        self.memory: dict[int, itertools.cycle[np.ndarray[Any, Any]]] = {}

    def _aligned(self, bytes: int) -> np.ndarray[Any, Any]:
        if bytes not in self.memory:
            made = [np.zeros(bytes + PAGE, np.uint8) for _ in range(5)]
            self.memory[bytes] = itertools.cycle([one[-one.ctypes.data % PAGE :][:bytes] for one in made])
        return next(self.memory[bytes])

    def __call__(self, path: pathlib.Path, rows: np.ndarray[Any, Any], size: int, begin: int) -> np.ndarray[Any, Any]:
        file, before = os.open(path, os.O_RDONLY | os.O_DIRECT), begin % PAGE
        each = -(-(before + size) // PAGE) * PAGE
        aligned = self._aligned(len(rows) * each).reshape(len(rows), each)
        step = max(-(-len(rows) * each // (self.threads * PAGE)) * PAGE, 128 << 10)
        parts = [(place, row, at) for place, row in enumerate(rows.tolist()) for at in range(0, each, step)]

        def read(share: list[tuple[int, int, int]]) -> None:
            for place, row, at in share:
                _fill(file, memoryview(aligned[place][at : at + step]), begin - before + row * size + at)

        list(self.pool.map(read, [parts[first :: self.threads] for first in range(self.threads)]))
        os.close(file)
        return aligned[:, before : before + size]


def _sets(folder: pathlib.Path) -> dict[str, tuple[Any, dict[str, Any], str, tuple[int, ...], pathlib.Path]]:
    """Write tensors of 140 MB and samples of 128 KiB. Return for each how we and NumPy read them, and fio's pattern, sizes and files."""
    rng, samples, tensors = np.random.default_rng(0), fewer(SMALL_SAMPLES, 1024), fewer(BIG_SAMPLES, 2)
    big = ps.create(folder / "big", {"x": ps.Tensor((None,), "uint8")})
    with big.transaction() as tx:
        for number in range(tensors):
            value = rng.integers(0, 256, BIG_BYTES, dtype=np.uint8)
            np.save(folder / f"{number}.npy", value)
            tx.append({"x": [value]})
    small = ps.create(folder / "small", {"x": ps.Tensor((SMALL_BYTES,), "uint8")})
    with small.transaction() as tx, (folder / "small.raw").open("wb") as flat:
        for _ in range(0, samples, 512):
            part = rng.integers(0, 256, (512, SMALL_BYTES), dtype=np.uint8)
            tx.append({"x": part})
            flat.write(part.tobytes())
    os.sync()
    takes = lambda: np.split(rng.permutation(samples), samples // TAKE)  # noqa: E731

    def ours_big() -> list[Any]:
        ds = ps.open(folder / "big", io="direct")
        return [lambda position=position: ds.take([position])["x"][0] for position in range(tensors)]

    def ours_small() -> list[Any]:
        ds = ps.open(folder / "small", io="direct")
        return [lambda rows=rows: ds.take(rows)["x"] for rows in takes()]

    def mapped() -> list[Any]:
        flat = np.memmap(folder / "small.raw", np.uint8, "r").reshape(-1, SMALL_BYTES)
        return [lambda rows=rows: flat[rows] for rows in takes()]

    one = np.zeros(1, np.int64)
    whole = {"numpy.load": lambda: [lambda number=number: np.load(folder / f"{number}.npy") for number in range(tensors)]}
    parts = {"numpy.memmap": mapped}
    for name, read in (("numpy, preadv", _into), *((f"numpy, O_DIRECT, {threads} threads", DirectReader(threads)) for threads in (16, 48))):
        whole[name] = lambda read=read: [
            lambda number=number: read(folder / f"{number}.npy", one, BIG_BYTES, 128)[0] for number in range(tensors)
        ]
        parts[name] = lambda read=read: [lambda rows=rows: read(folder / "small.raw", rows, SMALL_BYTES, 0) for rows in takes()]
    return {
        "140 MB tensors": (ours_big, whole, "read", (256 << 10, 1 << 20, 4 << 20), folder / "big"),
        "128 KiB random samples": (ours_small, parts, "randread", (SMALL_BYTES,), folder / "small"),
    }


def direct(folder: pathlib.Path, _photos: pathlib.Path | None) -> dict[str, Any]:
    """Read raw tensors of 140 MB one by one, and take 256 random samples of 128 KiB at a time."""
    if shutil.which("fio") is None:
        return {"what": "fio is missing", "lines": ["install fio to run this benchmark"], "missing": {"fio": "not installed"}}
    ps.configure(threads=2)
    note_versions("direct", {"fio": subprocess.run(["fio", "--version"], capture_output=True, text=True).stdout.strip()})
    results, lines, bars, comparisons = {}, [], [], []
    for name, (ours, buffered, pattern, sizes, place) in _sets(folder).items():
        limit, found = Limit(place, pattern, sizes), {}
        for reads in buffered.values():
            one_reader(reads()[:5])  # Memory that is used again is made here.
        for _ in range(rounds(4)):
            limit.turn()
            for way, (system, reads) in itertools.product((one_reader, readers), {"penstock": ours, **buffered}.items()):
                evict(folder)
                found.setdefault((system, way.__name__), []).append(measured(lambda way=way, reads=reads: way(reads())))
        rate = {key: [row[0] / 1e9 for row in rows] for key, rows in found.items()}
        spent = {key: statistics.median(row[1] for row in rows) for key, rows in found.items()}
        fastest = [value / 1e9 for value in limit.values]
        lines.append(f"{name}: fio is fastest with {limit.name(limit.best)}: {statistics.median(fastest):.2f} GB/s")
        lines += [
            f"{name}: {system}, {way}: {statistics.median(rate[system, way]):.2f} GB/s, {spent[system, way]:.3f} CPU seconds per GB"
            for system, way in found
        ]
        read = min(row[2] for (system, _), rows in found.items() if system == "penstock" for row in rows)
        lines.append(f"{name}: Penstock read {read / 1e9:.2f} GB per round from the device")
        results[name] = {
            "fio": limit.values,
            "fio_tried": {limit.name(one): found for one, found in limit.tried.items()},
            **{f"{system}, {way}": rows for (system, way), rows in found.items()},
        }
        for way, title in (("readers", "two readers"), ("one_reader", "one reader")):
            rates = {system: rate[system, of] for system, of in found if of == way} | {"limit: fio at its best": fastest}
            comparisons.append(
                comparison(
                    f"{name}, {title}",
                    "GB/s",
                    rates,
                    notes="NumPy's load, memmap and preadv read through the page cache, which was emptied.",
                )
            )
        ratio = statistics.median(rate["penstock", "readers"]) / statistics.median(fastest)
        bars.append(bar(f"penstock / fio at its best: {name}", ratio, at_least=1.0))
        rival = min((spent[system, "one_reader"], system) for system in buffered if "O_DIRECT" not in system)
        what = f"CPU seconds per GB, one reader, {name}: penstock / best rival ({rival[1]}, buffered)"
        bars.append(bar(what, spent["penstock", "one_reader"] / rival[0], at_most=0.5))
    return {
        "what": "O_DIRECT and io_uring on local disk; fio on the same files at the fastest of its block sizes, depths and jobs",
        "rates": results,
        "lines": lines,
        "bars": bars,
        "comparisons": comparisons,
    }

"""E50: a cache that knows the order of a loader, before a store that is far away, and jobs that share the cache."""

from __future__ import annotations

import collections
import contextlib
import heapq
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import harness
import numpy as np
import penstock as ps
import servers
from harness import bar, fewer

Result = dict[str, Any]
WHAT = (
    "a job takes 40 MB/s in shuffled epochs, through a cache of a part of the data, from a store behind a link; hits after the "
    "second epoch, and stalls after the first. The hit rates of Belady's choice, LRU and FIFO are computed for the same order"
)
SAMPLES, SAMPLE_BYTES, BATCH = 512, 400_000, 4
# The loader's lead at the beginning and at the end of the epochs that count can differ. The more epochs, the less this matters.
EPOCHS = 6
STEP_SECONDS = BATCH * SAMPLE_BYTES / 40e6
# Part of the data, latency in ms, MB/s of the link.
CASES = [(part, latency, 50) for part in (5, 10, 20, 50) for latency in (0, 20, 100)] + [(50, 20, 30), (20, 20, 30)]
# Two jobs share pages of more and smaller samples.
SHARED_SAMPLES, SHARED_BYTES, SHARED_BATCH, SHARED_EPOCHS = 4096, 100_000, 8, 4
COMMON = pathlib.Path(__file__).parents[2] / "adapters" / "common"


def belady(order: list[int], capacity: int) -> list[bool]:
    """Return which uses find their sample, if the one that is used last gives way."""
    next_use, seen = [0] * len(order), {}
    for at in reversed(range(len(order))):
        next_use[at] = seen.get(order[at], len(order))
        seen[order[at]] = at
    cached: dict[int, int] = {}
    latest: list[tuple[int, int]] = []
    hits = []
    for at, sample in enumerate(order):
        hits.append(sample in cached)
        cached[sample] = next_use[at]
        heapq.heappush(latest, (-next_use[at], sample))
        while len(cached) > capacity:
            use, victim = heapq.heappop(latest)
            if cached.get(victim) == -use:
                del cached[victim]
    return hits


def by_age(order: list[int], capacity: int, moves: bool) -> list[bool]:
    """Return which uses find their sample, if the oldest one gives way: by its last use (LRU), or by when it came (FIFO)."""
    cached: collections.OrderedDict[int, None] = collections.OrderedDict()
    hits = []
    for sample in order:
        hits.append(sample in cached)
        if sample in cached:
            if moves:
                cached.move_to_end(sample)
            continue
        cached[sample] = None
        if len(cached) > capacity:
            cached.popitem(last=False)
    return hits


@contextlib.contextmanager
def link(upstream: int, latency_seconds: float, *rates: float) -> Iterator[int]:
    """Connect to a server through a link. The rates in bytes per second are that of each connection and, if given, that of all."""
    port = servers.free_port()
    command = [sys.executable, COMMON / "shaping.py", port, upstream, latency_seconds, *rates]
    process = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "ready\n"
    try:
        yield port
    finally:
        process.terminate()
        process.wait()


def jobs(place: str, cache: str, ranks: list[tuple[int, int]], loop: tuple[int, int, float], endpoint: str = "") -> list[list[Result]]:
    """Run jobs at the same time, each a process. Return what each one noted of its epochs.

    `loop` has the number of epochs, the samples of a step, and the seconds that a step takes.
    """
    environment = {**os.environ, **({"AWS_ENDPOINT_URL": endpoint} if endpoint else {})}
    begin = time.time() + 3
    commands = [[sys.executable, COMMON / "consumer.py", place, cache, *loop, *rank, begin] for rank in ranks]
    running = [
        subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, text=True, env=environment) for command in commands
    ]
    found = [process.communicate()[0] for process in running]
    assert all(process.returncode == 0 for process in running)
    return [json.loads(text) for text in found]


def one_job(folder: pathlib.Path, minio: servers.Minio, place: str, count: int) -> list[Result]:
    rows = []
    for part, latency, speed in CASES[:1] if harness.QUICK else CASES:
        cache = folder / "cache"
        shutil.rmtree(cache, ignore_errors=True)
        budget = count * SAMPLE_BYTES * part // 100
        with link(minio.port, latency / 1000, speed * 1e6, speed * 1e6) as port:
            (epochs,) = jobs(place, f"{cache}:{budget}", [(0, 1)], (EPOCHS, BATCH, STEP_SECONDS), f"http://127.0.0.1:{port}")
        order = [sample for epoch in epochs for sample in epoch["order"]]
        # The plan knows the epoch after the last one, too. Any order has the same number of hits there.
        capacity = count * part // 100
        computed = {"belady": belady(order, capacity), "lru": by_age(order, capacity, True), "fifo": by_age(order, capacity, False)}
        # In the first two epochs, the loader gets ahead of its steps, so that they have more of the cold bytes.
        later = count * (EPOCHS - 2)
        row = {
            "cache_percent": part, "latency_ms": latency, "link_mb_per_second": speed,
            "hit_rate": 1 - sum(epoch["cold_bytes"] for epoch in epochs[2:]) / (later * SAMPLE_BYTES),
            **{name: sum(hits[2 * count :]) / later for name, hits in computed.items()},
            "stalled_seconds": sum(epoch["stalled_seconds"] for epoch in epochs[1:]),
            "seconds": sum(epoch["seconds"] for epoch in epochs[1:]),
        }  # fmt: skip
        rows.append(row)
        print(
            f"  {part} % cached, {latency} ms, {speed} MB/s: hits {row['hit_rate']:.3f}, Belady {row['belady']:.3f}, LRU {row['lru']:.3f}, "
            f"FIFO {row['fifo']:.3f}; stalled {row['stalled_seconds']:.2f} of {row['seconds']:.0f} s",
            flush=True,
        )
    return rows


def foresight(folder: pathlib.Path, _photos: pathlib.Path | None) -> Result:
    """Hits and stalls of a job of fixed speed, and the cold bytes of jobs that share a cache."""
    random = np.random.default_rng(0)
    (folder / "minio").mkdir()
    minio = servers.Minio(folder / "minio")
    os.environ |= minio.environment
    bars: list[Result] = []
    try:
        count = fewer(SAMPLES, 64)
        places = {}
        for name, number, size in (("one", count, SAMPLE_BYTES), ("shared", fewer(SHARED_SAMPLES, 64), SHARED_BYTES)):
            places[name] = str(minio.place(f"{name}/dataset"))
            blobs = [random.bytes(size) for _ in range(number)]
            ps.create(places[name], {"id": "int64", "blob": ps.Bytes()}).append({"id": np.arange(number), "blob": blobs})
        rows = one_job(folder, minio, places["one"], count)
        for row in rows:
            name = f"{row['cache_percent']} % cached, {row['latency_ms']} ms, {row['link_mb_per_second']} MB/s"
            bars += [
                bar(f"{name}: hit rate - Belady's", row["hit_rate"] - row["belady"], at_least=-0.01),
                bar(f"{name}: seconds of stalls / seconds, after the first epoch", row["stalled_seconds"] / row["seconds"], at_most=0.005),
            ]
        shared = []
        for part in (10,) if harness.QUICK else (10, 20, 50):
            found = {}
            for name, ranks in (("one job", [(0, 1)]), ("two jobs", [(0, 1)] * 2), ("two ranks", [(0, 2), (1, 2)])):
                cache = folder / "cache"
                shutil.rmtree(cache, ignore_errors=True)
                budget = fewer(SHARED_SAMPLES, 64) * SHARED_BYTES * part // 100
                done = jobs(places["shared"], f"{cache}:{budget}", ranks, (SHARED_EPOCHS, SHARED_BATCH, 0))
                found[name] = sum(epoch["cold_bytes"] for job in done for epoch in job)
            shared.append({"cache_percent": part, **found})
            print(f"  {part} % cached: " + ", ".join(f"{name} {received / 1e6:.0f} MB" for name, received in found.items()), flush=True)
            for name in ("two jobs", "two ranks"):
                bars.append(bar(f"{part} % cached: cold bytes of {name} / one job", found[name] / found["one job"], at_most=1.05))
    finally:
        minio.stop()
    return {"what": WHAT, "comparisons": [], "bars": bars, "missing": {}, "cases": rows, "shared": shared, "lines": []}

"""Benchmarks of small durable commits: one writer, threads, processes, object storage, and how they fare after 10,000 commits.

The limit on a local disk is to create a file, sync it, and sync its folder. On object storage, it is a conditional put of as many bytes.
Every turn uses a new folder or dataset, because the time to create a file depends on the folder. What is done once per dataset (creating it,
testing the store, and the first commit) is not counted, on either side.
"""

from __future__ import annotations

import http.client
import itertools
import os
import pathlib
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import penstock as ps
from harness import bar, comparison, interleaved, rate, synced_file
from workloads.stores.remote import BUCKET, servers

Result = dict[str, Any]
COMMITS, SECONDS, WRITERS = 240, 3.0, 8
SCHEMA = {"x": "int64", "blob": ps.Bytes()}
LARGE = {"x": [1], "blob": [bytes(3000)]}

PROCESS = """
import sys, time, penstock as ps
ds, begin, end, count = ps.open(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), 0
while time.time() < begin:
    time.sleep(0.001)  # All writers begin at once.
while time.time() < end:
    ds.append({"x": [1]})
    count += 1
print(count)
"""


def _plain(folder: pathlib.Path) -> None:
    for number in range(COMMITS):
        synced_file(folder / f"{number:020d}", 1500)


def _dataset(place: pathlib.Path | str) -> ps.Dataset:
    ds = ps.create(place, SCHEMA)
    ds.append({"x": [0]})
    return ds


def _appends(ds: ps.Dataset, values: dict[str, Any], threads: int = 1) -> None:
    def work() -> None:
        for _ in range(COMMITS // threads):
            ds.append(values)

    running = [threading.Thread(target=work) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()


def _processes(place: pathlib.Path, writers: int) -> list[int]:
    """Commit in several processes for a while, and return the number of each one's commits."""
    ps.create(place, SCHEMA)
    begin = time.time() + 2
    command = [sys.executable, "-c", PROCESS, str(place), str(begin), str(begin + SECONDS)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(writers)]
    return [int(process.communicate()[0]) for process in running]


def _many(folder: pathlib.Path) -> dict[str, Any]:
    """Make 10,000 commits, with a tag for each tenth. Compare the first 100 with the last 100, and open the dataset in a new handle."""
    place, spent = folder / "many", []
    ds = ps.create(place, SCHEMA)
    for number in range(10_000):
        begin = time.perf_counter()
        ds.append({"x": [number]})
        spent.append(time.perf_counter() - begin)
        if number % 10 == 0:
            ds.create_tag(f"tag {number}")
    opened = []
    for _ in range(50):
        begin = time.perf_counter()
        again = ps.open(place)
        opened.append(time.perf_counter() - begin)
    first, last = (statistics.median(part) for part in (spent[:100], spent[-100:]))
    tagged = ps.open(place, tag="tag 5000")
    return {
        "first_seconds": first, "last_seconds": last, "open_seconds": statistics.median(opened), "open_reads": again.stats()["reads"],
        "tag_reads": tagged.stats()["reads"], "samples_at_tag": len(tagged),
    }  # fmt: skip


def _puts(server: Any, keys: itertools.count[int]) -> Callable[[], None]:
    """Make as many conditional puts, signed beforehand, on one connection."""
    client = server.client()

    def sign() -> str:
        return str(client.generate_presigned_url("put_object", Params={"Bucket": BUCKET, "Key": f"plain/{next(keys):08d}"}))

    def work() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        for path in paths.pop():
            connection.request("PUT", path, body=bytes(1500), headers={"If-None-Match": "*"})
            answer = connection.getresponse()
            answer.read()
            if answer.status != 200:
                raise RuntimeError(f"MinIO answered {answer.status}")
        connection.close()

    paths = [[sign().removeprefix(server.endpoint) for _ in range(COMMITS)] for _ in range(8)]
    return work


def limits(folder: pathlib.Path, _photos: pathlib.Path | None) -> Result:
    """Compare commits with the syncs or puts that they need at least."""
    number = itertools.count()
    fresh = lambda: folder / f"d{next(number)}"  # noqa: E731
    rounds = 9
    folders = [fresh() for _ in range(rounds)]
    for place in folders:
        place.mkdir()
    ready = [_dataset(fresh()) for _ in range(3 * rounds)]
    times = interleaved({
        "plain": lambda: _plain(folders.pop()),
        "tiny": lambda: _appends(ready.pop(), {"x": [1]}),
        "with_data_file": lambda: _appends(ready.pop(), LARGE),
        "threads": lambda: _appends(ready.pop(), {"x": [1]}, WRITERS),
    }, rounds=rounds)  # fmt: skip
    rates = {name: rate(COMMITS, spent) for name, spent in times.items()}
    shares = [_processes(fresh(), WRITERS) for _ in range(3)]
    alone = statistics.median(_processes(fresh(), 1)[0] for _ in range(3))
    many = _many(folder)
    server = servers.Minio(folder)
    try:
        os.environ |= server.environment
        ready = [_dataset(f"s3://{BUCKET}/d{next(number)}") for _ in range(rounds)]
        remote = interleaved({
            "puts": _puts(server, itertools.count()),
            "commits": lambda: _appends(ready.pop(), {"x": [1]}),
        }, rounds=min(rounds, 8))  # fmt: skip
    finally:
        server.stop()
    remote_rates = {name: rate(COMMITS, spent) for name, spent in remote.items()}
    together = statistics.median(sum(each) for each in shares)
    return {
        "what": "commits of one sample. plain: create a file, sync it, and sync its folder; puts: conditional puts to MinIO",
        "commits_per_second": rates, "times": times, "processes": {"alone": alone / SECONDS, "each_of_eight": shares}, "after_10000": many,
        "minio_per_second": remote_rates,
        "lines": [
            *(f"{name}: {value:,.0f}/s" for name, value in rates.items()),
            f"one process: {alone / SECONDS:,.0f}/s; {WRITERS} processes together: {together / SECONDS:,.0f}/s, each {shares[0]}",
            f"after 10,000 commits: {many}",
            *(f"MinIO, {name}: {value:,.0f}/s" for name, value in remote_rates.items()),
        ],
        "comparisons": [
            comparison("commits of one sample, local", "commits/s", {
                "penstock": [COMMITS / s for s in times["tiny"]["seconds"]], "limit: synced files": [COMMITS / s for s in times["plain"]["seconds"]],
            }),
            comparison("commits of one sample, MinIO", "commits/s", {
                "penstock": [COMMITS / s for s in remote["commits"]["seconds"]], "limit: conditional puts": [COMMITS / s for s in remote["puts"]["seconds"]],
            }),
        ],
        "bars": [
            bar("a tiny append / a synced file", rates["tiny"] / rates["plain"], at_least=0.7),
            bar("an append with a data file / a synced file", rates["with_data_file"] / rates["plain"], at_least=0.35),
            bar("8 threads / one", rates["threads"] / rates["tiny"], at_least=3),
            bar("8 processes / one", together / alone, at_least=1),
            bar("the slowest of 8 processes / its share", min(min(each) / (sum(each) / WRITERS) for each in shares), at_least=0.25),
            bar("the last 100 of 10,000 commits / the first", many["last_seconds"] / many["first_seconds"], at_most=1.3),
            bar("requests of open after 10,000 commits", many["open_reads"], at_most=3),
            bar("milliseconds of open after 10,000 commits", 1e3 * many["open_seconds"], at_most=1),
            bar("requests of open by a tag among 1,000", many["tag_reads"], at_most=5),
            bar("a tiny append to MinIO / a conditional put", remote_rates["commits"] / remote_rates["puts"], at_least=0.7),
        ],
    }  # fmt: skip

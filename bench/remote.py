"""Benchmarks reads from MinIO on loopback, against plain signed GETs of the same ranges with the same HTTP library."""

from __future__ import annotations

import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import penstock as ps
from harness import touch

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "tests"))
import servers

BUCKET = "bench"
TAKES, ROUNDS = 12, 5
AT_ONCE = (8, 16, 32, 64, 128)
Batches = list[list[tuple[str, int, int]]]


def plain_gets(binary: pathlib.Path, batches: Batches, at_once: int) -> float:
    """Return how long plain GETs take, in seconds. The first batch is sent twice, the first time as an untimed warm-up."""
    lines = [";".join(f"{key} {begin} {end}" for key, begin, end in batch) for batch in [batches[0], *batches]]
    done = subprocess.run([str(binary), BUCKET, str(at_once)], input="\n".join(lines), capture_output=True, text=True, check=True)
    seconds, received = done.stdout.split()
    assert int(received) == sum(end - begin for batch in batches for _, begin, end in batch)
    return float(seconds)


def boto3_gets(endpoint: str, batches: Batches) -> float:
    """Return how long boto3 takes, in seconds, with 16 threads that read and discard the bodies."""
    import boto3
    from botocore.config import Config

    client = boto3.client("s3", endpoint_url=endpoint, config=Config(max_pool_connections=16))
    with concurrent.futures.ThreadPoolExecutor(16) as pool:

        def get(one: tuple[str, int, int]) -> int:
            key, begin, end = one
            return len(client.get_object(Bucket=BUCKET, Key=key, Range=f"bytes={begin}-{end - 1}")["Body"].read())

        list(pool.map(get, batches[0]))
        began = time.perf_counter()
        for batch in batches:
            list(pool.map(get, batch))
        return time.perf_counter() - began


WRK = """
local requests, at = {}, 0
function init(arguments)
  for line in io.lines(arguments[1]) do
    local key, from, to = line:match("(%S+) (%d+) (%d+)")
    table.insert(requests, wrk.format("GET", "/" .. key, {Range = "bytes=" .. from .. "-" .. to}))
  end
end
function request()
  at = at % #requests + 1
  return requests[at]
end
"""


def wrk_rate(folder: pathlib.Path, endpoint: str, batches: Batches) -> float | None:
    """Return wrk's best rate, in bytes/s, over several connection counts. wrk neither signs requests nor waits for a batch to end."""
    if shutil.which("wrk") is None:
        return None
    (folder / "wrk.lua").write_text(WRK)
    lines = [f"{BUCKET}/{key} {begin} {end - 1}" for batch in batches for key, begin, end in batch]
    (folder / "wrk.txt").write_text("\n".join(lines))
    rates = []
    for connections in (4, 16, 64):
        command = ["wrk", "-t2", f"-c{connections}", "-d2s", "-s", str(folder / "wrk.lua"), endpoint, "--", str(folder / "wrk.txt")]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        told = re.search(r"(\d+) requests in ([\d.]+)s, ([\d.]+)(\w+) read", report)
        assert told and "Non-2xx" not in report, report
        requests, seconds, volume, unit = told.groups()
        assert int(requests) > 0, report
        rates.append(float(volume) * {"B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30}[unit] / float(seconds))
    return max(rates)


def penstock_takes(ds: ps.Dataset, takes: list[Any], read: Callable[[ps.Dataset, Any], Any], scans: bool) -> float:
    """Return the duration, in seconds, of all takes or of one scan over the same samples."""
    began = time.perf_counter()
    if scans:
        for batch in ds.scan(batch_size=len(takes[0])):
            touch(np.frombuffer(batch.column(0).buffers()[2], np.uint8))
    else:
        for positions in takes:
            read(ds, positions)
    return time.perf_counter() - began


# Over 6 parameters: a workload is one row of the table below plus the environment it runs in.
def workload(
    folder: pathlib.Path, binary: pathlib.Path, uri: str, name: str, takes: list[Any], read: Any, columns: list[str], endpoint: str
) -> dict[str, Any]:
    """Time Penstock and the others in turn; each round opens a fresh handle."""
    prefix = uri.removeprefix(f"s3://{BUCKET}/")
    times: dict[str, list[float]] = {"penstock": [], "plain": [], "boto3": []}
    # For takes, the block cache is smaller than the data, so that it cannot help. A scan does not cache this much data anyway.
    ps.configure(memory_bytes=512 << 20 if name.startswith("sequential") else 16 << 20)
    fresh = ps.open(uri)
    fresh.take([0])
    batches = [
        [(f"{prefix}/{name}", begin, end) for name, begin, end in fresh._view.ranges(np.asarray(positions, np.int64), columns)]
        for positions in takes
    ]
    best = min(AT_ONCE, key=lambda at_once: plain_gets(binary, batches, at_once))
    total = sum(end - begin for batch in batches for _, begin, end in batch)
    for _ in range(ROUNDS):
        ds = ps.open(uri)
        for _warm in range(2):
            read(ds, takes[-1])
        before = ds.stats()
        times["penstock"].append(penstock_takes(ds, takes, read, scans=name.startswith("sequential")))
        received = ds.stats()["received_bytes"] - before["received_bytes"]
        times["plain"].append(plain_gets(binary, batches, best))
        times["boto3"].append(boto3_gets(endpoint, batches))
    medians = {name: statistics.median(spent) for name, spent in times.items()}
    ratio = medians["plain"] / medians["penstock"] * (min(received, total) / total)
    lines = [f"{name}: {system} {seconds:.3f} s, {total / seconds / 1e6:,.0f} MB/s" for system, seconds in medians.items()]
    wrk = wrk_rate(folder, endpoint, batches)
    lines.append(f"{name}: wrk, unsigned and without batches, " + (f"{wrk / 1e6:,.0f} MB/s" if wrk else "not installed"))
    requests = sum(len(batch) for batch in batches)
    lines.append(f"{name}: {requests} ranges, {total / 1e6:.0f} MB, plain GETs are fastest with {best} at once")
    return {
        "name": name,
        "times": times,
        "bytes": total,
        "requests": requests,
        "at_once": best,
        "ratio": ratio,
        "wrk_bytes_per_second": wrk,
        "lines": lines,
    }


def minio(folder: pathlib.Path, photos: Callable[[], list[pathlib.Path]]) -> dict[str, Any]:
    """Take 128 random JPEGs, scan, and take 1,000 random rows of three columns; then do the same with 20 ms added to each reply."""
    binary = servers.cargo_binary("plain-gets")
    server = servers.Minio(folder)
    proxy = servers.Proxy(server.port)
    try:
        os.environ |= {
            "AWS_ACCESS_KEY_ID": servers.KEY, "AWS_SECRET_ACCESS_KEY": servers.SECRET, "AWS_ENDPOINT": server.endpoint,
            "AWS_ENDPOINT_URL": server.endpoint, "AWS_REGION": "us-east-1",
        }  # fmt: skip
        server.client().create_bucket(Bucket=BUCKET)
        anyone = {"Effect": "Allow", "Principal": "*", "Action": "s3:GetObject", "Resource": f"arn:aws:s3:::{BUCKET}/*"}
        policy = {"Version": "2012-10-17", "Statement": [anyone]}
        server.client().put_bucket_policy(Bucket=BUCKET, Policy=json.dumps(policy))  # wrk does not sign its requests.
        ps.configure(threads=2)
        files = photos()
        images = f"s3://{BUCKET}/images"
        ps.create(images, {"image": ps.Image()}).append({"image": files})
        rows = f"s3://{BUCKET}/rows"
        rng = np.random.default_rng(0)
        count = 2_000_000
        words = np.array([f"w{number}" for number in range(1000)])
        texts = [" ".join(part) for part in words[rng.integers(0, 1000, (count // 4, 8))]] * 4
        ps.create(rows, {"a": "int64", "b": "float32", "text": ps.Text()}).append(
            {"a": np.arange(count), "b": rng.random(count, np.float32), "text": texts}
        )

        def bytes_of(ds: ps.Dataset, positions: Any) -> int:
            return sum(touch(image) for image in ds.take(positions, columns=["image"], decode=False)["image"])

        def small(ds: ps.Dataset, positions: Any) -> int:
            batch = ds.take(positions)
            return touch(batch["a"]) + touch(batch["b"]) + len(batch["text"])

        order = rng.permutation(len(files))
        random = [order[start : start + 128] for start in range(0, TAKES * 128, 128)]
        scan = [np.arange(start, min(start + 200, len(files))) for start in range(0, len(files), 200)]
        some = [rng.choice(count, 1000, replace=False) for _ in range(TAKES)]
        results = []
        for delay_ms, endpoint in ((0, server.endpoint), (20, proxy.endpoint)):
            os.environ["AWS_ENDPOINT_URL"] = os.environ["AWS_ENDPOINT"] = endpoint
            proxy.faults(f"delay_ms={delay_ms}")
            suffix = f", {delay_ms} ms on each reply" if delay_ms else ""
            for name, uri, takes, read, columns in (
                ("128 random JPEGs", images, random, bytes_of, ["image"]),
                ("sequential scan", images, scan, bytes_of, ["image"]),
                ("1,000 random rows", rows, some, small, ["a", "b", "text"]),
            ):
                results.append(workload(folder, binary, uri, name + suffix, takes, read, columns, endpoint))
    finally:
        proxy.stop()
        server.stop()
    return {
        "what": f"{len(files)} JPEGs and {count:,} rows on MinIO on loopback; all processes share the same cores",
        "workloads": results, "lines": [line for result in results for line in result["lines"]],
        "bars": [
            {"what": f"penstock / plain GETs: {result['name']}", "value": result["ratio"], "at_least": 0.72 if "scan" in result["name"] else 0.9}
            for result in results
        ],
    }  # fmt: skip

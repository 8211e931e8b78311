"""The tier: `penstock serve` beside nginx and MinIO, before a slow cold store, and epochs through the local cache beside a local dataset."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import pathlib
import re
import shutil
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import harness
import numpy as np
import penstock as ps
import servers
from harness import against_best, bar, comparison, fewer, interleaved, rounds
from photographs import photographs
from waiting import until
from workloads.stores.foresight import link

Result = dict[str, Any]
SIZES = {"100 KB": 100_000, "1 MiB": 1 << 20, "10 MiB": 10 << 20}
OBJECTS, CONNECTIONS, SECONDS = 16, 16, 3
WARM = "GETs of 16 objects in turn by wrk with 16 connections, without signatures; Penstock verifies each page of its cache on every read"
COLD = "objects of random bytes, each read once by 16 workers of one client: from the cold store, and twice through a server with an empty cache"
LOCAL = "shuffled epochs of a loader and random takes, through a cache that holds all, beside the same dataset on the same disk"
# A cold store as AIStore's authors measured it: 96 ms until a response begins, 9.9 MB/s a connection.
DELAY_SECONDS, BYTES_PER_SECOND = 0.096, 9.9e6
# The most workers of a client (E34).
FULL_LOAD = 300
COLD_OBJECTS, WORKERS = {"1 MiB": 160, "10 MiB": 48}, 16


def fill(client: Any, bucket: str, objects: dict[str, int]) -> dict[str, bytes]:
    """Create a bucket that anyone may read, and its objects of random bytes."""
    client.create_bucket(Bucket=bucket)
    anyone = {"Effect": "Allow", "Principal": "*", "Action": "s3:GetObject", "Resource": f"arn:aws:s3:::{bucket}/*"}
    client.put_bucket_policy(Bucket=bucket, Policy=json.dumps({"Version": "2012-10-17", "Statement": [anyone]}))
    random = np.random.default_rng(1)
    bodies = {key: random.bytes(size) for key, size in objects.items()}
    for key, body in bodies.items():
        client.put_object(Bucket=bucket, Key=key, Body=body)
    return bodies


@contextlib.contextmanager
def nginx(folder: pathlib.Path) -> Iterator[int | None]:
    """Serve a folder with nginx, which sends files by the kernel. Returns its port, or None if it is not installed."""
    if not shutil.which("nginx"):
        yield None
        return
    port = servers.free_port()
    configuration = folder.parent / "nginx.conf"
    configuration.write_text(
        f"worker_processes 2; user root; pid {folder.parent}/nginx.pid; error_log {folder.parent}/nginx.log; daemon off;\n"
        f"events {{ worker_connections 1024; }}\n"
        f"http {{ access_log off; sendfile on; tcp_nopush on; keepalive_requests 10000000;\n"
        f"server {{ listen 127.0.0.1:{port}; root {folder}; }} }}\n"
    )
    process = subprocess.Popen(["nginx", "-c", str(configuration)])
    until(lambda: _answers(port), "nginx answers")
    try:
        yield port
    finally:
        process.terminate()
        process.wait()


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def wrk(port: int, size: str, seconds: float) -> tuple[float, int]:
    """Return the bytes per second of bodies that wrk received, for objects of a size in turn, and the bytes."""
    script = f"local i = 0\nrequest = function() i = i + 1; return wrk.format('GET', '/bench/{size.replace(' ', '-')}-' .. (i % {OBJECTS})) end\n"
    path = pathlib.Path(f"/tmp/wrk-{os.getpid()}.lua")
    path.write_text(script)
    try:
        command = ["wrk", "-t2", f"-c{CONNECTIONS}", f"-d{seconds:g}s", "-s", str(path), f"http://127.0.0.1:{port}"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    finally:
        path.unlink()
    if "Non-2xx" in text or "Socket errors" in text:
        raise RuntimeError(f"wrk: {text}")
    count, spent = re.search(r"(\d+) requests in ([\d.]+)s", text).groups()  # type: ignore[union-attr]
    return int(count) * SIZES[size] / float(spent), int(count) * SIZES[size]


def processor_seconds(pid: int) -> float:
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def loopback_bytes() -> int:
    line = next(line for line in pathlib.Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split()[9])


def serve(folder: pathlib.Path, _photos: pathlib.Path | None) -> Result:
    """Warm GETs over HTTP: nginx, MinIO and Penstock, each on its own, in turns."""
    (folder / "minio").mkdir()
    (folder / "penstock").mkdir()
    minio = servers.Minio(folder / "minio")
    os.environ |= minio.environment
    objects = {f"{name.replace(' ', '-')}-{number}": size for name, size in SIZES.items() for number in range(OBJECTS)}
    bodies = fill(minio.client(), "bench", objects)
    files = folder / "files" / "bench"
    files.mkdir(parents=True)
    for key, body in bodies.items():
        (files / key).write_bytes(body)
    folder.chmod(0o755)
    # Not in the folder of the first server, which ends with it.
    options = ("--cache", f"{folder / 'cache'}:2GB", "--anonymous", "--revalidate", "never")
    server = servers.Penstock(folder / "penstock", "s3://", *options, environment=minio.environment)
    comparisons, bars, missing, rows = [], [], {}, {}
    try:
        for key, body in bodies.items():
            for _ in range(2):
                assert urllib.request.urlopen(f"http://127.0.0.1:{server.port}/bench/{key}", timeout=60).read() == body
        with nginx(files.parent) as port:
            ports = {"nginx": port, "penstock": server.port, "minio": minio.port}
            if port is None:
                missing["nginx"] = "not installed: install nginx"
            for size in SIZES:
                rates: dict[str, list[float]] = {name: [] for name, port in ports.items() if port}
                used, wire, sent = 0.0, dict.fromkeys(rates, 0), dict.fromkeys(rates, 0)
                for number in range(rounds(9)):
                    names = list(rates)
                    for name in names[number % len(names) :] + names[: number % len(names)]:
                        before, wired = processor_seconds(server.process.pid), loopback_bytes()
                        rate, received = wrk(ports[name] or 0, size, 1 if harness.QUICK else SECONDS)
                        rates[name].append(rate)
                        wire[name] += loopback_bytes() - wired
                        sent[name] += received
                        used += processor_seconds(server.process.pid) - before
                compared = comparison(f"warm GETs of {size}", "bytes/s", rates)
                comparisons.append(compared)
                nginx_rate = statistics.median(rates["nginx"]) if "nginx" in rates else 0
                ours = statistics.median(rates["penstock"])
                if nginx_rate:
                    at_least = 0.9 if SIZES[size] < 1 << 20 else 1.0
                    bars.append(bar(f"warm GETs of {size}: penstock / nginx", ours / nginx_rate, at_least=at_least))
                on_wire = {name: wire[name] / sent[name] for name in rates}
                bars += [
                    bar(f"warm GETs of {size}: penstock / minio", ours / statistics.median(rates["minio"]), at_least=1.0),
                    bar(f"warm GETs of {size}: processor seconds for each GiB", used / (sent["penstock"] / 2**30), at_most=0.4),
                    bar(f"warm GETs of {size}: bytes on the loopback for each of bodies", on_wire["penstock"], at_most=1.01),
                ]
                rows[size] = {
                    name: {"bytes_per_second": statistics.median(values), "loopback_ratio": on_wire[name]} for name, values in rates.items()
                }
                text = ", ".join(
                    f"{name} {row['bytes_per_second'] / 1e9:.2f} GB/s ({row['loopback_ratio']:.4f} on the loopback)"
                    for name, row in rows[size].items()
                )
                print(f"  {size}: {text}", flush=True)
        server.stop()
        # Most of the objects do not fit into its memory.
        (folder / "small").mkdir()
        server = servers.Penstock(folder / "small", "s3://", *options, "--memory-bytes", str(64 << 20), environment=minio.environment)
        decay = page_cache(server, folder / "cache", "10 MiB")
        seconds = ", ".join(f"{row['bytes_per_second'] / 1e9:.2f} GB/s ({row['drive_bytes'] / 1e6:.0f} MB)" for row in decay)
        print(f"  each second after the page cache was dropped, and what came from the drive: {seconds}", flush=True)
    finally:
        server.stop()
        minio.stop()
    return {"what": WARM, "comparisons": comparisons, "bars": bars, "missing": missing, "rates": rows, "page_cache": decay, "lines": []}


def page_cache(server: servers.Penstock, cache: pathlib.Path, size: str) -> list[dict[str, float]]:
    """E37: read again and again after the kernel has forgotten the cache's files. Return throughput and bytes from the drive for each second."""
    harness.evict(cache)
    device_bytes = lambda: int(re.search(r"^read_bytes: (\d+)", pathlib.Path(f"/proc/{server.process.pid}/io").read_text(), re.M)[1])  # type: ignore[index]  # noqa: E731
    rows = []
    for _ in range(2 if harness.QUICK else 6):
        before = device_bytes()
        rate, _received = wrk(server.port, size, 1)
        rows.append({"bytes_per_second": rate, "drive_bytes": device_bytes() - before})
    return rows


def read_all(port: int, keys: list[str], size: int) -> float:
    """Read each object once with 16 workers, each with a connection. Return bytes per second."""

    def work(part: list[str]) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        into = memoryview(bytearray(1 << 20))
        for key in part:
            connection.request("GET", f"/bench/{key}")
            response, received = connection.getresponse(), 0
            while count := response.readinto(into):
                received += count
            assert response.status == 200 and received == size, (response.status, received)
        connection.close()

    began = time.perf_counter()
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(work, [keys[worker::WORKERS] for worker in range(WORKERS)]))
    return len(keys) * size / (time.perf_counter() - began)


def tier(folder: pathlib.Path, _photos: pathlib.Path | None) -> Result:
    """E33: reads of a slow cold store, directly, through a server for the first time, and again. E34: the knee."""
    (folder / "minio").mkdir()
    minio = servers.Minio(folder / "minio")
    os.environ |= minio.environment
    comparisons, bars, found = [], [], {}
    try:
        objects = {}
        for name, count in COLD_OBJECTS.items():
            objects |= {f"{name.replace(' ', '-')}-{number}": SIZES[name] for number in range(fewer(count, WORKERS))}
        fill(minio.client(), "bench", objects)
        with link(minio.port, DELAY_SECONDS, BYTES_PER_SECOND) as port:
            for name, expected in (("1 MiB", 11.1), ("10 MiB", 6.3)):
                keys = [key for key in objects if key.startswith(name.replace(" ", "-") + "-")]
                direct, cold, warm = [], [], []
                for number in range(rounds(3)):
                    place = folder / f"penstock-{name.replace(' ', '-')}-{number}"
                    place.mkdir()
                    options = ("--cache", f"{place / 'cache'}:2GB", "--anonymous", "--revalidate", "never")
                    environment = {**minio.environment, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
                    server = servers.Penstock(place, "s3://", *options, environment=environment)
                    try:
                        direct.append(read_all(port, keys, SIZES[name]))
                        cold.append(read_all(server.port, keys, SIZES[name]))
                        received = _cold_bytes(place / "cache")
                        warm.append(read_all(server.port, keys, SIZES[name]))
                        assert _cold_bytes(place / "cache") == received, "the second epoch read cold bytes"
                        assert received == len(keys) * SIZES[name], "each byte is read once"
                    finally:
                        server.stop()
                comparisons.append(comparison(f"{name}, cold store at 96 ms and 9.9 MB/s a connection, 16 workers", "bytes/s",
                                              {"penstock": cold, "penstock, warm": warm, "direct": direct}))  # fmt: skip
                median = {"direct": statistics.median(direct), "cold": statistics.median(cold), "warm": statistics.median(warm)}
                bars += [
                    bar(f"{name}: cold through the server / direct", median["cold"] / median["direct"], at_least=0.95),
                    bar(f"{name}: warm / direct", median["warm"] / median["direct"], at_least=expected),
                ]
                found[name] = median
                print(f"  {name}: " + ", ".join(f"{kind} {value / 1e6:.0f} MB/s" for kind, value in median.items()), flush=True)
        bars += knee(folder, minio, found)
    finally:
        minio.stop()
    return {"what": COLD, "comparisons": comparisons, "bars": bars, "missing": {}, "found": found, "lines": []}


def _cold_bytes(cache: pathlib.Path) -> int:
    command = [sys.executable, "-m", "penstock", "cache", "status", "--cache", str(cache), "--json"]
    # A server writes what it owes to the counts a moment later.
    time.sleep(0.3)
    return int(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)[0]["cold_bytes"])


def knee(folder: pathlib.Path, minio: servers.Minio, found: dict[str, Any]) -> list[dict[str, Any]]:
    """Let the autotuner find the knee of a warm server, and compare it with full load."""
    place = folder / "penstock-knee"
    place.mkdir()
    server = servers.Penstock(place, "s3://", "--cache", f"{place / 'cache'}:2GB", environment=minio.environment)
    try:
        load = [sys.executable, "-m", "penstock", "-o", f"endpoint_url={server.endpoint}", "load", "s3://bench/knee", "--json", "--keep"]
        run = lambda *more: json.loads(subprocess.run([*load, *more], capture_output=True, text=True, check=True).stdout)  # noqa: E731
        seconds = "2" if harness.QUICK else "30"
        tuned = run("--tune", "--workers", str(FULL_LOAD), "--seconds", seconds, "--objects", "50")
        # In turns, so that what the machine does beside them is the same for all.
        counts = sorted({tuned["workers"], 16, 64, 128, FULL_LOAD})
        full: dict[int, list[Any]] = {count: [] for count in counts}
        for number in range(rounds(5)):
            for count in counts[number % len(counts) :] + counts[: number % len(counts)]:
                full[count] += run("--workers", str(count), "--seconds", "1" if harness.QUICK else "3", "--objects", "50", "--existing")
        throughput = {count: statistics.median(row["bytes_per_second"] for row in rows) for count, rows in full.items()}
        latency = {count: statistics.median(row["mean_ms"] for row in rows) for count, rows in full.items()}
        chosen = tuned["workers"]
        found["knee"] = {"tuned": tuned, "throughput": throughput, "mean_ms": latency}
        print("  knee: " + ", ".join(f"{count} workers{' (chosen)' if count == chosen else ''} {throughput[count] / 1e9:.2f} GB/s, "
                                    f"{latency[count]:.2f} ms" for count in counts), flush=True)  # fmt: skip
        return [
            bar("knee: throughput / best throughput", throughput[chosen] / max(throughput.values()), at_least=0.95),
            bar(f"knee: latency / latency at {FULL_LOAD} workers", latency[chosen] / latency[FULL_LOAD], at_most=1 / 3),
        ]
    finally:
        server.stop()


def local_cache(folder: pathlib.Path, photos: pathlib.Path | None) -> Result:
    """Epochs and takes through a warm local cache, beside the same dataset on a local disk."""
    random = np.random.default_rng(0)
    count = fewer(50_000)
    pixels = random.integers(0, 255, (count, 32, 32, 3), dtype=np.uint8)
    blobs = [random.bytes(int(size)) for size in random.integers(60_000, 100_000, fewer(4000, 128))]
    (folder / "minio").mkdir()
    minio = servers.Minio(folder / "minio")
    os.environ |= minio.environment
    comparisons, bars = [], []
    try:
        jpegs = [path.read_bytes() for path in photographs(folder, photos, 1000)]
        crop = {"transform": [ps.transforms.RandomResizedCrop(224)]}
        for name, schema, columns, batch, options in (
            ("CIFAR-shaped samples", {"image": ps.Tensor((32, 32, 3), "uint8"), "label": "int64"}, {"image": pixels, "label": np.arange(count)}, 512, {}),
            ("photographs, cropped", {"image": ps.Image()}, {"image": jpegs}, 64, crop),
            ("bytes of 80 KB", {"blob": ps.Bytes()}, {"blob": blobs}, 128, {}),
        ):  # fmt: skip
            slug = name.replace(" ", "-").replace(",", "")
            places = {"local disk": str(folder / slug), "penstock": str(minio.place(f"{slug}/dataset"))}
            opened = {}
            for kind, place in places.items():
                ps.create(place, schema).append(columns)
                opened[kind] = ps.open(place, cache=f"{folder / 'cache'}:4GB") if kind == "penstock" else ps.open(place)
            loaders = {kind: ds.loader(batch_size=batch, shuffle=True, seed=1, **options) for kind, ds in opened.items()}
            orders = [random.permutation(len(opened["penstock"]))[:batch] for _ in range(20)]

            def epoch(kind: str, loaders: dict[str, Any] = loaders) -> None:
                # Not one batch of the next epoch is made while the other one is measured.
                for _ in loaders[kind].stream(1):
                    pass

            def takes(kind: str, opened: dict[str, Any] = opened, orders: list[Any] = orders) -> None:
                for order in orders:
                    opened[kind].take(order)

            works: dict[str, Callable[[str], None]] = {"epochs": epoch, "takes": takes}
            for what, work in works.items():
                for kind in places:
                    work(kind)
                before = opened["penstock"].stats()["received_bytes"]
                samples = len(opened["penstock"]) if what == "epochs" else batch * len(orders)
                times = interleaved({kind: lambda kind=kind, work=work: work(kind) for kind in places})
                assert opened["penstock"].stats()["received_bytes"] == before, "a warm cache reads no cold bytes"
                rates = {kind: [samples / spent for spent in row["seconds"]] for kind, row in times.items()}
                compared = comparison(f"{what} of {name}, from a warm cache", "samples/s", rates)
                comparisons.append(compared)
                bars += against_best(compared, 0.9)
                print(
                    f"  {what} of {name}: " + ", ".join(f"{kind} {statistics.median(row):,.0f}/s" for kind, row in rates.items()),
                    flush=True,
                )
    finally:
        minio.stop()
    return {"what": LOCAL, "comparisons": comparisons, "bars": bars, "missing": {}, "lines": []}

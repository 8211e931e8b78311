"""Reads from MinIO on loopback, without and with 20 ms added to each reply: images and rows, taken at random or scanned, and epochs.

The limit is plain signed GETs of the same ranges with the same HTTP library, at the fastest concurrency, whose bodies are discarded.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import penstock as ps
import servers
from harness import against_best, bar, comparison, fewer, rounds
from photographs import BATCHES, photographs
from race import Entry, System, fastest, once, race, start, told, written

Result = dict[str, Any]
BUCKET = servers.BUCKET
TAKES, ROWS = 12, 2_000_000
ROUNDS = 3
AT_ONCE = (8, 16, 32, 64, 128)
DELAYS_MS = (0, 20)
Batches = list[list[tuple[str, int, int]]]


class Bucket:
    """MinIO with the photographs as objects, and a proxy that counts and can wait."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, self.binary = folder, servers.cargo_binary("plain-gets")
        (folder / "minio").mkdir()
        self.server = servers.Minio(folder / "minio")
        self.proxy = servers.Proxy(self.server.port)
        os.environ |= self.server.environment | {"AWS_ENDPOINT": self.server.endpoint}
        anyone = {"Effect": "Allow", "Principal": "*", "Action": "s3:GetObject", "Resource": f"arn:aws:s3:::{BUCKET}/*"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [anyone]})
        self.server.client().put_bucket_policy(Bucket=BUCKET, Policy=policy)  # wrk does not sign its requests.
        self.missing: dict[str, str] = {}

    def options(self, **own: Any) -> dict[str, Any]:
        return {"bucket": BUCKET, "endpoint": os.environ["AWS_ENDPOINT_URL"], **own}

    def write(self, name: str, adapter: str, workload: str, **own: Any) -> None:
        written([Entry(name, adapter, workload, self.options(**own))], self.missing)

    def upload(self, files: list[pathlib.Path], prefix: str) -> None:
        client = self.server.client()
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda path: client.upload_file(str(path), BUCKET, f"{prefix}/{path.name}"), files))

    def upload_folder(self, folder: pathlib.Path, prefix: str) -> None:
        for path in folder.rglob("*") if folder.exists() else ():
            if path.is_file():
                self.server.client().upload_file(str(path), BUCKET, f"{prefix}/{path.relative_to(folder)}")

    def delay(self, delay_ms: int) -> None:
        """Let clients connect through the proxy if replies are to wait."""
        self.proxy.faults(f"delay_ms={delay_ms}")
        os.environ["AWS_ENDPOINT_URL"] = os.environ["AWS_ENDPOINT"] = self.proxy.endpoint if delay_ms else self.server.endpoint

    def counted(self, entry: Entry) -> dict[str, int]:
        """Run a workload once through the proxy, and return the requests and bytes of all that it does, opening included."""
        self.proxy.faults("")
        os.environ["AWS_ENDPOINT_URL"] = os.environ["AWS_ENDPOINT"] = self.proxy.endpoint
        once(Entry(entry.name, entry.adapter, entry.workload, {**entry.options, "endpoint": self.proxy.endpoint}))
        return dict(self.proxy.counts())

    def plain(self, batches: Batches, at_once: int) -> float:
        """Return how long plain GETs take, in seconds. The first batch is sent twice, the first time as an untimed warm-up."""
        lines = [";".join(f"{key} {begin} {end}" for key, begin, end in batch) for batch in [batches[0][:64], *batches]]
        done = subprocess.run([str(self.binary), BUCKET, str(at_once)], input="\n".join(lines), capture_output=True, text=True, check=True)
        seconds, received = done.stdout.split()
        assert int(received) == _total(batches)
        return float(seconds)

    def fastest_plain(self, batches: Batches) -> tuple[list[float], int]:
        best = min(AT_ONCE, key=lambda at_once: self.plain(batches, at_once))
        return [self.plain(batches, best) for _ in range(rounds(ROUNDS))], best

    def close(self) -> None:
        self.proxy.stop()
        self.server.stop()


def _ranges(uri: str, takes: list[Any], columns: list[str]) -> Batches:
    """Return the ranges that Penstock reads for some takes."""
    ds, prefix = ps.open(uri), uri.removeprefix(f"s3://{BUCKET}/")
    return [
        [(f"{prefix}/{name}", begin, end) for name, begin, end in ds._view.ranges(np.asarray(rows, np.int64), columns)] for rows in takes
    ]


def _total(batches: Batches) -> int:
    return sum(end - begin for batch in batches for _, begin, end in batch)


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


def minio(folder: pathlib.Path, photos: pathlib.Path | None) -> Result:
    """Take 12 times 128 random JPEGs, and scan all of them. Baselines of a scan do not wait between batches."""
    lines, bars, comparisons, results = [], [], [], {}
    with contextlib.closing(Bucket(folder)) as store:
        files = photographs(folder, photos)
        source, count = files[0].parent, len(files)
        for name in ("penstock", "lance"):
            store.write(name, f"tables/{name}", "remote_images_write", source=source)
        order = np.random.default_rng(0).permutation(count)
        random = [order[start : start + 128] for start in range(0, TAKES * 128, 128)][: count // 128]
        for delay_ms in DELAYS_MS:
            store.delay(delay_ms)
            for what, workload, takes in (("128 random JPEGs", "remote_takes", random), ("scan", "remote_scan", [np.arange(count)])):
                title = what + (f", {delay_ms} ms on each reply" if delay_ms else "")
                batches = _ranges(f"s3://{BUCKET}/penstock", takes, ["image"])
                (folder / "ranges.json").write_text(json.dumps(batches))
                options = store.options(batch=128, takes=len(takes) if what != "scan" else None, ranges=str(folder / "ranges.json"))
                plain, best = store.fastest_plain(batches)
                entries = [
                    Entry(name, f"tables/{name}", workload, options, fresh=name == "penstock")
                    for name in ("penstock", "lance")
                    if name not in store.missing
                ]
                tuned = fastest(
                    [
                        Entry("boto3", "objects/boto3", "ranges", {**options, "threads": threads, "scan": what == "scan"})
                        for threads in (16, 64)
                    ],
                    store.missing,
                    0 if what == "scan" else 4,
                )
                rows = race(start([*entries, *([tuned] if tuned else [])], store.missing), store.missing, ROUNDS)
                total = _total(batches)
                rates = {
                    name: [total / row["seconds"] / 1e6 * rate / row["per_second"] for rate in row["rates"]] for name, row in rows.items()
                }
                rates["limit: plain GETs"] = [total / seconds / 1e6 for seconds in plain]
                wrk = wrk_rate(folder, os.environ["AWS_ENDPOINT_URL"], batches)
                lines += [f"{title}: {name}: {statistics.median(all):,.0f} MB/s" for name, all in rates.items()]
                lines.append(
                    f"{title}: {sum(map(len, batches))} ranges, {total / 1e6:.0f} MB; plain GETs are fastest with {best} at once; wrk, unsigned: "
                    + (f"{wrk / 1e6:,.0f} MB/s" if wrk else "not installed")
                )
                comparisons.append(comparison(title, "MB/s", rates, notes="boto3 gets Penstock's ranges."))
                results[title] = {"systems": rows, "plain_seconds": plain, "at_once": best, "wrk_bytes_per_second": wrk, "bytes": total}
                ratio = statistics.median(rates["penstock"]) / statistics.median(rates["limit: plain GETs"])
                bars.append(bar(f"{title}: penstock / plain GETs", ratio, at_least=0.72 if what == "scan" else 0.9))
                if "lance" in rates:
                    ratio = statistics.median(rates["penstock"]) / statistics.median(rates["lance"])
                    bars.append(bar(f"{title}: penstock / lance", ratio, at_least=1.0))
        missing = store.missing
    return {
        "what": f"{count:,} JPEGs of {sum(path.stat().st_size for path in files) / count / 1e3:.0f} KB on MinIO on loopback; all processes share the same cores; each turn is cold, but connections are open",
        "workloads": results, "lines": lines, "bars": bars, "comparisons": comparisons, "missing": missing,
    }  # fmt: skip


def minio_rows(folder: pathlib.Path, _photos: pathlib.Path | None) -> Result:
    """Take 12 times 1,000 random rows of three small columns: seconds, requests, and the bytes received for each needed."""
    count = fewer(ROWS, 200_000)
    needed = TAKES * 1000 * (8 + 4 + 36)
    lines, bars, comparisons, results = [], [], [], {}
    with contextlib.closing(Bucket(folder)) as store:
        for name in ("penstock", "lance"):
            store.write(name, f"tables/{name}", "remote_rows_write", rows=count)
        names = [name for name in ("penstock", "lance") if name not in store.missing]
        entry = lambda name, takes=TAKES: Entry(  # noqa: E731
            name, f"tables/{name}", "remote_rows", store.options(batch=1000, takes=takes), fresh=True
        )
        for takes in (1, TAKES):
            counts = {name: store.counted(entry(name, takes)) for name in names}
            for name, found in counts.items():
                lines.append(
                    f"{takes} takes: {name}: {found['requests']:,} requests, {found['body_bytes'] / (needed * takes / TAKES):,.1f} × the bytes needed"
                )
            results[f"{takes} takes"] = counts
            for what in ("requests", "body_bytes"):
                comparisons.append(
                    comparison(
                        f"{takes} takes: {what.replace('body_', '')}",
                        what.replace("body_", ""),
                        {name: [float(found[what])] for name, found in counts.items()},
                        "lowest",
                    )
                )
            times = counts["penstock"]["body_bytes"] / (needed * takes / TAKES)
            bars.append(bar(f"{takes} takes: bytes received / needed", times, at_most=700))
            if "lance" in counts:
                ratio = counts["penstock"]["body_bytes"] / counts["lance"]["body_bytes"]
                bars.append(bar(f"{takes} takes: bytes received, penstock / lance", ratio, at_most=1.0))
        for delay_ms in DELAYS_MS:
            store.delay(delay_ms)
            title = "12 takes of 1,000 rows" + (f", {delay_ms} ms on each reply" if delay_ms else "")
            rows = race(start([entry(name) for name in names], store.missing), store.missing)
            order = np.random.default_rng(0).permutation(count)
            batches = _ranges(
                f"s3://{BUCKET}/penstock-rows", [order[start : start + 1000] for start in range(0, TAKES * 1000, 1000)], ["a", "b", "text"]
            )
            plain, best = store.fastest_plain(batches)
            seconds = {name: [TAKES * 1000 / rate for rate in row["rates"]] for name, row in rows.items()}
            seconds["limit: plain GETs of Penstock's ranges"] = plain
            lines += [f"{title}: {name}: {statistics.median(all):.2f} s" for name, all in seconds.items()]
            comparisons.append(comparison(title, "s", seconds, "lowest", f"Plain GETs are fastest with {best} at once."))
            results[title] = {"systems": rows, "plain_seconds": plain, "at_once": best, "bytes": _total(batches)}
            ours = statistics.median(seconds["penstock"])
            bars.append(bar(f"{title}: plain GETs / penstock", statistics.median(plain) / ours, at_least=0.9))
            if "lance" in seconds:
                bars.append(bar(f"{title}: lance / penstock, seconds", statistics.median(seconds["lance"]) / ours, at_least=1.0))
        missing = store.missing
    return {
        "what": f"{count:,} rows of int64, float32 and a text of 36 B on MinIO; {TAKES} takes of 1,000 random rows, cold",
        "workloads": results, "lines": lines, "bars": bars, "comparisons": comparisons, "missing": missing,
    }  # fmt: skip


def epoch_choices(name: str, delay_ms: int) -> list[dict[str, Any]]:
    """Return the settings of a system among which the fastest is taken: how much is in flight, mostly."""
    if name == "obstore":
        return [{"way": "tasks", "threads": 32}, {"way": "tasks", "threads": 128}, {"way": "threads", "threads": 32}]
    # Each worker of s3torchconnector has one request in flight; 27 were slower than 18, and 2 slower than 4.
    # Two workers of LitData wait busily for files that they share, and took ten times as long as one. MosaicML was fastest with two.
    threads = {"lance": [2, 8], "boto3": [16], "litdata": [1], "mosaicml": [2], "s3torchconnector": [18 if delay_ms else 4]}
    return [{"threads": one} for one in threads.get(name, [2])]


EPOCHS = {
    "penstock": "tables/penstock", "lance": "tables/lance", "litdata": "loaders/litdata", "mosaicml": "loaders/mosaicml", "boto3": "objects/boto3",
    "obstore": "objects/obstore", "s3torchconnector": "objects/s3torchconnector",
}  # fmt: skip


# Systems that keep what they have read.
FRESH = ("penstock", "lance", "litdata", "mosaicml")


def settle(_system: System) -> None:
    """Let the disk come to rest, to which systems download files."""
    os.sync()


def minio_epochs(folder: pathlib.Path, photos: pathlib.Path | None) -> Result:
    """Load a shuffled epoch of raw JPEG bytes in 54 batches of 64. LitData and MosaicML shuffle within and among their files of 64 MB."""
    lines, bars, comparisons, results = [], [], [], {}
    with contextlib.closing(Bucket(folder)) as store:
        files = photographs(folder, photos, BATCHES * 64)
        source, count = files[0].parent, len(files)
        store.upload(files, "files")
        for name in ("penstock", "lance"):
            store.write(name, f"tables/{name}", "remote_images_write", source=source)
        for name in ("litdata", "mosaicml"):
            (folder / f"{name}-made").mkdir()
            store.write(name, f"loaders/{name}", "ingest", source=source, place=folder / f"{name}-made", threads=2)
            store.upload_folder(folder / f"{name}-made" / name, name)
        total = sum(path.stat().st_size for path in files)
        for delay_ms in DELAYS_MS:
            store.delay(delay_ms)
            title = "epoch" + (f", {delay_ms} ms on each reply" if delay_ms else "")
            entries = []
            for name, adapter in EPOCHS.items():
                if name in store.missing:
                    continue
                options = store.options(batch=64, images=count, scratch=str(folder / f"{name}-cache"))
                made = [
                    Entry(name, adapter, "remote_epoch", {**options, **own}, fresh=name in FRESH) for own in epoch_choices(name, delay_ms)
                ]
                best = fastest(made, store.missing, settle=settle)
                entries += [best] if best else []
            rows = race(start(entries, store.missing, settle), store.missing, ROUNDS, settle)
            ranges = [[(f"files/{path.name}", 0, path.stat().st_size) for path in files]]
            plain, best_plain = store.fastest_plain(ranges)
            rates = {name: [rate * total / count / 1e6 for rate in row["rates"]] for name, row in rows.items()}
            rates["limit: plain GETs"] = [total / seconds / 1e6 for seconds in plain]
            lines += told(rows, f"{title}: ") + [
                f"{title}: plain GETs: {statistics.median(rates['limit: plain GETs']):,.0f} MB/s, fastest with {best_plain} at once"
            ]
            comparisons.append(comparison(title, "MB/s", rates))
            results[title] = {"systems": rows, "plain_seconds": plain}
            ours = statistics.median(rates["penstock"])
            bars.append(bar(f"{title}: penstock / plain GETs", ours / statistics.median(rates["limit: plain GETs"]), at_least=0.9))
            bars += against_best(comparisons[-1])
        missing = store.missing
    return {
        "what": f"{count:,} JPEGs, {total / 1e6:.0f} MB, on MinIO on loopback; a shuffled epoch of raw bytes in batches of 64, cold; all processes share the same cores. Penstock, Lance, LitData and MosaicML have a new process for each turn, whose start and opening are not timed; the workers of the last two start in the turn",
        "workloads": results, "lines": lines, "bars": bars, "comparisons": comparisons, "missing": missing,
    }  # fmt: skip

"""Benchmarks of embedding tables (E10): batches of ids are read, changed, and written back; ids are repeated, and the last value of an id counts.

Every system gets the same batches, and starts with a table of all ids. It reads and writes the distinct ids
of a batch. `once`: everything is durable at the end. `each`: every batch is durable before the next one; Penstock keeps a
journal, the rivals sync each batch.
"""

from __future__ import annotations

import itertools
import multiprocessing
import pathlib
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import penstock as ps
from drawn import STEP
from harness import against_best, bar, comparison, fewer, rounds, stored_bytes
from race import Entry, Missing, failed, once

Result = dict[str, Any]
Ids = npt.NDArray[np.int64]
ROUNDS = 4
# A turn has at least so many rows, so that it takes a tenth of a second.
TURN_ROWS = 131_072
# A turn of a slow system ends after this time. Its rate is that of the batches so far.
SECONDS = 1.0


# One parameter at a time varies: the draw, the number of ids, the size of an embedding, the size of a batch.
POINTS = [
    ("zipf", 32768, 400, 1024),
    ("power", 32768, 400, 1024),
    ("zipf", 4096, 400, 1024),
    ("zipf", 32768, 200, 1024),
    ("zipf", 32768, 400, 128),
]
LEAST = {"once": 5, "each": 2}


SYSTEMS = {
    "penstock": "tables/penstock", "rocksdb": "tables/rocksdb", "rocksdb, log": "tables/rocksdb", "tensorstore": "arrays/tensorstore",
    "tensorstore, ocdbt": "arrays/tensorstore", "tiledb": "arrays/tiledb",
}  # fmt: skip


def embeddings(folder: pathlib.Path, _photos: pathlib.Path | None) -> Result:
    """Read, change and write rows of a table by published batches of ids, against RocksDB, TensorStore and TileDB."""
    results, bars, lines, comparisons, missing = [], [], [], [], {}
    slow: set[tuple[str, str]] = set()
    for mode, (draw, count, size, batch) in itertools.product(LEAST, POINTS[: fewer(len(POINTS))]):
        passes = fewer(TURN_ROWS, count) // count
        options = {"draw": draw, "each": mode == "each", "count": count, "size": size, "batch": batch, "passes": passes}
        names = [
            name for name in SYSTEMS if name not in missing and (name, mode) not in slow and (mode == "once" or name != "rocksdb, log")
        ]
        rates: dict[str, list[float]] = {name: [] for name in names}
        digests = set()
        for number in range(rounds(ROUNDS)):
            names = list(rates)
            for name in [*names[number % len(names) :], *names[: number % len(names)]]:
                fastest = max((max(rates[other]) for other in names if other != "penstock" and rates[other]), default=0.0)
                if number > 1 and name != "penstock" and 2 * max(rates[name]) < fastest:
                    continue  # It cannot become the best rival.
                place = folder / name
                place.mkdir()
                own = {**options, "place": place, "seconds": SECONDS, "log": name == "rocksdb, log", "ocdbt": name == "tensorstore, ocdbt"}
                try:
                    turn = once(Entry(name, SYSTEMS[name], "embeddings", own))
                    rates[name].append(turn["samples"] / turn["seconds"])
                    if turn["samples"] == passes * count:
                        digests.add(turn["digest"])
                except Missing as reason:
                    del rates[name]
                    failed(Entry(name, SYSTEMS[name], "embeddings"), missing, str(reason))
                shutil.rmtree(place)
        assert len(digests) == 1, f"{draw}, {count}: systems have other values"
        median = {name: statistics.median(all) for name, all in rates.items()}
        rivals = {name: rate for name, rate in median.items() if name != "penstock"}
        slow |= {(name, mode) for name, rate in rivals.items() if 4 * rate < max(rivals.values())}
        what = f"{draw}, {count} ids of {size} float32, batches of {batch}, durable {mode}"
        results.append({"what": what, "rows_per_second": median})
        comparisons.append(comparison(what, "rows/s", rates))
        bars += against_best(comparisons[-1], LEAST[mode])
        lines.append(f"{what}: " + ", ".join(f"{name} {rate:,.0f}/s" for name, rate in median.items()))
    large = _large(folder)
    lines.append(
        f"10^6 distinct ids of 400 float32: {large['rows_per_second']:,.0f} rows/s, {large['peak_anonymous_mib']:.0f} MiB anonymous memory"
    )
    bars.append(bar("10^6 distinct ids of 400 float32: rows/s", large["rows_per_second"], at_least=200_000))
    return {
        "what": "read-modify-write of embeddings, two cores. A system that is four times slower than the best rival is left out of later rows that are durable alike", "points": results, "large": large, "lines": lines, "bars": bars, "comparisons": comparisons, "missing": missing,
    }  # fmt: skip


def _anonymous() -> int:
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) << 10


def _large_child(place: str, answers: Any) -> None:
    """Change every row of a table of 10^6 rows once, in random order, in one transaction."""
    count, size, batch = 1_000_000, 400, 1024
    rng = np.random.default_rng(0)
    ds = ps.create(place, {"e": ps.Tensor((size,), "float32")})
    with ds.transaction() as tx:
        for _ in range(20):
            tx.append({"e": rng.random((count // 20, size), dtype=np.float32)})
    subprocess.run(["sync", "-f", place], check=True)
    order, before, peak = rng.permutation(count), _anonymous(), 0
    begin = time.perf_counter()
    with ds.transaction() as tx:
        for start in range(0, count, batch):
            ids = order[start : start + batch]
            values = tx.take(ids)["e"]
            values -= STEP
            tx.update({"e": values}, row_ids=ids)
            if start % (batch * 16) == 0:
                peak = max(peak, _anonymous())
    answers.put({"rows_per_second": count / (time.perf_counter() - begin), "peak_anonymous_mib": (peak - before) / 2**20})


def _large(folder: pathlib.Path) -> dict[str, float]:
    """Run in processes of their own, so that their memory can be measured. The median of three."""
    context, found = multiprocessing.get_context("spawn"), []
    for turn in range(rounds(3)):
        answers = context.Queue()
        child = context.Process(target=_large_child, args=(str(folder / f"large{turn}"), answers))
        child.start()
        found.append(answers.get())
        child.join()
        shutil.rmtree(folder / f"large{turn}")
    return sorted(found, key=lambda one: one["rows_per_second"])[(len(found) - 1) // 2]


# E13: update patterns.
TABLE, WIDTH, TAKE = 100_000, 128, 512


def _changed_rows(rng: np.random.Generator, share: float, pattern: str) -> Ids:
    count = int(TABLE * share)
    if pattern == "random":
        return rng.choice(TABLE, count, replace=False)
    begin = int(rng.integers(0, TABLE - count + 1))
    return np.arange(begin, begin + count)


def _reads(ds: ps.Dataset) -> dict[str, float]:
    """Return seconds per sample of a scan and of shuffled takes: the least of five."""
    order = np.random.default_rng(1).permutation(len(ds))[:TABLE]

    def scan() -> Iterator[Any]:
        for batch in ds.scan(["e"], batch_size=4096):
            yield batch.column("e").storage.flatten().to_numpy()

    def takes() -> Iterator[Any]:
        for begin in range(0, len(order), TAKE):
            yield ds.take(order[begin : begin + TAKE])["e"]

    spent: dict[str, list[float]] = {"scan": [], "takes": []}
    for _ in range(6):
        for name, read in (("scan", scan), ("takes", takes)):
            begin = time.perf_counter()
            for values in read():
                np.bitwise_xor.reduce(values.reshape(-1).view(np.uint8)[::64])
            spent[name].append((time.perf_counter() - begin) / (len(ds) if name == "scan" else len(order)))
    return {name: min(each[1:]) for name, each in spent.items()}


def patterns(folder: pathlib.Path, _photos: pathlib.Path | None) -> Result:
    """E13: update a share of a table, at random or in a run, in one or many commits among reads, or append. What is written, and how reads fare."""
    rng, number, results, bars, lines = np.random.default_rng(0), itertools.count(), [], [], []
    row, rows = 4 * WIDTH, rng.random((TABLE, WIDTH), dtype=np.float32)
    base = folder / "base"
    ds = ps.create(base, {"e": ps.Tensor((WIDTH,), "float32")})
    for begin in range(0, TABLE, 10_000):
        ds.append({"e": rows[begin : begin + 10_000]})

    def run(what: str, work: Callable[[ps.Dataset], int]) -> None:
        place = folder / f"{next(number)}"
        shutil.copytree(base, place)
        handle, before = ps.open(place), stored_bytes(place)
        changed = work(handle)
        written = stored_bytes(place) - before
        after, untouched = _reads(ps.open(place)), _reads(ps.open(base))
        ratio = {name: after[name] / untouched[name] for name in after}
        amplification = written / max(changed * row, 1)
        results.append({"what": what, "changed_bytes": changed * row, "written_bytes": written, "reads": ratio})
        lines.append(
            f"{what}: wrote {amplification:.2f} × the changed bytes; scan {ratio['scan']:.2f}, takes {ratio['takes']:.2f} of the time before"
        )
        if changed:
            bars.append(bar(f"{what}: bytes written / (changed + 32 KiB)", written / (changed * row + (32 << 10)), at_most=2))
        bars.extend(bar(f"{what}: {name} after / before", value, at_most=1.2) for name, value in ratio.items())
        shutil.rmtree(place)

    for share, pattern in itertools.product((0.001, 0.01, 1.0), ("random", "clustered")):

        def update(handle: ps.Dataset, share: float = share, pattern: str = pattern) -> int:
            ids = _changed_rows(rng, share, pattern)
            with handle.transaction() as tx:
                for begin in range(0, len(ids), 4096):
                    tx.update({"e": rows[: len(ids[begin : begin + 4096])] + 1}, row_ids=ids[begin : begin + 4096])
            return len(ids)

        run(f"update {share:.1%}, {pattern}, one commit", update)
    for reads, batches in ((0.95, 200), (0.5, 200), (0.0, 100)):
        for pattern in ("random", "clustered"):

            def mixed(handle: ps.Dataset, reads: float = reads, batches: int = batches, pattern: str = pattern) -> int:
                changed = 0
                for _ in range(batches):
                    ids = _changed_rows(rng, TAKE / TABLE, pattern)
                    values = handle.take(row_ids=ids)["e"]
                    if rng.random() >= reads:
                        with handle.transaction() as tx:
                            tx.update({"e": values + 1}, row_ids=ids)
                        changed += len(ids)
                return changed

            run(f"{reads:.0%} reads, batches of {TAKE}, {pattern}, a commit each", mixed)

    def append(handle: ps.Dataset) -> int:
        for _ in range(100):
            handle.append({"e": rows[:TAKE]})
        return 100 * TAKE

    run(f"append {100 * TAKE} in 100 commits", append)
    return {"what": f"update patterns of {TABLE} × {WIDTH} float32", "patterns": results, "lines": lines, "bars": bars}


if __name__ == "__main__":
    print(_large(pathlib.Path(sys.argv[1])))

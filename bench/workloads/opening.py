"""Opening a dataset of a million samples, and small durable commits, beside other versioned stores."""

from __future__ import annotations

import os
import pathlib
import shutil
import statistics
import time
from typing import Any

import numpy as np
import penstock as ps
from harness import against_best, bar, comparison, evict, fewer, interleaved
from race import Entry, System, race, start, told, written
from workloads import writers

Result = dict[str, Any]
RIVALS = ("lance", "deeplake", "icechunk")


def opening(folder: pathlib.Path, _photos: pathlib.Path | None) -> Result:
    """Open 1,000,000 samples in 1,000 commits, and take 100 samples; rivals have the same rows and commits."""
    options, missing = {"place": folder, "rows": fewer(1_000_000, 100_000)}, {}
    entries = []
    for name in ("penstock", *RIVALS, "icechunk, chunks in the manifest"):
        adapter, own = f"tables/{name.split(',')[0]}", {**options, "inlined": "," in name}
        if written([Entry(name, adapter, "first_sample_write", own)], missing):
            entries.append(Entry(name, adapter, "first_sample", own))
    place = folder / "penstock"
    times = interleaved(
        {
            "open": lambda: ps.open(place),
            "open_and_take_100": lambda: ps.open(place).take(np.arange(0, options["rows"], options["rows"] // 100)),
        },
        9,
    )
    evict(place)
    begin = time.perf_counter()
    opened = ps.open(place)
    cold = time.perf_counter() - begin
    rows = race(start(entries, missing), missing, 9)
    seconds = {name: [100 / rate for rate in row["rates"]] for name, row in rows.items()}
    compared = comparison("open, and take 100 samples", "s", seconds, "lowest")
    bars = [
        bar("open, ms", times["open"]["median_seconds"] * 1e3, at_most=1),
        bar("open with caches evicted, ms", cold * 1e3, at_most=10),
        *against_best(compared),
    ]
    return {
        "what": f"{options['rows']:,} samples in {options['rows'] // 1000:,} commits, in a process that has opened the dataset before", "times": times, "cold_open_seconds": cold, "requests_of_open": opened.stats(),
        "lines": [*(f"penstock, {name}: {spent['median_seconds'] * 1e3:.2f} ms" for name, spent in times.items()), f"open, page cache evicted: {cold * 1e3:.2f} ms",
                  *(f"{name}: open and take 100: {1e3 * statistics.median(spent):.2f} ms" for name, spent in seconds.items())],
        "bars": bars, "missing": missing, "comparisons": [compared],
    }  # fmt: skip


def commits(folder: pathlib.Path, photos: pathlib.Path | None) -> Result:
    """Measure small durable commits against the machine's limits, and beside rivals, none of which syncs its files."""
    result, missing = writers.limits(folder, photos), {}
    options = {"place": folder / "raced", "commits": fewer(100)}

    def settle(system: System) -> None:
        system.entry.options["place"].mkdir(exist_ok=True)
        os.sync()  # So that no system's syncs write what others left.

    rows = race(
        start([Entry(name, f"tables/{name}", "commits", options) for name in ("penstock", *RIVALS)], missing, settle), missing, 5, settle
    )
    shutil.rmtree(folder / "raced")
    compared = comparison(
        "commits of one row, beside other stores",
        "commits/s",
        {name: row["rates"] for name, row in rows.items()},
        notes="Lance, Deep Lake and Icechunk do not sync their files; Penstock does.",
    )
    result["bars"] += against_best(compared)
    result["lines"] += told(rows, "beside other stores: ")
    result["comparisons"].append(compared)
    return {**result, "missing": missing, "beside": rows}

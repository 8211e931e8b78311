"""Reads of arrays on MinIO (E47): requests, bytes and seconds for random samples, and for windows of a volume.

Each turn is a new process, so that nothing is cached; its clock begins after imports. All systems have the same budget for caches, chunks or
tiles of the same shapes, and at least their best documented concurrency.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import statistics
from typing import Any

import numpy as np
import servers
from harness import against_best, bar, comparison, fewer, rounds
from race import LONG_TURN_SECONDS, Entry, Missing, failed, once, written

Result = dict[str, Any]
BUCKET = servers.BUCKET
SAMPLES, LENGTH = 10_000, 25_000  # 100 KB each, 1 GB in total
EDGE, BUDGET, SMALL_BUDGET = 256, 512 << 20, 8 << 20
SYSTEMS: dict[str, tuple[str, dict[str, Any]]] = {
    "penstock": ("penstock", {}),
    "h5py": ("hdf5", {"variant": "exact"}),
    "h5py, blocks of 1 MiB": ("hdf5", {"variant": "blocks-1"}),
    "h5py, blocks of 8 MiB": ("hdf5", {"variant": "blocks-8"}),
    "h5py, pages of 1 MiB": ("hdf5", {"variant": "paged-1"}),
    "h5py, pages of 8 MiB": ("hdf5", {"variant": "paged-8"}),
    "zarr": ("zarr", {"variant": "plain"}),
    "zarr, sharded": ("zarr", {"variant": "sharded"}),
    "tensorstore": ("tensorstore", {"variant": "plain"}),
    "tensorstore, sharded": ("tensorstore", {"variant": "sharded"}),
    "tiledb": ("tiledb", {"gap": 0}),
    "tiledb, gaps of 512 KiB joined": ("tiledb", {"gap": 512 << 10}),
}
# Name: the workload, its options, and the bytes that are needed.
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "open": ("samples", {"batches": 0, "batch": 1, "cache": BUDGET}, 1),
    "one sample": ("samples", {"batches": 1, "batch": 1, "cache": BUDGET}, LENGTH * 4),
    "1,000 random samples": ("samples", {"batches": 10, "batch": 100, "cache": BUDGET}, 1000 * LENGTH * 4),
    "100 windows, chunks of 64³": ("windows", {"batches": 100, "side": 64, "cache": BUDGET}, 100 * 64**3 * 4),
    "100 windows, chunks of 32³": ("windows", {"batches": 100, "side": 32, "cache": BUDGET}, 100 * 64**3 * 4),
    "100 windows, chunks of 32³, caches of 8 MiB": ("windows", {"batches": 100, "side": 32, "cache": SMALL_BUDGET}, 100 * 64**3 * 4),
}
# Penstock's default tiles run beside the chunks of 64³ of the others.
OTHER_TILES, BESIDE = "100 windows, default tiles (others: chunks of 64³)", "100 windows, chunks of 64³"


def _make(folder: pathlib.Path) -> None:
    rng, samples = np.random.default_rng(0), fewer(SAMPLES, 1000)
    data = np.lib.format.open_memmap(folder / "samples.npy", "w+", np.float32, (samples, LENGTH))
    for start in range(0, samples, 1000):
        data[start : start + 1000] = rng.random((min(1000, samples - start), LENGTH), np.float32)
    np.save(folder / "volume.npy", rng.random((EDGE,) * 3, np.float32))


def slices(folder: pathlib.Path, _photos: pathlib.Path | None) -> Result:
    """Run each case through a proxy that counts requests and bytes. The bodies of all replies count."""
    (folder / "minio").mkdir()
    server = servers.Minio(folder / "minio")
    proxy = servers.Proxy(server.port)
    os.environ |= server.environment | {"HDF5_USE_FILE_LOCKING": "FALSE"}
    missing: dict[str, str] = {}
    results: dict[str, dict[str, dict[str, list[float]]]] = {}
    common = {"data": str(folder), "bucket": BUCKET, "samples": fewer(SAMPLES, 1000), "edge": EDGE, "side": 64, "cache": BUDGET}
    try:
        _make(folder)
        for adapter in dict.fromkeys(adapter for adapter, _ in SYSTEMS.values()):
            options = {**common, "endpoint": server.endpoint}
            entries = [Entry(adapter, f"arrays/{adapter}", "samples_write", options)]
            sides = (64, 32, 0) if adapter == "penstock" else (64, 32)
            entries += [Entry(adapter, f"arrays/{adapter}", "volume_write", {**options, "side": side}) for side in sides]
            written(entries, missing, *(name for name, (of, _) in SYSTEMS.items() if of == adapter))
        os.sync()
        os.environ["AWS_ENDPOINT_URL"] = proxy.endpoint
        for case, (workload, options, _) in CASES.items():
            systems = {**SYSTEMS, OTHER_TILES: ("penstock", {"side": 0})} if case == BESIDE else SYSTEMS
            results[case] = {name: {"requests": [], "bytes": [], "seconds": [], "digest": []} for name in systems if name not in missing}
            for number in range(rounds(2 if case in ("open", "one sample") else 3)):
                names = list(results[case])
                for name in [*names[number:], *names[:number]]:
                    row, (adapter, variant) = results[case][name], systems[name]
                    if _is_slow(results[case], name, number):
                        continue
                    entry = Entry(name, f"arrays/{adapter}", workload, {**common, **options, **variant, "endpoint": proxy.endpoint})
                    try:
                        turn = once(entry, lambda _system: proxy.faults(""))  # What opened a connection does not count.
                    except Missing as reason:
                        del results[case][name]
                        failed(dataclasses.replace(entry, name=f"{name}, {case}"), missing, str(reason))
                        continue
                    counts = proxy.counts()
                    for key, value in (
                        ("requests", counts["requests"]),
                        ("bytes", counts["body_bytes"]),
                        ("seconds", turn["seconds"]),
                        ("digest", turn["digest"]),
                    ):
                        row[key].append(value)
    finally:
        proxy.stop()
        server.stop()
    own = results[BESIDE].pop(OTHER_TILES)
    results[OTHER_TILES] = {**results[BESIDE], "penstock": own}
    return _report(results, missing)


def _is_slow(rows: dict[str, dict[str, list[float]]], name: str, number: int) -> bool:
    """Return whether a rival stops, as in a race: more than twice as slow as the best after two rounds, or four times after a long turn.

    Its row keeps the values that it has.
    """
    fastest = {other: min(row["seconds"]) for other, row in rows.items() if other not in ("penstock", OTHER_TILES) and row["seconds"]}
    if number == 0 or name not in fastest:
        return False
    own, best = fastest[name], min(fastest.values())
    return own > 2 * best if number == 2 else own > max(4 * best, LONG_TURN_SECONDS)


def _report(results: dict[str, dict[str, dict[str, list[float]]]], missing: dict[str, str]) -> Result:
    lines, comparisons, bars = [], [], []
    for case, rows in results.items():
        needed = CASES[BESIDE if case == OTHER_TILES else case][2]
        wrong = {name for name, row in rows.items() if set(row["digest"]) != set(rows["penstock"]["digest"])}
        assert not wrong, f"{case}: {wrong} read other values"
        median = {name: {key: statistics.median(row[key]) for key in ("requests", "bytes", "seconds")} for name, row in rows.items()}
        for name, row in sorted(median.items(), key=lambda one: one[1]["seconds"]):
            times = f"{row['bytes'] / needed:.2f} × the bytes needed, " if needed > 1 else ""
            lines.append(f"{case}: {name}: {row['requests']:,.0f} requests, {times}{row['seconds']:.2f} s")
        # Requests are compared only with systems that fetch at most 1.5 × the least bytes, or as many as Penstock: few requests that fetch much more are not better.
        most = max(1.5 * min(row["bytes"] for row in median.values()), median["penstock"]["bytes"])
        lean = {name for name, row in median.items() if row["bytes"] <= most or needed == 1}
        for what, unit in (("seconds", "s"), ("requests", "requests"), ("bytes", "bytes")):
            values = {name if what != "requests" or name in lean else f"({name}: many bytes)": row[what] for name, row in rows.items()}
            comparisons.append(comparison(f"{case}: {what}", unit, values, "lowest"))
            if case not in ("open", "one sample"):
                bars += against_best(comparisons[-1])
    middle = lambda case, what: statistics.median(results[case]["penstock"][what])  # noqa: E731
    bars.append(bar("one cold sample after open: requests", middle("one sample", "requests") - middle("open", "requests"), at_most=2))
    many = "1,000 random samples"
    bars.append(bar(f"{many}: bytes received / needed", middle(many, "bytes") / CASES[many][2], at_most=1.1))
    return {
        "what": f"E47: samples of 100 KB and a volume of {EDGE}³ float32 on MinIO; a fresh process each turn, whose imports, clients and first connection are not timed; caches of {BUDGET >> 20} MiB for each system unless stated (Penstock's block cache, which is half of its `memory_bytes`). TileDB has none",
        "cases": results, "lines": lines, "bars": bars, "comparisons": comparisons, "missing": missing,
    }  # fmt: skip

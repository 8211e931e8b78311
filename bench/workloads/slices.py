"""Reads of arrays on MinIO (E47): requests, bytes and seconds for random samples, and for windows of a volume.

Each turn is a new process, so that nothing is cached; its clock begins after imports. All systems have the same budget for caches, chunks or
tiles of the same shapes, and at least their best documented concurrency.
"""

from __future__ import annotations

import os
import pathlib
import statistics
import sys
from typing import Any

import numpy as np
from harness import comparison, fewer, rounds
from race import Entry, Missing, once

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent.parent / "tests"))
import servers

Result = dict[str, Any]
BUCKET = servers.BUCKET
SAMPLES, LENGTH = 10_000, 25_000  # 100 KB each, 1 GB in total
EDGE, BUDGET, SMALL_BUDGET = 256, 512 << 20, 8 << 20
SYSTEMS: dict[str, tuple[str, dict[str, Any]]] = {
    "penstock": ("penstock", {}),
    "h5py": ("hdf5", {"variant": "exact"}),
    "h5py, blocks of 1 MiB": ("hdf5", {"variant": "blocks"}),
    "h5py, paged": ("hdf5", {"variant": "paged"}),
    "zarr": ("zarr", {"variant": "plain"}),
    "zarr, sharded": ("zarr", {"variant": "sharded"}),
    "tensorstore": ("tensorstore", {"variant": "plain"}),
    "tensorstore, sharded": ("tensorstore", {"variant": "sharded"}),
    "tiledb": ("tiledb", {}),
}
# Name: the workload, its options, and the bytes that are needed.
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "one sample": ("samples", {"batches": 1, "batch": 1, "cache": BUDGET}, LENGTH * 4),
    "1,000 random samples": ("samples", {"batches": 10, "batch": 100, "cache": BUDGET}, 1000 * LENGTH * 4),
    "100 windows, chunks of 64³": ("windows", {"batches": 100, "side": 64, "cache": BUDGET}, 100 * 64**3 * 4),
    "100 windows, chunks of 32³": ("windows", {"batches": 100, "side": 32, "cache": BUDGET}, 100 * 64**3 * 4),
    "100 windows, chunks of 32³, caches of 8 MiB": ("windows", {"batches": 100, "side": 32, "cache": SMALL_BUDGET}, 100 * 64**3 * 4),
    "100 windows, default tiles (others: chunks of 64³)": ("windows", {"batches": 100, "side": 0, "cache": BUDGET}, 100 * 64**3 * 4),
}


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
            try:
                once(Entry(adapter, f"arrays/{adapter}", "samples_write", options))
                for side in (64, 32, 0):
                    once(Entry(adapter, f"arrays/{adapter}", "volume_write", {**options, "side": side}))
            except Missing as reason:
                missing |= dict.fromkeys((name for name, (of, _) in SYSTEMS.items() if of == adapter), str(reason))
                print(f"  {adapter}: {reason}", flush=True)
        os.environ["AWS_ENDPOINT_URL"] = proxy.endpoint
        for case, (workload, options, _) in CASES.items():
            results[case] = {}
            for _ in range(rounds(3)):
                for name, (adapter, variant) in SYSTEMS.items():
                    if name in missing:
                        continue
                    proxy.faults("")
                    try:
                        turn = once(
                            Entry(name, f"arrays/{adapter}", workload, {**common, **options, **variant, "endpoint": proxy.endpoint})
                        )
                    except Missing as reason:
                        missing[name] = f"{case}: {reason}"
                        print(f"  {name}: {missing[name]}", flush=True)
                        continue
                    counts, row = proxy.counts(), results[case].setdefault(name, {"requests": [], "bytes": [], "seconds": [], "digest": []})
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
    return _report(results, missing)


def _report(results: dict[str, dict[str, dict[str, list[float]]]], missing: dict[str, str]) -> Result:
    lines, comparisons, bars = [], [], []
    for case, rows in results.items():
        needed = CASES[case][2]
        wrong = {name for name, row in rows.items() if set(row["digest"]) != set(rows["penstock"]["digest"])}
        assert not wrong, f"{case}: {wrong} read other values"
        for name, row in sorted(rows.items(), key=lambda one: statistics.median(one[1]["seconds"])):
            requests, received, seconds = (statistics.median(row[key]) for key in ("requests", "bytes", "seconds"))
            lines.append(f"{case}: {name}: {requests:,.0f} requests, {received / needed:.2f} × the bytes needed, {seconds:.2f} s")
        for what, unit in (("seconds", "s"), ("requests", "requests"), ("bytes", "bytes")):
            comparisons.append(comparison(f"{case}: {what}", unit, {name: row[what] for name, row in rows.items()}, "lowest"))
            values = {name: statistics.median(row[what]) for name, row in rows.items()}
            rivals = {name: value for name, value in values.items() if name != "penstock"}
            if rivals and case != "one sample":
                best = min(rivals, key=lambda name: rivals[name])
                bars.append(
                    {
                        "what": f"{case}: {what} / the best rival's ({best})",
                        "value": values["penstock"] / rivals[best],
                        "at_most": 1.0 if what != "bytes" else 1.1,
                    }
                )
    ours = results["one sample"]["penstock"]
    bars.append({"what": "one cold sample after open: requests", "value": statistics.median(ours["requests"]) - 3, "at_most": 2})
    many = results["1,000 random samples"]["penstock"]
    bars.append(
        {
            "what": "1,000 random samples: bytes received / needed",
            "value": statistics.median(many["bytes"]) / CASES["1,000 random samples"][2],
            "at_most": 1.1,
        }
    )
    return {
        "what": f"E47: samples of 100 KB and a volume of {EDGE}³ float32 on MinIO; fresh process each turn, imports not timed; caches of {BUDGET >> 20} MiB for each system unless stated",
        "cases": results, "lines": lines, "bars": bars, "comparisons": comparisons, "missing": missing,
    }  # fmt: skip

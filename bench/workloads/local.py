"""Reads and writes of stored samples on a local disk: CIFAR-shaped arrays, JPEG bytes, and ingest of JPEG files."""

from __future__ import annotations

import pathlib
import statistics
from typing import Any

import numpy as np
import penstock as ps
from harness import bar, comparison, fewer, interleaved
from photographs import photographs
from race import Entry, empty_place, race, start, told, written

Result = dict[str, Any]
SAMPLES = 50_000
# Epochs in a turn, which would be over in 30 ms otherwise. A fresh handle has one, in which it verifies.
EPOCHS = 3


def takes(workload: str, common: dict[str, Any], first: tuple[str, ...], rivals: tuple[str, ...]) -> Result:
    """Race shuffled takes: with one thread on one core, also by fresh handles, and with two threads on two cores, by the `first` systems only.

    Systems that cannot run are noted. The result has rates by name, and the missing.
    """
    missing: dict[str, str] = {}
    for adapter in ("tables/penstock", *rivals):
        written([Entry(adapter, adapter, f"{workload}_write", common)], missing)
    kinds = {
        "": {"threads": 1, "fresh": False, "epochs": EPOCHS},
        ", fresh handle": {"threads": 1, "fresh": True, "epochs": 1},
        ", two threads": {"threads": 2, "fresh": False, "epochs": EPOCHS},
    }
    entries = []
    for ending, own in kinds.items():
        for adapter in (*first, *(one for one in rivals if one not in missing and "fresh" not in ending)):
            limit = workload == "jpegs" and adapter == "loaders/numpy"
            name = adapter.split("/")[1] + ending
            entries.append(Entry(name, adapter, workload, {**common, **own}, own["threads"], group=ending, rival=not limit))
    systems = start(entries, missing, request="check")
    for epochs in (1, EPOCHS):
        alike = [one for one in systems if one.entry.options["threads"] == 1 and one.entry.options["epochs"] == epochs]
        digests = {system.entry.name: system.first["digest"] for system in alike}
        assert len(set(digests.values())) == 1, f"{workload}: systems read other values: {digests}"
    return {"systems": race(systems, missing, 9 if workload == "samples" else 5), "missing": missing}


def _parts(rows: dict[str, dict[str, Any]], what: str) -> list[dict[str, Any]]:
    """Return the comparisons of takes: each kind of handle apart."""
    found = []
    for ending in ("", ", fresh handle", ", two threads"):
        rates = {
            name.removesuffix(ending): row["rates"] for name, row in rows.items() if (name.endswith(ending) if ending else "," not in name)
        }
        if "numpy" in rates and what != "samples":
            rates["(a loop of copies in Python)"] = rates.pop("numpy")
        found.append(comparison(what + ending, "samples/s", rates))
    return found


def cifar(folder: pathlib.Path, _photos: pathlib.Path | None) -> Result:
    """CIFAR-shaped samples: shuffled epochs in takes of 512, against NumPy's take from a memmap, Lance and LMDB."""
    rng, samples = np.random.default_rng(0), fewer(SAMPLES)
    np.save(folder / "images.npy", rng.integers(0, 256, (samples, 32, 32, 3), dtype=np.uint8))
    np.save(folder / "labels.npy", rng.integers(0, 10, samples))
    found = takes("samples", {"place": folder, "batch": 512}, ("tables/penstock", "loaders/numpy"), ("tables/lance", "tables/lmdb"))
    rate = {name: row["per_second"] for name, row in found["systems"].items()}
    bars = [
        bar("penstock / numpy, one thread, after the first epoch", rate["penstock"] / rate["numpy"], at_least=1.1),
        bar("penstock / numpy, one thread, first epoch of a fresh handle", rate["penstock, fresh handle"] / rate["numpy, fresh handle"], at_least=1.0),
        bar("penstock / numpy, two threads", rate["penstock, two threads"] / rate["numpy, two threads"], at_least=1.0),
        *(bar("penstock / lance", rate["penstock"] / rate["lance"], at_least=25) for _ in range("lance" in rate)),
    ]  # fmt: skip
    return {
        "what": f"{samples:,} samples of 32 × 32 × 3 uint8 and a label, takes of 512; a fresh handle verifies every checksum", **found,
        "lines": told(found["systems"]), "bars": bars, "comparisons": _parts(found["systems"], "samples"),
    }  # fmt: skip


def jpeg(folder: pathlib.Path, photos: pathlib.Path | None) -> Result:
    """Compare shuffled takes of 128 raw JPEGs with copying the same bytes from the page cache, with Lance and LMDB."""
    files = photographs(folder, photos)
    common = {"place": folder, "source": files[0].parent, "batch": 128}
    found = takes("jpegs", common, ("tables/penstock", "loaders/numpy"), ("tables/lance", "tables/lmdb"))
    rate = {name: row["per_second"] for name, row in found["systems"].items()}
    mean = statistics.mean(path.stat().st_size for path in files)
    bars = [
        bar("penstock / copies from the page cache", rate["penstock"] / rate["numpy"], at_least=0.85),
        *(bar("penstock / lance", rate["penstock"] / rate["lance"], at_least=5) for _ in range("lance" in rate)),
    ]
    return {
        "what": f"{len(files):,} JPEGs, mean {mean / 1e3:.1f} KB, takes of 128 as bytes objects", "mean_bytes": mean, **found,
        "lines": told(found["systems"]), "bars": bars, "comparisons": _parts(found["systems"], "JPEGs"),
    }  # fmt: skip


INGEST = {
    "one file": "loaders/numpy", "penstock": "tables/penstock", "lance": "tables/lance", "lmdb": "tables/lmdb", "litdata": "loaders/litdata",
    "webdataset": "loaders/webdataset", "mosaicml": "loaders/mosaicml", "grain": "loaders/grain", "ffcv": "loaders/ffcv",
}  # fmt: skip


def ingest(folder: pathlib.Path, photos: pathlib.Path | None) -> Result:
    """Compare durable ingest of JPEG files with writing the same bytes to one synced file. What a system wrote is synced, and nothing else."""
    files = photographs(folder, photos)
    total = sum(path.stat().st_size for path in files)
    lines, bars, comparisons, results, missing = [], [], [], {}, {}
    for cores in (1, 2):
        options = {"source": files[0].parent, "threads": cores, "quality": 95, "recipe": "jpg", "batch": 128}
        entries = [
            Entry(
                name, adapter, "photos_write" if name == "ffcv" else "ingest", {**options, "place": folder / f"out-{cores}-{number}", "durable": True}, cores,
                rival=name not in ("one file", "ffcv"), fresh=name == "ffcv",
            )
            for number, (name, adapter) in enumerate(INGEST.items())
        ]  # fmt: skip

        systems = start(entries, missing, empty_place)
        rows = race(systems, missing, 3, empty_place)
        results[str(cores)] = rows
        seconds = {name: [len(files) / rate for rate in row["rates"]] for name, row in rows.items()}
        seconds["limit: one file"] = seconds.pop("one file")
        if "ffcv" in seconds:
            seconds["(ffcv: encodes)"] = seconds.pop("ffcv")
        lines += [
            f"{cores} cores: {name}: {statistics.median(spent):.2f} s ({min(spent):.2f}–{max(spent):.2f})"
            for name, spent in seconds.items()
        ]
        comparisons.append(comparison(f"{cores} cores", "s", seconds, "lowest"))
        ratio = statistics.median(seconds["penstock"]) / statistics.median(seconds["limit: one file"])
        bars.append(bar(f"{cores} cores: penstock / one file with the same bytes + fsync, seconds", ratio, at_most=1.0))
    return {
        "what": f"{len(files):,} JPEGs, {total / 1e6:.0f} MB, from the page cache to a synced disk; Penstock also checks headers and computes checksums, FFCV decodes and encodes",
        "bytes": total, "threads": results, "lines": lines, "bars": bars, "comparisons": comparisons, "missing": missing,
    }  # fmt: skip


def calls(folder: pathlib.Path, _photos: pathlib.Path | None) -> Result:
    """Measure the latency of warm takes of 1, 32 and 10,000 samples."""
    rng = np.random.default_rng(0)
    ds = ps.create(folder / "d", {"image": ps.Tensor((32, 32, 3), "uint8"), "label": "int64"})
    ds.append({"image": rng.integers(0, 256, (SAMPLES, 32, 32, 3), dtype=np.uint8), "label": np.arange(SAMPLES)})
    ds[:]
    ps.configure(threads=1)
    micros = {}
    for count, repeats in ((1, 5000), (32, 2000), (10_000, 20)):
        positions = [rng.integers(0, SAMPLES, count) for _ in range(repeats)]

        def work(positions: list[Any] = positions) -> None:
            for chosen in positions:
                ds.take(chosen)

        micros[count] = interleaved({"take": work})["take"]["median_seconds"] / repeats * 1e6
    return {
        "what": "takes of CIFAR-shaped samples, warm, one thread", "microseconds_per_call": micros,
        "lines": [f"take of {count}: {spent:,.1f} µs, {spent / count:.2f} µs per row" for count, spent in micros.items()],
        "bars": [
            bar("take of 1, µs", micros[1], at_most=10), bar("take of 32, µs per row", micros[32] / 32, at_most=2),
        ],
    }  # fmt: skip

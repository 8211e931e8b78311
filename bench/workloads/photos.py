"""The photographs workload: JPEG → RandomResizedCrop(224) + flip → batches of uint8, one shuffled epoch, on two cores."""

from __future__ import annotations

import os
import pathlib
import shutil
import statistics
import subprocess
from typing import Any

import numpy as np
import penstock as ps
import servers
from harness import against_best, bar, comparison, fewer
from penstock import transforms as T
from photographs import SETS, digest, linked, sets
from race import CORES, Entry, System, fastest, race, start, told, written

Result = dict[str, Any]
# torchvision's decoder and transforms in the workers of torch's DataLoader. One system races these choices, and all take the fastest.
WAYS = [{"path": "tensor", "threads": 2}, {"path": "tensor", "threads": 3}, {"path": "pil", "threads": 2}]
WORKERS = ("torchvision", "webdataset", "mosaicml", "huggingface")
# Each system, with the choices among which the fastest is taken.
SYSTEMS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "penstock": ("loaders/penstock", [{"decode": "fast", "threads": 2}]),
    "penstock, full scale": ("loaders/penstock", [{"decode": "exact", "threads": 2}]),
    "ffcv": ("loaders/ffcv", [{"recipe": "jpg", "threads": 2}]),
    "ffcv, own recipe": ("loaders/ffcv", [{"recipe": "own", "threads": 2}]),
    "dali": ("loaders/dali", [{"threads": 2}, {"threads": 3}]),
    **{name: (f"loaders/{name}", WAYS) for name in WORKERS},
    "litdata": ("loaders/litdata", [{"threads": 2}, {"threads": 3}]),
    "grain": (
        "loaders/grain",
        [
            {"threads": 2, "ways": "processes", "path": "tensor"},
            {"threads": 2, "ways": "threads", "path": "tensor"},
            {"threads": 2, "ways": "processes", "path": "pil"},
        ],
    ),
    "spdl": (
        "loaders/spdl",
        [
            {"threads": 2, "path": "processes"},
            {"threads": 2, "path": "tensor"},
            {"threads": 3, "path": "tensor"},
            {"threads": 3, "path": "ffmpeg"},
        ],
    ),
}
# How many batches a choice is judged by: 2 and 3 workers share them evenly.
CHOICE_BATCHES = 12
# Decoding takes nearly all of the time on large photographs, so of these systems, which decode alike, only torchvision runs.
ONLY_SMALL = {*WORKERS, "litdata"} - {"torchvision"}
# Systems that read the files as they are.
IN_PLACE = ("dali", "torchvision", "spdl")


def prepare(name: str, options: dict[str, Any], missing: dict[str, str]) -> None:
    """Write the files of a system, untimed."""
    adapter, choices = SYSTEMS[name]
    if name in IN_PLACE or name == "penstock, full scale":
        return
    written([Entry(name, adapter, "photos_write", {**choices[0], **options, "threads": 2})], missing)


def limit(folder: pathlib.Path, scaled: bool) -> float:
    """Return how many random crops per second our own decoder decodes in two threads, without anything else."""
    command = [servers.cargo_binary("region-decode"), folder, "2", "1.5", *(["scaled"] if scaled else [])]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=True, preexec_fn=lambda: os.sched_setaffinity(0, set(CORES[:2]))
    )
    return float(done.stdout)


def likeness(files: list[pathlib.Path], folder: pathlib.Path) -> dict[str, float] | None:
    """Compare the default crops with those decoded at full scale: the same photographs, boxes and flips. None if they are all the same."""
    ds = ps.create(folder / "likeness", {"image": ps.Image()})
    ds.append({"image": files[:256]})
    crops = [
        np.concatenate([b["image"] for b in ds.loader(batch_size=64, seed=0, transform=[T.RandomResizedCrop(224, decode=how)]).stream(1)])
        for how in ("fast", "exact")
    ]
    errors = [float(np.mean((one.astype(np.float64) - other) ** 2)) for one, other in zip(*crops, strict=True)]
    scaled = [10 * float(np.log10(255**2 / error)) for error in errors if error]
    return {"scaled_share": len(scaled) / len(errors), "median_db": statistics.median(scaled), "worst_db": min(scaled)} if scaled else None


def _set(name: str, files: list[pathlib.Path], batch: int, place: pathlib.Path, earlier: dict[str, dict[str, Any]]) -> Result:
    """Race all systems on one set, each with its fastest choice, or that of an earlier set."""
    missing: dict[str, str] = {}
    source = linked(files, place / "class" / "0").parent
    options = {"source": source, "place": place, "batch": batch, "quality": SETS[name][2] if name in SETS else 95}
    # FFCV's own recipe shrinks photographs to 500 pixels: only on the small ones does it decode the same pixels.
    left_out = {"ffcv, own recipe"} if name != "small" else set()
    left_out |= ONLY_SMALL if name == "large" else set()
    psnr = likeness(files, place)
    left_out |= set() if psnr else {"penstock, full scale"}  # It would do the same as the default.
    systems = {system: how for system, how in SYSTEMS.items() if system not in left_out}
    for system in systems:
        prepare(system, options, missing)
    os.sync()
    entries: list[Entry] = []
    chosen: dict[str, dict[str, Any]] = {}
    for system, (adapter, choices) in systems.items():
        if system not in missing:
            known = earlier.get(system) or next((chosen[other] for other in WORKERS if system in WORKERS and other in chosen), None)
            made = [Entry(system, adapter, "photos", {**options, **one}) for one in ([known] if known else choices)]
            best = fastest(made, missing, CHOICE_BATCHES)
            if best:
                entries.append(best)
                chosen[system] = {key: best.options[key] for key in choices[0]}
    alone: dict[str, list[float]] = {"penstock": [], "penstock, full scale": []}

    def settle(system: System) -> None:
        """Measure the limit of Penstock's next turn just before it."""
        if system.entry.name in alone:
            alone[system.entry.name].append(limit(source / "0", system.entry.name == "penstock"))

    rows = race(start(entries, missing, request="go 8"), missing, 3, settle)
    for system, row in rows.items():
        assert len(files) <= row["samples"] < len(files) + 2 * batch, f"{system} gave {row['samples']} of {len(files)} photographs"
        assert "uint8" in row["kind"][1], f"{system} gave {row['kind']}"
    return {
        "images": len(files), "mean_bytes": statistics.mean(path.stat().st_size for path in files), "batch": batch, "systems": rows, "missing": missing,
        "digest": digest(files), "pixels": f"{SETS[name][0]} × {SETS[name][1]}" if name in SETS else "", "region_decode": {system: rates for system, rates in alone.items() if rates}, "likeness": psnr, "chosen": chosen,
    }  # fmt: skip


def _compared(name: str, found: Result) -> tuple[list[Result], list[Result]]:
    """Return the comparisons and bars of a set: all at full scale, and Penstock's default, if it decodes large boxes at half size or less."""
    rates, alone = {label: row["rates"] for label, row in found["systems"].items()}, found["region_decode"]
    ours = {label: rates.pop(label) for label in alone}
    what = " ".join(f"{name}: {found['images']:,} photographs of {found['pixels']} {found['mean_bytes'] / 1e3:.0f} KB".split())
    scales = {
        "penstock": "Penstock's default scales" if len(ours) > 1 else "full scale, which is Penstock's default here",
        "penstock, full scale": "full scale",
    }
    comparisons, bars = [], []
    for label, mine in ours.items():
        compared = comparison(
            f"{what}, {scales[label]}", "images/s", {"penstock": mine, **rates, "limit: region decode at these scales": alone[label]}
        )
        comparisons.append(compared)
        value = statistics.median(mine) / statistics.median(alone[label])
        bars.append(bar(f"{name}, {scales[label]}: penstock / region decode at the same scales", value, at_least=0.65))
        bars += against_best(compared, 1.8 if label == "penstock" else 1.0, what=f"{name}, {scales[label]}")
    if len(ours) > 1:
        value = statistics.median(ours["penstock"]) / statistics.median(alone["penstock, full scale"])
        bars.append(bar(f"{name}: penstock at its default scales / region decode at full scale", value, at_least=0.95))
    return comparisons, bars


def _told(psnr: dict[str, float] | None) -> str:
    if psnr is None:
        return "all of Penstock's default crops are decoded at full scale"
    return (
        f"{psnr['scaled_share']:.0%} of Penstock's default crops are decoded at half size or less; "
        f"PSNR {psnr['median_db']:.1f} dB (median), {psnr['worst_db']:.1f} dB (worst)"
    )


def loader_photos(folder: pathlib.Path, given: pathlib.Path | None) -> Result:
    """Run a shuffled epoch of at least 50 batches of each set, on two cores."""
    lines, bars, results, comparisons, missing = [], [], {}, [], {}
    earlier: dict[str, dict[str, Any]] = {}
    for name, (files, batch) in sets(folder, given).items():
        found = results[name] = _set(name, files, batch, folder / name, earlier)
        # These were the same on both sets in each run. The number of DALI's threads was not.
        earlier = {system: choice for system, choice in found["chosen"].items() if system in ("torchvision", "grain", "spdl")}
        shutil.rmtree(folder / name)
        missing |= found["missing"]
        of_set = _compared(name, found)
        comparisons += of_set[0]
        bars += of_set[1]
        lines += [
            *told(found["systems"], f"{name}: "),
            *(f"{name}: {label} runs with {choice}" for label, choice in found["chosen"].items()),
            *(
                f"{name}: region decode alone, as {how}: {statistics.median(values):,.0f}/s"
                for how, values in found["region_decode"].items()
            ),
            f"{name}: {_told(found['likeness'])}",
        ]
    return {
        "what": "one shuffled epoch of 54 batches on two cores, uint8; random crops to 224 and flips. Penstock's default decodes large boxes at half size or less; all others decode at full scale, FFCV with the fast DCT. Penstock, FFCV and DALI give (height, width, 3), the others (3, height, width). FFCV's batches are not owned",
        "sets": results, "lines": lines, "bars": bars, "comparisons": comparisons, "missing": missing,
    }  # fmt: skip


def loader_augment(folder: pathlib.Path, _photos: pathlib.Path | None) -> Result:
    """Crop, flip and normalise CIFAR-shaped samples in batches of 512, on one core per system and then on two."""
    rng, count = np.random.default_rng(0), fewer(50_000)
    np.save(folder / "x.npy", rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8))
    np.save(folder / "y.npy", rng.integers(0, 10, count))
    lines, bars, results, comparisons, missing = [], [], {}, [], {}
    for system in ("penstock", "ffcv"):
        written([Entry(system, f"loaders/{system}", "small_images_write", {"place": folder})], missing)
    for cores in (1, 2):
        options = {"place": folder, "batch": 512, "threads": cores}
        entries = [
            Entry(name, f"loaders/{name}", "small_images", options, cores) for name in ("penstock", "numpy", "ffcv") if name not in missing
        ]
        rows = race(start(entries, missing), missing)
        results[str(cores)] = rows
        lines += told(rows, f"{cores} cores: ")
        comparisons.append(comparison(f"{cores} cores", "samples/s", {name: row["rates"] for name, row in rows.items()}))
        for rival in ("numpy", "ffcv"):
            if rival in rows:
                bars.append(
                    bar(f"{cores} cores: penstock / {rival}", rows["penstock"]["per_second"] / rows[rival]["per_second"], at_least=1.0)
                )
    return {
        "what": f"{count:,} samples of 32 × 32 × 3 uint8: crop with padding, flip, normalise to float32; batches of 512; each system is pinned to as many cores as it has threads",
        "threads": results, "lines": lines, "bars": bars, "comparisons": comparisons, "missing": missing,
    }  # fmt: skip

"""Rows of a label and a text, taken at random."""

from __future__ import annotations

import pathlib
import random
from typing import Any

import numpy as np
from harness import against_best, bar, comparison, fewer
from race import Entry, race, start, told, written

Result = dict[str, Any]
ROWS = 500_000
ORDERED = "(rocksdb, 1,024 rows a key, in the order of keys)"
SYSTEMS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "penstock": ("tables/penstock", "text", {}),
    "penstock, loader": ("tables/penstock", "text_loader", {}),
    "rocksdb, one row a key": ("tables/rocksdb", "text", {"variant": "row"}),
    "rocksdb, one row a key, plain tables": ("tables/rocksdb", "text", {"variant": "plain"}),
    ORDERED: ("tables/rocksdb", "text", {"variant": "block"}),
    "lmdb": ("tables/lmdb", "text", {}),
    "lance": ("tables/lance", "text", {"variant": "default"}),
    "lance, uncompressed": ("tables/lance", "text", {"variant": "plain"}),
    "huggingface": ("loaders/huggingface", "text", {}),
    "h5py": ("arrays/hdf5", "text", {"variant": "variable"}),
    "h5py, strings of one length": ("arrays/hdf5", "text", {"variant": "fixed"}),
    "litdata": ("loaders/litdata", "text", {}),
}


def text(folder: pathlib.Path, _photos: pathlib.Path | None) -> Result:
    """Take 100 times 1,024 random rows out of 500,000, as an int64 array and a list of str, on one core."""
    rng, count = random.Random(0), fewer(ROWS)
    words = np.array(["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(5000)])
    lengths = np.random.default_rng(0).integers(5, 30, count)
    chosen = np.random.default_rng(1).integers(0, len(words), lengths.sum())
    texts = [" ".join(part) for part in np.split(words[chosen], np.cumsum(lengths)[:-1])]
    (folder / "texts").write_text("\n".join(texts))
    missing: dict[str, str] = {}
    common = {"place": folder, "source": folder / "texts", "batch": 1024, "takes": fewer(100), "threads": 1}
    for adapter in dict.fromkeys(adapter for adapter, *_ in SYSTEMS.values()):
        written([Entry(adapter, adapter, "text_write", common)], missing, *(name for name, (of, *_) in SYSTEMS.items() if of == adapter))
    entries = [
        Entry(name, adapter, workload, {**common, **own}, 1, rival=not name.startswith("("))
        for name, (adapter, workload, own) in SYSTEMS.items() if name not in missing
    ]  # fmt: skip
    systems = start(entries, missing, request="check")
    same = {
        system.entry.name: system.first["digest"] for system in systems if system.entry.name not in ("litdata", "penstock, loader", ORDERED)
    }
    assert len(set(same.values())) == 1, f"systems read other rows: {same}"
    rows = race(systems, missing)
    rates = {name: row["per_second"] for name, row in rows.items()}
    compared = comparison("random rows", "rows/s", {name: row["rates"] for name, row in rows.items()})
    bars = against_best(compared, 3.0) + against_best(compared, 3.0, "penstock, loader")
    if ORDERED in rates:
        bars.append(bar("penstock at random / RocksDB in the order of keys", rates["penstock"] / rates[ORDERED], at_least=0.5))
    return {
        "what": f"{count:,} rows of a label and a text of {sum(map(len, texts[:1000])) / 1000:.0f} B; takes of 1,024 random rows; each text is read in full; one core for each system. LitData has no takes: its rows come in its own shuffled order",
        "systems": rows, "lines": told(rows), "bars": bars, "missing": missing,
        "comparisons": [compared],
    }  # fmt: skip

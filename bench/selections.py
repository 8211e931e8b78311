"""Time and memory of selections of 10^9 samples: slices, masks, random splits, loaders and seeks, and splits by value of 10^8 samples.

Run with `.venv/bin/python bench/selections.py [samples]`. It makes datasets of a few bytes per sample in a temporary folder, and measures each
in a new process. Memory is what is not shared with files. These figures are not among those of `make bench`, because they need gigabytes.
"""

from __future__ import annotations

import multiprocessing
import pathlib
import pickle
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import penstock as ps

APPENDED = 100_000_000


def resident_mb() -> float:
    """Return the memory of this process that is not shared with files, in MB."""
    status = dict(line.split(":", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) / 1e3


class Peak:
    """Notes the most memory that the process takes while it works."""

    def __enter__(self) -> Peak:
        self.most, self._done = resident_mb(), threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._done.wait(0.002):
            self.most = max(self.most, resident_mb())

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()


def timed(what: str, work: Callable[[], Any]) -> Any:
    """Print the time of one call, how much memory it left, and its peak beside what was held before."""
    before = resident_mb()
    with Peak() as peak:
        began = time.perf_counter()
        made = work()
        seconds = time.perf_counter() - began
    print(f"{what:<36}{seconds * 1000:>12.2f} ms {resident_mb() - before:>9.1f} MB, peak {peak.most - before:>7.1f} MB", flush=True)
    return made


def use(what: str, view: ps.View) -> None:
    """Time what a training run does with a view."""
    loader = timed(f"{what}: loader", lambda: view.loader(batch_size=256, shuffle=True, columns=["n"]))
    state = timed(f"{what}: state of a late step", lambda: loader.state_dict(step=len(loader) // 2))
    batches = iter(loader)
    timed(f"{what}: first batch", lambda: next(batches))
    loader.close()
    timed(f"{what}: seek", lambda: loader.load_state_dict(state))
    batches = iter(loader)
    timed(f"{what}: batch after the seek", lambda: next(batches))
    loader.close()
    body = timed(f"{what}: pickle", lambda: pickle.dumps(view))
    print(f"{what + ': pickled':<36}{len(body):>12,} bytes")


def make(path: pathlib.Path, samples: int) -> None:
    ds = ps.create(path, {"n": "uint8"})
    with ds.transaction() as tx:
        for begin in range(0, samples, APPENDED):
            tx.append({"n": np.arange(begin, min(samples, begin + APPENDED), dtype=np.uint32).astype(np.uint8)})


def make_valued(path: pathlib.Path, samples: int) -> None:
    random = np.random.default_rng(0)
    ds = ps.create(path, {"label": ps.Label([f"class {n}" for n in range(10)]), "group": "int32"})
    with ds.transaction() as tx:
        for begin in range(0, samples, APPENDED // 4):
            count = min(samples - begin, APPENDED // 4)
            tx.append({"label": random.integers(0, 10, count), "group": random.integers(0, 1000, count, np.int32)})


def delete(path: pathlib.Path, samples: int) -> None:
    with ps.open(path).transaction() as tx:
        tx.delete(row_ids=np.random.default_rng(0).choice(samples, samples // 100, replace=False))


def measure(path: pathlib.Path) -> None:
    small = ps.create("memory://small", {"n": "uint8"})
    small.append({"n": np.zeros(1000, np.uint8)})
    next(iter(small.loader(batch_size=8)))  # Imports what loaders need.
    ds = timed("open", lambda: ps.open(path))
    print(f"{len(ds):,} samples")
    timed("last sample", lambda: ds[len(ds) - 1])
    before = resident_mb()
    stepped = timed("select(slice(None, None, 2))", lambda: ds.select(slice(None, None, 2)))
    use("stepped", stepped)
    parts = timed("split", lambda: ds.split({"train": 0.8, "val": 0.1, "test": 0.1}))
    use("train", parts["train"])
    use("test", parts["test"])
    print(f"{'held by all':<36}{resident_mb() - before:>25.1f} MB")


def measure_mask(path: pathlib.Path) -> None:
    ds = ps.open(path)
    mask = np.zeros(len(ds), bool)
    mask[::7] = mask[::5] = True
    masked = timed("select(mask)", lambda: ds.select(mask))
    use("masked", masked)


def measure_values(path: pathlib.Path) -> None:
    ds = ps.open(path)
    ds.head(100).split({"train": 0.9, "test": 0.1}, by="label")  # Imports what it needs.
    for arguments in ({"by": "label"}, {"by": "group"}, {"group": "group"}, {"group": "group", "by": "label"}):
        parts = timed(f"split({arguments})", lambda arguments=arguments: ds.split({"train": 0.9, "test": 0.1}, **arguments))
        print({name: len(part) for name, part in parts.items()})


def run(folder: pathlib.Path, samples: int) -> None:
    def alone(work: Callable[..., None], *arguments: Any) -> None:
        print(f"\n{work.__name__}")
        process = multiprocessing.get_context("spawn").Process(target=work, args=arguments)
        process.start()
        process.join()

    alone(make, folder / "set", samples)
    alone(measure, folder / "set")
    alone(measure_mask, folder / "set")
    alone(delete, folder / "set", samples)
    alone(measure, folder / "set")
    alone(make_valued, folder / "values", samples // 10)
    alone(measure_values, folder / "values")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        run(pathlib.Path(folder), int(float(sys.argv[1])) if len(sys.argv) > 1 else 10**9)

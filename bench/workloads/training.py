"""Benchmarks the complete loader, from files to batches that a consumer touches, against the machine's limit and rivals."""

from __future__ import annotations

import concurrent.futures
import gc
import itertools
import os
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import penstock as ps
from harness import against_best, bar, comparison, evict, fewer, interleaved, rounds
from penstock import transforms as T
from serving import device_bytes, touch

Result = dict[str, Any]


def jitter(sample: dict[str, Any], rng: Any = None) -> dict[str, Any]:
    """Sort and scale, as a user's function might."""
    x = sample["x"].astype(np.float32)
    return {"x": np.sort(x, 0) + x * 0.5, "label": sample["label"]}


class Samples:
    """The same samples as a dataset for a DataLoader."""

    def __init__(self, path: str) -> None:
        self.x = np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return jitter({"x": self.x[index], "label": index % 10})


def loader_functions(folder: pathlib.Path, _photos: pathlib.Path | None) -> Result:
    """Run the same Python function in our loader and in a DataLoader with persistent workers, with the same number of processes."""
    import torch

    images = np.random.default_rng(0).integers(0, 256, (6000, 96, 96, 3), dtype=np.uint8)
    np.save(folder / "x.npy", images)
    ds = ps.create(folder / "penstock", {"x": ps.Tensor((96, 96, 3), "uint8"), "label": "int64"})
    ds.append({"x": images, "label": np.arange(len(images)) % 10})
    ours = ds.loader(batch_size=64, shuffle=True, transform=[jitter], python_workers=2, output="torch")
    theirs = torch.utils.data.DataLoader(
        Samples(str(folder / "x.npy")), batch_size=64, shuffle=True, num_workers=2, persistent_workers=True
    )  # type: ignore[arg-type]

    def run(batches: Any) -> None:
        for batch in batches:
            touch(batch["x"].numpy())

    # Several epochs a turn: our workers begin the next epoch when one ends, and have up to 6 of a turn's 282 batches ready when it begins.
    systems = {"penstock": lambda: [run(ours) for _ in range(3)], "dataloader": lambda: [run(theirs) for _ in range(3)]}
    for work in systems.values():
        work()  # The first run starts the processes.
    times = interleaved(systems, settle=lambda: time.sleep(0.5))
    ours.close()
    rates = {name: 3 * len(images) / row["median_seconds"] for name, row in times.items()}
    return {
        "what": "6,000 samples of 96 × 96 × 3 through a NumPy function, two processes, three epochs a turn", "samples_per_second": rates, "times": times,
        "comparisons": [comparison("a NumPy function per sample", "samples/s", {name: [3 * len(images) / s for s in row["seconds"]] for name, row in times.items()})],
        "lines": [f"{name}: {value:,.0f} samples/s" for name, value in rates.items()],
        "bars": [bar("penstock / DataLoader", rates["penstock"] / rates["dataloader"], at_least=1.0)],
    }  # fmt: skip


def loader_starting(folder: pathlib.Path, _photos: pathlib.Path | None) -> Result:
    """Measure the time from `ps.open` of 1 M samples to the first batch, and the time to resume at step 10^6 of 10^9 draws."""
    ds = ps.create(folder / "million", {"x": ps.Tensor((16,), "uint8"), "label": "int64"})
    with ds.transaction() as tx:
        for begin in range(0, 1_000_000, 100_000):
            tx.append({"x": np.full((100_000, 16), begin % 251, np.uint8), "label": np.arange(begin, begin + 100_000)})

    def first() -> None:
        loader = ps.open(folder / "million").loader(batch_size=256, shuffle=True)
        next(iter(loader))
        loader.close()

    first()
    times = interleaved({"first_batch": first}, rounds=9)
    mixed = ps.mix({"a": (ds, 3), "b": (ds.select(range(1000)), 1)}, epoch_samples=10**9)
    huge = {
        "resume": ds.loader(batch_size=256, shuffle=ps.Replacement(samples=10**9)),
        "resume of a mixture of permutations": mixed.loader(batch_size=256, shuffle=True),
    }

    def resuming(loader: Any) -> Callable[[], None]:
        state = loader.state_dict(step=10**6)

        def resume() -> None:
            loader.load_state_dict(state)
            loader._core.places(0)

        return resume

    times |= interleaved({name: resuming(loader) for name, loader in huge.items()}, rounds=9)
    return {
        "what": "1 M samples in 10 fragments, local; 10^9 draws", "times": times,
        "lines": [f"{name}: {1000 * row['median_seconds']:.2f} ms" for name, row in times.items()],
        "bars": [
            bar("open to first batch, ms", 1000 * times["first_batch"]["median_seconds"], at_most=50),
            *(bar(f"{name}, at step 10^6 of 10^9 draws, ms", 1000 * times[name]["median_seconds"], at_most=1) for name in huge),
        ],
    }  # fmt: skip


def loader_whole_direct(folder: pathlib.Path, _photos: pathlib.Path | None) -> Result:
    """Load raw tensors of 140 MB without the page cache, from a dataset and from NPY files in place, against fio."""
    from workloads import direct

    count, epochs = 8, 4
    rng = np.random.default_rng(0)
    (folder / "npy").mkdir()
    ds = ps.create(folder / "big", {"x": ps.Tensor((direct.BIG_BYTES,), "uint8")})
    with ds.transaction() as tx:
        for number in range(count):
            value = rng.integers(0, 256, direct.BIG_BYTES, dtype=np.uint8)
            tx.append({"x": value[None]})
            np.save(folder / "npy" / f"{number}.npy", value)
    os.sync()
    ps.configure(threads=2)

    def run(view: Any) -> None:
        with view.loader(batch_size=1, shuffle=True, memory_bytes=1 << 30) as loader:
            for batch in loader.stream(epochs):
                touch(next(value for value in batch.values() if isinstance(value, np.ndarray) and value.nbytes > 1000))

    limits = {"dataset": direct.Limit(folder / "big", "read", (1 << 20, 4 << 20))}
    size, depth, _ = limits["dataset"].best
    limits["npy in place"] = direct.Limit(folder / "npy", "read", (size,), (depth,))  # The same bytes on the same disk.
    rates: dict[str, list[float]] = {name: [] for name in limits}
    read: dict[str, int] = {}
    for _ in range(rounds(4)):
        for name, limit in limits.items():
            limit.turn()
            view = ps.open(folder / "big", io="direct") if name == "dataset" else ps.files(folder / "npy" / "*.npy", io="direct")
            evict(folder)
            before, began = device_bytes(), time.perf_counter()
            run(view)
            rates[name].append(epochs * count * direct.BIG_BYTES / (time.perf_counter() - began))
            read[name] = device_bytes() - before
    medians = {name: statistics.median(values) for name, values in rates.items()}
    fio = {name: statistics.median(limit.values) for name, limit in limits.items()}
    return {
        "what": f"{count} tensors of 140 MB, {epochs} epochs per round; the device read in the last round " + ", ".join(f"{size / 1e9:.2f} GB ({name})" for name, size in read.items()), "bytes_per_second": rates,
        "comparisons": [comparison(name, "GB/s", {"penstock": [v / 1e9 for v in rates[name]], "limit: fio at its best": [v / 1e9 for v in limits[name].values]}) for name in limits],
        "lines": [f"{name}: {value / 1e9:.2f} GB/s, fio {fio[name] / 1e9:.2f} with {limits[name].name(limits[name].best)}" for name, value in medians.items()],
        "bars": [bar(f"{name} / fio", medians[name] / fio[name], at_least=1.0) for name in limits],
    }  # fmt: skip


CROPS_OF, CROPS_SAMPLES, CROPS_BATCH = (96, 320, 320), 12, 4


def loader_crops(folder: pathlib.Path, _photos: pathlib.Path | None) -> Result:
    """Load random boxes of volumes: from a dataset, and from NPY files by np.load with a map, one file per sample, in one thread and in two."""
    rng = np.random.default_rng(0)
    (folder / "npy").mkdir()
    ds = ps.create(folder / "volumes", {"volume": ps.Tensor(CROPS_OF, "int16")})
    with ds.transaction() as tx:
        for number in range(CROPS_SAMPLES):
            value = rng.integers(0, 1000, CROPS_OF, dtype=np.int16)
            tx.append({"volume": value[None]})
            np.save(folder / "npy" / f"{number}.npy", value)
    os.sync()
    ps.configure(threads=2)
    files = [folder / "npy" / f"{number}.npy" for number in range(CROPS_SAMPLES)]
    found: dict[str, dict[str, list[float]]] = {}
    pool = concurrent.futures.ThreadPoolExecutor(2)

    def one(path: pathlib.Path, crop: tuple[int, ...]) -> Any:
        lows = [int(rng.integers(size - side + 1)) for size, side in zip(CROPS_OF, crop, strict=True)]
        return np.load(path, mmap_mode="r")[tuple(slice(low, low + side) for low, side in zip(lows, crop, strict=True))]

    def with_numpy(crop: tuple[int, ...], threads: int, epochs: int) -> None:
        for _ in range(epochs):
            order = rng.permutation(CROPS_SAMPLES)
            for begin in range(0, CROPS_SAMPLES, CROPS_BATCH):
                chosen = [files[index] for index in order[begin : begin + CROPS_BATCH]]
                copied = (one(path, crop) for path in chosen) if threads == 1 else pool.map(lambda path: np.array(one(path, crop)), chosen)
                touch(np.stack(list(copied)))

    def loader_of(crop: tuple[int, ...], threads: int) -> Any:
        crops = [T.RandomCrop(crop, on="volume")]
        return ps.open(folder / "volumes").loader(batch_size=CROPS_BATCH, shuffle=True, transform=crops, threads=threads)

    def with_penstock(loader: Any, epochs: int) -> None:
        for batch in loader.stream(epochs):
            touch(batch["volume"])

    cases = [((16, 16, 16), fewer(100, 2)), ((64, 256, 256), fewer(8, 2))]
    for state, (crop, warm_epochs) in itertools.product(("cold", "warm"), cases):
        name, epochs = f"{' × '.join(map(str, crop))}, {state}", 1 if state == "cold" else warm_epochs
        loaders = {threads: loader_of(crop, threads) if state == "warm" else None for threads in (1, 2)}
        found[name] = {"penstock": [], "penstock, one thread": [], "numpy": [], "numpy, two threads": []}
        for number, (system, values) in itertools.product(range(rounds(9) + 1), found[name].items()):
            threads = 1 if system in ("penstock, one thread", "numpy") else 2
            if state == "cold":
                gc.collect()  # Pages of a map that is open cannot be evicted.
                evict(folder)
            began = time.perf_counter()
            if system.startswith("numpy"):
                with_numpy(crop, threads, epochs)
            else:
                with_penstock(loaders[threads] or loader_of(crop, threads), epochs)
            if number:  # A first turn is not timed.
                values.append(epochs * CROPS_SAMPLES / (time.perf_counter() - began))
    compared = {name: comparison(name, "samples/s", values) for name, values in found.items()}
    return {
        "what": f"random boxes of {CROPS_SAMPLES} volumes of {CROPS_OF} int16, batches of {CROPS_BATCH}; cold: evicted, with a fresh handle",
        "comparisons": list(compared.values()),
        "lines": [f"{name}, {system}: {statistics.median(values):,.0f} samples/s" for name, row in found.items() for system, values in row.items()],
        "bars": [bar for name, one in compared.items() for bar in against_best(one, 1.0 if "cold" in name else 0.7)],
    }  # fmt: skip

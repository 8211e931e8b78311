"""The benchmarks. All systems read the same bytes and return the same type, owned and writable; consumers touch every 64th byte."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import penstock as ps
from harness import evict, in_two_threads, interleaved, rate, touch
from photos import ingest, jpeg, photographs

Result = dict[str, Any]
SAMPLES, TAKE = 50_000, 512


def cifar(folder: pathlib.Path, _photos: pathlib.Path | None) -> Result:
    """CIFAR-shaped samples: shuffled epochs in takes of 512, against NumPy fancy-indexing of a memmap, and Lance."""
    import lance
    import pyarrow as pa

    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (SAMPLES, 32, 32, 3), dtype=np.uint8), rng.integers(0, 10, SAMPLES)
    np.save(folder / "images.npy", images)
    np.save(folder / "labels.npy", labels)
    ps.create(folder / "penstock", {"image": ps.Tensor((32, 32, 3), "uint8"), "label": "int64"}).append({"image": images, "label": labels})
    flat = pa.FixedSizeListArray.from_arrays(pa.array(images.reshape(-1)), 3072)
    lance.write_dataset(pa.table({"image": flat, "label": labels}), str(folder / "lance"))
    ps.configure(threads=1)
    order = rng.permutation(SAMPLES)

    def numpy_epoch(maps: tuple[Any, Any], order: np.ndarray[Any, Any]) -> None:
        for start in range(0, len(order), TAKE):
            batch, label = maps[0][order[start : start + TAKE]], maps[1][order[start : start + TAKE]]
            touch(batch), touch(label)

    def penstock_epoch(ds: ps.Dataset, order: np.ndarray[Any, Any]) -> None:
        for start in range(0, len(order), TAKE):
            batch = ds.take(order[start : start + TAKE])
            touch(batch["image"]), touch(batch["label"])

    def maps() -> tuple[Any, Any]:
        return np.load(folder / "images.npy", mmap_mode="r"), np.load(folder / "labels.npy", mmap_mode="r")

    opened = lance.dataset(str(folder / "lance"))

    def lance_epoch() -> None:
        for start in range(0, SAMPLES // 10, TAKE):  # A tenth of an epoch is enough to measure the rate.
            table = opened.take(order[start : start + TAKE])
            touch(table["image"].combine_chunks().flatten().to_numpy().copy()), touch(table["label"].to_numpy().copy())

    warm_maps, warm = maps(), ps.open(folder / "penstock")
    numpy_epoch(warm_maps, order), penstock_epoch(warm, order)
    times = interleaved({
        "numpy": lambda: numpy_epoch(warm_maps, order), "penstock": lambda: penstock_epoch(warm, order),
        "numpy_first_epoch": lambda: numpy_epoch(maps(), order), "penstock_first_epoch": lambda: penstock_epoch(ps.open(folder / "penstock"), order),
        "numpy_two_threads": lambda: in_two_threads(lambda part: numpy_epoch(warm_maps, part), order),
        "penstock_two_threads": lambda: in_two_threads(lambda part: penstock_epoch(warm, part), order), "lance": lance_epoch,
    }, rounds=9)  # fmt: skip
    rates = {name: rate(SAMPLES // 10 // TAKE * TAKE + TAKE if name == "lance" else SAMPLES, spent) for name, spent in times.items()}
    return {
        "what": f"{SAMPLES} samples of 32x32x3 uint8 + label, takes of {TAKE}, one thread unless stated; first_epoch uses a fresh handle and verifies every checksum",
        "samples_per_second": rates, "times": times, "lines": [f"{name}: {value / 1e3:,.0f} k/s" for name, value in rates.items()],
        "bars": [
            {"what": "penstock / numpy, one thread, after the first epoch", "value": rates["penstock"] / rates["numpy"], "at_least": 1.0},
            {"what": "penstock / numpy, one thread, first epoch of a fresh handle", "value": rates["penstock_first_epoch"] / rates["numpy_first_epoch"], "at_least": 1.0},
            {"what": "penstock / lance", "value": rates["penstock"] / rates["lance"], "at_least": 10},
        ],
    }  # fmt: skip


ROWS, ROWS_A_KEY = 500_000, 1024


def text(folder: pathlib.Path, _photos: pathlib.Path | None) -> Result:
    """Take 1,024 random rows out of 500,000 (label, text of ~110 B), against RocksDB with 1,024 rows per key."""
    from rocksdict import Rdict

    rng = np.random.default_rng(0)
    words = np.array([f"w{number}" for number in range(1000)])
    texts = [" ".join(words[rng.integers(0, 1000, 23)]) for _ in range(ROWS)]
    labels = rng.integers(0, 3, ROWS)
    ps.create(folder / "penstock", {"label": "int64", "text": ps.Text()}).append({"label": labels, "text": texts})
    store = Rdict(str(folder / "rocks"))
    for start in range(0, ROWS, ROWS_A_KEY):
        store[start // ROWS_A_KEY] = (labels[start : start + ROWS_A_KEY].tolist(), texts[start : start + ROWS_A_KEY])
    store.flush()
    store.close()
    store, ds = Rdict(str(folder / "rocks")), ps.open(folder / "penstock")
    order = rng.permutation(ROWS)
    takes = [order[start : start + 1024] for start in range(0, 100 * 1024, 1024)]

    def output(label: Any, value: list[str]) -> int:
        return len(label) + len(value)  # Both systems return an int64 array and a list of str.

    def rocks_random(takes: list[Any]) -> None:
        for rows in takes:
            keys: dict[int, Any] = {}
            for key in np.unique(rows // ROWS_A_KEY).tolist():
                keys[key] = store[key]
            picked = [keys[row // ROWS_A_KEY] for row in rows.tolist()]
            places = (rows % ROWS_A_KEY).tolist()
            output(
                np.array([chunk[0][place] for chunk, place in zip(picked, places, strict=True)]),
                [chunk[1][place] for chunk, place in zip(picked, places, strict=True)],
            )

    def rocks_order() -> None:
        for key in range(100):
            label, value = store[key]
            output(np.array(label), value)

    def penstock() -> None:
        for rows in takes:
            batch = ds.take(rows)
            output(batch["label"], batch["text"])

    ps.configure(threads=1)
    penstock(), rocks_order()
    times = interleaved(
        {"penstock_random": penstock, "rocksdb_block_order": rocks_order, "rocksdb_random": lambda: rocks_random(takes[:3])}
    )
    counts = {"penstock_random": 100, "rocksdb_block_order": 100, "rocksdb_random": 3}
    rates = {name: rate(counts[name] * 1024, spent) for name, spent in times.items()}
    mean = sum(map(len, texts[:1000])) / 1000
    return {
        "what": f"{ROWS} rows, text of {mean:.0f} B, takes of 1,024, output int64 array + list of str", "rows_per_second": rates, "times": times,
        "lines": [f"{name}: {value / 1e3:,.0f} k rows/s" for name, value in rates.items()],
        "bars": [
            {"what": "penstock / RocksDB, the same random rows", "value": rates["penstock_random"] / rates["rocksdb_random"], "at_least": 20},
            {"what": "penstock at random / RocksDB in key order", "value": rates["penstock_random"] / rates["rocksdb_block_order"], "at_least": 0.5},
        ],
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
            {"what": "take of 1, µs", "value": micros[1], "at_most": 10}, {"what": "take of 32, µs per row", "value": micros[32] / 32, "at_most": 2},
        ],
    }  # fmt: skip


def opening(folder: pathlib.Path, _photos: pathlib.Path | None) -> Result:
    """Open 1,000,000 samples in 1,000 fragments, and take the first batch."""
    ds = ps.create(folder / "d", {"x": "int64"})
    for start in range(0, 1_000_000, 1000):
        ds.append({"x": np.arange(start, start + 1000)})

    def first() -> None:
        ps.open(folder / "d").take(np.arange(0, 1_000_000, 10_000))

    times = interleaved({"open": lambda: ps.open(folder / "d"), "open_and_take_100": first})
    evict(folder / "d")
    begin = time.perf_counter()
    opened = ps.open(folder / "d")
    cold = time.perf_counter() - begin
    requests = opened.stats()
    return {
        "what": "1,000,000 samples in 1,000 fragments (1,000 commits)", "times": times, "cold_open_seconds": cold, "requests_of_open": requests,
        "lines": [f"{name}: {spent['median_seconds'] * 1e3:.2f} ms" for name, spent in times.items()] + [f"open, page cache evicted: {cold * 1e3:.2f} ms"],
        "bars": [{"what": "open, ms", "value": times["open"]["median_seconds"] * 1e3, "at_most": 10}, {"what": "open with caches evicted, ms", "value": cold * 1e3, "at_most": 10}],
    }  # fmt: skip


def memory(folder: pathlib.Path, _photos: pathlib.Path | None) -> Result:
    """Measure the peak memory while importing 2 GB at the default budget, excluding the interpreter and its libraries."""
    source = folder / "files"
    source.mkdir()
    body = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8).tobytes()
    (source / "first").write_bytes(body)
    for number in range(2047):
        os.link(source / "first", source / f"{number:05d}")
    script = """
import sys, pathlib, time, penstock as ps
from penstock import importers
from penstock.frameworks import arrow
peak = lambda: int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) * 1024
ds = ps.create(sys.argv[2] + "-warm", {"file": ps.Bytes()}); ds.append({"file": [b"x"]}); ds[0]
before, begin = peak(), time.perf_counter()
files = ({"file": path} for path in sorted(pathlib.Path(sys.argv[1]).iterdir()))
report = importers.import_data(files, sys.argv[2], types={"file": ps.Bytes()})
print(report.samples, peak() - before, time.perf_counter() - begin, ps.configure()["memory_bytes"])
"""
    samples, peak, seconds, budget = subprocess.run(
        [sys.executable, "-c", script, str(source), str(folder / "d")], capture_output=True, text=True, check=True
    ).stdout.split()
    return {
        "what": "2,048 files of 1 MiB imported as one commit", "peak_bytes": int(peak), "seconds": float(seconds), "budget_bytes": int(budget),
        "lines": [f"{samples} files, peak {int(peak) >> 20} MiB excluding the interpreter, {float(seconds):.1f} s"],
        "bars": [{"what": "peak memory / budget", "value": int(peak) / int(budget), "at_most": 1.0}],
    }  # fmt: skip


def larger_than_memory(folder: pathlib.Path, _photos: pathlib.Path | None) -> Result:
    """Take CIFAR-shaped samples from data 4 times as large as memory: 1 GiB of samples in a cgroup of 256 MiB. No ratio is required."""
    group = (
        next(
            (pathlib.Path(path) for path in ("/sys/fs/cgroup/memory", "/sys/fs/cgroup") if pathlib.Path(path, "cgroup.procs").exists()),
            pathlib.Path("/none"),
        )
        / "penstock-bench"
    )
    count, limit = 350_000, 256 << 20
    rng = np.random.default_rng(0)
    ds = ps.create(folder / "penstock", {"image": ps.Tensor((32, 32, 3), "uint8")})
    with ds.transaction() as tx, (folder / "flat").open("wb") as flat:
        for _ in range(7):
            part = rng.integers(0, 256, (count // 7, 32, 32, 3), dtype=np.uint8)
            tx.append({"image": part})
            flat.write(part.tobytes())
    script = """
import sys, time, numpy as np
which, path, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
order = np.random.default_rng(1).permutation(count)[:20480]
if which == "penstock":
    import penstock as ps
    ps.configure(threads=1); ds = ps.open(path); read = lambda rows: ds.take(rows)["image"]
else:
    flat = np.memmap(path, np.uint8, "r").reshape(count, 32, 32, 3); read = lambda rows: flat[rows]
io = lambda: int(next(l for l in open("/proc/self/io") if l.startswith("read_bytes")).split()[1])
before, begin = io(), time.perf_counter()
for start in range(0, len(order), 512): read(order[start:start + 512]).reshape(-1)[::64].sum()
print(len(order) / (time.perf_counter() - begin), io() - before)
"""
    try:
        group.mkdir(exist_ok=True)
        knob = next(name for name in ("memory.max", "memory.limit_in_bytes") if (group / name).exists())
        (group / knob).write_text(str(limit))
    except (OSError, StopIteration) as error:
        return {"what": "data 4 x memory", "lines": [f"not measured: cannot create a cgroup on this machine ({error})"]}
    rates = {}
    try:
        for which, path in (("penstock", folder / "penstock"), ("numpy", folder / "flat")):
            evict(folder)
            shell = f"echo $$ > {group}/cgroup.procs; exec {sys.executable} -c '{script}' {which} {path} {count}"
            out = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True).stdout.split()
            rates[which] = {"samples_per_second": float(out[0]), "device_bytes": int(out[1])}
    finally:
        group.rmdir()
    return {
        "what": f"{count} samples of 3,072 B in a cgroup of {limit >> 20} MiB, random takes of 512, cold", "systems": rates,
        "lines": [f"{name}: {row['samples_per_second']:,.0f} samples/s, {row['device_bytes'] / 20480:,.0f} bytes read from the device per sample" for name, row in rates.items()],
    }  # fmt: skip


def codecs(folder: pathlib.Path, photos: pathlib.Path | None) -> Result:
    """Measure the size and speed of each block codec for each kind of column. The results justify the default codec."""
    rng = np.random.default_rng(0)
    words = np.array([f"word{number}" for number in range(2000)])
    data: dict[str, tuple[Callable[[str], Any], Any]] = {
        "text": (lambda codec: ps.Text(codec=codec), [" ".join(words[rng.zipf(1.4, 18) % 2000]) for _ in range(100_000)]),
        "vectors float32": (lambda codec: ps.Tensor((256,), "float32", codec=codec), rng.standard_normal((20_000, 256), dtype=np.float32)),
        "pixels uint8": (lambda codec: ps.Tensor((32, 32, 3), "uint8", codec=codec), _natural_tiles()),
        "counters int64": (lambda codec: ps.Scalar("int64", codec=codec), np.sort(rng.integers(0, 10**6, 500_000))),
    }
    rows, lines = [], []
    for kind, (column, values) in data.items():
        for codec in ("none", "lz4", "zstd"):
            root = folder / f"{kind}-{codec}".replace(" ", "-")
            begin = time.perf_counter()
            ps.create(root, {"x": column(codec)}).append({"x": values})
            written = time.perf_counter() - begin
            stored = sum(file.stat().st_size for file in root.glob("d/*"))
            order = rng.permutation(len(values))[:20_480]
            reads = []
            for _ in range(3):
                ds = ps.open(root)
                begin = time.perf_counter()
                for start in range(0, len(order), 512):
                    ds.take(order[start : start + 512])
                reads.append(time.perf_counter() - begin)
            row = {
                "kind": kind,
                "codec": codec,
                "stored_bytes": stored,
                "write_seconds": written,
                "random_samples_per_second": len(order) / sorted(reads)[1],
            }
            rows.append(row)
            lines.append(
                f"{kind:16} {codec:5} {stored / 1e6:7.1f} MB, write {written:5.2f} s, random {row['random_samples_per_second'] / 1e3:8,.0f} k/s"
            )
    return {"what": "fresh handle, 20,480 random samples in takes of 512", "rows": rows, "lines": lines}


def _natural_tiles() -> np.ndarray[Any, Any]:
    from sklearn.datasets import load_sample_images

    rng, tiles = np.random.default_rng(0), []
    for photo in load_sample_images().images:
        for _ in range(10_000):
            y, x = rng.integers(0, photo.shape[0] - 32), rng.integers(0, photo.shape[1] - 32)
            tiles.append(photo[y : y + 32, x : x + 32])
    return np.stack(tiles)


def commits(folder: pathlib.Path, photos: pathlib.Path | None) -> Result:
    """Measure small durable commits; see bench/writers.py."""
    import writers

    return writers.commits(folder, photos)


def minio(folder: pathlib.Path, photos: pathlib.Path | None) -> Result:
    """Measure reads from object storage; see bench/remote.py."""
    import remote

    return remote.minio(folder, lambda: photographs(folder, photos))


def direct(folder: pathlib.Path, _photos: pathlib.Path | None) -> Result:
    """Measure reads without the page cache; see bench/direct.py."""
    import direct

    return direct.direct(folder)


def slices(folder: pathlib.Path, _photos: pathlib.Path | None) -> Result:
    """Read arrays on object storage, against h5py and Zarr; see bench/slices.py."""
    import slices

    return slices.slices(folder)


def overlays(folder: pathlib.Path, photos: pathlib.Path | None) -> Result:
    """Read a dataset after an update and after a deletion; see bench/changes.py."""
    import changes

    return changes.overlays(folder, photos)


def branches(folder: pathlib.Path, photos: pathlib.Path | None) -> Result:
    """Create branches, merge them, and open old snapshots; see bench/changes.py."""
    import changes

    return changes.branches(folder, photos)


def embeddings(folder: pathlib.Path, photos: pathlib.Path | None) -> Result:
    """Read, change and write embeddings; see bench/embeddings.py."""
    import embeddings

    return embeddings.embeddings(folder, photos)


def patterns(folder: pathlib.Path, photos: pathlib.Path | None) -> Result:
    """Update a table in different patterns; see bench/embeddings.py."""
    import embeddings

    return embeddings.patterns(folder, photos)


def beside(folder: pathlib.Path, photos: pathlib.Path | None) -> Result:
    """Read beside a writer; see bench/changes.py."""
    import changes

    return changes.beside(folder, photos)


def _rows(name: str) -> Callable[[pathlib.Path, pathlib.Path | None], Result]:
    """Return a benchmark with millions of rows; see bench/rows.py."""

    def run(folder: pathlib.Path, photos: pathlib.Path | None) -> Result:
        import rows

        found: Result = getattr(rows, name)(folder, photos)
        return found

    return run


def _training(name: str) -> Callable[[pathlib.Path, pathlib.Path | None], Result]:
    """Return a benchmark of the loader; see bench/training.py."""

    def run(folder: pathlib.Path, photos: pathlib.Path | None) -> Result:
        import training
        import transforms

        return {**training.ALL, "transforms": transforms.loader_transforms}[name](folder, photos)

    return run


TRAINING = ("photos", "augment", "rows", "functions", "transforms", "starting", "whole_direct", "whole_minio")

ALL: dict[str, Callable[[pathlib.Path, pathlib.Path | None], Result]] = {
    "cifar": cifar, "jpeg": jpeg, "ingest": ingest, "text": text, "calls": calls, "opening": opening, "memory": memory,
    "larger_than_memory": larger_than_memory, "codecs": codecs, "commits": commits, "minio": minio, "direct": direct, "slices": slices,
    "rows": _rows("rows"), "import_rows": _rows("import_rows"), "overlays": overlays, "branches": branches, "embeddings": embeddings,
    "patterns": patterns, "beside": beside,
    **{f"loader_{name}": _training(name) for name in TRAINING},
}  # fmt: skip

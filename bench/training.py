"""Benchmarks the complete loader, from files to batches that a consumer touches, against the machine's limit and rivals."""

from __future__ import annotations

import json
import os
import pathlib
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import penstock as ps
from harness import ROUNDS, evict, interleaved, touch

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "tests"))
import servers

Result = dict[str, Any]
ROOT = pathlib.Path(__file__).parent.parent
RIVALS = ROOT / ".tools" / "rivals" / "bin" / "python"
SET_BYTES = 120e6  # The maximum total size of a set of photographs. This limit keeps the run time to a few minutes.
CORES = sorted(os.sched_getaffinity(0))[:2]


def _pinned() -> None:
    os.sched_setaffinity(0, CORES)


class System:
    """A loader in a separate process, pinned to the same cores as the others."""

    def __init__(self, python: pathlib.Path, task: str, system: str, folder: pathlib.Path, workers: int) -> None:
        command = [python, ROOT / "bench" / "rivals.py", task, system, folder, str(workers)]
        self.name, self.workers = system, workers
        self.process = subprocess.Popen(
            list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=_pinned
        )
        self._line("ready")
        self.epoch()  # The first epoch compiles, starts workers and fills caches.

    def _line(self, wanted: str | None = None) -> str:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith(wanted or "["):
                return line
        raise RuntimeError(f"{self.name} ended: {self.process.stderr.read()[-2000:] if self.process.stderr else ''}")

    def epoch(self) -> tuple[float, float, int]:
        assert self.process.stdin
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        seconds, spent, samples = json.loads(self._line())
        return seconds, spent, samples

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def best_of(python: pathlib.Path, task: str, system: str, folder: pathlib.Path, choices: tuple[int, ...]) -> System:
    """Start the system with each number of workers and return the fastest."""
    found: list[tuple[float, System]] = []
    for workers in choices:
        candidate = System(python, task, system, folder, workers)
        found.append((min(candidate.epoch()[0] for _ in range(2)), candidate))
    found.sort(key=lambda pair: pair[0])
    for _, slower in found[1:]:
        slower.close()
    return found[0][1]


def race(systems: list[System]) -> dict[str, dict[str, Any]]:
    """Run epochs in turn. Return the median samples per second and CPU seconds per 1,000 samples for each system."""
    rows: dict[str, list[tuple[float, float, int]]] = {system.name: [] for system in systems}
    for _ in range(ROUNDS):
        for system in systems:
            rows[system.name].append(system.epoch())
    answer = {}
    for system in systems:
        rates = [samples / seconds for seconds, _, samples in rows[system.name]]
        spent = [1000 * cpu / samples for _, cpu, samples in rows[system.name]]
        answer[system.name] = {
            "per_second": statistics.median(rates), "min": min(rates), "max": max(rates), "workers": system.workers,
            "cpu_seconds_per_1000": statistics.median(spent),
        }  # fmt: skip
        system.close()
    return answer


def told(rows: dict[str, dict[str, Any]], what: str = "") -> list[str]:
    return [
        f"{what}{name}: {row['per_second']:,.0f}/s ({row['min']:,.0f}–{row['max']:,.0f}), {row['cpu_seconds_per_1000']:.3g} CPU seconds per 1,000, {row['workers']} workers"
        for name, row in rows.items()
    ]


def photos(folder: pathlib.Path, given: pathlib.Path | None) -> Result:
    """JPEG → RandomResizedCrop(224) + flip → batches of 128 uint8, on two cores, for each subfolder of `--photos` or the folder itself."""
    from photos import photographs

    given = given or photographs(folder, None)[0].parent
    sets = sorted(path for path in given.iterdir() if path.is_dir()) or [given]
    limit = servers.cargo_binary("region-decode")
    lines, bars, results = [], [], {}
    for source in sets:
        place = folder / source.name
        (place / "class" / "0").mkdir(parents=True)
        files = sorted(source.glob("*.jpg"))
        files = files[: int(SET_BYTES / statistics.mean(path.stat().st_size for path in files))]
        for path in files:
            shutil.copy(path, place / "class" / "0")
        (place / "quality").write_text("96" if statistics.mean(path.stat().st_size for path in files) < 150_000 else "94")
        ps.create(place / "penstock", {"image": ps.Image()}).append({"image": files})
        names = ["torchvision", "dali", "ffcv", "litdata"]
        done = subprocess.run([RIVALS, ROOT / "bench" / "rivals.py", "prepare", "-", place, "2"], capture_output=True, text=True)
        if done.returncode:
            lines.append(f"{source.name}: cannot prepare the rivals: {done.stderr[-500:]}")
            names = ["torchvision"]
        systems = [best_of(pathlib.Path(sys.executable), "photos", "penstock", place, (2,))]
        for name in names:
            try:
                systems.append(
                    best_of(RIVALS, "photos", name, place, (1, 2) if name == "ffcv" else (2, 3))
                )  # FFCV allows at most one thread per core.
            except RuntimeError as error:
                lines.append(f"{source.name}: cannot run {name}: {str(error)[-300:]}")

        def decoding(place: pathlib.Path = place) -> float:
            command = [limit, place / "class" / "0", "2", "1.5"]
            return float(subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True, preexec_fn=_pinned).stdout)

        decoded = [decoding() for _ in range(3)]
        rows = race(systems)
        if (place / "photos.beton").exists():
            sizes = [sum(path.stat().st_size for path in files), (place / "photos.beton").stat().st_size]
            lines.append(f"{source.name}: {sizes[0] / len(files):,.0f} bytes per image; as re-encoded by FFCV {sizes[1] / len(files):,.0f}")
        decoded += [decoding() for _ in range(2)]
        alone = statistics.median(decoded)
        ours = rows["penstock"]["per_second"]
        rivals = {name: row["per_second"] for name, row in rows.items() if name != "penstock"}
        results[source.name] = {"systems": rows, "region_decode_alone": alone, "images": len(files)}
        lines += [
            *told(rows, f"{source.name}: "),
            f"{source.name}: region decode alone, two threads: {alone:,.0f}/s ({min(decoded):,.0f}–{max(decoded):,.0f})",
        ]
        bars.append({"what": f"{source.name}: penstock / region decode alone", "value": ours / alone, "at_least": 0.55})
        if rivals:
            best = max(rivals, key=lambda name: rivals[name])
            bars.append({"what": f"{source.name}: penstock / best rival ({best})", "value": ours / rivals[best], "at_least": 1.4})
    return {"what": "one shuffled epoch, uint8 output", "sets": results, "lines": lines, "bars": bars}


def augment(folder: pathlib.Path, _photos: pathlib.Path | None) -> Result:
    """Crop, flip and normalise CIFAR-shaped samples in batches of 512, with one thread per system and then with two."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (50_000, 32, 32, 3), dtype=np.uint8)
    labels = rng.integers(0, 10, 50_000)
    np.save(folder / "cifar-x.npy", images)
    np.save(folder / "cifar-y.npy", labels)
    ps.create(folder / "cifar", {"x": ps.Tensor((32, 32, 3), "uint8"), "label": "int64"}).append({"x": images, "label": labels})
    (folder / "class" / "0").mkdir(parents=True)
    from PIL import Image

    Image.new("RGB", (64, 64)).save(folder / "class" / "0" / "0.jpg")
    (folder / "quality").write_text("90")
    prepared = subprocess.run([RIVALS, ROOT / "bench" / "rivals.py", "prepare", "-", folder, "2"], capture_output=True, text=True)
    lines, bars, results = [], [], {}
    for threads in (1, 2):
        python = pathlib.Path(sys.executable)
        systems = [System(python, "cifar", name, folder, threads) for name in ("penstock", "numpy")]
        if prepared.returncode == 0:
            systems.append(System(RIVALS, "cifar", "ffcv", folder, threads))
        rows = race(systems)
        results[str(threads)] = rows
        lines += told(rows, f"{threads} threads: ")
        ours = rows["penstock"]["per_second"]
        bars.append({"what": f"{threads} threads: penstock / NumPy", "value": ours / rows["numpy"]["per_second"], "at_least": 0.8})
        if "ffcv" in rows:
            bars.append({"what": f"{threads} threads: penstock / FFCV", "value": ours / rows["ffcv"]["per_second"], "at_least": 1.0})
    return {"what": "50,000 samples of 32 × 32 × 3 uint8, float32 output", "threads": results, "lines": lines, "bars": bars}


def rows(folder: pathlib.Path, _photos: pathlib.Path | None) -> Result:
    """Load text in batches of 1,024 random rows, as lists of str, against HDF5, Lance and LitData."""
    import h5py
    import lance
    import pyarrow as pa

    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(5000)]
    texts = [" ".join(rng.choices(words, k=rng.randint(5, 40))) for _ in range(100_000)]
    ds = ps.create(folder / "penstock", {"text": ps.Text()})
    ds.append({"text": texts})
    with h5py.File(folder / "h5", "w") as file:
        file.create_dataset("text", data=texts, dtype=h5py.string_dtype())
    stored = h5py.File(folder / "h5")["text"].asstr()
    lance.write_dataset(pa.table({"text": texts}), str(folder / "lance"))
    opened = lance.dataset(str(folder / "lance"))
    some = 8 * 1024

    def order() -> np.ndarray[Any, Any]:
        return np.random.default_rng().permutation(len(texts))[:some]

    def penstock() -> None:
        for batch in ds.select(order()).loader(batch_size=1024, shuffle=True, threads=1).stream(1):
            sum(map(len, batch["text"]))

    def hdf5() -> None:
        for part in order().reshape(-1, 1024):
            sum(map(len, stored[np.sort(part)]))

    def of_lance() -> None:
        for part in order().reshape(-1, 1024):
            sum(map(len, opened.take(part)["text"].to_pylist()))

    systems: dict[str, Callable[[], Any]] = {"penstock": penstock, "hdf5": hdf5, "lance": of_lance}
    penstock()
    times = interleaved(systems)
    rates = {name: some / row["median_seconds"] for name, row in times.items()}
    script = (
        "import sys,time,random,litdata\n"
        "def give(t): return {'text': t}\n"
        "if __name__ == '__main__':\n"
        " texts=open(sys.argv[1]).read().split('\\n')\n"
        " litdata.optimize(give, texts, sys.argv[2], chunk_bytes='64MB', num_workers=1)\n"
        " ds=litdata.StreamingDataset(sys.argv[2]); out=[]\n"
        " for k in range(6):\n"
        "  order=random.sample(range(len(ds)),8192); t=time.perf_counter(); sum(len(ds[i]['text']) for i in order); out.append(time.perf_counter()-t)\n"
        " print('seconds', sorted(out[1:])[2])\n"
    )
    (folder / "lit.py").write_text(script)
    (folder / "texts").write_text("\n".join(texts))
    done = subprocess.run([RIVALS, folder / "lit.py", folder / "texts", folder / "lit"], capture_output=True, text=True)
    if done.returncode == 0:
        rates["litdata"] = some / float(done.stdout.split("seconds")[-1])
    best = max((name for name in rates if name != "penstock"), key=lambda name: rates[name])
    return {
        "what": "100,000 lines of 5 to 40 words; LitData, which has no takes, reads one sample at a time in a separate process", "rows_per_second": rates, "times": times,
        "lines": [f"{name}: {value:,.0f} rows/s" for name, value in rates.items()] + ([] if done.returncode == 0 else [f"cannot run litdata: {done.stderr[-300:]}"]),
        "bars": [{"what": f"penstock / best rival ({best})", "value": rates["penstock"] / rates[best], "at_least": 3.0}],
    }  # fmt: skip


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


def functions(folder: pathlib.Path, _photos: pathlib.Path | None) -> Result:
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

    def run(loader: Any) -> None:
        for batch in loader:
            touch(batch["x"].numpy())

    systems = {"penstock": lambda: run(ours), "dataloader": lambda: run(theirs)}
    for work in systems.values():
        work()  # The first run starts the processes.
    # Our workers start the next epoch as soon as one ends. The pause lets our workers finish before the rival's turn.
    times = interleaved(systems, settle=lambda: time.sleep(0.5))
    ours.close()
    rates = {name: len(images) / row["median_seconds"] for name, row in times.items()}
    return {
        "what": "6,000 samples of 96 × 96 × 3 through a NumPy function, two processes; our loader may have 6 of 94 batches ready when an epoch begins", "samples_per_second": rates, "times": times,
        "lines": [f"{name}: {value:,.0f} samples/s" for name, value in rates.items()],
        "bars": [{"what": "penstock / DataLoader", "value": rates["penstock"] / rates["dataloader"], "at_least": 1.0}],
    }  # fmt: skip


def starting(folder: pathlib.Path, _photos: pathlib.Path | None) -> Result:
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
            {"what": "open to first batch, ms", "value": 1000 * times["first_batch"]["median_seconds"], "at_most": 50},
            *({"what": f"{name}, at step 10^6 of 10^9 draws, ms", "value": 1000 * times[name]["median_seconds"], "at_most": 1} for name in huge),
        ],
    }  # fmt: skip


def whole_direct(folder: pathlib.Path, _photos: pathlib.Path | None) -> Result:
    """Load raw tensors of 140 MB without the page cache, from a dataset and from NPY files in place, against fio."""
    import direct

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

    rates: dict[str, list[float]] = {"fio": [], "dataset": [], "npy in place": []}
    read = 0
    for _ in range(ROUNDS):
        rates["fio"].append(direct.fio(folder / "big", "read", 1 << 20, epochs))
        for name, view in (
            ("dataset", ps.open(folder / "big", io="direct")),
            ("npy in place", ps.files(folder / "npy" / "*.npy", io="direct")),
        ):
            evict(folder)
            before, began = direct.device_bytes(), time.perf_counter()
            run(view)
            rates[name].append(epochs * count * direct.BIG_BYTES / (time.perf_counter() - began))
            read = direct.device_bytes() - before
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "what": f"{count} tensors of 140 MB, {epochs} epochs per round; {read / 1e9:.2f} GB read from the device in the last round", "bytes_per_second": rates,
        "lines": [f"{name}: {value / 1e9:.2f} GB/s" for name, value in medians.items()],
        "bars": [{"what": f"{name} / fio", "value": medians[name] / medians["fio"], "at_least": 0.95} for name in ("dataset", "npy in place")],
    }  # fmt: skip


def whole_minio(folder: pathlib.Path, photos: pathlib.Path | None) -> Result:
    """Load raw JPEG bytes from MinIO with 20 ms added to each reply, against plain GETs of the same ranges."""
    import remote
    from photos import photographs

    if photos is not None and not list(photos.glob("*.jpg")):
        photos = sorted(path for path in photos.iterdir() if path.is_dir())[-1]
    files = photographs(folder, photos)[:4000]
    binary, server = servers.cargo_binary("plain-gets"), servers.Minio(folder)
    proxy = servers.Proxy(server.port)
    try:
        os.environ |= {"AWS_ACCESS_KEY_ID": servers.KEY, "AWS_SECRET_ACCESS_KEY": servers.SECRET, "AWS_REGION": "us-east-1"}
        os.environ["AWS_ENDPOINT_URL"] = os.environ["AWS_ENDPOINT"] = proxy.endpoint
        server.client().create_bucket(Bucket=remote.BUCKET)
        uri = f"s3://{remote.BUCKET}/images"
        ps.create(uri, {"image": ps.Image()}).append({"image": files})
        proxy.faults("delay_ms=20")
        ps.configure(memory_bytes=64 << 20, threads=2)  # The block cache is smaller than the data.
        ds = ps.open(uri)
        ds.take([0])
        order = [ds.loader(batch_size=128, shuffle=True, decode=False)._core.places(step)[2] for step in range(len(files) // 128)]
        batches = [[(f"images/{name}", begin, end) for name, begin, end in ds._view.ranges(np.sort(part), ["image"])] for part in order]
        flat = [one for batch in batches for one in batch]
        total = sum(end - begin for _, begin, end in flat)
        best = min(remote.AT_ONCE, key=lambda at_once: remote.plain_gets(binary, [flat], at_once))
        rates: dict[str, list[float]] = {"penstock": [], "plain": []}
        received = 0
        for timed in [False] + [True] * ROUNDS:  # The first epoch is an untimed warm-up; plain GETs have a warm-up run too.
            fresh = ps.open(uri)
            before = fresh.stats()["received_bytes"]
            with fresh.loader(batch_size=128, shuffle=True, decode=False, last_batch="drop", memory_bytes=512 << 20) as loader:
                began = time.perf_counter()
                for batch in loader.stream(1):
                    for body in batch["image"]:
                        touch(body)
                seconds = time.perf_counter() - began
            if timed:
                received = fresh.stats()["received_bytes"] - before
                rates["penstock"].append(min(received, total) / seconds)
                rates["plain"].append(total / remote.plain_gets(binary, [flat], best))
    finally:
        proxy.stop()
        server.stop()
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "what": f"{len(flat)} ranges, {total / 1e6:.0f} MB, shuffled batches of 128; plain GETs are fastest with {best} at once; the loader received {received / 1e6:.0f} MB",
        "bytes_per_second": rates, "lines": [f"{name}: {value / 1e6:,.0f} MB/s" for name, value in medians.items()],
        "bars": [{"what": "penstock / plain GETs, 20 ms on each reply", "value": medians["penstock"] / medians["plain"], "at_least": 0.9}],
    }  # fmt: skip


ALL: dict[str, Callable[[pathlib.Path, pathlib.Path | None], Result]] = {
    "photos": photos, "augment": augment, "rows": rows, "functions": functions, "starting": starting, "whole_direct": whole_direct, "whole_minio": whole_minio,
}  # fmt: skip

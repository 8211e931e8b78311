"""Benchmarks for photographs as stored bytes: random takes (`jpeg`) and ingest (`ingest`)."""

from __future__ import annotations

import os
import pathlib
import shutil
from typing import Any

import numpy as np
import penstock as ps
from harness import in_two_threads, interleaved, rate, touch

Result = dict[str, Any]


def photographs(folder: pathlib.Path, photos: pathlib.Path | None, count: int = 4000) -> list[pathlib.Path]:
    """Return the user's JPEGs, or make JPEGs of similar size from scikit-learn's two photographs."""
    if photos is not None:
        return sorted(path for path in photos.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))[:count]
    from PIL import Image
    from sklearn.datasets import load_sample_images

    made, rng = folder / "photos", np.random.default_rng(7)
    made.mkdir()
    sources = [Image.fromarray(image) for image in load_sample_images().images]
    for number in range(count):
        source = sources[number % 2]
        x, y = int(rng.integers(0, source.width - 400)), int(rng.integers(0, source.height - 300))
        source.crop((x, y, x + 400, y + 300)).resize((500, 375)).save(made / f"{number:06d}.jpg", "JPEG", quality=96)
    return sorted(made.iterdir())


def jpeg(folder: pathlib.Path, photos: pathlib.Path | None) -> Result:
    """Compare shuffled takes of 128 raw JPEGs with copying the same bytes from the page cache, and with Lance."""
    import lance
    import pyarrow as pa

    files = photographs(folder, photos)
    bodies = [path.read_bytes() for path in files]
    offsets = np.cumsum([0] + [len(body) for body in bodies])
    (folder / "flat").write_bytes(b"".join(bodies))
    ds = ps.create(folder / "penstock", {"image": ps.Image()})
    ds.append({"image": files})
    ds = ps.open(folder / "penstock")
    lance.write_dataset(pa.table({"image": pa.array(bodies, pa.large_binary())}), str(folder / "lance"))
    opened, flat = lance.dataset(str(folder / "lance")), np.memmap(folder / "flat", np.uint8, "r")
    ps.configure(threads=1)
    order = np.random.default_rng(0).permutation(len(files))
    view = memoryview(flat)

    def copy(order: np.ndarray[Any, Any] = order) -> None:
        for start in range(0, len(order), 128):
            for body in [bytes(view[offsets[i] : offsets[i + 1]]) for i in order[start : start + 128]]:
                touch(body)

    def penstock(order: np.ndarray[Any, Any] = order) -> None:
        for start in range(0, len(order), 128):
            for body in ds.take(order[start : start + 128], decode=False)["image"]:
                touch(body)

    def lance_epoch() -> None:
        for start in range(0, len(order), 128):
            for body in opened.take(order[start : start + 128])["image"].to_pylist():
                touch(body)

    def penstock_fresh(order: np.ndarray[Any, Any]) -> None:
        fresh = ps.open(folder / "penstock")
        for start in range(0, len(order), 128):
            for body in fresh.take(order[start : start + 128], decode=False)["image"]:
                touch(body)

    copy(), penstock()
    times = interleaved(
        {
            "copy": copy,
            "penstock": penstock,
            "penstock_first_epoch": lambda: penstock_fresh(order),
            "copy_two_threads": lambda: in_two_threads(copy, order),
            "penstock_two_threads": lambda: in_two_threads(penstock, order),
            "lance": lance_epoch,
        }
    )
    rates = {name: rate(len(files), spent) for name, spent in times.items()}
    mean = offsets[-1] / len(files)
    return {
        "what": f"{len(files)} JPEGs, mean {mean / 1e3:.1f} KB, takes of 128 as bytes objects", "mean_bytes": mean, "samples_per_second": rates, "times": times,
        "lines": [f"{name}: {value / 1e3:,.1f} k/s, {value * mean / 1e9:.2f} GB/s" for name, value in rates.items()],
        "bars": [
            {"what": "penstock / copy from the page cache", "value": rates["penstock"] / rates["copy"], "at_least": 0.7},
            {"what": "penstock / lance", "value": rates["penstock"] / rates["lance"], "at_least": 2},
        ],
    }  # fmt: skip


def ingest(folder: pathlib.Path, photos: pathlib.Path | None) -> Result:
    """Compare durable ingest of 4,000 JPEGs, with validated headers and checksums, to writing the same bytes to one synced file."""
    files = photographs(folder, photos)
    total = sum(path.stat().st_size for path in files)
    number = iter(range(10**6))

    def one_file() -> None:
        with (folder / f"flat{next(number)}").open("wb") as out:
            for path in files:
                out.write(path.read_bytes())
            out.flush()
            os.fsync(out.fileno())

    def penstock() -> None:
        ps.create(folder / f"penstock{next(number)}", {"image": ps.Image()}).append({"image": files})

    def lance_write() -> None:
        import lance
        import pyarrow as pa

        table = pa.table({"image": pa.array([path.read_bytes() for path in files], pa.large_binary())})
        lance.write_dataset(table, str(folder / f"lance{next(number)}"))
        os.sync()

    def settle() -> None:
        """Remove the output of the previous turn and sync the disk, so that no system pays for another system's writes."""
        for path in folder.iterdir():
            if path.name.startswith(("flat", "penstock", "lance")):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        os.sync()

    ps.configure(threads=2)
    one_file()
    times = interleaved({"one_file": one_file, "penstock": penstock, "lance": lance_write}, rounds=9, settle=settle)
    ratio = times["penstock"]["median_seconds"] / times["one_file"]["median_seconds"]
    return {
        "what": f"{len(files)} JPEGs, {total / 1e6:.0f} MB, from the page cache to a synced disk", "bytes": total, "times": times,
        "lines": [f"{name}: {spent['median_seconds']:.2f} s ({spent['min_seconds']:.2f} to {spent['max_seconds']:.2f})" for name, spent in times.items()],
        "bars": [{"what": "penstock / one file with the same bytes + fsync, seconds", "value": ratio, "at_most": 1.5}],
    }  # fmt: skip

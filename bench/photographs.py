"""The photographs of the benchmarks: a folder of the user's, or two sets cut from scikit-learn's two photographs, the same on each machine with the same Pillow and scikit-learn."""

from __future__ import annotations

import functools
import io
import multiprocessing
import os
import pathlib
import random
import shutil
import statistics
import tempfile
import zlib

import harness

# Width, height, quality, photographs in a batch. An epoch is 54 batches, which divide among 2 and 3 workers. `small` is like ImageNet's files; `large` is where scaled decoding pays.
SETS = {"small": (500, 375, 96, 64), "large": (1200, 800, 94, 32)}
BATCHES = 54


@functools.cache
def _sources() -> list[object]:
    from PIL import Image
    from sklearn.datasets import load_sample_images

    return [Image.fromarray(image) for image in load_sample_images().images]


def _make(kind: str, number: int) -> bytes:
    """Cut a window, resize it, change its brightness, and add fine noise, without which enlarged photographs would be too smooth."""
    import numpy as np
    from PIL import Image, ImageEnhance, ImageOps

    width, height, quality, _ = SETS[kind]
    rng, grain = random.Random(f"{kind}{number}"), np.random.default_rng(number)
    image = rng.choice(_sources())
    assert isinstance(image, Image.Image)
    share = rng.uniform(0.6, 1.0)
    w = min(image.width, int(image.height * width / height)) * share
    h = w * height / width
    x, y = rng.uniform(0, image.width - w), rng.uniform(0, image.height - h)
    cut = image.resize((width, height), Image.Resampling.LANCZOS, (x, y, x + w, y + h))
    cut = ImageEnhance.Brightness(ImageOps.mirror(cut) if rng.random() < 0.5 else cut).enhance(rng.uniform(0.85, 1.15))
    noise = grain.normal(0, 3, (height, width, 1))
    out = io.BytesIO()
    Image.fromarray(np.clip(np.asarray(cut) + noise, 0, 255).astype(np.uint8)).save(out, "JPEG", quality=quality, subsampling=2)
    return out.getvalue()


def _write(job: tuple[str, int, pathlib.Path]) -> None:
    kind, number, path = job
    new = path.with_suffix(".new")
    new.write_bytes(_make(kind, number))
    new.replace(path)  # A full disk leaves no half of a photograph to the next benchmark.


@functools.cache
def _kept(scratch: pathlib.Path) -> tempfile.TemporaryDirectory[str]:
    """Return a folder beside those of the benchmarks, for the photographs of a whole run. It is removed when the run ends."""
    return tempfile.TemporaryDirectory(prefix="penstock-bench-photographs-", dir=scratch)


def made(kind: str, place: pathlib.Path, count: int) -> list[pathlib.Path]:
    """Make the first photographs of a set, or link those made before. A quarter are distinct; each is linked under four names."""
    place.mkdir(parents=True)
    kept, distinct = pathlib.Path(_kept(place.parent.parent).name), -(-count // 4)
    sources = [kept / f"{kind}-{number:06d}.jpg" for number in range(distinct)]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        pool.map(_write, [(kind, number, path) for number, path in enumerate(sources) if not path.exists()], chunksize=50)
    paths = [place / f"{number:06d}.jpg" for number in range(count)]
    for number, path in enumerate(paths):
        os.link(sources[number % distinct], path)
    return paths


def sets(folder: pathlib.Path, given: pathlib.Path | None) -> dict[str, tuple[list[pathlib.Path], int]]:
    """Return the photographs of each set, and its batch size: all JPEGs below the user's folder, or small and large."""
    if given is None:
        return {
            kind: (made(kind, folder / f"made-{kind}", harness.fewer(BATCHES * batch, 4 * batch)), batch)
            for kind, (*_, batch) in SETS.items()
        }
    files = sorted(path for path in given.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg") and path.is_file())
    batch = 64 if statistics.mean(path.stat().st_size for path in files) < 200_000 else 32
    return {given.resolve().name: (files[: harness.fewer(BATCHES * batch, 4 * batch)], batch)}


def digest(files: list[pathlib.Path]) -> str:
    """Return a digest of the first photographs, which shows whether two machines made the same ones."""
    return f"{zlib.crc32(b''.join(path.read_bytes() for path in files[:8])):08x}"


def linked(files: list[pathlib.Path], place: pathlib.Path) -> pathlib.Path:
    """Link files into a new folder as 000000.jpg and so on, and return it."""
    place.mkdir(parents=True)
    for number, path in enumerate(files):
        target = place / f"{number:06d}.jpg"
        os.link(path, target) if path.stat().st_dev == place.stat().st_dev else shutil.copy(path, target)
    return place


def photographs(folder: pathlib.Path, given: pathlib.Path | None, count: int = 4000) -> list[pathlib.Path]:
    """Return photographs of one set, alone in their folder and named 000000.jpg and so on: the user's, or small ones."""
    if given is not None:
        return sorted(linked(list(sets(folder, given).values())[-1][0][:count], folder / "photographs").iterdir())
    return made("small", folder / "photographs", harness.fewer(count, 600))

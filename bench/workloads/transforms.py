"""Benchmarks each transform of the core against torchvision v2: uint8 images in memory become batches, on one core."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import numpy as np
import penstock as ps
from harness import comparison, interleaved, touch
from penstock import transforms as T

SIDE, IMAGES, BATCH = 224, 512, 64


class Images:
    """Images as tensors of torchvision's layout, with their transform, for a DataLoader."""

    def __init__(self, images: Any, transform: Any) -> None:
        self.images, self.transform = images, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.images[index])


def loader_transforms(folder: pathlib.Path, _photos: pathlib.Path | None) -> dict[str, Any]:
    """Measure one epoch for each transform. Both sides read images from memory, in order, and stack batches of 64."""
    import torch
    from torchvision.transforms import InterpolationMode, v2

    bilinear = InterpolationMode.BILINEAR
    cases = {
        "rotation, nearest": (T.RandomRotation(30, on="image"), v2.RandomRotation(30)),
        "rotation, bilinear": (T.RandomRotation(30, interpolation="bilinear", on="image"), v2.RandomRotation(30, bilinear)),
        "affine, bilinear": (
            T.RandomAffine(15, (0.1, 0.1), (0.8, 1.2), 10, interpolation="bilinear", on="image"),
            v2.RandomAffine(15, (0.1, 0.1), (0.8, 1.2), 10, bilinear),
        ),
        "colour jitter": (T.ColorJitter(0.4, 0.4, 0.4, 0.1, on="image"), v2.ColorJitter(0.4, 0.4, 0.4, 0.1)),
        "colour jitter without hue": (T.ColorJitter(0.4, 0.4, 0.4, on="image"), v2.ColorJitter(0.4, 0.4, 0.4)),
        "grayscale": (T.Grayscale(3, on="image"), v2.Grayscale(3)),
        "blur, 9 × 9": (T.GaussianBlur(9, on="image"), v2.GaussianBlur(9)),
        "erasing": (T.RandomErasing(1.0, on="image"), v2.RandomErasing(1.0)),
    }
    rng = np.random.default_rng(0)
    # Smooth images with some noise, so that colours and interpolation do what they do on photographs.
    coarse = rng.integers(0, 256, (IMAGES, 8, 8, 3), dtype=np.uint8)
    images = np.kron(coarse, np.ones((1, SIDE // 8, SIDE // 8, 1), np.uint8)) ^ rng.integers(0, 16, (IMAGES, SIDE, SIDE, 3), dtype=np.uint8)
    ds = ps.create(folder / "set", {"image": ps.Tensor((SIDE, SIDE, 3), "uint8")})
    ds.append({"image": images})
    planes = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, sorted(cores)[:1])
    rates: dict[str, dict[str, float]] = {}
    comparisons = []
    try:
        for name, (mine, other) in cases.items():
            ours = ds.loader(batch_size=BATCH, transform=[mine], threads=1)
            theirs = torch.utils.data.DataLoader(Images(planes, other), batch_size=BATCH)

            def run(batches: Any) -> None:
                for batch in batches:
                    touch(batch["image"] if isinstance(batch, dict) else batch.numpy())

            systems = {
                "penstock": lambda ours=ours, run=run: run(ours.stream(1)),
                "torchvision": lambda theirs=theirs, run=run: run(theirs),
            }
            for work in systems.values():
                work()
            times = interleaved(systems)
            rates[name] = {system: IMAGES / row["median_seconds"] for system, row in times.items()}
            comparisons.append(
                comparison(name, "images/s", {system: [IMAGES / s for s in row["seconds"]] for system, row in times.items()})
            )
            ours.close()
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)
    return {
        "what": f"{IMAGES} images of {SIDE} × {SIDE} × 3 uint8 from memory to batches of {BATCH}, one core, one transform each; DataLoader without workers",
        "images_per_second": rates, "comparisons": comparisons,
        "lines": [f"{name}: {row['penstock']:,.0f}/s, torchvision {row['torchvision']:,.0f}/s" for name, row in rates.items()],
        "bars": [{"what": f"{name}: penstock / torchvision", "value": row["penstock"] / row["torchvision"], "at_least": 1.5} for name, row in rates.items()],
    }  # fmt: skip

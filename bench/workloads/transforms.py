"""Each transform of the core beside torchvision v2: uint8 images in memory become batches, on one core."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
from harness import bar, comparison, fewer
from race import Entry, fastest, once, race, start, told

SIDE, IMAGES, BATCH = 224, 512, 64
CASES = (
    "rotation, nearest", "rotation, bilinear", "affine, bilinear", "colour jitter", "colour jitter without hue", "grayscale", "blur, 9 × 9", "erasing",
)  # fmt: skip
# torchvision's erasing takes only tensors.
ONLY_TENSORS = ("erasing",)


def loader_transforms(folder: pathlib.Path, _photos: pathlib.Path | None) -> dict[str, Any]:
    """Measure one epoch for each transform. Both sides read images from memory, in order, and stack batches of 64. torchvision has tensors or PIL."""
    count, missing = fewer(IMAGES, BATCH), {}
    rng = np.random.default_rng(0)
    # Smooth images with some noise, so that colours and interpolation do what they do on photographs.
    coarse = rng.integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
    images = np.kron(coarse, np.ones((1, SIDE // 8, SIDE // 8, 1), np.uint8)) ^ rng.integers(0, 16, (count, SIDE, SIDE, 3), dtype=np.uint8)
    np.save(folder / "images.npy", images)
    options = {"place": folder, "batch": BATCH, "threads": 1}
    once(Entry("penstock", "loaders/penstock", "transforms_write", options, 1))
    rows, lines, bars, comparisons = {}, [], [], []
    for case in CASES:
        paths = ("tensor",) if case in ONLY_TENSORS else ("tensor", "pil")
        other = fastest(
            [Entry("torchvision", "loaders/torchvision", "transforms", {**options, "case": case, "path": path}, 1) for path in paths],
            missing,
        )
        entries = [Entry("penstock", "loaders/penstock", "transforms", {**options, "case": case}, 1), *([other] if other else [])]
        found = rows[case] = race(start(entries, missing), missing, 3)
        lines += told(found, f"{case}: ") + [f"{case}: torchvision is fastest with {other.options['path']}" for _ in range(bool(other))]
        comparisons.append(comparison(case, "images/s", {name: row["rates"] for name, row in found.items()}))
        if "torchvision" in found:
            ratio = found["penstock"]["per_second"] / found["torchvision"]["per_second"]
            bars.append(bar(f"{case}: penstock / torchvision", ratio, at_least=1.5))
    return {
        "what": f"{count} images of {SIDE} × {SIDE} × 3 uint8 from memory to batches of {BATCH}, one core, one transform each; torchvision in a DataLoader without workers, on tensors or PIL images",
        "systems": rows, "lines": lines, "bars": bars, "comparisons": comparisons, "missing": missing,
    }  # fmt: skip

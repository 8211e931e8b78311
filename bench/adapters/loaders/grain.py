"""Grain: samples from ArrayRecord, mapped in worker processes. It has no image operations: Pillow crops and resizes."""
# /// script
# dependencies = ["grain==0.2.18", "array-record==0.8.6", "pillow==13.0.0", "numpy==2.4.6"]
# ///

from __future__ import annotations

import io
import itertools
import math
import pathlib
from typing import Any

import grain
import numpy as np
import serving
from array_record.python.array_record_data_source import ArrayRecordDataSource
from array_record.python.array_record_module import ArrayRecordWriter
from PIL import Image


def photos_write(o: Any) -> Any:
    def turn() -> int:
        files = sorted(pathlib.Path(o.source).rglob("*.jpg"))
        writer = ArrayRecordWriter(f"{o.place}/grain.array_record", "group_size:1")
        for path in files:
            writer.write(path.read_bytes())
        writer.close()
        return len(files)

    return turn


ingest = photos_write


class Crop(grain.transforms.RandomMap):  # type: ignore[misc]
    """torchvision's RandomResizedCrop(224) and flip."""

    def random_map(self, element: bytes, rng: np.random.Generator) -> Any:
        image = Image.open(io.BytesIO(element)).convert("RGB")
        width, height = image.size
        box = (0, 0, width, height)
        for _ in range(10):
            area, ratio = width * height * rng.uniform(0.08, 1), math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                left, top = int(rng.integers(0, width - w + 1)), int(rng.integers(0, height - h + 1))
                box = (left, top, left + w, top + h)
                break
        pixels = np.asarray(image.resize((224, 224), Image.Resampling.BILINEAR, box))
        return pixels[:, ::-1] if rng.random() < 0.5 else pixels


def photos(o: Any) -> Any:
    """One iterator over all epochs, as its processes or threads start again with each new iterator."""
    source = ArrayRecordDataSource(f"{o.place}/grain.array_record")
    dataset = grain.MapDataset.source(source).seed(1).shuffle().repeat().random_map(Crop())
    if o.ways == "threads":
        batches = dataset.to_iter_dataset(grain.ReadOptions(num_threads=o.threads, prefetch_buffer_size=2 * o.batch)).batch(o.batch)
    else:
        batches = dataset.to_iter_dataset().batch(o.batch).mp_prefetch(grain.multiprocessing.MultiprocessingOptions(num_workers=o.threads))
    iterator = iter(batches)
    return lambda: itertools.islice(iterator, -(-len(source) // o.batch))


if __name__ == "__main__":
    serving.serve(globals())

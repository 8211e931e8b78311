"""Grain: samples from ArrayRecord, mapped in worker processes or threads. It has no image operations: Pillow or torchvision decode and crop.

Up to two batches for each worker are ready before a turn begins.
"""
# /// script
# dependencies = [
#   "grain==0.2.18", "array-record==0.8.6", "pillow==13.0.0", "numpy==2.4.6", "torch==2.15.0", "torchvision==0.29.2",
# ]
# ///

from __future__ import annotations

import io
import itertools
import pathlib
from typing import Any

import crops
import drawn
import grain
import numpy as np
from array_record.python.array_record_data_source import ArrayRecordDataSource
from array_record.python.array_record_module import ArrayRecordWriter
from PIL import Image


def photos_write(o: Any) -> Any:
    """Each process writes a file of its own."""

    def write(number: int, files: list[pathlib.Path]) -> None:
        writer = ArrayRecordWriter(f"{o.place}/{number}.array_record", "group_size:1,uncompressed")
        for path in files:
            writer.write(path.read_bytes())
        writer.close()

    return lambda: drawn.in_processes(o, write)


ingest = photos_write


class Crop(grain.transforms.RandomMap):  # type: ignore[misc]
    """torchvision's RandomResizedCrop(224) and flip, by Pillow."""

    def random_map(self, element: bytes, rng: np.random.Generator) -> Any:
        image = Image.open(io.BytesIO(element)).convert("RGB")
        left, top, w, h = drawn.crop(image.size, rng.uniform)
        pixels = np.asarray(image.resize((224, 224), Image.Resampling.BILINEAR, (left, top, left + w, top + h)))
        return pixels[:, ::-1] if rng.random() < 0.5 else pixels


class Tensors(grain.transforms.Map):  # type: ignore[misc]
    """The same by torchvision."""

    def map(self, element: bytes) -> Any:
        if not hasattr(self, "decode"):
            import torch  # Not needed for ingest.

            torch.set_num_threads(1)
            self.decode = crops.of_bytes("tensor")
        return self.decode(element).numpy()


def photos(o: Any) -> Any:
    """One iterator over all epochs, as its processes or threads start again with each new iterator."""
    source = ArrayRecordDataSource(sorted(map(str, pathlib.Path(o.place).glob("*.array_record"))))
    dataset = grain.MapDataset.source(source).seed(1).shuffle().repeat()
    dataset = dataset.map(Tensors()) if o.path == "tensor" else dataset.random_map(Crop())
    if o.ways == "threads":
        batches = dataset.to_iter_dataset(grain.ReadOptions(num_threads=o.threads, prefetch_buffer_size=2 * o.batch)).batch(o.batch)
    else:
        batches = (
            dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
            .batch(o.batch)
            .mp_prefetch(grain.multiprocessing.MultiprocessingOptions(num_workers=o.threads))
        )
    iterator = iter(batches)
    return lambda: itertools.islice(iterator, -(-len(source) // o.batch))

"""WebDataset: tar files of 64 MB, or 24 smaller ones. They are shuffled by file and in a buffer of 1,000 samples; workers persist."""
# /// script
# dependencies = ["webdataset==1.0.2", "torch==2.15.0", "torchvision==0.29.2", "numpy==2.4.6", "pillow==13.0.0"]
# ///

from __future__ import annotations

import pathlib
from typing import Any

import crops
import drawn
import torch
import webdataset as wds


def ingest(o: Any, most: float = 64e6) -> Any:
    """Each process writes its own files."""
    place = pathlib.Path(o.place, "webdataset")

    def write(number: int, files: list[pathlib.Path]) -> None:
        with wds.ShardWriter(str(place / f"{number}-%04d.tar"), maxsize=most, verbose=0) as writer:
            for path in files:
                writer.write({"__key__": path.stem, "jpg": path.read_bytes()})

    def turn() -> int:
        place.mkdir()
        return drawn.in_processes(o, write)

    return turn


def photos_write(o: Any) -> Any:
    """At least 24 files of equal numbers of photographs, which 2 and 3 workers share evenly."""
    return ingest(o, min(64e6, sum(path.stat().st_size + 1024 for path in drawn.photographs(o)) / 23.5))


def photos(o: Any) -> Any:
    torch.set_num_threads(1)
    files = sorted(map(str, pathlib.Path(o.place, "webdataset").glob("*.tar")))
    decode = crops.of_bytes(o.path)
    dataset = (
        wds.WebDataset(files, shardshuffle=len(files))
        .shuffle(1000)
        .map(lambda sample: decode(sample["jpg"]))
        .batched(o.batch, collation_fn=torch.utils.data.default_collate)
    )
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=o.threads, persistent_workers=True)
    return lambda: loader

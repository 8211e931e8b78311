"""MosaicML Streaming: MDS files of 64 MB, its default shuffle, and a DataLoader whose workers persist."""
# /// script
# dependencies = [
#   "mosaicml-streaming==0.13.0", "huggingface-hub==0.36.2", "torch==2.15.0", "torchvision==0.29.2", "numpy==2.1.3", "pillow==13.0.0",
# ]
# ///

from __future__ import annotations

import pathlib
import shutil
from typing import Any

import crops
import drawn
import streaming
import torch


class Photos(streaming.StreamingDataset):  # type: ignore[misc]
    def __init__(self, path: str, **options: Any) -> None:
        super().__init__(**options)
        self.augment = crops.of_bytes(path)

    def __getitem__(self, index: Any) -> Any:
        return self.augment(super().__getitem__(index)["image"])


class Bodies(streaming.StreamingDataset):  # type: ignore[misc]
    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index)["image"]


def photos_write(o: Any) -> Any:
    """Each process writes a folder of its own; their indexes are merged."""

    def write(number: int, files: list[pathlib.Path]) -> None:
        place = f"{o.place}/mosaicml/{number}" if o.threads > 1 else f"{o.place}/mosaicml"
        with streaming.MDSWriter(out=place, columns={"image": "bytes"}, size_limit="64mb") as writer:
            for path in files:
                writer.write({"image": path.read_bytes()})

    def turn() -> int:
        count = drawn.in_processes(o, write)
        if o.threads > 1:
            streaming.base.util.merge_index(f"{o.place}/mosaicml", keep_local=True)
        return count

    return turn


ingest = photos_write


def photos(o: Any) -> Any:
    torch.set_num_threads(1)
    streaming.base.util.clean_stale_shared_memory()
    dataset = Photos(o.path, local=f"{o.place}/mosaicml", shuffle=True, batch_size=o.batch)
    loader = torch.utils.data.DataLoader(dataset, o.batch, num_workers=o.threads, persistent_workers=True)
    return lambda: loader


def remote_epoch(o: Any) -> Any:
    """Each process begins with an empty folder for downloaded files. Its workers start, and connect, in its turn."""
    shutil.rmtree(o.scratch, ignore_errors=True)
    streaming.base.util.clean_stale_shared_memory()
    dataset = Bodies(remote=f"s3://{o.bucket}/mosaicml", local=o.scratch, shuffle=True, batch_size=o.batch)
    for stream in dataset.streams:
        stream._downloader.clean_up()  # Forked workers would share its connection, and wait for replies that others have read.
    loader = torch.utils.data.DataLoader(dataset, o.batch, num_workers=o.threads, collate_fn=list)
    return lambda: loader

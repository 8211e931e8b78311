"""SPDL: a pipeline of threads or processes. They decode with FFmpeg, whose filters crop, resize and flip, or with torchvision."""
# /// script
# dependencies = ["spdl==0.8.0", "spdl-io==0.8.0", "numpy==2.4.6", "torch==2.15.0", "torchvision==0.29.2"]
# [tool.bench]
# apt = ["ffmpeg"]
# ///

from __future__ import annotations

import concurrent.futures
import multiprocessing
import pathlib
import random
from typing import Any

import crops
import drawn
import spdl.io
import torch
from spdl.pipeline import PipelineBuilder


def _decoded(path: str) -> Any:
    packets = spdl.io.demux_image(path)
    left, top, w, h = drawn.crop((packets.codec.width, packets.codec.height), random.uniform)
    flip = ",hflip" if random.random() < 0.5 else ""
    chain = f"crop={w}:{h}:{left}:{top}:exact=1,scale=224:224:flags=bilinear{flip},format=pix_fmts=rgb24"
    return spdl.io.decode_packets(packets, filter_desc=chain)


def _together(frames: list[Any]) -> Any:
    return spdl.io.to_numpy(spdl.io.convert_frames(frames))


def _batch(paths: list[str]) -> Any:
    """In a worker process. The tensor returns in shared memory, as that of a DataLoader."""
    return torch.stack([_batch.decode(pathlib.Path(path).read_bytes()) for path in paths])  # type: ignore[attr-defined]


def photos(o: Any) -> Any:
    files = list(map(str, drawn.photographs(o)))
    decode, together = _decoded, _together
    pool = None
    if o.path != "ffmpeg":
        torch.set_num_threads(1)
        of_bytes = _batch.decode = crops.of_bytes("tensor")  # type: ignore[attr-defined]
        decode, together = lambda path: of_bytes(pathlib.Path(path).read_bytes()), torch.stack
    if o.path == "processes":
        pool = concurrent.futures.ProcessPoolExecutor(o.threads, multiprocessing.get_context("fork"))
        list(pool.map(abs, range(o.threads)))

    def turn() -> Any:
        order = random.sample(files, len(files))
        if pool:
            batches = [order[start : start + o.batch] for start in range(0, len(order), o.batch)]
            made = PipelineBuilder().add_source(batches).pipe(_batch, executor=pool, concurrency=o.threads)
        else:
            made = PipelineBuilder().add_source(order).pipe(decode, concurrency=o.threads).aggregate(o.batch).pipe(together)
        pipeline = made.add_sink(2).build(num_threads=o.threads)
        with pipeline.auto_stop():
            yield from pipeline.get_iterator(timeout=60)

    return turn

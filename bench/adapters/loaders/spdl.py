"""SPDL: a pipeline of threads that decode with FFmpeg, whose filters crop, resize and flip."""
# /// script
# dependencies = ["spdl==0.8.0", "spdl-io==0.8.0", "numpy==2.4.6"]
# [tool.bench]
# apt = ["ffmpeg"]
# ///

from __future__ import annotations

import math
import pathlib
import random
from typing import Any

import serving
import spdl.io
from spdl.pipeline import PipelineBuilder


def _decoded(path: str) -> Any:
    packets = spdl.io.demux_image(path)
    width, height = packets.codec.width, packets.codec.height
    w, h = width, height
    for _ in range(10):
        area, ratio = width * height * random.uniform(0.08, 1), math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            break
        w, h = width, height
    left, top, flip = random.randint(0, width - w), random.randint(0, height - h), ",hflip" if random.random() < 0.5 else ""
    chain = f"crop={w}:{h}:{left}:{top}:exact=1,scale=224:224:flags=bilinear{flip},format=pix_fmts=rgb24"
    return spdl.io.decode_packets(packets, filter_desc=chain)


def _together(frames: list[Any]) -> Any:
    return spdl.io.to_numpy(spdl.io.convert_frames(frames))


def photos(o: Any) -> Any:
    files = sorted(map(str, pathlib.Path(o.source).rglob("*.jpg")))

    def turn() -> Any:
        order = random.sample(files, len(files))
        pipeline = (
            PipelineBuilder().add_source(order).pipe(_decoded, concurrency=o.threads).aggregate(o.batch).pipe(_together).add_sink(2)
            .build(num_threads=o.threads)
        )  # fmt: skip
        with pipeline.auto_stop():
            yield from pipeline.get_iterator(timeout=60)

    return turn


if __name__ == "__main__":
    serving.serve(globals())

"""DALI on the CPU. It decodes only the crop, at full scale. It prepares two batches of the next epoch before that epoch begins."""
# /// script
# dependencies = ["nvidia-dali-cuda120==2.4.0", "numpy==2.4.6"]
# ///

from __future__ import annotations

from typing import Any

import drawn
from nvidia.dali import fn, pipeline_def, types


def photos(o: Any) -> Any:
    batches = -(-len(drawn.photographs(o)) // o.batch)

    @pipeline_def(batch_size=o.batch, num_threads=o.threads, device_id=None, seed=1)
    def pipeline() -> Any:
        jpegs, _ = fn.readers.file(file_root=o.source, random_shuffle=True, name="reader")
        images = fn.decoders.image_random_crop(
            jpegs, device="cpu", output_type=types.RGB, random_area=[0.08, 1.0], random_aspect_ratio=[3 / 4, 4 / 3]
        )
        images = fn.resize(images, resize_x=224, resize_y=224, interp_type=types.INTERP_LINEAR, antialias=True)
        return fn.flip(images, horizontal=fn.random.coin_flip())

    pipe = pipeline()
    pipe.build()
    return lambda: (pipe.run()[0].as_array() for _ in range(batches))

"""Penstock: tensors on object storage. Tiles have the default shape, or the one that others have as chunks."""

from __future__ import annotations

from typing import Any

import drawn
import numpy as np
import penstock as ps
import serving


def _tile(o: Any) -> tuple[int, ...] | None:
    return (o.side,) * 3 if o.side else None


def samples_write(o: Any) -> Any:
    data = np.load(f"{o.data}/samples.npy", mmap_mode="r")
    schema = {"x": ps.Tensor(data.shape[1:], "float32")}
    return lambda: len(ps.create(f"s3://{o.bucket}/penstock-samples", schema).append({"x": data}).row_ids)


def volume_write(o: Any) -> Any:
    whole = np.load(f"{o.data}/volume.npy")
    schema = {"x": ps.Tensor(whole.shape, "float32", tile=_tile(o))}
    return lambda: len(ps.create(f"s3://{o.bucket}/penstock-volume-{o.side}", schema).append({"x": [whole]}).row_ids)


def _ready(o: Any, other: str) -> None:
    """Give the block cache the budget, and open a connection by opening something else."""
    ps.configure(memory_bytes=2 * o.cache)
    ps.open(f"s3://{o.bucket}/penstock-{other}")


def samples(o: Any) -> Any:
    _ready(o, "volume-64")

    def turn() -> Any:
        column = ps.open(f"s3://{o.bucket}/penstock-samples")["x"]
        for batch in drawn.sorted_batches(o):
            yield column[batch]

    return turn


def windows(o: Any) -> Any:
    _ready(o, "samples")

    def turn() -> Any:
        column = ps.open(f"s3://{o.bucket}/penstock-volume-{o.side}")["x"]
        for window in drawn.windows(o):
            yield column[(0, *window)]

    return turn


if __name__ == "__main__":
    serving.serve(globals())

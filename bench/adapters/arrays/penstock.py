"""Penstock: tensors on object storage. Tiles have the default shape, or the one that others have as chunks."""

from __future__ import annotations

import operator
from typing import Any

import drawn
import numpy as np
import penstock as ps


def samples_write(o: Any) -> Any:
    data = np.load(f"{o.data}/samples.npy", mmap_mode="r")
    schema = {"x": ps.Tensor(data.shape[1:], "float32")}
    return lambda: len(ps.create(f"s3://{o.bucket}/penstock-samples", schema).append({"x": data}).row_ids)


def volume_write(o: Any) -> Any:
    whole = np.load(f"{o.data}/volume.npy")
    schema = {"x": ps.Tensor(whole.shape, "float32", tile=(o.side,) * 3 if o.side else None)}
    return lambda: len(ps.create(f"s3://{o.bucket}/penstock-volume-{o.side}", schema).append({"x": [whole]}).row_ids)


def _ready(o: Any, other: str) -> None:
    """Give the block cache the budget, and open a connection by opening something else."""
    ps.configure(memory_bytes=2 * o.cache)
    ps.open(f"s3://{o.bucket}/penstock-{other}")


def samples(o: Any) -> Any:
    _ready(o, "volume-64")
    return drawn.reads(o, drawn.sorted_batches, lambda: ps.open(f"s3://{o.bucket}/penstock-samples")["x"], operator.getitem)


def windows(o: Any) -> Any:
    _ready(o, "samples")
    uri = f"s3://{o.bucket}/penstock-volume-{o.side}"
    return drawn.reads(o, drawn.windows, lambda: ps.open(uri)["x"], lambda column, window: column[(0, *window)])

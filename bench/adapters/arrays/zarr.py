"""Zarr-Python with obstore, its fastest store, 64 requests at once, and a cache of the budget. Variant sharded: many chunks in one object."""
# /// script
# dependencies = ["zarr==3.1.6", "obstore==0.12.1", "numpy==2.4.6"]
# ///

from __future__ import annotations

import functools
import operator
from typing import Any

import drawn
import numpy as np
import obstore
import zarr
from zarr.experimental.cache_store import CacheStore


def _store(o: Any, name: str) -> Any:
    remote = obstore.store.S3Store(
        o.bucket, prefix=f"zarr/{name}", endpoint=o.endpoint, region="us-east-1", client_options={"allow_http": True}
    )
    return zarr.storage.ObjectStore(remote)


def _write(o: Any, name: str, values: Any, chunks: tuple[int, ...], shards: tuple[int, ...]) -> Any:
    def turn() -> int:
        for kind, sharded in (("plain", None), ("sharded", shards)):
            options = {"shape": values.shape, "chunks": chunks, "shards": sharded, "dtype": "float32", "compressors": None}
            zarr.create_array(_store(o, f"{name}-{kind}"), **options)[:] = values
        return 1

    return turn


def samples_write(o: Any) -> Any:
    data = np.load(f"{o.data}/samples.npy", mmap_mode="r")
    return _write(o, "samples", data, (1, data.shape[1]), (1000, data.shape[1]))


def volume_write(o: Any) -> Any:
    whole, side = np.load(f"{o.data}/volume.npy"), o.side or 64
    return _write(o, f"volume-{o.side}", whole, (side,) * 3, (whole.shape[0] // 2, *whole.shape[1:]))


def _ready(o: Any, name: str) -> Any:
    """Return a store with an open connection, and an empty cache."""
    zarr.config.set({"async.concurrency": 64})
    store = _store(o, f"{name}-{o.variant}")
    obstore.head(store.store, "zarr.json")
    return CacheStore(store, cache_store=zarr.storage.MemoryStore(), max_size=o.cache)


def samples(o: Any) -> Any:
    store = _ready(o, "samples")
    opened = functools.partial(zarr.open_array, store, mode="r", zarr_format=3)
    return drawn.reads(o, drawn.sorted_batches, opened, lambda array, batch: array.oindex[batch])


def windows(o: Any) -> Any:
    store = _ready(o, f"volume-{o.side}")
    opened = functools.partial(zarr.open_array, store, mode="r", zarr_format=3)
    return drawn.reads(o, drawn.windows, opened, operator.getitem)

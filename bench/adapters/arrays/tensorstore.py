"""TensorStore: Zarr 3 on S3 with a cache pool of the budget. Variant sharded: many chunks in one object."""
# /// script
# dependencies = ["tensorstore==0.1.86", "numpy==2.4.6"]
# ///

from __future__ import annotations

from typing import Any

import drawn
import numpy as np
import tensorstore


def _spec(o: Any, name: str) -> dict[str, Any]:
    kvstore = {"driver": "s3", "bucket": o.bucket, "path": f"tensorstore/{name}/", "endpoint": o.endpoint, "aws_region": "us-east-1"}
    return {"driver": "zarr3", "kvstore": kvstore, "recheck_cached_data": "open"}


def _write(o: Any, name: str, values: Any, chunks: list[int], shards: list[int]) -> Any:
    def turn() -> int:
        for kind in ("plain", "sharded"):
            codecs: list[Any] = [{"name": "bytes", "configuration": {"endian": "little"}}]
            grid = chunks
            if kind == "sharded":
                codecs, grid = [{"name": "sharding_indexed", "configuration": {"chunk_shape": chunks, "codecs": codecs}}], shards
            metadata = {
                "shape": list(values.shape), "data_type": "float32", "codecs": codecs,
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": grid}},
            }  # fmt: skip
            array = tensorstore.open({**_spec(o, f"{name}-{kind}"), "metadata": metadata}, create=True, delete_existing=True).result()
            array[...].write(values).result()
        return 1

    return turn


def samples_write(o: Any) -> Any:
    data = np.load(f"{o.data}/samples.npy", mmap_mode="r")
    return _write(o, "samples", data, [1, data.shape[1]], [1000, data.shape[1]])


def volume_write(o: Any) -> Any:
    whole, side = np.load(f"{o.data}/volume.npy"), o.side or 64
    return _write(o, f"volume-{o.side}", whole, [side] * 3, [whole.shape[0] // 2, *whole.shape[1:]])


def _ready(o: Any, spec: dict[str, Any]) -> Any:
    """Return a context with an open connection, and an empty cache pool of the budget."""
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": o.cache}, "s3_request_concurrency": {"limit": 64}})
    tensorstore.KvStore.open(spec["kvstore"], context=context).result().read("nothing").result()
    return context


def _reads(o: Any, parts: Any, spec: dict[str, Any]) -> Any:
    options = {"open": True, "read": True, "context": _ready(o, spec)}
    return drawn.reads(o, parts, lambda: tensorstore.open(spec, **options).result(), lambda array, part: array[part].read().result())


def samples(o: Any) -> Any:
    return _reads(o, drawn.sorted_batches, _spec(o, f"samples-{o.variant}"))


def windows(o: Any) -> Any:
    return _reads(o, drawn.windows, _spec(o, f"volume-{o.side}-{o.variant}"))


def embeddings(o: Any) -> Any:
    """A local Zarr array with chunks of 16 rows, as files or in OCDBT. All changes are one transaction, or each batch is one.

    Files are synced together after each transaction, which is faster than one by one.
    """
    rows = drawn.embedding_rows(o)
    files = {"driver": "file", "path": f"{o.place}/tensorstore/", "file_io_sync": False}
    spec = {
        "driver": "zarr", "kvstore": {"driver": "ocdbt", "base": files} if o.ocdbt else files,
        "metadata": {"shape": list(rows.shape), "chunks": [16, rows.shape[1]], "dtype": "<f4", "compressor": None},
        "context": {"cache_pool": {"total_bytes_limit": 512 << 20}}, "recheck_cached_data": "open",
    }  # fmt: skip
    array = tensorstore.open(spec, create=True, delete_existing=True).result()
    with tensorstore.Transaction() as writing:
        array.with_transaction(writing)[...] = rows
    transaction = tensorstore.Transaction()

    def finish() -> None:
        transaction.commit_sync()
        drawn.sync_file_system(o.place)

    def change(ids: Any) -> Any:
        nonlocal transaction
        unique, back = np.unique(ids, return_inverse=True)
        table = array.with_transaction(transaction)
        values = table[unique].read().result() - drawn.STEP
        table[unique].write(values).result()
        if o.each:
            finish()
            transaction = tensorstore.Transaction()
        return values[back]

    return drawn.changes(o, change, finish)

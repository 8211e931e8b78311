"""TileDB: dense arrays on S3, without filters. This version has no cache of tiles. Variants: ranges as near as `gap` are joined, or none are."""
# /// script
# dependencies = ["tiledb==0.36.1", "numpy==2.4.6"]
# ///

from __future__ import annotations

from typing import Any

import drawn
import numpy as np
import tiledb


def _context(o: Any) -> Any:
    return tiledb.Ctx({
        "vfs.s3.endpoint_override": o.endpoint.removeprefix("http://"), "vfs.s3.scheme": "http", "vfs.s3.use_virtual_addressing": "false",
        "vfs.s3.region": "us-east-1",
            "sm.io_concurrency_level": "64",
            "vfs.s3.max_parallel_ops": "64",
            "vfs.min_batch_size": "0",
            "vfs.min_batch_gap": str(getattr(o, "gap", 0)),
    })  # fmt: skip


def _write(o: Any, name: str, values: Any, tile: tuple[int, ...]) -> Any:
    def turn() -> int:
        dims = [
            tiledb.Dim(f"d{axis}", domain=(0, size - 1), tile=side, dtype=np.int32)
            for axis, (size, side) in enumerate(zip(values.shape, tile, strict=True))
        ]
        schema = tiledb.ArraySchema(tiledb.Domain(*dims), [tiledb.Attr("x", dtype=np.float32)])
        uri, context = f"s3://{o.bucket}/tiledb/{name}", _context(o)
        tiledb.Array.create(uri, schema, ctx=context)
        with tiledb.open(uri, "w", ctx=context) as array:
            array[:] = np.asarray(values)
        return 1

    return turn


def samples_write(o: Any) -> Any:
    data = np.load(f"{o.data}/samples.npy", mmap_mode="r")
    return _write(o, "samples", data, (1, data.shape[1]))


def volume_write(o: Any) -> Any:
    whole, side = np.load(f"{o.data}/volume.npy"), o.side or 64
    return _write(o, f"volume-{o.side}", whole, (side,) * 3)


def _connected(o: Any, other: str) -> Any:
    """Return a context with an open connection."""
    context = _context(o)
    tiledb.object_type(f"s3://{o.bucket}/tiledb/{other}", ctx=context)
    return context


def samples(o: Any) -> Any:
    context = _connected(o, "volume-64")

    def turn() -> Any:
        with tiledb.open(f"s3://{o.bucket}/tiledb/samples", ctx=context) as array:
            for batch in drawn.sorted_batches(o):
                yield array.multi_index[batch.tolist(), :]["x"]

    return turn


def windows(o: Any) -> Any:
    context = _connected(o, "samples")

    def turn() -> Any:
        with tiledb.open(f"s3://{o.bucket}/tiledb/volume-{o.side}", ctx=context) as array:
            for window in drawn.windows(o):
                yield array[window]

    return turn


def embeddings(o: Any) -> Any:
    """A sparse array of rows. Each batch is a fragment; fragments are consolidated when there are many, as its documentation advises."""
    rows, path, fragments = drawn.embedding_rows(o), f"{o.place}/tiledb", iter(range(1, 1 << 30))
    value = np.dtype([("", np.float32)] * rows.shape[1])
    domain = tiledb.Domain(tiledb.Dim("id", domain=(0, len(rows) - 1), tile=1024, dtype=np.uint64))
    tiledb.Array.create(path, tiledb.ArraySchema(domain, [tiledb.Attr("e", dtype=value)], sparse=True, capacity=64))

    def write(ids: Any, values: Any) -> None:
        with tiledb.open(path, "w") as array:
            array[ids.astype(np.uint64)] = {"e": np.ascontiguousarray(values).view(value).reshape(len(ids))}
        if next(fragments) % 32 == 0:
            tiledb.consolidate(path)
            tiledb.vacuum(path)

    def change(ids: Any) -> Any:
        unique, places = np.unique(ids, return_inverse=True)
        with tiledb.open(path) as array:
            found = array.multi_index[[int(key) for key in unique]]
        values = np.ascontiguousarray(found["e"]).view(np.float32).reshape(len(unique), rows.shape[1]) - drawn.STEP
        values = values[np.argsort(found["id"])]
        write(unique, values)
        if o.each:
            drawn.sync_file_system(o.place)
        return values[places]

    write(np.arange(len(rows)), rows)
    return drawn.changes(o, change, lambda: drawn.sync_file_system(o.place))

"""Lance: takes of rows, scans, appends, at its defaults or without compression. Local writes are not synced by Lance."""
# /// script
# dependencies = ["pylance==14.0.2", "pyarrow==26.0.1", "numpy==2.4.6"]
# ///

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import drawn
import lance
import numpy as np
import pyarrow as pa

PLAIN = {"lance-encoding:compression": "none"}


def _remote(o: Any, name: str) -> tuple[str, dict[str, str]]:
    return f"s3://{o.bucket}/{name}", {"endpoint": o.endpoint, "allow_http": "true", "region": "us-east-1"}


def _fixed(array: Any) -> Any:
    """Return one contiguous writable array of a column of fixed-size lists."""
    return array.combine_chunks().flatten().to_numpy().copy()


def samples_write(o: Any) -> Any:
    def turn() -> int:
        images, labels = np.load(f"{o.place}/images.npy"), np.load(f"{o.place}/labels.npy")
        flat = pa.FixedSizeListArray.from_arrays(pa.array(images.reshape(-1)), 3072)
        lance.write_dataset(pa.table({"image": flat, "label": labels}), f"{o.place}/lance")
        return len(labels)

    return turn


def samples(o: Any) -> Any:
    ds = lance.dataset(f"{o.place}/lance")

    def read(rows: Any) -> Any:
        table = ds.take(rows)
        return {"label": table["label"].to_numpy().copy(), "image": _fixed(table["image"])}

    return lambda: drawn.takes(o, ds.count_rows(), read)


def _bodies(o: Any) -> Any:
    """Return a stream of batches of 256 photographs, so that reading them overlaps with writing. JPEGs are not compressed again."""
    files, schema = drawn.photographs(o), pa.schema([pa.field("image", pa.large_binary(), metadata=PLAIN)])
    parts = (files[start : start + 256] for start in range(0, len(files), 256))
    batches = (pa.record_batch([pa.array([path.read_bytes() for path in part], pa.large_binary())], schema=schema) for part in parts)
    return pa.RecordBatchReader.from_batches(schema, batches)


def jpegs_write(o: Any) -> Any:
    return lambda: lance.write_dataset(_bodies(o), f"{o.place}/lance").count_rows()


ingest = jpegs_write


def jpegs(o: Any) -> Any:
    ds = lance.dataset(f"{o.place}/lance")
    return lambda: drawn.takes(o, ds.count_rows(), lambda rows: ds.take(rows)["image"].to_pylist())


def _plain(table: Any) -> Any:
    """Return a table whose columns Lance does not compress."""
    fields = [field.with_metadata(PLAIN) for field in table.schema]
    return table.cast(pa.schema(fields))


def text_write(o: Any) -> Any:
    """At the defaults, and without compression."""

    def turn() -> int:
        texts, labels = drawn.texts(o)
        table = pa.table({"text": texts, "label": labels})
        lance.write_dataset(table, f"{o.place}/lance-default")
        lance.write_dataset(_plain(table), f"{o.place}/lance-plain")
        return len(texts)

    return turn


def text(o: Any) -> Any:
    ds = lance.dataset(f"{o.place}/lance-{o.variant}")

    def turn() -> Any:
        for rows in drawn.random_rows(o, ds.count_rows()):
            table = ds.take(rows)
            yield {"text": table["text"].to_numpy().tolist(), "label": table["label"].to_numpy().copy()}

    return turn


def remote_images_write(o: Any) -> Any:
    def turn() -> int:
        uri, options = _remote(o, "lance")
        return lance.write_dataset(_bodies(o), uri, storage_options=options).count_rows()

    return turn


def _opened(o: Any, name: str) -> Any:
    """Open a dataset, and take its last rows, so that connections are open."""
    uri, options = _remote(o, name)
    ds = lance.dataset(uri, storage_options=options)
    count = ds.count_rows()
    ds.take(np.arange(count - 64, count))
    return ds, count


def remote_takes(o: Any) -> Any:
    ds, count = _opened(o, "lance")
    return lambda: (ds.take(rows)["image"].to_pylist() for rows in drawn.shuffled(o, count))


def remote_scan(o: Any) -> Any:
    ds, _ = _opened(o, "lance")

    def turn() -> Any:
        for batch in ds.to_batches(batch_size=o.batch, batch_readahead=16):
            yield [np.frombuffer(batch.column(0).buffers()[2], np.uint8)]

    return turn


def remote_epoch(o: Any) -> Any:
    """Takes of random rows, with as many in flight as `threads`."""
    ds, count = _opened(o, "lance")

    def turn() -> Any:
        with ThreadPoolExecutor(o.threads) as pool:
            yield from pool.map(lambda rows: ds.take(rows)["image"].to_pylist(), drawn.shuffled(o, count))

    return turn


def remote_rows_write(o: Any) -> Any:
    def turn() -> int:
        uri, options = _remote(o, "lance-rows")
        lance.write_dataset(pa.table(drawn.three_columns(o.rows)), uri, storage_options=options)
        return int(o.rows)

    return turn


def remote_rows(o: Any) -> Any:
    ds, count = _opened(o, "lance-rows")

    def turn() -> Any:
        for rows in drawn.random_rows(o, count):
            table = ds.take(rows)
            yield {"a": table["a"].to_numpy().copy(), "b": table["b"].to_numpy().copy(), "text": table["text"].to_numpy().tolist()}

    return turn


def first_sample_write(o: Any) -> Any:
    def turn() -> int:
        for start in range(0, o.rows, 1000):
            lance.write_dataset(pa.table({"x": np.arange(start, start + 1000)}), f"{o.place}/lance", mode="append" if start else "create")
        return int(o.rows)

    return turn


def first_sample(o: Any) -> Any:
    """With a session, which keeps the caches of datasets that were opened before."""
    positions, session = np.arange(0, o.rows, o.rows // 100), lance.Session()
    return lambda: len(lance.dataset(f"{o.place}/lance", session=session).take(positions))


def commits(o: Any) -> Any:
    turns = iter(range(1000))

    def turn() -> int:
        path = f"{o.place}/lance-{next(turns)}"
        ds = lance.write_dataset(pa.table({"x": [0]}), path)
        for number in range(o.commits):
            ds.insert(pa.table({"x": [number]}))
        return int(o.commits)

    return turn


def append_rows(o: Any) -> Any:
    table = pa.table(drawn.table_of(o))
    table = _plain(table) if o.variant == "plain" else table

    def turn() -> int:
        lance.write_dataset(table, f"{o.place}/lance", data_storage_version="2.0" if o.variant == "2.0" else None)
        return len(table)

    return turn

"""RocksDB by rocksdict. Variant row: one row a key, read by its multi-get. Variant plain: the same in plain tables, which are mapped.
Variant block: 1,024 rows a key, read in the order of keys.
"""
# /// script
# dependencies = ["rocksdict==0.3.29", "numpy==2.4.6"]
# ///

from __future__ import annotations

import pathlib
from typing import Any

import drawn
import numpy as np
from rocksdict import DBCompressionType, Options, PlainTableFactoryOptions, Rdict, SliceTransform, WriteBatch, WriteOptions

ROWS = 1024


def _open(o: Any, kind: str) -> Any:
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_write_buffer_size(256 << 20)
    options.set_compression_type(DBCompressionType.none())
    options.optimize_for_point_lookup(256)  # A block cache of 256 MiB, as large as Penstock's.
    if kind == "plain":
        tables = PlainTableFactoryOptions()
        tables.user_key_length = 4
        options.set_allow_mmap_reads(True)
        options.set_plain_table_factory(tables)
        options.set_prefix_extractor(SliceTransform.create_fixed_prefix(4))
    return Rdict(f"{o.place}/rocksdb-{kind}", options)


def text_write(o: Any) -> Any:
    def turn() -> int:
        texts, labels = drawn.texts(o)
        for kind in ("row", "plain", "block"):
            store = _open(o, kind)
            for start in range(0, len(texts), ROWS):
                part, batch = texts[start : start + ROWS], WriteBatch(raw_mode=True)
                if kind == "block":
                    own = np.array(labels[start : start + ROWS], np.int64)
                    batch.put((start // ROWS).to_bytes(4, "big"), own.tobytes() + "\n".join(part).encode())
                else:
                    for row, text in enumerate(part, start):
                        batch.put(row.to_bytes(4, "big"), drawn.packed(text, labels[row]))
                store.write(batch)
            store.flush()
            store.compact_range(None, None)
            store.close()
        pathlib.Path(o.place, "rows").write_text(str(len(texts)))
        return len(texts)

    return turn


def text(o: Any) -> Any:
    store, count = _open(o, o.variant), int(pathlib.Path(o.place, "rows").read_text())

    def rows() -> Any:
        for wanted in drawn.random_rows(o, count):
            yield drawn.unpacked(store[[row.to_bytes(4, "big") for row in wanted.tolist()]])

    def blocks() -> Any:
        for key in range(min(o.takes, count // ROWS)):
            body = store[key.to_bytes(4, "big")]
            yield {"label": np.frombuffer(body, np.int64, ROWS).copy(), "text": str(body[8 * ROWS :], "utf-8").split("\n")}

    return blocks if o.variant == "block" else rows


def embeddings(o: Any) -> Any:
    """Reads are one multi-get, writes one batch. If only the end is durable, it is a flush of the table, or with `log` a sync of the log."""
    rows, store, writing = drawn.embedding_rows(o), _open(o, "embeddings"), WriteOptions()
    writing.sync, writing.disable_wal = o.each, not (o.each or o.log)

    def write(ids: Any, values: Any) -> None:
        batch, data, width = WriteBatch(raw_mode=True), values.tobytes(), 4 * rows.shape[1]
        for place, key in enumerate(ids.tolist()):
            batch.put(key.to_bytes(4, "big"), data[place * width : (place + 1) * width])
        store.write(batch, writing)

    def change(ids: Any) -> Any:
        unique, back = np.unique(ids, return_inverse=True)
        found = store[[key.to_bytes(4, "big") for key in unique.tolist()]]
        values = np.frombuffer(b"".join(found), np.float32).reshape(len(unique), rows.shape[1]) - drawn.STEP
        write(unique, values)
        return values[back]

    for begin in range(0, len(rows), 1 << 14):
        write(np.arange(begin, min(begin + (1 << 14), len(rows))), rows[begin : begin + (1 << 14)])
    store.flush()
    return drawn.changes(o, change, (lambda: None) if o.each else (lambda: store.flush_wal(True)) if o.log else store.flush)

"""LMDB: one row a key, an integer in the order of the machine. A get of a transaction for each row is faster than a cursor's getmulti."""
# /// script
# dependencies = ["lmdb==3.0.0", "numpy==2.4.6"]
# ///

from __future__ import annotations

import sys
import threading
from typing import Any

import drawn
import lmdb
import numpy as np


def _write(o: Any, values: Any) -> Any:
    def turn() -> int:
        rows = 0
        with lmdb.open(f"{o.place}/lmdb", map_size=8 << 30, writemap=True, max_dbs=1) as store:
            table = store.open_db(b"rows", integerkey=True)
            with store.begin(write=True, db=table) as writing:
                for rows, value in enumerate(values(), 1):
                    writing.put((rows - 1).to_bytes(4, sys.byteorder), value, append=True)
        return rows

    return turn


def _reads(o: Any) -> Any:
    """Return the number of rows, and a function that reads rows in the order asked for, in a transaction of each thread."""
    store = lmdb.open(f"{o.place}/lmdb", readonly=True, lock=False, readahead=False, map_size=8 << 30, max_dbs=1)
    table, own = store.open_db(b"rows", integerkey=True, create=False), threading.local()

    def get(rows: Any) -> list[bytes]:
        if not hasattr(own, "get"):
            own.get = store.begin(db=table).get
        one = own.get
        return [one(row.to_bytes(4, sys.byteorder)) for row in rows.tolist()]

    with store.begin() as reading:
        return reading.stat(table)["entries"], get


def samples_write(o: Any) -> Any:
    images, labels = np.load(f"{o.place}/images.npy"), np.load(f"{o.place}/labels.npy")
    return _write(o, lambda: (image.tobytes() + label.tobytes() for image, label in zip(images, labels, strict=True)))


def samples(o: Any) -> Any:
    count, get = _reads(o)

    def read(rows: Any) -> Any:
        batch = np.frombuffer(b"".join(get(rows)), np.uint8).reshape(len(rows), 3080)
        return {"image": batch[:, :3072].copy(), "label": batch[:, 3072:].copy().view(np.int64)[:, 0]}

    return lambda: drawn.takes(o, count, read)


def jpegs_write(o: Any) -> Any:
    return _write(o, lambda: (path.read_bytes() for path in drawn.photographs(o)))


ingest = jpegs_write


def jpegs(o: Any) -> Any:
    count, get = _reads(o)
    return lambda: drawn.takes(o, count, get)


def text_write(o: Any) -> Any:
    return _write(o, lambda: map(drawn.packed, *drawn.texts(o)))


def text(o: Any) -> Any:
    count, get = _reads(o)
    return lambda: (drawn.unpacked(get(rows)) for rows in drawn.random_rows(o, count))

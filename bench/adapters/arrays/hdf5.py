"""h5py through s3fs. Variants: s3fs fetches exactly what h5py asks for; s3fs keeps blocks; the file has pages, which HDF5 buffers."""
# /// script
# dependencies = ["h5py==3.16.0", "s3fs==2026.9.0", "numpy==2.4.6"]
# ///

from __future__ import annotations

import operator
from typing import Any

import drawn
import h5py
import numpy as np
import s3fs

PAGES = {"1": 1 << 20, "8": 8 << 20}  # In MiB.


def _system(o: Any) -> Any:
    return s3fs.S3FileSystem(endpoint_url=o.endpoint, skip_instance_cache=True)


def _write(o: Any, name: str, fill: Any) -> Any:
    def turn() -> int:
        paged = {f"paged-{size}": {"fs_strategy": "page", "fs_page_size": size_bytes} for size, size_bytes in PAGES.items()}
        for kind, options in {"plain": {}, **paged}.items():
            path = f"{o.data}/{name}-{kind}.h5"
            with h5py.File(path, "w", libver="latest", **options) as file:
                fill(file)
            _system(o).put(path, f"{o.bucket}/hdf5/{name}-{kind}.h5")
        return 1

    return turn


def samples_write(o: Any) -> Any:
    data = np.load(f"{o.data}/samples.npy", mmap_mode="r")
    return _write(o, "samples", lambda file: file.create_dataset("x", data=data))


def volume_write(o: Any) -> Any:
    whole, side = np.load(f"{o.data}/volume.npy"), o.side or 64
    return _write(o, f"volume-{o.side}", lambda file: file.create_dataset("x", data=whole, chunks=(side,) * 3))


def _array(o: Any, system: Any, name: str) -> Any:
    """Open with a chunk cache of the budget, which must have about a hundred slots a chunk."""
    kind, _, size = o.variant.partition("-")
    size_bytes, options, paged = PAGES.get(size, 0), {"cache_type": "none"}, {}
    if kind == "blocks":
        options = {"cache_type": "blockcache", "block_size": size_bytes, "cache_options": {"maxblocks": max(o.cache // size_bytes, 1)}}
    if kind == "paged":
        paged = {"page_buf_size": max(o.cache, size_bytes)}
    file = system.open(f"{o.bucket}/hdf5/{name}-{o.variant if kind == 'paged' else 'plain'}.h5", **options)
    return h5py.File(file, "r", rdcc_nbytes=o.cache, rdcc_nslots=100_003, **paged)["x"]


def _connected(o: Any, other: str) -> Any:
    """Return a file system with an open connection."""
    system = _system(o)
    system.info(f"{o.bucket}/hdf5/{other}-plain.h5")
    return system


def samples(o: Any) -> Any:
    system = _connected(o, "volume-64")
    return drawn.reads(o, drawn.sorted_batches, lambda: _array(o, system, "samples"), operator.getitem)


def windows(o: Any) -> Any:
    system = _connected(o, "samples")
    return drawn.reads(o, drawn.windows, lambda: _array(o, system, f"volume-{o.side}"), operator.getitem)


def text_write(o: Any) -> Any:
    def turn() -> int:
        texts, labels = drawn.texts(o)
        encoded = [text.encode() for text in texts]
        with h5py.File(f"{o.place}/rows.h5", "w", libver="latest") as file:
            file.create_dataset("variable", data=texts, dtype=h5py.string_dtype())
            file.create_dataset("fixed", data=np.array(encoded, f"S{max(map(len, encoded))}"))
            file.create_dataset("label", data=labels)
        return len(texts)

    return turn


def text(o: Any) -> Any:
    """By h5py's low-level selection of points, which is faster than a list of positions, and keeps their order.

    Variants: strings of variable length, or all as long as the longest.
    """
    file = h5py.File(f"{o.place}/rows.h5", "r")
    texts, labels = file[o.variant], file["label"]

    def read(values: Any, rows: Any, out: Any) -> Any:
        space = values.id.get_space()
        space.select_elements(rows[:, None].astype(np.uint64))
        values.id.read(h5py.h5s.create_simple((len(rows),)), space, out)
        return out

    def turn() -> Any:
        for rows in drawn.random_rows(o, len(labels)):
            found = read(texts, rows, np.empty(len(rows), texts.dtype))
            yield {"text": [one.decode() for one in found.tolist()], "label": read(labels, rows, np.empty(len(rows), np.int64))}

    return turn

"""Icechunk: a Zarr array in a local repository, with a commit for each append. Its files are not synced.

Version 2 needs Python 3.12, and environments are made with the oldest Python that Penstock supports.
"""
# /// script
# dependencies = ["icechunk==1.1.21", "zarr==3.1.6", "numpy==2.4.6"]
# ///

from __future__ import annotations

import os
from typing import Any

os.environ["ICECHUNK_LOG"] = "error"  # It would format warnings in each open.

import icechunk
import numpy as np
import zarr

zarr.config.set({"async.concurrency": 128})


def _create(path: str, chunk: int, inlined: bool = True) -> Any:
    """Chunks of 8 KB are stored in the manifest if they are to be inlined."""
    config = icechunk.RepositoryConfig(inline_chunk_threshold_bytes=16_000 if inlined else 512)
    repository = icechunk.Repository.create(icechunk.local_filesystem_storage(path), config)
    session = repository.writable_session("main")
    zarr.create_array(session.store, name="x", shape=(0,), chunks=(chunk,), dtype="int64", compressors=None)
    session.commit("create")
    return repository


def _append(repository: Any, values: Any) -> None:
    session = repository.writable_session("main")
    zarr.open_array(session.store, path="x", mode="r+").append(values)
    session.commit("append")


def first_sample_write(o: Any) -> Any:
    def turn() -> int:
        repository = _create(f"{o.place}/icechunk-{o.inlined}", 1000, o.inlined)
        for start in range(0, o.rows, 1000):
            _append(repository, np.arange(start, start + 1000))
        return int(o.rows)

    return turn


def first_sample(o: Any) -> Any:
    positions = np.arange(0, o.rows, o.rows // 100)

    def turn() -> int:
        repository = icechunk.Repository.open(icechunk.local_filesystem_storage(f"{o.place}/icechunk-{o.inlined}"))
        array = zarr.open_array(repository.readonly_session("main").store, path="x", mode="r")
        return len(array.oindex[positions])

    return turn


def commits(o: Any) -> Any:
    turns = iter(range(1000))

    def turn() -> int:
        repository = _create(f"{o.place}/icechunk-{next(turns)}", 1000)
        for number in range(o.commits):
            _append(repository, np.array([number]))
        return int(o.commits)

    return turn

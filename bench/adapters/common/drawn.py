"""What workloads read and write: the same rows, in the same order, for all systems."""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import os
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from serving import Parallel

# How much an embedding changes.
STEP = np.float32(0.01)
TURN = iter(range(1 << 30))


def shuffled(o: Any, count: int) -> list[Any]:
    """Return all rows in random order, or the first `takes` batches of them: the same for all systems, and others in each turn."""
    order = np.random.default_rng(next(TURN)).permutation(count)
    return [order[start : start + o.batch] for start in range(0, count, o.batch)][: getattr(o, "takes", None)]


def takes(o: Any, count: int, read: Any) -> Any:
    """Read shuffled batches of rows by `read`, in as many threads as `threads`, for as many epochs as `epochs`."""
    batches = [batch for _ in range(o.epochs) for batch in shuffled(o, count)]
    return Parallel(map(read, batches[thread :: o.threads]) for thread in range(o.threads)) if o.threads > 1 else map(read, batches)


def random_rows(o: Any, count: int) -> list[Any]:
    """Return `takes` batches of random rows, as `shuffled` does."""
    return [batch for batch in shuffled(o, count) if len(batch) == o.batch]


def three_columns(rows: int) -> dict[str, Any]:
    """Return a table of an int64, a float32, and a text of eight words."""
    rng = np.random.default_rng(0)
    words = np.array([f"w{number}" for number in range(1000)])
    texts = [" ".join(part) for part in words[rng.integers(0, 1000, (rows // 4, 8))]] * 4
    return {"a": np.arange(rows), "b": rng.random(rows, np.float32), "text": texts}


def sorted_batches(o: Any) -> list[Any]:
    """Return the positions of 1,000 random samples in batches of 100, each in order, as stores of arrays want them."""
    order = np.random.default_rng(1).permutation(o.samples)[:1000]
    return [np.sort(order[start : start + o.batch]) for start in range(0, len(order), o.batch)][: o.batches]


def windows(o: Any) -> Any:
    """Return random windows of 64³ of a volume."""
    lows = np.random.default_rng(2).integers(0, o.edge - 64 + 1, (o.batches, 3))
    return [tuple(slice(low, low + 64) for low in row) for row in lows.tolist()]


def reads(o: Any, parts: Any, opened: Any, read: Any) -> Any:
    """Return a turn that opens an array, and reads each of the `parts` of a workload from it."""

    def turn() -> Iterator[Any]:
        array = opened()
        for part in parts(o):
            yield read(array, part)

    return turn


def photographs(o: Any) -> list[Any]:
    """Return the files of a folder of photographs."""
    return sorted(pathlib.Path(o.source).rglob("*.jpg"))


def texts(o: Any) -> tuple[list[str], list[int]]:
    """Return the texts of a file, one a line, and their labels."""
    found = pathlib.Path(o.source).read_text().split("\n")
    return found, [len(text) % 3 for text in found]


def packed(text: str, label: int) -> bytes:
    """Return a row for stores of keys and values."""
    return label.to_bytes(8, "little") + text.encode()


def unpacked(rows: list[bytes]) -> dict[str, Any]:
    """Return the columns of packed rows."""
    return {"label": np.frombuffer(b"".join([row[:8] for row in rows]), np.int64).copy(), "text": [str(row[8:], "utf-8") for row in rows]}


def in_processes(o: Any, write: Any) -> int:
    """Let as many forked processes as `threads` each write a part of the photographs by `write(number, files)`. Return how many there are."""
    files = photographs(o)
    parts = [files[number :: o.threads] for number in range(o.threads)]
    if o.threads == 1:
        write(0, files)
        return len(files)
    running = [multiprocessing.get_context("fork").Process(target=write, args=part) for part in enumerate(parts)]
    for process in running:
        process.start()
    for process in running:
        process.join()
        if process.exitcode:
            raise RuntimeError(f"a writer ended with exit code {process.exitcode}")
    return len(files)


def crop(size: tuple[int, int], uniform: Any) -> tuple[int, int, int, int]:
    """Draw left, top, width and height of a box as torchvision's RandomResizedCrop does."""
    width, height = size
    for _ in range(10):
        area, ratio = width * height * uniform(0.08, 1), math.exp(uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return int(uniform(0, width - w + 1)), int(uniform(0, height - h + 1)), w, h
    return 0, 0, width, height


def table_of(o: Any) -> dict[str, Any]:
    """Return the columns of an Arrow file as Arrow, NumPy or lists: all of them, or the first `rows` of the named ones."""
    import pyarrow as pa

    table = pa.ipc.open_file(pa.memory_map(o.source)).read_all()
    table = table.slice(0, o.rows).select(o.columns or table.column_names)
    columns = {name: table[name].combine_chunks() for name in table.column_names}
    if o.given == "arrow":
        return columns
    if o.given == "lists":
        return {name: column.to_pylist() for name, column in columns.items()}
    numbers = {name: columns[name].to_numpy() for name in ("number", "float")}
    return {**columns, **numbers, "vector": columns["vector"].flatten().to_numpy().reshape(-1, 16)}


def zipf(rng: Any, count: int) -> Any:
    """Ids of words in a text: Zipf's law with exponent 2, as published."""
    return np.minimum(rng.zipf(2.0, count) - 1, count - 1).astype(np.int64)


def power(rng: Any, count: int) -> Any:
    """Ids of vertices in a graph: a power law with exponent 2.5 from 5 on, as published."""
    return np.minimum(5 * (1 - rng.random(count)) ** (-1 / 1.5) - 5, count - 1).astype(np.int64)


def embedding_rows(o: Any) -> Any:
    return np.random.default_rng(0).random((o.count, o.size), dtype=np.float32)


def sync_file_system(place: str) -> None:
    """Sync the file system that holds a folder, without starting a process."""
    folder = os.open(place, os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).syncfs(folder):
        raise OSError(ctypes.get_errno(), "syncfs failed")
    os.close(folder)


def changes(o: Any, change: Any, finish: Any) -> Any:
    """Return a turn that changes batches of ids, gives the new values, and finishes. A slow system ends after `seconds`: its rate is that of the batches so far."""
    rng, draw = np.random.default_rng(o.count), {"zipf": zipf, "power": power}[o.draw]
    ids = np.concatenate([draw(rng, o.count) for _ in range(o.passes)])
    change(ids[: o.batch])  # Untimed, as the first turn of others.
    sync_file_system(o.place)

    def turn() -> Iterator[Any]:
        begin = time.perf_counter()
        for start in range(0, len(ids), o.batch):
            batch = ids[start : start + o.batch]
            yield change(batch)
            if o.seconds and time.perf_counter() - begin > o.seconds:
                break
        finish()

    return turn

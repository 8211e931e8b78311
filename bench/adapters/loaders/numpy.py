"""NumPy alone: memory-mapped arrays, gathered and augmented for whole batches."""

from __future__ import annotations

import concurrent.futures
import pathlib
from collections.abc import Iterator
from typing import Any

import drawn
import numpy as np
import serving

MEAN, STD = [125.3, 123.0, 113.9], [51.6, 50.8, 51.3]


def _augmented(batch: Any, rng: Any) -> Any:
    """Pad by 4, crop to 32 × 32, flip and normalise a whole batch, keeping rows of pixels contiguous."""
    count = len(batch)
    padded = np.zeros((count, 40, 40 * 3), np.uint8)
    padded[:, 4:36, 12:108] = batch.reshape(count, 32, 96)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (32, 96), axis=(1, 2))
    cut = windows[np.arange(count), rng.integers(0, 9, count), 3 * rng.integers(0, 9, count)]
    flipped = rng.random(count) < 0.5
    cut[flipped] = cut[flipped].reshape(-1, 32, 32, 3)[:, :, ::-1].reshape(-1, 32, 96)
    values = cut.astype(np.float32)
    values -= np.tile(np.array(MEAN, np.float32), 32)
    values *= np.tile(1 / np.array(STD, np.float32), 32)
    return values.reshape(count, 32, 32, 3)


def small_images(o: Any) -> Any:
    images, labels = np.load(f"{o.place}/x.npy", mmap_mode="r"), np.load(f"{o.place}/y.npy")

    def one(indices: Any) -> Any:
        labels[indices]
        return _augmented(images[indices], np.random.default_rng(int(indices[0])))

    def turn() -> Iterator[Any]:
        order = np.random.default_rng().permutation(len(images))
        parts = [order[start : start + o.batch] for start in range(0, len(order), o.batch)]
        if o.threads == 1:
            yield from map(one, parts)
            return
        with concurrent.futures.ThreadPoolExecutor(o.threads) as pool:
            waiting = [pool.submit(one, part) for part in parts[: 2 * o.threads]]
            for part in [*parts[2 * o.threads :], *[None] * 2 * o.threads]:
                yield waiting.pop(0).result()
                if part is not None:
                    waiting.append(pool.submit(one, part))

    return turn


def samples(o: Any) -> Any:
    """Gather rows of memory-mapped arrays by index. `take` is a tenth faster than fancy indexing."""
    opened = lambda: [np.asarray(np.load(f"{o.place}/{name}.npy", mmap_mode="r")) for name in ("images", "labels")]  # noqa: E731
    kept = opened()

    def turn() -> Any:
        images, labels = opened() if o.fresh else kept
        return drawn.takes(
            o, len(labels), lambda rows: {"image": images.take(rows, 0, mode="clip"), "label": labels.take(rows, mode="clip")}
        )

    return turn


def jpegs(o: Any) -> Any:
    """Copy values out of one memory-mapped file whose offsets are known: no system can copy less."""
    files = drawn.photographs(o)
    bodies = [path.read_bytes() for path in files]
    ends = np.cumsum([0, *map(len, bodies)])
    pathlib.Path(o.place, "flat").write_bytes(b"".join(bodies))
    whole = memoryview(np.memmap(f"{o.place}/flat", np.uint8, "r"))
    del bodies

    return lambda: drawn.takes(o, len(files), lambda rows: [bytes(whole[ends[row] : ends[row + 1]]) for row in rows])


def ingest(o: Any) -> Any:
    """Write the same bytes to one file."""

    def turn() -> int:
        files = drawn.photographs(o)
        with pathlib.Path(o.place, "flat").open("wb") as out:
            for path in files:
                out.write(path.read_bytes())
        return len(files)

    return turn


if __name__ == "__main__":
    serving.serve(globals())

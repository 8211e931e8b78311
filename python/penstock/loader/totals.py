"""Counts what a loader has delivered and spent so far, for `Loader.stats`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# If a consumer waits for more than this share of the time, the loader is too slow. Below this share, the consumer may have waited only
# for the first batch.
STALLED = 0.1


class Totals:
    """Counts for one loader, across all its cores and workers."""

    def __init__(self) -> None:
        self.waiting_seconds = self.elapsed_seconds = 0.0
        # Delivered batches, samples and bytes; damaged samples.
        self._given = np.zeros(4, np.int64)
        # Totals of closed cores and workers: times, peak memory, and storage operations of workers.
        self.spent: dict[str, int] = {}
        self.peak_bytes = 0
        self.read: dict[str, int] = {}

    def note_batch(self, about: Mapping[str, Any]) -> None:
        self._given += np.array([1, len(about["valid"]), about["bytes"], len(about["refused"])])

    def note_spent(self, counts: Sequence[Mapping[str, int]]) -> None:
        """Add the counts of cores or workers that were closed together."""
        self.peak_bytes = max(self.peak_bytes, sum(count["peak_bytes"] for count in counts))
        times = ({name: value for name, value in count.items() if name.endswith("_ns")} for count in counts)
        self.spent = sums(self.spent, *times)

    def stats(
        self, counts: Mapping[str, int], functions: float, processes: int, threads: int, step_seconds: float | None
    ) -> dict[str, Any]:
        """Return statistics. `counts`: sums over all cores; `functions`: seconds in user functions; `threads`: sum over all processes."""
        elapsed = max(self.elapsed_seconds, 1e-9)
        batches, samples, size, refused = self._given.tolist()
        waiting = self.waiting_seconds
        answer: dict[str, Any] = {
            "batches": batches, "samples": samples, "bytes": size, "seconds": elapsed,
            "samples_per_second": samples / elapsed, "bytes_per_second": size / elapsed,
            "waiting_seconds": waiting, "stall": min(1.0, waiting / elapsed), "function_seconds": functions,
            "stages": {stage: counts[f"{stage}_ns"] / 1e9 for stage in ("fetch", "gather", "transform")},
            "occupancy": {stage: counts[f"{stage}_ns"] / 1e9 / elapsed / threads for stage in ("gather", "transform")},
            "kept_bytes": counts["kept_bytes"], "peak_bytes": max(self.peak_bytes, counts["peak_bytes"]), "refused": refused,
        }  # fmt: skip
        if step_seconds is not None and batches:
            busy = sum(counts[f"{stage}_ns"] for stage in ("gather", "transform")) / 1e9 / threads + functions / processes
            # A stalled consumer receives batches as fast as they are made.
            made = elapsed if waiting > STALLED * elapsed else max(busy, waiting)
            answer["accelerator_utilisation"] = step_seconds / max(step_seconds, made / batches)
        return answer


def sums(*counts: Mapping[str, int]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for count in counts:
        for name, value in count.items():
            totals[name] = totals.get(name, 0) + value
    return totals

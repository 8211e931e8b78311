"""Loader reports: the expected cost of an epoch, what was delivered and spent so far, and a live progress line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.loader.order import JOINED
from penstock.loader.results.kinds import described

if TYPE_CHECKING:
    from penstock import _core
    from penstock.loader.loader import Loader


def explained(loader: Loader) -> dict[str, str]:
    """Describe the cost of an epoch and how well it is shuffled. Cost: plans up to 131,072 draws, and reads the tails of their data files."""
    steps, draws = len(loader), loader._core.epoch_samples
    mean = [source.sizes[0] for source in loader.recipe.sources]
    total = (
        mean[0] * draws
        if loader.recipe.mix is None
        else sum(m * len(source.view) for m, source in zip(mean, loader.recipe.sources, strict=True))
        * draws
        / max(1, sum(len(source.view) for source in loader.recipe.sources))
        if loader.recipe.mix == JOINED
        else sum(m * draws * share for m, share in zip(mean, loader.recipe.mix["shares"], strict=True)) / sum(loader.recipe.mix["shares"])
    )
    looked = sorted({int(step) for step in np.linspace(0, max(0, steps - 2), 8)}) if steps else []
    probe = loader.recipe.open((0, 0))
    quality = _quality(loader, probe, looked)
    windowed = next((source for source in loader.recipe.sources if source.order["kind"] == "window"), None)
    # A run in a window is read whole: once by one rank or, in a mixture, once by each rank that draws from it.
    parts = 1 if windowed and loader.recipe.mix else loader.world_size
    counted, kept = probe.foreseen_requests(max(1, loader.recipe.processes))
    requests, moved = (sum(counts) for counts in zip(*counted, strict=True))
    mapped = all(source.view._snapshot.mapped and source.view._files is None for source in loader.recipe.sources)
    foreseen = loader._core.foreseen(loader._position.step)  # Bytes in memory, in the cache, and in neither, and requests.
    in_parts, at_first = probe.columns_in_parts, " if the cache is empty at first"
    if foreseen and kept is None and len(loader.recipe.sources) == 1 and not in_parts:
        (moved, requests), at_first = foreseen[2:], ""
    answer = {
        "epoch": f"{draws} samples in {steps} steps of {loader.global_batch_size} "
        f"({loader.global_batch_size // loader.world_size} per rank)",
        "order": ", ".join(json.dumps(source.order) for source in loader.recipe.sources),
        "bytes": f"about {size_text(total)} per epoch, up to {size_text(total / parts)} per rank",
        "requests": f"about {requests:,.0f} per rank and epoch, which transfer {size_text(moved)}{at_first}"
        if requests
        else "none: files are mapped"
        if mapped
        else "one per file"
        if any(source.view._files is not None for source in loader.recipe.sources)
        else "none: all data is cached",
        "memory": f"up to {size_text(loader.options.settings.memory_bytes)} for batches prepared in advance and for windows; "
        f"the fixed-shape columns of a batch take {size_text(loader._core.least_bytes)}",
        "shuffle": f"a batch draws from {min(1.0, quality):.0%} as many regions of the data as a full permutation would",
    }
    if in_parts:
        answer["parts"] = (
            f"of large samples in {', '.join(f'`{name}`' for name in in_parts)}, only the boxes that the first crops need are read"
        )
    if foreseen is not None:
        held, cached, cold = map(size_text, foreseen[:3])
        in_memory = f"{held} of the data files are in memory, " if foreseen[0] else ""
        answer["cache"] = (
            f"{in_memory}{cached} of the next epoch are in the cache, {cold} will be fetched{', besides the parts' if in_parts else ''}"
        )
    if kept is not None:
        answer["kept"] = _kept(*kept, loader.options.shuffle is not False)
    answer["columns"] = described(loader.recipe.stages.kinds, loader._core.results(), loader.recipe.stages.has_functions)
    for source in loader.recipe.sources:
        need, held_tails = source.tail_bytes(loader.global_batch_size // loader.world_size)
        if need and not source.window_runs:
            answer["tails"] = (
                f"a batch comes from data files whose tails take {size_text(need)}, and {size_text(held_tails)} of them are kept. The others are "
                f"read again for each batch, unless ps.configure(memory_bytes={4 * need}) keeps them"
            )
    if windowed:
        order = windowed.order
        answer["window"] = (
            f"{order['window_samples']} samples, {size_text(windowed.window_bytes)} over {order['lanes']} lanes, in runs of {order['run_samples']}; "
            f"a rank holds up to {size_text(loader.recipe.window_bytes())}"
        )
    return answer


def _kept(total: int, room: int, twice: int, again: int, shuffled: bool) -> str:
    """Describe what a loader keeps in its own memory, in bytes: of what it reads, and what it fetches more than once."""
    later = "" if shuffled else " until the loop ends. A stream of several epochs is one loop"
    if total <= room:
        return f"all {size_text(total)} are fetched once, and then stay in this loader's memory{later}"
    repeated = f"{size_text(twice)} are fetched more than once in the first epoch, and " if twice else ""
    again_text = f"{repeated}{size_text(again)} are fetched again in each later epoch"
    return f"up to {size_text(room)} of {size_text(total)}, the data that is read next{later}. {again_text}"


def _quality(loader: Loader, probe: _core.Loader, looked: list[int]) -> float:
    """Return how widely the batches of these steps draw compared with a full permutation."""
    distinct, full = [], []
    for step in looked:
        _, sources, positions, _ = probe.places(step)
        for number, source in enumerate(loader.recipe.sources):
            mine = positions[sources == number]
            # Divide the source into as many equal parts as the batch has samples. A full permutation draws from 63 % of the parts.
            count = len(mine)
            distinct.append(len(np.unique(mine * count // max(1, len(source.view)))))
            full.append(count * (1 - (1 - 1 / count) ** count) if count else 0)
    return sum(distinct) / sum(full) if sum(full) else 1.0


def size_text(count: float) -> str:
    """Format a number of bytes for human readers."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


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

    def note_times(self, waiting: float, elapsed: float) -> None:
        self.waiting_seconds += waiting
        self.elapsed_seconds += elapsed

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


class Line:
    """A live line: progress, speed, and the share of time spent waiting."""

    def __init__(self, loader: Loader) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self.loader = loader
        self.bar = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}  {task.fields[text]}"),
            TimeElapsedColumn(),
        )
        self.task = self.bar.add_task("", total=len(loader), epoch=loader.epoch, text="")
        self.bar.start()

    def update(self) -> None:
        loader = self.loader
        stats = loader.stats()
        epoch, draw = loader._core.begin_of(loader._position.step)  # The batch that is about to be delivered.
        text = f"{stats['samples_per_second']:,.0f} samples/s, waited {stats['stall']:.0%}"
        self.bar.update(self.task, completed=draw // loader.global_batch_size + 1, epoch=epoch, text=text)

    def close(self) -> None:
        self.bar.stop()

"""Loader reports: the expected cost of an epoch, and a live progress line."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.loader.order import JOINED

if TYPE_CHECKING:
    from penstock.loader.loader import Loader


def _samples(loader: Loader) -> int:
    return sum(len(source.view) for source in loader.recipe.sources)


def explained(loader: Loader) -> dict[str, str]:
    """Describe the cost of an epoch and how well it is shuffled. Cost: reads the manifest and some data-file tails."""
    steps, draws = len(loader), loader._core.epoch_samples
    mean = [source.sample_bytes for source in loader.recipe.sources]
    total = (
        mean[0] * draws
        if loader.recipe.mix is None
        else sum(m * len(source.view) for m, source in zip(mean, loader.recipe.sources, strict=True)) * draws / max(1, _samples(loader))
        if loader.recipe.mix == JOINED
        else sum(m * draws * share for m, share in zip(mean, loader.recipe.mix["shares"], strict=True)) / sum(loader.recipe.mix["shares"])
    )
    looked = sorted({int(step) for step in np.linspace(0, max(0, steps - 2), 8)}) if steps else []
    asked_of, quality = _sampled(loader, looked)
    windowed = next((source for source in loader.recipe.sources if source.order["kind"] == "window"), None)
    # A run in a window is read whole: once by one rank or, in a mixture, once by each rank that draws from it.
    parts = 1 if windowed and loader.recipe.mix else loader.world_size
    requests, asked_bytes = (sum(counts) for counts in zip(*asked_of, strict=True))
    asked, moved = requests / max(1, len(looked)) * steps, asked_bytes / max(1, len(looked)) * steps
    planned = loader._core.kept(loader._step)
    if windowed:
        asked, moved = draws / windowed.order["run_samples"] / parts, total / parts
    elif any(not source.view._snapshot.mapped for source in loader.recipe.sources):
        known = map(float, planned[3][0]) if planned else (0.0, 0.0)
        others = _ranged(loader, [[count / max(1, len(looked)) * steps for count in counts] for counts in asked_of], planned)
        asked, moved = (one + other for one, other in zip(known, others, strict=True))
    mapped = all(source.view._snapshot.mapped and source.view._files is None for source in loader.recipe.sources)
    foreseen = loader._core.foreseen(loader._step)  # Bytes in memory, in the cache, and in neither.
    answer = {
        "epoch": f"{draws} samples in {steps} steps of {loader.global_batch_size} "
        f"({loader.global_batch_size // loader.world_size} per rank)",
        "order": ", ".join(json.dumps(source.order) for source in loader.recipe.sources),
        "bytes": f"about {size_text(total)} per epoch, up to {size_text(total / parts)} per rank",
        "requests": f"about {asked:,.0f} per rank and epoch, which transfer {size_text(moved)} if the cache is empty at first"
        if requests
        else "none: files are mapped"
        if mapped
        else "one per file"
        if any(source.view._files is not None for source in loader.recipe.sources)
        else ("for what is not in the cache" if foreseen and foreseen[2] else "none: all data is cached"),
        "memory": f"up to {size_text(loader.options.ints.memory_bytes)} for batches prepared in advance and for windows; "
        f"the fixed-shape columns of a batch take {size_text(loader._core.least_bytes)}",
        "shuffle": f"a batch draws from {min(1.0, quality):.0%} as many regions of the data as a full permutation would",
    }
    if foreseen is not None:
        held, cached, cold = map(size_text, foreseen)
        in_memory = f"{held} of the data files are in memory, " if foreseen[0] else ""
        answer["cache"] = f"{in_memory}{cached} of the next epoch are in the cache, {cold} will be fetched"
    if planned is not None:
        answer["kept"] = _kept(*planned)
    loose = [name for name, _, shape, image in loader._core.results() if image and None in shape]
    if loose:
        names = ", ".join(f"`{name}`" for name in loose)
        answer["images"] = (
            f"{names} {'is' if len(loose) == 1 else 'are'} one array if all images of a batch have the same size, and otherwise a list; "
            "T.Resize((height, width)) guarantees one array"
        )
    for source in loader.recipe.sources:
        need, kept = source.tail_bytes(loader.global_batch_size // loader.world_size)
        if need and not source.window_runs:
            answer["tails"] = (
                f"a batch comes from data files whose tails take {size_text(need)}, and {size_text(kept)} of them are kept. The others are "
                f"read again for each batch, unless ps.configure(memory_bytes={4 * need}) keeps them"
            )
    if windowed:
        order = windowed.order
        answer["window"] = (
            f"{order['window_samples']} samples, {size_text(windowed.window_bytes)} over {order['lanes']} lanes, in runs of {order['run_samples']}; "
            f"a rank holds up to {size_text(loader.recipe.window_bytes())}"
        )
    return answer


def _ranged(loader: Loader, asked_of: list[list[float]], planned: Any) -> tuple[float, float]:
    """Return the requests and bytes of an epoch, from those that its batches would have without the cache of blocks. Sources that the loader
    keeps in its own memory are left out.
    """
    asked = moved = 0.0
    for number, (source, (some, some_bytes)) in enumerate(zip(loader.recipe.sources, asked_of, strict=True)):
        if source.view._snapshot.mapped or (planned and planned[0][number]):
            continue
        gap, kept = source.view._snapshot.request_cost()
        stored, decoded, block, spanned, _ = source.view._column_bytes(source.columns)
        if spanned <= kept:
            # The cache can hold everything from the source's first block to its last. Each block is read once, in ranges that join
            # neighbouring blocks or, if the ranges of a batch are longer, in ranges of that length.
            some, some_bytes = min(some, stored / max(gap, some_bytes / max(1.0, some)) + 1), min(some_bytes, stored)
        elif block:
            # The cache holds some blocks. The hit rate is proportional to the cached share, but each block is read at least once.
            missed = max(0.0, 1 - 2 * kept / max(1, decoded))
            blocks = len(source.columns) * decoded / block
            some, some_bytes = max(some * missed, min(some, blocks)), max(some_bytes * missed, min(some_bytes, stored))
        asked, moved = asked + some, moved + some_bytes
    return asked, moved


def _kept(_sources: list[bool], own: int, room: int, fetches: list[tuple[int, int]]) -> str:
    """Describe what a loader keeps in its own memory: the bytes of its samples, the memory for them, and the fetches of two epochs."""
    if own <= room:
        return f"all {size_text(own)} are fetched once, and then stay in this loader's memory"
    again = size_text(fetches[1][1])
    return f"{size_text(room)} of {size_text(own)} stay in this loader's memory; about {again} are fetched again in each epoch"


def _sampled(loader: Loader, looked: list[int]) -> tuple[list[list[int]], float]:
    """Return the requests and bytes of these steps by source, and how widely they draw compared with a full permutation."""
    probe = loader.recipe.open((0, 0))
    asked_of = [[0, 0] for _ in loader.recipe.sources]  # Requests and bytes of the sampled batches, by source.
    distinct, full = [], []
    for step in looked:
        _, sources, positions, _ = probe.places(step)
        for number, source in enumerate(loader.recipe.sources):
            mine = positions[sources == number]
            if len(mine) and not source.view._snapshot.mapped:
                ranges = source.view._view.ranges(np.sort(mine), list(source.columns))
                asked_of[number][0] += len(ranges)
                asked_of[number][1] += sum(end - begin for _, begin, end in ranges)
            # Divide the source into as many equal parts as the batch has samples. A full permutation draws from 63 % of the parts.
            count = len(mine)
            distinct.append(len(np.unique(mine * count // max(1, len(source.view)))))
            full.append(count * (1 - (1 - 1 / count) ** count) if count else 0)
    return asked_of, sum(distinct) / sum(full) if sum(full) else 1.0


def size_text(count: float) -> str:
    """Format a number of bytes for human readers."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


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
        epoch, _ = loader._core.begin_of(loader._step)
        self.task = self.bar.add_task("", total=len(loader), epoch=epoch, text="")
        self.bar.start()

    def update(self) -> None:
        loader = self.loader
        stats = loader.stats()
        epoch, draw = loader._core.begin_of(loader._step)  # The batch that is about to be delivered.
        text = f"{stats['samples_per_second']:,.0f} samples/s, waited {stats['stall']:.0%}"
        self.bar.update(self.task, completed=draw // loader.global_batch_size + 1, epoch=epoch, text=text)

    def close(self) -> None:
        self.bar.stop()

"""A recipe: everything that determines the contents of batches. Loading a state replaces its sources, mixture, seed and order block."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock import _core
from penstock.errors import InvalidInputError, NotFoundError
from penstock.loader.options import Settings
from penstock.loader.order import JOINED, checked_mix
from penstock.loader.report import size_text, sums
from penstock.loader.source import Source
from penstock.loader.stages import Stages
from penstock.values.checks import whole, whole_seed
from penstock.views.concat import union_of
from penstock.views.readable import Batch

STATE_FORMAT = 1
# Version of the permutations, window orders and mixtures, whose results are frozen in crates/loader/tests/golden.
PERMUTATION = 2
# Memory needed to fetch windows, in addition to their contents: thread stacks, plans, and freed memory that the allocator keeps.
FETCHING_BYTES = 24 << 20


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Sources with their orders, and how their samples are processed. Picklable if the functions of the stages are."""

    sources: list[Source]
    mix: dict[str, Any] | None
    # Maps each result to its column.
    outputs: dict[str, str]
    stages: Stages
    settings: Settings
    # Number of Python workers to use.
    processes: int

    def open(self, base: tuple[int, int]) -> _core.Loader:
        """Create the core of a loader whose step 0 begins at this epoch and draw. Raises InvalidInputError if the memory budget is too
        small.
        """
        held, memory_bytes = self.window_bytes(), self.settings.memory_bytes
        beside = FETCHING_BYTES if held else 0
        declared = {
            **vars(self.settings),
            "names": [source.name for source in self.sources],
            "outputs": list(self.outputs.items()),
            "transform": self.stages.declared,
            "listed": self.stages.left_to_python(list(self.outputs)),
            "orders": [source.order for source in self.sources],
            "mix": None if self.mix == JOINED else self.mix,
            "joined": self.mix == JOINED,
            "codes": self._codes(),
            "base": base,
            "row_ids": "_row_id" in self.stages.extras,
            "window_bytes": held + beside,
        }
        views, files = [source.view._view for source in self.sources], [source.view._files for source in self.sources]
        core = _core.Loader(views, files, [source.weights for source in self.sources], _json(declared))
        in_parts = core.columns_in_parts
        core.expect(int(max(source.fetched_bytes(in_parts) + self._tail_bytes(source) for source in self.sources)))
        workers = max(1, self.processes)  # Each worker holds its own windows.
        batches = 2 * core.least_bytes  # The current batch and the previously delivered batch.
        need = workers * (held + batches + beside)
        if held and need > memory_bytes:
            raise InvalidInputError(
                f"the window takes up to {size_text(held)} on each rank{' and in each worker' if workers > 1 else ''}, two batches "
                f"take {size_text(batches)} and fetching takes {size_text(beside)}: {size_text(need)} in total, but memory_bytes is "
                f"{size_text(memory_bytes)}",
                hint=f"pass memory_bytes={int(1.5 * need)}, or use a smaller window",
            )  # fmt: skip
        return core

    def finished(self, core: _core.Loader, batch: Batch, about: dict[str, Any]) -> Batch:
        """Apply the stages that are in Python to a batch of the core."""
        return self.stages.apply(batch, about, core.number_of(about["step"]), self.settings.seed)

    def _codes(self) -> list[list[tuple[str, list[int]]]]:
        """Return the codes in batches for the codes of each source: those of all sources' words, in the columns whose words differ."""
        found: list[list[tuple[str, list[int]]]] = [[] for _ in self.sources]
        schema = self.sources[0].view.schema
        for column in dict.fromkeys(self.outputs.values()) if len(self.sources) > 1 else ():
            if column in schema and schema[column].is_coded:
                vocabularies = [source.view.vocabulary(column) for source in self.sources if column in source.view.schema]
                _, codes = union_of(vocabularies)
                belong = {
                    source.view.schema[column].belongs_to for source in self.sources if column in source.view.schema
                }  # Does not matter to a reader.
                differ = len(belong) > 1 or any(own != vocabularies[0] for own in vocabularies)
                if len(vocabularies) == len(self.sources) and differ:
                    for own, known in zip(found, codes, strict=True):
                        own.append((column, known))
        return found

    def _tail_bytes(self, source: Source) -> float:
        """Return the bytes of data-file tails per fetched sample; 0 if the tails that a batch needs are kept."""
        if source.window_runs:
            return 0.0  # The window keeps the tails in memory.
        settings = self.settings
        draws = settings.global_batch_size // settings.world_size
        need, _ = source.tail_bytes(draws)
        if need > settings.memory_bytes:
            raise InvalidInputError(
                f"a batch of {draws} samples comes from data files whose tails take {size_text(need)}, but memory_bytes is "
                f"{size_text(settings.memory_bytes)}",
                hint=f"use memory_bytes={2 * need}, a smaller batch or ps.Window, or keep the tails: ps.configure(memory_bytes={4 * need})",
            )
        return need / max(1, draws)

    def window_bytes(self) -> int:
        """Return the maximum size of the windows that this rank holds: those of its own lanes or, in a mixture, of all lanes.

        In a mixture, draws are divided differently, so a rank may draw from any lane.
        """
        parts = 1 if self.mix else self.settings.world_size
        tails = sum(source.tail_bytes(2 * source.window_runs // parts)[0] for source in self.sources)
        return int(sum(source.held_bytes for source in self.sources) / parts) + tails

    def counted(self) -> dict[str, int]:
        """Return counts of the storage operations of all sources, counting each handle once."""
        return sums(*(source.view.stats() for source in {source.view._counts(): source for source in self.sources}.values()))

    def state(self) -> dict[str, Any]:
        """Return the part of a loader's state that does not depend on its place."""
        own = {name: getattr(self.settings, name) for name in ("seed", "order_block_samples", "global_batch_size", "last_batch")}
        sources = [source.state() for source in self.sources]
        return {"format": STATE_FORMAT, "permutation": PERMUTATION, "sources": sources, "mix": self.mix, **own}

    def loaded(self, state: Mapping[str, Any]) -> tuple[Recipe, tuple[int, int]]:
        """Return this recipe with the sources and order of a loader's state, and the state's epoch and draw."""
        try:
            if (state["format"], state["permutation"]) != (STATE_FORMAT, PERMUTATION):
                theirs, ours = f"{state['format']}.{state['permutation']}", f"{STATE_FORMAT}.{PERMUTATION}"
                raise InvalidInputError(
                    f"cannot load a state in format {theirs}: this release reads {ours}",
                    hint="the order would differ in this release; continue with the release that saved the state",
                )  # fmt: skip
            sources = list(state["sources"])
            mix = checked_mix(state["mix"], len(sources))
            place, seed = (whole(state["epoch"], "epoch", 0), whole(state["draw"], "draw", 0)), whole_seed(state["seed"])
            block = whole(state["order_block_samples"], "order_block_samples", 1)
            if len(sources) != len(self.sources):
                raise InvalidInputError(f"cannot load the state: it has {len(sources)} sources, but this loader has {len(self.sources)}")
            found = [own.loaded(state_of) for own, state_of in zip(self.sources, sources, strict=True)]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, InvalidInputError | NotFoundError):
                raise
            raise InvalidInputError(f"this is not a loader state: {error!r}", hint="pass the result of state_dict()") from error
        settings = dataclasses.replace(self.settings, seed=seed, order_block_samples=block)
        return dataclasses.replace(self, sources=found, mix=mix, settings=settings), place

    def for_worker(self, workers: int) -> Recipe:
        """Return the recipe for one of `workers` processes, which share the memory and thread budgets."""
        memory_bytes, threads = (max(1, budget // workers) for budget in (self.settings.memory_bytes, self.settings.threads))
        settings = dataclasses.replace(self.settings, memory_bytes=memory_bytes, threads=threads)
        return dataclasses.replace(self, settings=settings, processes=0, stages=dataclasses.replace(self.stages, seconds=0.0))


def _json(declared: Mapping[str, Any]) -> str:
    def plain(value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        raise InvalidInputError(f"{value!r} in the loader's options is neither a number nor text")

    try:
        return json.dumps(declared, default=plain, allow_nan=False)
    except ValueError as error:
        raise InvalidInputError("numbers in transforms must be finite") from error

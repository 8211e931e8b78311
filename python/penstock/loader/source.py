"""A view that a loader reads, with its order and the cost of that order."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock import _core
from penstock.errors import InvalidInputError, NotFoundError
from penstock.loader.order import LANES, Replacement, Window, checked_order
from penstock.values.checks import whole
from penstock.views.view import View

# Samples of a larger mean size are likely to be read in parts.
PARTS_FROM_BYTES = 64 << 10


@dataclasses.dataclass
class Source:
    """A view that a loader reads, with its order."""

    name: str
    view: View
    # The columns to read.
    columns: Sequence[str]
    order: dict[str, Any]
    weights: _core.Weights | None = None
    # The weights as an array.
    given: npt.NDArray[np.float64] | None = None
    # Cached `sizes`. In Python 3.11, a cached_property would use a lock, which a forked child may inherit in the locked state.
    measured: tuple[float, float, float] | None = None
    # Cached `selection`.
    digest: str | None = None
    # Cached numbers for `tail_bytes`.
    tails: tuple[int, int, int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "weights": None}  # The core's table is rebuilt from `given`.

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.weights = None if self.given is None else _core.Weights(self.given)

    @classmethod
    def ordered(cls, name: str, view: View, shuffle: bool | Window | Replacement, columns: Sequence[str], block: int) -> Source:
        """Order a view by `shuffle`. Converts window bytes to samples, using the mean size of `columns`. The default number of lanes
        divides `block`.
        """
        if shuffle is True or shuffle is False:
            return Source(name, view, columns, {"kind": "full" if shuffle else "sequential"})
        if isinstance(shuffle, Replacement):
            samples = len(view) if shuffle.samples is None else whole(shuffle.samples, "samples", 0)
            if shuffle.weights is None:
                return Source(name, view, columns, {"kind": "replacement", "samples": samples, "weights": None})
            try:
                weights = np.ascontiguousarray(shuffle.weights, dtype=np.float64)
            except (TypeError, ValueError) as error:
                raise InvalidInputError(f"weights do not form an array of numbers: {error}") from error
            if weights.ndim != 1:
                raise InvalidInputError(f"the weights have shape {weights.shape}, expected ({len(view)},)")
            digest = hashlib.sha256(weights.tobytes()).hexdigest()[:32]
            return Source(
                name, view, columns, {"kind": "replacement", "samples": samples, "weights": digest}, _core.Weights(weights), weights
            )
        if not isinstance(shuffle, Window):
            raise InvalidInputError(f"shuffle={shuffle!r}, expected True, False, ps.Window or ps.Replacement")
        window_bytes = whole(shuffle.bytes, "Window bytes", 1)
        measured = _sizes(view, columns)
        mean = max(1.0, measured[1])
        window = max(1, int(window_bytes / mean))
        run_bytes = min(max(window_bytes / 64, 64 << 10), 16 << 20)
        run = 1 << max(0, int(math.log2(max(1.0, run_bytes / mean))))
        run = min(run, window)
        if shuffle.lanes is None:
            common = math.gcd(block, LANES)
            most = max(1, min(window, len(view)) // (4 * run))  # Leaves each lane several runs to shuffle.
            lanes = max(lanes for lanes in range(1, common + 1) if common % lanes == 0 and lanes <= most)
        else:
            lanes = whole(shuffle.lanes, "lanes", 1)
        return Source(
            name, view, columns, {"kind": "window", "run_samples": run, "window_samples": window, "lanes": lanes}, measured=measured
        )

    @staticmethod
    def joined(sources: list[Source], shuffle: bool | Window | Replacement, samples: int) -> list[Source]:
        """Give sources that are joined one order, which has the samples of all."""
        order = dict(sources[0].order)
        if isinstance(shuffle, Replacement) and shuffle.samples is None:
            order["samples"] = samples
        return [dataclasses.replace(source, order=order) for source in sources]

    @property
    def sizes(self) -> tuple[float, float, float]:
        """Sizes in these columns, in bytes: one stored sample, one decoded sample, and one block of each column.

        Stored sizes are means over the snapshot; decoded sizes are means over the fragments that have the columns.
        Cost: reads the whole manifest and a few tails, once.
        """
        if self.measured is None:
            self.measured = _sizes(self.view, self.columns)
        return self.measured

    def fetched_bytes(self, in_parts: Sequence[str]) -> float:
        """Memory for one fetched sample and, unless a window holds them, its whole blocks. For mapped files, this is 0 and requires
        no reads. Large samples of the columns `in_parts` are not fetched whole.
        """
        if self.view._snapshot.mapped and self.view._files is None:
            return 0.0
        large = [name for name in in_parts if _sizes(self.view, [name])[1] > PARTS_FROM_BYTES]
        sizes = _sizes(self.view, [name for name in self.columns if name not in large]) if large else self.sizes
        return sizes[1] + (0.0 if self.order["kind"] == "window" else sizes[2])

    @property
    def window_bytes(self) -> float:
        """Decoded bytes of a window; 0 if the order does not use windows."""
        return self.sizes[1] * min(int(self.order["window_samples"]), len(self.view)) if self.order["kind"] == "window" else 0.0

    def tail_bytes(self, draws: int) -> tuple[int, int]:
        """Return the bytes of data-file tails needed for `draws` draws, and the bytes of tails that remain in memory.

        The first number is 0 if all tails remain in memory or files are mapped. Cost: reads the whole manifest, once.
        """
        if self.view._snapshot.mapped or not draws:
            return 0, 0
        if self.tails is None:
            self.tails = self.view._kept_bytes(self.columns)
        every, largest, kept = self.tails
        need = min(every, draws * largest)
        return (need, kept) if need > kept else (0, kept)

    @property
    def window_runs(self) -> int:
        """Number of runs that a window draws from; 0 if the order does not use windows."""
        if self.order["kind"] != "window":
            return 0
        return math.ceil(min(int(self.order["window_samples"]), len(self.view)) / int(self.order["run_samples"]))

    @property
    def held_bytes(self) -> float:
        """The maximum size in bytes of the windows on all ranks together; 0 for mapped files, which the kernel caches.

        Counts two windows, because the next one begins while the current one is ending. Runs begin and end inside blocks, which are held
        whole. This adds half a block on average at each end, and a quarter of a block as a margin.
        """
        if self.view._snapshot.mapped or self.order["kind"] != "window":
            return 0.0
        return 2 * (self.window_bytes + 1.25 * self.window_runs * self.sizes[2])

    def selection(self) -> str:
        """Return an identifier for the selected samples: "all", or a hash of their description."""
        if self.digest is None:
            view = self.view._view
            self.digest = "all" if view.is_all() else hashlib.sha256(view.description(False)).hexdigest()[:32]
        return self.digest

    def loaded(self, state: Mapping[str, Any]) -> Source:
        """Return this source with the snapshot and order from a state."""
        own = self.state()
        for what in ("name", "dataset", "selection"):
            if state[what] != own[what]:
                there = str(state["snapshot"])
                theirs, ours = (f"{one['origin']} ({one[what]})" if what == "selection" else one[what] for one in (state, own))
                other = f'commits since then changed it: make the same view of ps.open("{self.view.uri}", snapshot="{there}")'
                raise InvalidInputError(
                    f"cannot load the state: its {what} is {theirs}, but this loader reads {ours}",
                    hint=other if what == "selection" and there != own["snapshot"] else self.view._other(what, int(state["samples"])),
                )  # fmt: skip
        if state["order"].get("weights") != self.order.get("weights"):
            raise InvalidInputError(
                "cannot load the state: its weights differ from this loader's", hint="pass the weights that the state was saved with"
            )
        if state["snapshot"] == own["snapshot"] and state["order"] == self.order:
            return self
        view = self.view
        if state["snapshot"] != own["snapshot"]:
            snapshot = _reopened(view, str(state["snapshot"]))
            view = View(snapshot, snapshot.view(None if view._view.is_all() else view._view.description(True)))
        return Source(str(state["name"]), view, self.columns, checked_order(state["order"]), self.weights, self.given)

    def state(self) -> dict[str, Any]:
        return {
            "name": self.name, "dataset": self.view._identity, "snapshot": self.view.snapshot, "selection": self.selection(),
            "origin": self.view._view.origin(),
            "samples": len(self.view), "order": self.order,
        }  # fmt: skip


def _sizes(view: View, columns: Sequence[str]) -> tuple[float, float, float]:
    stored, blocks, decoded = view._column_bytes(columns)
    return stored / max(1, len(view._snapshot)), decoded, float(blocks)


def _reopened(view: View, snapshot: str) -> _core.Snapshot:
    try:
        return _core.open(view.uri, snapshot, *view._snapshot.options())
    except NotFoundError as error:
        raise NotFoundError(
            f"cannot load the state: its snapshot {snapshot} no longer exists",
            code="snapshot-not-found",
            hint="train with pin=True to keep the snapshot",
        ) from error

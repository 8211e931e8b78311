"""The orders that users can pass to a loader: `Window` and `Replacement`. Also checks the orders and mixtures in states."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from penstock.errors import InvalidInputError
from penstock.values.checks import whole

# In the place of a mixture: the sources are joined, and share one order.
JOINED = {"joined": True}
# What a mixture can do once it has drawn all samples from a source.
EXHAUSTED = ("repeat", "stop", "raise")
# The default number of lanes divides this number, so that the lanes can be divided evenly among ranks at many world sizes.
LANES = 48
# The kinds of orders and the numeric fields of each.
_ORDERS = {"sequential": (), "full": (), "window": ("run_samples", "window_samples", "lanes"), "replacement": ("samples",)}


def checked_order(state: Mapping[str, Any]) -> dict[str, Any]:
    """Check that all numbers of the order in a state are in range, and return the order."""
    kind = state["kind"]
    if kind not in _ORDERS or set(state) - {"kind", "weights", *_ORDERS[kind]}:
        raise InvalidInputError(f"this is not a loader state: its order is {dict(state)!r}")
    for what in _ORDERS[kind]:
        whole(state[what], what, 0 if kind == "replacement" else 1)
    return dict(state)


def checked_mix(state: Any, sources: int) -> dict[str, Any] | None:
    """Check that all numbers of the mixture in a state are in range, and return the mixture."""
    if state is None or state == JOINED:
        return state  # type: ignore[no-any-return]
    if set(state) != {"shares", "epoch_samples", "exhausted"} or state["exhausted"] not in EXHAUSTED or len(state["shares"]) != sources:
        raise InvalidInputError(f"this is not a loader state: its mixture is {state!r}")
    shares = [whole(share, "a share of the mixture", 0) for share in state["shares"]]
    return {"shares": shares, "epoch_samples": whole(state["epoch_samples"], "epoch_samples", 1), "exhausted": state["exhausted"]}


@dataclasses.dataclass(frozen=True)
class Window:
    """Shuffle within windows of about `bytes` bytes: for remote data, and for disks that are fastest with long reads.

    Shuffles whole runs of neighbouring samples, then the samples within windows of many runs. `loader.explain()` reports the
    cost and quality of the shuffle. `lanes`: the number of streams, divided among the ranks so that each rank reads its own blocks.
    """

    bytes: int
    lanes: int | None = None


@dataclasses.dataclass(frozen=True)
class Replacement:
    """Draw with replacement: `samples` per epoch (default: the size of the view), by `weights` (one per sample) or uniformly."""

    samples: int | None = None
    weights: npt.ArrayLike | None = None

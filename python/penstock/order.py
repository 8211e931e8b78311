"""What a loader visits and in which order: the options `Window`, `Replacement` and `mix`, and the saved state of an order."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock import _core
from penstock.errors import InvalidInputError, NotFoundError
from penstock.values.checks import is_whole
from penstock.view import View

if TYPE_CHECKING:
    from penstock.loader import Loader

# What a mixture does once it has drawn all samples of a source.
EXHAUSTED = ("repeat", "stop", "raise")

# The default number of lanes divides this number, so that many world sizes share the lanes evenly.
LANES = 48


def whole(value: Any, what: str, least: int, below: int = 2**62) -> int:
    """Return a whole number from `least` to below `below`. Raises: InvalidInputError for anything else."""
    if not is_whole(value) or not least <= value < below:
        power = below.bit_length() - 1
        raise InvalidInputError(
            f"{what}={value!r}, expected a whole number of at least {least} and less than 2^{power}", code="invalid-argument"
        )
    return int(value)


def whole_seed(value: Any) -> int:
    """Return a seed: any unsigned 64-bit number, as torch accepts."""
    return whole(value, "seed", 0, 2**64)


def shares_of(weights: Mapping[str, float]) -> list[int]:
    """Return weights as whole numbers: unchanged if all are whole, else as parts of 2^52.

    >>> shares_of({"a": 3.0, "b": 1.0}), sum(shares_of({"a": 0.1, "b": 0.7}))
    ([3, 1], 4503599627370496)
    """
    try:
        total = math.fsum(weights.values())
    except OverflowError:
        total = math.inf
    if not total < math.inf:
        raise InvalidInputError(f"cannot mix: the weights sum to {total}", code="invalid-argument")
    if total < 2**53 and all(weight.is_integer() for weight in weights.values()):
        return [int(weight) for weight in weights.values()]
    shares = {name: round(weight / total * 2**52) for name, weight in weights.items()}
    for name, weight in weights.items():
        if weight > 0 and not shares[name]:
            raise InvalidInputError(f"cannot mix `{name}`: its weight {weight} is too small compared with {total}", code="invalid-argument")
    return list(shares.values())


def checked_mix(state: Any, sources: int) -> dict[str, Any] | None:
    """Return the mixture of a state after checking that all its numbers are in range."""
    if state is None:
        return None
    if set(state) != {"shares", "epoch_samples", "exhausted"} or state["exhausted"] not in EXHAUSTED or len(state["shares"]) != sources:
        raise InvalidInputError(f"this is not a loader state: its mixture is {state!r}", code="invalid-argument")
    shares = [whole(share, "a share of the mixture", 0) for share in state["shares"]]
    return {"shares": shares, "epoch_samples": whole(state["epoch_samples"], "epoch_samples", 1), "exhausted": state["exhausted"]}


# Kinds of orders and the numbers in each.
_ORDERS = {"sequential": (), "full": (), "window": ("run_samples", "window_samples", "lanes"), "replacement": ("samples",)}


def checked_order(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the order of a state after checking that all its numbers are in range."""
    kind = state["kind"]
    if kind not in _ORDERS or set(state) - {"kind", "weights", *_ORDERS[kind]}:
        raise InvalidInputError(f"this is not a loader state: its order is {dict(state)!r}", code="invalid-argument")
    for what in _ORDERS[kind]:
        whole(state[what], what, 0 if kind == "replacement" else 1)
    return dict(state)


@dataclasses.dataclass(frozen=True)
class Window:
    """Shuffle inside windows of about `bytes` bytes: for remote data, and for disks that are fastest with long reads.

    Shuffles whole runs of neighbouring samples, then the samples inside windows of many runs. `loader.explain()` reports the
    cost and quality of the shuffle. `lanes`: streams that are divided among the ranks, so that each rank reads its own blocks.
    """

    bytes: int
    lanes: int | None = None


@dataclasses.dataclass(frozen=True)
class Replacement:
    """Draw with replacement: `samples` per epoch (default: the size of the view), by `weights` (one per sample) or uniformly."""

    samples: int | None = None
    weights: npt.ArrayLike | None = None


@dataclasses.dataclass(frozen=True)
class Mix:
    """Several views combined by `ps.mix`. Supports `loader(…)` like a view."""

    sources: Mapping[str, tuple[View, float]]
    epoch_samples: int
    exhausted: str

    def loader(self, **options: Any) -> Loader:
        """Make a loader of the mixture; see `View.loader`. Request the column `_source` to see where samples come from."""
        from penstock.loader import Loader

        return Loader(self, **options)

    def __len__(self) -> int:
        return self.epoch_samples


def mix(sources: Mapping[str, Any], *, epoch_samples: int | None = None, exhausted: str = "repeat") -> Mix:
    """Mix views in exact proportions: name → view, or (view, weight). The default weight of a view is its size.

    Every block of `order_block_samples` draws (by default a global batch) has each source's share, in shuffled places. At the start of
    any block, the draws of each source differ from its exact share by less than one. `epoch_samples`: by default, the samples of all
    sources together. `exhausted`: "repeat" starts a source again and continues it in the next epoch; "stop" ends the epoch before a
    source would repeat; "raise" refuses an epoch that needs more samples than a source has.

    >>> import penstock as ps
    >>> ds = ps.create("memory://mix", {"number": "int32"})
    >>> receipt = ds.append({"number": range(100)})
    >>> mixed = ps.mix({"low": (ds.select(range(50)), 3), "high": (ds.select(range(50, 100)), 1)}, epoch_samples=80)
    >>> batch = next(iter(mixed.loader(batch_size=8, columns=["number", "_source"], shuffle=True)))
    >>> sorted(batch["_source"].tolist())
    [0, 0, 0, 0, 0, 0, 1, 1]
    """
    if not isinstance(sources, Mapping) or not sources:
        raise InvalidInputError(f"cannot mix {sources!r}: expected a dict of name to view, or to (view, weight)", code="invalid-argument")
    pairs: dict[str, tuple[View, float]] = {}
    for name, given in sources.items():
        view, weight = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
        weight = len(view) if weight is None and isinstance(view, View) else weight
        if not isinstance(name, str):
            raise InvalidInputError(f"cannot mix {name!r}: expected a str as name", code="invalid-argument")
        if not isinstance(view, View) or not isinstance(weight, int | float | np.number) or not 0 <= weight < math.inf:
            raise InvalidInputError(
                f"cannot mix `{name}`: expected a view and a weight of at least 0, got {given!r}", code="invalid-argument"
            )
        pairs[name] = (view, float(weight))
    if not sum(weight for _, weight in pairs.values()):
        raise InvalidInputError("cannot mix: all weights are 0", code="invalid-argument")
    if exhausted not in EXHAUSTED:
        raise InvalidInputError(f"exhausted={exhausted!r}", code="invalid-argument", hint=f"one of {', '.join(EXHAUSTED)}")
    samples = sum(len(view) for view, _ in pairs.values()) if epoch_samples is None else epoch_samples
    return Mix(pairs, whole(samples, "epoch_samples", 1), exhausted)


@dataclasses.dataclass
class Source:
    """A view that a loader reads, with its order."""

    name: str
    view: View
    # The columns that are read.
    columns: Sequence[str]
    order: dict[str, Any]
    weights: _core.Weights | None = None
    # The weights as an array.
    given: npt.NDArray[np.float64] | None = None
    # The cache of `sizes`. Not a cached_property: in Python 3.11 that has a lock, which a forked child may inherit locked.
    measured: tuple[float, float, float] | None = None
    # The cache of `tail_bytes`.
    tails: tuple[int, int, int] | None = None

    @classmethod
    def ordered(cls, name: str, view: View, shuffle: bool | Window | Replacement, columns: Sequence[str], block: int) -> Source:
        """Order a view by `shuffle`. Converts window bytes to samples by the mean size of `columns`; the default lanes divide `block`."""
        if shuffle is True or shuffle is False:
            return Source(name, view, columns, {"kind": "full" if shuffle else "sequential"})
        if isinstance(shuffle, Replacement):
            samples = len(view) if shuffle.samples is None else whole(shuffle.samples, "samples", 0)
            if shuffle.weights is None:
                return Source(name, view, columns, {"kind": "replacement", "samples": samples, "weights": None})
            try:
                weights = np.ascontiguousarray(shuffle.weights, dtype=np.float64)
            except (TypeError, ValueError) as error:
                raise InvalidInputError(f"weights do not form an array of numbers: {error}", code="invalid-argument") from error
            if weights.ndim != 1:
                raise InvalidInputError(f"weights of shape {weights.shape}, expected ({len(view)},)", code="invalid-argument")
            digest = hashlib.sha256(weights.tobytes()).hexdigest()[:32]
            return Source(
                name, view, columns, {"kind": "replacement", "samples": samples, "weights": digest}, _core.Weights(weights), weights
            )
        if not isinstance(shuffle, Window):
            raise InvalidInputError(f"shuffle={shuffle!r}, expected True, False, ps.Window or ps.Replacement", code="invalid-argument")
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

    @property
    def sizes(self) -> tuple[float, float, float]:
        """Bytes of a sample's columns: stored (snapshot mean), decoded (mean of the fragments that have them), and one block of each.

        Cost: reads the whole manifest and a few tails, once.
        """
        if self.measured is None:
            self.measured = _sizes(self.view, self.columns)
        return self.measured

    @property
    def sample_bytes(self) -> float:
        """Stored bytes of a sample's columns."""
        return self.sizes[0]

    @property
    def fetched_bytes(self) -> float:
        """Memory for one fetched sample and its whole blocks, unless a window holds the blocks; 0, at no cost, if files are mapped."""
        if self.view._snapshot.mapped and self.view._files is None:
            return 0.0
        return self.sizes[1] + (0.0 if self.order["kind"] == "window" else self.sizes[2])

    @property
    def window_bytes(self) -> float:
        """Decoded bytes of a window; 0 without windows."""
        return self.sizes[1] * min(int(self.order["window_samples"]), len(self.view)) if self.order["kind"] == "window" else 0.0

    def tail_bytes(self, draws: int) -> tuple[int, int]:
        """Return the bytes of data-file tails that `draws` draws need, and the bytes of tails that are kept.

        The need is 0 if the tails can be kept or files are mapped. Cost: reads the whole manifest, once.
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
        """Number of runs that a window draws from; 0 without windows."""
        if self.order["kind"] != "window":
            return 0
        return math.ceil(min(int(self.order["window_samples"]), len(self.view)) / int(self.order["run_samples"]))

    @property
    def held_bytes(self) -> float:
        """The most window bytes that all ranks hold together; 0 for mapped files, which the kernel holds.

        Counts two windows, because the next one begins while one ends. Runs begin and end inside blocks, which are held whole:
        half a block on average at each end, and a quarter more as a margin.
        """
        if self.view._snapshot.mapped or self.order["kind"] != "window":
            return 0.0
        return 2 * (self.window_bytes + 1.25 * self.window_runs * self.sizes[2])

    def selection(self) -> str:
        """Identify the selected samples: "all", or a hash of the positions."""
        positions = self.view._view.positions()
        return "all" if positions is None else hashlib.sha256(np.ascontiguousarray(positions).tobytes()).hexdigest()[:32]

    def loaded(self, state: Mapping[str, Any]) -> Source:
        """Return the source with the snapshot and order of a state."""
        own = self.state()
        for what in ("name", "dataset", "selection"):
            if state[what] != own[what]:
                raise InvalidInputError(
                    f"cannot load the state: its {what} is {state[what]}, this loader reads {own[what]}", code="invalid-argument",
                    hint=self.view._other(what, int(state["samples"])),
                )  # fmt: skip
        if state["order"].get("weights") != self.order.get("weights"):
            raise InvalidInputError(
                "cannot load the state: its weights differ", code="invalid-argument", hint="pass the weights that the state was taken with"
            )
        if state["snapshot"] == own["snapshot"] and state["order"] == self.order:
            return self
        view = self.view
        if state["snapshot"] != own["snapshot"]:
            snapshot = _reopened(view, str(state["snapshot"]))
            positions = view._view.positions()
            view = View(snapshot, snapshot.view(positions))
        return Source(str(state["name"]), view, self.columns, checked_order(state["order"]), self.weights, self.given)

    def state(self) -> dict[str, Any]:
        return {
            "name": self.name, "dataset": self.view._identity, "snapshot": self.view.snapshot, "selection": self.selection(),
            "samples": len(self.view), "order": self.order,
        }  # fmt: skip


def _sizes(view: View, columns: Sequence[str]) -> tuple[float, float, float]:
    stored, _, blocks, _, decoded = view._column_bytes(columns)
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

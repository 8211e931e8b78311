"""What a loader visits and in which order, as its user says it: `Window`, `Replacement`, `mix`; and the state of that."""

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
from penstock.view import View

if TYPE_CHECKING:
    from penstock.loader import Loader

# Ranks that evenly share the lanes of a window order.
LANES = 48


def whole(value: Any, what: str, least: int) -> int:
    """Give a whole number of at least `least`, or say that it is none."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= value < 2**62:
        raise InvalidInputError(f"{what}={value!r}, expected a whole number of at least {least}", code="invalid-argument")
    return int(value)


@dataclasses.dataclass(frozen=True)
class Window:
    """Shuffle inside windows of about so many bytes: for data that is read from far away, or from disks that like long reads.

    Runs of neighbouring samples are shuffled as wholes, then samples inside windows of many runs. `loader.explain()` says what that
    costs and how good it is. `lanes`: streams that ranks share out, so that each reads blocks of its own.
    """

    bytes: int
    lanes: int | None = None


@dataclasses.dataclass(frozen=True)
class Replacement:
    """Draw with replacement: `samples` an epoch (default: as many as there are), by `weights` (one a sample) or evenly."""

    samples: int | None = None
    weights: npt.ArrayLike | None = None


@dataclasses.dataclass(frozen=True)
class Mix:
    """Several views as one; made by `ps.mix`. Has `loader(…)` as a view has."""

    sources: Mapping[str, tuple[View, float]]
    epoch_samples: int
    exhausted: str

    def loader(self, **options: Any) -> Loader:
        """Make a loader of the mixture; see `View.loader`. Ask for `_source` to see where samples come from."""
        from penstock.loader import Loader

        return Loader(self, **options)

    def __len__(self) -> int:
        return self.epoch_samples


def mix(sources: Mapping[str, Any], *, epoch_samples: int | None = None, exhausted: str = "repeat") -> Mix:
    """Mix views in exact proportions: name → view, or (view, weight); without weights, by their sizes.

    Inside every `order_block_samples` draws (by default a global batch) each source has its share, in shuffled places. `epoch_samples`:
    by default all sources together. `exhausted`: "repeat" begins a source again, and goes on with it in the next epoch; "stop" ends the epoch
    before one would repeat; "raise" refuses an epoch that needs more than there is.

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
        if not isinstance(view, View) or not isinstance(weight, int | float | np.number) or not 0 <= weight < math.inf:
            raise InvalidInputError(
                f"cannot mix `{name}`: expected a view and a weight of at least 0, got {given!r}", code="invalid-argument"
            )
        pairs[name] = (view, float(weight))
    if not sum(weight for _, weight in pairs.values()):
        raise InvalidInputError("cannot mix: all weights are 0", code="invalid-argument")
    if exhausted not in ("repeat", "stop", "raise"):
        raise InvalidInputError(f"exhausted={exhausted!r}", code="invalid-argument", hint="one of repeat, stop, raise")
    samples = sum(len(view) for view, _ in pairs.values()) if epoch_samples is None else epoch_samples
    return Mix(pairs, whole(samples, "epoch_samples", 1), exhausted)


@dataclasses.dataclass
class Source:
    """A view that a loader reads, and how it is ordered."""

    name: str
    view: View
    # Those that are read of it.
    columns: Sequence[str]
    order: dict[str, Any]
    weights: _core.Weights | None = None
    # The weights as they were given.
    given: npt.NDArray[np.float64] | None = None
    # What `sample_bytes` found. No cached_property: Python 3.11's has a lock, which a forked child may inherit.
    measured: float | None = None

    @classmethod
    def ordered(cls, name: str, view: View, shuffle: bool | Window | Replacement, columns: Sequence[str], block: int) -> Source:
        """Order a view as `shuffle` says. A window's bytes become samples here, by the mean of these columns; `block` is shared out to lanes."""
        if shuffle is True or shuffle is False:
            return Source(name, view, columns, {"kind": "full" if shuffle else "sequential"})
        if isinstance(shuffle, Replacement):
            samples = len(view) if shuffle.samples is None else whole(shuffle.samples, "samples", 0)
            if shuffle.weights is None:
                return Source(name, view, columns, {"kind": "replacement", "samples": samples, "weights": None})
            try:
                weights = np.ascontiguousarray(shuffle.weights, dtype=np.float64)
            except (TypeError, ValueError) as error:
                raise InvalidInputError(f"weights make no array of numbers: {error}", code="invalid-argument") from error
            if weights.ndim != 1:
                raise InvalidInputError(f"weights of shape {weights.shape}, expected ({len(view)},)", code="invalid-argument")
            digest = hashlib.sha256(weights.tobytes()).hexdigest()[:32]
            return Source(
                name, view, columns, {"kind": "replacement", "samples": samples, "weights": digest}, _core.Weights(weights), weights
            )
        if not isinstance(shuffle, Window):
            raise InvalidInputError(f"shuffle={shuffle!r}, expected True, False, ps.Window or ps.Replacement", code="invalid-argument")
        window_bytes = whole(shuffle.bytes, "Window bytes", 1)
        mean = max(1.0, _mean_bytes(view, columns))
        window = max(1, int(window_bytes / mean))
        run_bytes = min(max(window_bytes / 64, 64 << 10), 16 << 20)
        run = 1 << max(0, int(math.log2(max(1.0, run_bytes / mean))))
        run = min(run, window)
        if shuffle.lanes is None:
            common = math.gcd(block, LANES)
            most = max(1, window // (4 * run))
            lanes = max(lanes for lanes in range(1, common + 1) if common % lanes == 0 and lanes <= most)
        else:
            lanes = whole(shuffle.lanes, "lanes", 1)
        return Source(name, view, columns, {"kind": "window", "run_samples": run, "window_samples": window, "lanes": lanes})

    @property
    def sample_bytes(self) -> float:
        """What is stored of a sample's columns, by the mean of the whole snapshot. Cost: the whole manifest, once."""
        if self.measured is None:
            self.measured = _mean_bytes(self.view, self.columns)
        return self.measured

    @property
    def fetched_bytes(self) -> float:
        """The same, of what is not mapped; costs nothing where all is."""
        return 0.0 if self.view._snapshot.mapped and self.view._files is None else self.sample_bytes

    @property
    def window_bytes(self) -> float:
        """What a window takes; 0 without windows."""
        return self.sample_bytes * min(self.order["window_samples"], len(self.view)) if self.order["kind"] == "window" else 0.0

    @property
    def held_bytes(self) -> float:
        """What all ranks hold of windows at most: the next one begins while one ends. What is mapped is the kernel's."""
        return 0.0 if self.view._snapshot.mapped else 2 * self.window_bytes

    def selection(self) -> str:
        """Tell the selection's samples apart from others: "all", or a hash."""
        positions = self.view._view.positions()
        return "all" if positions is None else hashlib.sha256(np.ascontiguousarray(positions).tobytes()).hexdigest()[:32]

    def loaded(self, state: Mapping[str, Any]) -> Source:
        """Give the source as a state has it: its snapshot, in its order."""
        own = self.state()
        for what in ("name", "dataset", "selection"):
            if state[what] != own[what]:
                raise InvalidInputError(
                    f"cannot load the state: it is of {what} {state[what]}, this loader reads {own[what]}", code="invalid-argument",
                    hint=self.view._other(what, int(state["samples"])),
                )  # fmt: skip
        if state["order"].get("weights") != self.order.get("weights"):
            raise InvalidInputError(
                "cannot load the state: it draws by other weights", code="invalid-argument", hint="give the weights it was taken with"
            )
        if state["snapshot"] == own["snapshot"] and state["order"] == self.order:
            return self
        view = self.view
        if state["snapshot"] != own["snapshot"]:
            snapshot = _reopened(view, str(state["snapshot"]))
            positions = view._view.positions()
            view = View(snapshot, snapshot.view(None if positions is None else positions.tolist()))
        return Source(str(state["name"]), view, self.columns, dict(state["order"]), self.weights, self.given)

    def state(self) -> dict[str, Any]:
        return {
            "name": self.name, "dataset": self.view._identity, "snapshot": self.view.snapshot, "selection": self.selection(),
            "samples": len(self.view), "order": self.order,
        }  # fmt: skip


def _mean_bytes(view: View, columns: Sequence[str]) -> float:
    return view._stored_bytes(columns) / max(1, len(view._snapshot))


def _reopened(view: View, snapshot: str) -> _core.Snapshot:
    try:
        return _core.open(view.uri, snapshot, *view._snapshot.options())
    except NotFoundError as error:
        raise NotFoundError(
            f"cannot load the state: its snapshot {snapshot} is gone", code="snapshot-not-found", hint="tag what you train on"
        ) from error

"""Mixtures of views: `ps.mix`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.errors import InvalidInputError
from penstock.loadable import Loadable
from penstock.loader.order import EXHAUSTED
from penstock.values.checks import whole
from penstock.views.view import View


def shares_of(weights: Mapping[str, float]) -> list[int]:
    """Return weights as whole numbers: unchanged if all are whole, or else as shares of 2^52.

    >>> shares_of({"a": 3.0, "b": 1.0}), sum(shares_of({"a": 0.1, "b": 0.7}))
    ([3, 1], 4503599627370496)
    """
    try:
        total = math.fsum(weights.values())
    except OverflowError:
        total = math.inf
    if not total < math.inf:
        raise InvalidInputError(f"cannot mix: the weights sum to {total}, expected a finite sum")
    if total < 2**53 and all(weight.is_integer() for weight in weights.values()):
        return [int(weight) for weight in weights.values()]
    shares = {name: round(weight / total * 2**52) for name, weight in weights.items()}
    for name, weight in weights.items():
        if weight > 0 and not shares[name]:
            raise InvalidInputError(f"cannot mix `{name}`: its weight {weight} is too small compared with {total}")
    return list(shares.values())


@dataclasses.dataclass(frozen=True)
class Mix(Loadable):
    """Several views combined by `ps.mix`. Supports `loader(…)` like a view."""

    sources: Mapping[str, tuple[View, float]]
    epoch_samples: int
    exhausted: str

    def __len__(self) -> int:
        return self.epoch_samples


def mix(sources: Mapping[str, Any], *, epoch_samples: int | None = None, exhausted: str = "repeat") -> Mix:
    """Mix views in exact proportions. `sources` maps names to views or (view, weight) pairs. The default weight of a view is its size.

    Every block of `order_block_samples` draws (by default a global batch) contains each source's share, at shuffled positions. At the
    start of any block, the number of draws from each source differs from its exact share by at most one. `epoch_samples`: by default,
    the total number of samples of all sources. `exhausted`: "repeat" starts a source over and continues it in the next epoch; "stop" ends
    the epoch before a source would repeat; "raise" refuses an epoch that needs more samples than a source has. Labels and categories are
    matched by name: codes in batches are places in `loader.vocabulary(column)`. Boxes have the format of the first view.

    >>> import penstock as ps
    >>> ds = ps.create("memory://mix", {"number": "int32"})
    >>> receipt = ds.append({"number": range(100)})
    >>> mixed = ps.mix({"low": (ds.select(range(50)), 3), "high": (ds.select(range(50, 100)), 1)}, epoch_samples=80)
    >>> batch = next(iter(mixed.loader(batch_size=8, columns=["number", "_source"], shuffle=True)))
    >>> sorted(batch["_source"].tolist())
    [0, 0, 0, 0, 0, 0, 1, 1]
    """
    if not isinstance(sources, Mapping) or not sources:
        raise InvalidInputError(f"cannot mix {sources!r}: expected a dict of names to views or to (view, weight) pairs")
    pairs: dict[str, tuple[View, float]] = {}
    for name, given in sources.items():
        view, weight = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
        weight = len(view) if weight is None and isinstance(view, View) else weight
        if not isinstance(name, str):
            raise InvalidInputError(f"cannot mix {name!r}: expected a str as the name")
        if not isinstance(view, View) or not isinstance(weight, int | float | np.number) or not 0 <= weight < math.inf:
            raise InvalidInputError(f"cannot mix `{name}`: expected a view and a weight of at least 0, got {given!r}")
        pairs[name] = (view, float(weight))
    if not sum(weight for _, weight in pairs.values()):
        raise InvalidInputError("cannot mix: all weights are 0")
    if exhausted not in EXHAUSTED:
        raise InvalidInputError(f"exhausted={exhausted!r}", hint=f"valid values: {', '.join(EXHAUSTED)}")
    samples = sum(len(view) for view, _ in pairs.values()) if epoch_samples is None else epoch_samples
    return Mix(pairs, whole(samples, "epoch_samples", 1), exhausted)

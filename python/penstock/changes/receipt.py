"""The result of a commit."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock import _core


@dataclasses.dataclass(frozen=True)
class Receipt:
    """The result of a commit: its snapshot and the row ids of the added samples, in input order. `not_found` lists the keys that no sample
    has, for `Dataset.update(on=…)`.
    """

    snapshot: str
    row_ids: npt.NDArray[np.int64]
    not_found: list[Any] = dataclasses.field(default_factory=list)


def receipt_of(committed: tuple[str, int, int, _core.Snapshot]) -> tuple[Receipt, _core.Snapshot]:
    """Return the receipt for a commit, and the new snapshot."""
    snapshot_id, first, samples, snapshot = committed
    return Receipt(snapshot_id, np.arange(first, first + samples, dtype=np.int64)), snapshot

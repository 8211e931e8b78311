"""Samples that are written, but not committed yet."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Stage:
    """Samples in data files that belong to no snapshot yet, made by `Dataset.stage`. `Transaction.add` commits them.

    A stage can be pickled and sent to another process. It has a few hundred bytes, because the samples are in the files.
    """

    samples: int
    # The description of the files, for the core, which counts the samples itself.
    _data: bytes = dataclasses.field(repr=False)

    def __len__(self) -> int:
        return self.samples

    def __bool__(self) -> bool:
        return True

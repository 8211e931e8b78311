"""Deep Lake 4: a local dataset of one column."""
# /// script
# dependencies = ["deeplake==4.7.4", "numpy==2.4.6"]
# ///

from __future__ import annotations

from typing import Any

import deeplake
import numpy as np


def first_sample_write(o: Any) -> Any:
    def turn() -> int:
        ds = deeplake.create(f"file://{o.place}/deeplake")
        ds.add_column("x", "int64")
        ds.commit()
        for start in range(0, o.rows, 1000):
            ds.append({"x": np.arange(start, start + 1000)})
            ds.commit()
        return int(o.rows)

    return turn


def first_sample(o: Any) -> Any:
    positions = np.arange(0, o.rows, o.rows // 100).tolist()

    def turn() -> int:
        ds = deeplake.open_read_only(f"file://{o.place}/deeplake")
        return len(ds["x"][positions])

    return turn


def commits(o: Any) -> Any:
    turns = iter(range(1000))

    def turn() -> int:
        ds = deeplake.create(f"file://{o.place}/deeplake-{next(turns)}")
        ds.add_column("x", "int64")
        ds.commit()
        for number in range(o.commits):
            ds.append({"x": [number]})
            ds.commit()
        return int(o.commits)

    return turn

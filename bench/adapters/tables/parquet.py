"""Uncompressed Parquet by PyArrow."""
# /// script
# dependencies = ["pyarrow==26.0.1", "numpy==2.4.6"]
# ///

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import drawn
import pyarrow as pa
import pyarrow.parquet as pq


def append_rows(o: Any) -> Any:
    """As many files as `files`, each written by a thread."""
    table = pa.table(drawn.table_of(o))
    parts = [table.slice(start, -(-len(table) // o.files)) for start in range(0, len(table), -(-len(table) // o.files))]
    pool = ThreadPoolExecutor(o.files)

    def write(number: int, part: Any) -> None:
        pq.write_table(part, f"{o.place}/{number}.parquet", compression="none", use_dictionary=o.dictionary, write_statistics=False)

    def turn() -> int:
        list(pool.map(write, range(len(parts)), parts))
        return len(table)

    return turn

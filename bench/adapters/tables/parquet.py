"""Uncompressed Parquet by PyArrow."""
# /// script
# dependencies = ["pyarrow==26.0.1", "numpy==2.4.6"]
# ///

from __future__ import annotations

from typing import Any

import drawn
import pyarrow as pa
import pyarrow.parquet as pq
import serving


def append_rows(o: Any) -> Any:
    table = pa.table(drawn.table_of(o))

    def turn() -> int:
        pq.write_table(table, f"{o.place}/rows.parquet", compression="none", use_dictionary=o.dictionary, write_statistics=False)
        return len(table)

    return turn


if __name__ == "__main__":
    serving.serve(globals())

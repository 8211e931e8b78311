"""DuckDB, which converts a file to Parquet."""
# /// script
# dependencies = ["duckdb==2.0.1"]
# ///

from __future__ import annotations

import pathlib
from typing import Any

import duckdb


def import_rows(o: Any) -> Any:
    reader = {".csv": "read_csv", ".jsonl": "read_json", ".parquet": "read_parquet"}[pathlib.Path(o.source).suffix]

    def turn() -> int:
        duckdb.execute(f"SET threads = {o.threads}")
        return int(duckdb.execute(f"COPY (SELECT * FROM {reader}('{o.source}')) TO '{o.place}/rows.parquet'").fetchall()[0][0])

    return turn

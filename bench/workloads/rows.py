"""Millions of rows: appends beside Lance and uncompressed Parquet, imports beside DuckDB, and selection.

All output is synced: that of rivals after they have written it, their own files and folders only.
"""

from __future__ import annotations

import json
import pathlib
import statistics
from typing import Any

import numpy as np
import penstock as ps
from harness import bar, comparison, fewer, interleaved
from race import Entry, empty_place, fastest, race, start, told

Result = dict[str, Any]
ROWS, TWEETS, POSITIONS = 2_000_000, 1_600_000, 10_000_000


def _seconds(rows: dict[str, dict[str, Any]], count: int) -> dict[str, list[float]]:
    return {name: [count / rate for rate in row["rates"]] for name, row in rows.items()}


def rows(folder: pathlib.Path, _photos: pathlib.Path | None) -> Result:
    """Append 2 M rows of int64, float32[16], text, a category of 100,000 words and float64; also 1 M rows without vectors from lists."""
    import pyarrow as pa

    rng, count, missing = np.random.default_rng(0), fewer(ROWS), {}
    words = pa.array([f"word-{index:06d}" for index in range(100_000)])
    table = pa.table({
        "number": rng.integers(0, 1 << 40, count),
        "vector": pa.FixedSizeListArray.from_arrays(pa.array(rng.random((count, 16), dtype=np.float32).reshape(-1)), 16),
        "text": [f"sample number {index} of many" for index in range(count)],
        "word": pa.DictionaryArray.from_arrays(pa.array(rng.integers(0, 100_000, count).astype(np.int32)), words),
        "float": rng.random(count),
    })  # fmt: skip
    with pa.ipc.new_file(folder / "rows.arrow", table.schema) as out:
        out.write_table(table)
    half = ["number", "float", "text", "word"]

    def entry(name: str, adapter: str, given: str = "arrow", columns: list[str] | None = None, **own: Any) -> Entry:
        options = {**own, "source": folder / "rows.arrow", "rows": count // 2 if columns else count, "given": given, "columns": columns}
        return Entry(name, adapter, "append_rows", {**options, "place": folder / name.replace(" ", "-"), "durable": True})

    own = "tables/penstock"
    ways = [entry("parquet", "tables/parquet", dictionary=dictionary, files=files) for dictionary in (False, ["word"]) for files in (1, 2)]
    variants = [entry("lance", "tables/lance", variant=variant) for variant in ("default", "plain", "2.0")]
    rivals = [best for best in (fastest(ways, missing, settle=empty_place), fastest(variants, missing, settle=empty_place)) if best]
    systems = [
        entry("penstock", own), *rivals, entry("penstock from numpy", own, "numpy"),
        entry("penstock half", own, "arrow", half), entry("penstock from lists", own, "lists", half),
    ]  # fmt: skip
    found = race(start(systems, missing, empty_place), missing, 5, empty_place)
    seconds = {**_seconds({name: row for name, row in found.items() if name not in ("penstock half", "penstock from lists")}, count),
               **_seconds({name: row for name, row in found.items() if name in ("penstock half", "penstock from lists")}, count // 2)}  # fmt: skip
    median = {name: statistics.median(spent) for name, spent in seconds.items()}
    ds = ps.create(folder / "select", {"n": "int8"})
    ds.append({"n": np.zeros(POSITIONS, np.int8)})
    positions = rng.integers(0, POSITIONS, POSITIONS)
    select = interleaved({"select": lambda: ds.select(positions)})
    bars = [
        *(bar(f"from Arrow / {name}", median["penstock"] / median[name], at_most=1.0) for name in ("lance", "parquet") if name in median),
        bar("lists / the same rows from Arrow", median["penstock from lists"] / median["penstock half"], at_most=2.0),
        bar("seconds to select 10^7 positions", select["select"]["median_seconds"], at_most=0.1),
    ]  # fmt: skip
    return {
        "what": f"{count:,} rows from Arrow and NumPy; half as many, without vectors, from lists; all synced, two cores", "systems": found, "times": select,
        "lines": [*(f"{name}: {value:.2f} s" for name, value in median.items()), f"select of {POSITIONS:,}: {select['select']['median_seconds']:.3f} s"],
        "bars": bars, "missing": missing,
        "comparisons": [comparison("append from Arrow", "s", {name: seconds[name] for name in ("penstock", "lance", "parquet") if name in seconds}, "lowest")],
    }  # fmt: skip


def import_rows(folder: pathlib.Path, _photos: pathlib.Path | None) -> Result:
    """Import 1.6 M tweet-like rows of six columns from CSV, JSONL and Parquet, against DuckDB converting the same file to Parquet."""
    import pyarrow as pa
    import pyarrow.csv as pc
    import pyarrow.parquet as pq

    rng, count, missing = np.random.default_rng(0), fewer(TWEETS), {}
    table = pa.table({
        "target": rng.integers(0, 5, count), "id": rng.integers(10**9, 2 * 10**9, count),
        "date": [f"Mon Apr 06 22:19:{index % 60:02d} PDT 2009" for index in range(count)], "flag": ["NO_QUERY"] * count,
        "user": [f"user_{index % 650_000}" for index in range(count)],
        "text": [f'tweet {index}: "quoted", and as many more words as such messages have, on average' for index in range(count)],
    })  # fmt: skip
    sources = {kind: folder / f"tweets.{kind}" for kind in ("csv", "jsonl", "parquet")}
    pc.write_csv(table, sources["csv"])
    pq.write_table(table, sources["parquet"])
    with sources["jsonl"].open("w") as out:
        out.writelines(json.dumps(row) + "\n" for batch in table.to_batches(100_000) for row in batch.to_pylist())
    bars, lines, comparisons, results = [], [], [], {}
    for kind, most in (("csv", 2.0), ("jsonl", 2.0), ("parquet", 1.2)):
        options = {"source": sources[kind], "threads": 2, "durable": True}
        systems = [
            Entry(name, f"tables/{name}", "import_rows", {**options, "place": folder / f"{name}-{kind}"}) for name in ("penstock", "duckdb")
        ]
        found = results[kind] = race(start(systems, missing, empty_place), missing, 5, empty_place)
        lines += told(found, f"{kind}: ")
        comparisons.append(comparison(kind, "s", _seconds(found, count), "lowest"))
        if "duckdb" in found:
            bars.append(bar(f"{kind} / DuckDB", found["penstock"]["seconds"] / found["duckdb"]["seconds"], at_most=most))
    return {
        "what": f"{count:,} rows, imported and synced; DuckDB converts the same file to Parquet, synced; two cores", "systems": results,
        "lines": lines, "bars": bars, "comparisons": comparisons, "missing": missing,
    }  # fmt: skip

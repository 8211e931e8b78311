"""Benchmarks with millions of rows: appends against Lance and uncompressed Parquet, imports against DuckDB, and selection.

All output is synced. The rivals' files and folders are synced after writing, to match Penstock's durability.
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import shutil
from typing import Any

import numpy as np
import penstock as ps
from harness import interleaved

Result = dict[str, Any]
ROWS, TWEETS, POSITIONS = 2_000_000, 1_600_000, 10_000_000


def sync(place: pathlib.Path) -> None:
    """Sync everything at `place`: all files, all folders, and the parent folder."""
    for path in [place, *(place.rglob("*") if place.is_dir() else ()), place.parent]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


class Fresh:
    """Returns a new output path for each turn. `clear` removes the output of earlier turns and runs untimed."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, self.number = folder, itertools.count()

    def __call__(self, ending: str = "") -> pathlib.Path:
        return self.folder / f"out{next(self.number)}{ending}"

    def clear(self) -> None:
        for path in self.folder.glob("out*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        os.sync()


def rows(folder: pathlib.Path, _photos: pathlib.Path | None) -> Result:
    """Append 2 M rows of int64, float32[16], text, a category of 100,000 words and float64; also 1 M rows without vectors from lists."""
    import lance
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng, fresh = np.random.default_rng(0), Fresh(folder)
    words = np.array([f"word-{index:06d}" for index in range(100_000)])
    numbers, vectors, floats = rng.integers(0, 1 << 40, ROWS), rng.random((ROWS, 16), dtype=np.float32), rng.random(ROWS)
    texts, codes = [f"sample number {index} of many" for index in range(ROWS)], rng.integers(0, 100_000, ROWS)
    arrow = {
        "number": pa.array(numbers),
        "vector": pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), 16),
        "text": pa.array(texts),
        "word": pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32)), pa.array(words)),
        "float": pa.array(floats),
    }
    table = pa.table(arrow)
    schema = {"number": "int64", "vector": ps.Tensor((16,), "float32"), "text": ps.Text(), "word": ps.Category(), "float": "float64"}
    named = [str(words[code]) for code in codes]
    numpy_columns = {"number": numbers, "vector": vectors, "text": arrow["text"], "word": arrow["word"], "float": floats}
    half = ROWS // 2
    plain = {"number": numbers[:half].tolist(), "float": floats[:half].tolist(), "text": texts[:half], "word": named[:half]}
    same = {name: arrow[name][:half] for name in plain}

    def penstock(columns: dict[str, Any]) -> None:
        ps.create(fresh(), schema).append(columns)

    def write_lance() -> None:
        place = fresh()
        lance.write_dataset(table, str(place))
        sync(place)

    def write_parquet() -> None:
        place = fresh(".parquet")
        pq.write_table(table, place, compression="none")
        sync(place)

    times = interleaved(
        {
            "penstock_arrow": lambda: penstock(arrow), "lance": write_lance, "parquet": write_parquet,
            "penstock_numpy": lambda: penstock(numpy_columns), "penstock_lists": lambda: penstock(plain), "penstock_same": lambda: penstock(same),
        },
        settle=fresh.clear,
    )  # fmt: skip
    seconds = {name: spent["median_seconds"] for name, spent in times.items()}
    ds = ps.create(folder / "select", {"n": "int8"})
    ds.append({"n": np.zeros(POSITIONS, np.int8)})
    positions = rng.integers(0, POSITIONS, POSITIONS)
    select = interleaved({"select": lambda: ds.select(positions)})
    return {
        "what": f"{ROWS:,} rows from Arrow and NumPy; half as many, without vectors, from lists; all synced", "seconds": seconds, "times": {**times, **select},
        "lines": [f"{name}: {value:.2f} s" for name, value in seconds.items()] + [f"select of {POSITIONS:,}: {select['select']['median_seconds']:.3f} s"],
        "bars": [
            {"what": "from Arrow / Lance", "value": seconds["penstock_arrow"] / seconds["lance"], "at_most": 1.0},
            {"what": "from Arrow / uncompressed Parquet", "value": seconds["penstock_arrow"] / seconds["parquet"], "at_most": 1.0},
            {"what": "lists / the same rows from Arrow", "value": seconds["penstock_lists"] / seconds["penstock_same"], "at_most": 2.0},
            {"what": "seconds to select 10^7 positions", "value": select["select"]["median_seconds"], "at_most": 0.1},
        ],
    }  # fmt: skip


def import_rows(folder: pathlib.Path, _photos: pathlib.Path | None) -> Result:
    """Import 1.6 M tweet-like rows of six columns from CSV, JSONL and Parquet, against DuckDB converting the same file to Parquet."""
    import duckdb
    import pyarrow as pa
    import pyarrow.csv as pc
    import pyarrow.parquet as pq
    from penstock.importers import import_data

    rng, fresh = np.random.default_rng(0), Fresh(folder)
    table = pa.table({
        "target": rng.integers(0, 5, TWEETS), "id": rng.integers(10**9, 2 * 10**9, TWEETS),
        "date": [f"Mon Apr 06 22:19:{index % 60:02d} PDT 2009" for index in range(TWEETS)], "flag": ["NO_QUERY"] * TWEETS,
        "user": [f"user_{index % 650_000}" for index in range(TWEETS)],
        "text": [f'tweet {index}: "quoted", and as many more words as such messages have, on average' for index in range(TWEETS)],
    })  # fmt: skip
    sources = {kind: folder / f"tweets.{kind}" for kind in ("csv", "jsonl", "parquet")}
    pc.write_csv(table, sources["csv"])
    pq.write_table(table, sources["parquet"])
    with sources["jsonl"].open("w") as out:
        out.writelines(json.dumps(row) + "\n" for batch in table.to_batches(100_000) for row in batch.to_pylist())
    readers = {"csv": "read_csv", "jsonl": "read_json", "parquet": "read_parquet"}

    def convert(kind: str) -> None:
        place = fresh(".parquet")
        duckdb.sql(f"COPY (SELECT * FROM {readers[kind]}('{sources[kind]}')) TO '{place}'")
        sync(place)

    systems = {}
    for kind in sources:
        systems[f"penstock_{kind}"] = lambda kind=kind: import_data(sources[kind], fresh())
        systems[f"duckdb_{kind}"] = lambda kind=kind: convert(kind)
    times = interleaved(systems, settle=fresh.clear)
    seconds = {name: spent["median_seconds"] for name, spent in times.items()}
    bars = {"csv": 2.0, "jsonl": 2.0, "parquet": 1.2}
    return {
        "what": f"{TWEETS:,} rows, imported and synced; DuckDB converts the same file to Parquet, synced", "seconds": seconds, "times": times,
        "lines": [f"{name}: {value:.2f} s" for name, value in seconds.items()],
        "bars": [
            {"what": f"{kind} / DuckDB", "value": seconds[f"penstock_{kind}"] / seconds[f"duckdb_{kind}"], "at_most": most} for kind, most in bars.items()
        ],
    }  # fmt: skip

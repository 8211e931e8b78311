"""Import random tables with some invalid values from CSV, JSON Lines, Parquet, and dicts, in blocks of random sizes.

The dataset must match the predictions from a plain Python model, and every refusal must report its row.
"""

import csv
import datetime
import json
import random
import re

import numpy as np
import penstock as ps
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from anything import SEEDS
from penstock.importers import csv as csv_importer
from penstock.importers import import_data, jsonl, parquet, rows

TYPES = {"i": "int64", "small": "int8", "f": "float64", "half": "float16", "b": "bool", "t": ps.Text(), "c": ps.Category()}
TYPES |= {"w": "timestamp", "j": ps.Json()}
TEXTS = ["plain", 'quo"ted', "a,b", "two\nlines", "ü🙂", " spaces ", "NA of a text", "x" * 300, "\ttab", "back\\slash", "'"]
LINE = "a line with more fields than columns"
pytestmark = pytest.mark.local


def good(rng, name):
    """Return a random value that fits the column `name`."""
    return {
        "i": lambda: rng.choice([0, -1, 2**63 - 1, -(2**63), rng.randint(-(10**6), 10**6)]),
        "small": lambda: rng.choice([127, -128, rng.randint(-128, 127)]),
        "f": lambda: rng.choice([0.0, -1.5, 1e300, 1e-300, float("inf"), rng.random()]),
        "half": lambda: rng.choice([0.0, -65504.0, 0.25, float(rng.randint(-2000, 2000))]),
        "b": lambda: rng.random() < 0.5,
        "t": lambda: rng.choice(TEXTS),
        "c": lambda: rng.choice(["cat", "dog", "cow", "élan"]),
        "w": lambda: (
            datetime.datetime(1, 1, 1) + datetime.timedelta(days=rng.randrange(3_652_059), microseconds=rng.randrange(86_400 * 10**6))
        ),
        "j": lambda: [
            rng.choice([None, {"a": rng.choice([None, 2**63 - 1, -1]), "s": rng.choice([None, "", *TEXTS])}])
            for _ in range(rng.randint(0, 3))
        ],
    }[name]()


def bad(rng, name, kind):
    """Return a value that does not fit the column `name`, or None if the format or column rules out such a value."""
    if kind == "parquet":
        return {"small": 128, "half": 65_520.0}.get(name)
    texts = {
        "i": ["many", "1.5", str(2**63)],
        "small": ["128", "-129", "x"],
        "f": ["many", "1e400", "1,5", str(2**53 + 1)],
        "half": ["65520", "-1e9", "2049"],
        "b": ["maybe", "2"],
        "w": ["yesterday", "2024-13-01T00:00:00", "2024-01-01T00:00:00.0000009"],
        "j": ["{", "[1, 2", "Infinity"],
    }
    values = {
        "i": ["many", 1.5, 2**63],
        "small": [128, -129, "x"],
        "f": ["many", 2**53 + 1],
        "half": [65520.0, -1e9, "y", 2049],
        "b": ["maybe", 2],
        "w": ["now?", "2024-01-01T00:00:00.123456001", datetime.timedelta(1)]
        if kind == "dicts"
        else ["now?", "2024-01-01T00:00:00.123456001"],
    }
    return rng.choice((texts if kind == "csv" else values).get(name, [None]))


def table(rng, kind):
    """Make a random table. Return the column names, the rows, and, for each row, the columns whose values do not fit."""
    names = rng.sample(list(TYPES), rng.randint(1, len(TYPES)))
    share, given, wrong = rng.choice([0, 0, 0.02, 0.3]), [], []
    for _ in range(rng.choice([1, 2, 17, 150])):
        row, unfit = {}, []
        for name in names:
            row[name] = None if rng.random() < 0.15 and (name != "t" or kind != "csv") else good(rng, name)
            if rng.random() < share and (value := bad(rng, name, kind)) is not None:
                row[name] = value
                unfit.append(name)
        if kind == "csv" and rng.random() < share / 2:
            unfit = [LINE]
        given.append(row)
        wrong.append(unfit)
    return names, given, wrong


def as_text(value):
    if isinstance(value, datetime.datetime):  # Some timestamps have nine decimals.
        return value.isoformat() + ("000" if value.microsecond % 2 else "")
    return json.dumps(value) if isinstance(value, list) else value


def write(path, kind, names, given, wrong):
    if kind == "csv":
        with path.open("w", newline="", encoding="utf-8") as out:
            writer = csv.writer(out, quoting=csv.QUOTE_MINIMAL)
            writer.writerow(names)
            for row, unfit in zip(given, wrong, strict=True):
                fields = ["" if row[name] is None else as_text(row[name]) for name in names]
                if fields == [""] and unfit != [LINE] and names != ["t"]:
                    out.write("\r\n")  # csv.writer would quote the empty field, because most readers skip empty lines.
                else:
                    writer.writerow(fields + (["more"] if unfit == [LINE] else []))
    elif kind == "jsonl":
        with path.open("w", encoding="utf-8") as out:
            for row in given:
                held = {name: value for name, value in row.items() if value is not None or random.Random(str(row)).random() < 0.5}
                out.write(json.dumps(held, default=as_text) + "\n")
    else:
        kinds = {
            "i": pa.int64(),
            "small": pa.int32(),
            "f": pa.float64(),
            "half": pa.float64(),
            "b": pa.bool_(),
            "t": pa.string(),
            "c": pa.string(),
            "w": pa.timestamp("us"),
            "j": pa.list_(pa.struct({"a": pa.int64(), "s": pa.string()})),
        }
        arrays = {name: pa.array([row[name] for row in given], kinds[name]) for name in names}
        pq.write_table(pa.table(arrays), path, row_group_size=max(1, len(given) // 3), use_deprecated_int96_timestamps=len(given) % 2 == 1)


def stored(ds, name, row):
    value = ps.views.sample.unwrap(ds[name][row : row + 1])
    if value is None or name == "t":
        return value
    return ds.vocabulary(name)[int(value)] if name == "c" else value


def same(found, wanted):
    return (
        found is None
        if wanted is None
        else found is not None and (found == wanted if isinstance(wanted, str | list) else np.asarray(found).item() == wanted)
    )


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet", "dicts"])
def test_what_is_imported_is_what_the_model_says(tmp_path, monkeypatch, kind):
    begin = 1 if kind in ("csv", "jsonl") else 0  # A header is row 0 of its file, and lines are counted from 1, as in editors.
    for seed in SEEDS:
        rng = random.Random(f"{kind} {seed}")
        names, given, wrong = table(rng, kind)
        if kind == "jsonl":  # JSON has no infinity.
            given = [{name: 7.0 if value == float("inf") else value for name, value in row.items()} for row in given]
        block = rng.choice([300, 1000, 5000, 1 << 20])  # A CSV block must be large enough for any row.
        for module, setting, value in ((csv_importer, "BLOCK_BYTES", max(block, 3000 if "j" in names else 700)), (jsonl, "BLOCK_BYTES", block), (parquet, "CHUNK_BYTES", block),
                                       (parquet, "ROWS_AT_ONCE", rng.choice([1, 7, 10**6])), (rows, "CHUNK_BYTES", block), (rows, "ROWS_AT_ONCE", rng.choice([1, 7, 10**6]))):  # fmt: skip
            monkeypatch.setattr(module, setting, value)
        path, on_error = tmp_path / f"{seed}.{kind}", rng.choice(["raise", "skip", "null"])
        if kind != "dicts":
            write(path, kind, names, given, wrong)
        options = {"types": {name: TYPES[name] for name in names}, "on_error": on_error}
        source, place = (iter(given) if kind == "dicts" else path), tmp_path / f"out {seed}"
        if on_error == "raise" and any(wrong):
            with pytest.raises(ps.InvalidInputError) as caught:
                import_data(source, place, **options)
            at = int(re.search(r"(?:line|row) (\d+)`?:", str(caught.value))[1]) - begin
            assert caught.value.column in wrong[at] or wrong[at] == [LINE], (seed, str(caught.value))
            assert not place.exists(), seed
            continue
        report = import_data(source, place, **options)
        ds = ps.open(place)
        kept = [at for at, unfit in enumerate(wrong) if not unfit or (on_error == "null" and unfit != [LINE])]
        assert report.samples == len(ds) == len(kept), (seed, on_error)
        for row, at in enumerate(kept):
            for name in names:
                wanted = None if name in wrong[at] else given[at][name]
                assert same(stored(ds, name, row), wanted), (seed, at, name, wanted)
        where = sorted(at for at, unfit in enumerate(wrong) for _ in (unfit if on_error == "null" else unfit[:1]))
        named = sorted(int(refusal.path.rsplit(" ", 1)[1]) - begin for refusal in report.refused)
        assert named == where, (seed, on_error, report.refused[:3])

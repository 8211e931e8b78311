"""Writes views to pandas and Polars frames and to Parquet files."""

from __future__ import annotations

import json
import os
import pathlib
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import InvalidInputError, UnsupportedError
from penstock.views.sample import unwrap

if TYPE_CHECKING:
    import pandas as pd

    from penstock.views.view import View

ROW_GROUP_BYTES = 64 << 20


def to_pandas(view: View, columns: Sequence[str] | None) -> pd.DataFrame:
    """Convert a view to a pandas frame."""
    try:
        import pandas as pd
    except ImportError as error:
        raise UnsupportedError("cannot make a pandas frame: pandas is not installed", hint="pip install pandas") from error
    import pyarrow as pa

    view = view._as_it_is()
    schema = view.schema
    names = list(schema) if columns is None else view._named(columns) or []
    if len(set(names)) != len(names):
        raise InvalidInputError("cannot make a frame in which two columns have the same name", hint="name each column once")
    complex_numbers = [name for name in names if name in schema and getattr(schema[name], "dtype", "").startswith("complex")]
    arrays = [
        name for name in names if name in complex_numbers or (name in schema and schema[name].type in ("tensor", "boxes", "keypoints"))
    ]
    table = view.to_arrow([name for name in names if name not in arrays])
    # Types that keep whole numbers, bools and floats with nulls exactly. pandas would make floats, objects and NaN of them.
    nullable: dict[Any, Any] = {
        pa.type_for_alias(name): getattr(pd, f"{kind}Dtype")()
        for name, kind in [("bool", "Boolean")]
        + [(f"{u}int{bits}", f"{u.upper()}Int{bits}") for u in ("", "u") for bits in (8, 16, 32, 64)]
    } | {kind: pd.ArrowDtype(kind) for kind in (pa.float16(), pa.float32(), pa.float64())}
    made = {}
    for name in names:
        if name in arrays:
            values = view[[name]][:][name]
            if name in complex_numbers and schema[name].type == "scalar" and not isinstance(values, np.ma.MaskedArray):
                made[name] = pd.Series(values)
                continue
            each = np.empty(len(view), object)
            each[:] = [unwrap(values, index) for index in range(len(view))]
            made[name] = pd.Series(each)
        else:
            column = table.column(name)
            if name in schema and schema[name].type == "json":
                made[name] = pd.Series([None if text is None else json.loads(text) for text in column.to_pylist()], dtype=object)
                continue
            made[name] = column.to_pandas(types_mapper=nullable.get if column.null_count else None)
    return pd.DataFrame(made)


def to_polars(view: View, columns: Sequence[str] | None) -> Any:
    """Convert a view to a Polars frame."""
    try:
        import polars as pl
    except ImportError as error:
        raise UnsupportedError("cannot make a Polars frame: Polars is not installed", hint="pip install polars") from error
    import pyarrow as pa

    table = view.to_arrow(columns)
    for index, field in enumerate(table.schema):
        if isinstance(field.type, pa.BaseExtensionType):  # Polars does not know Arrow's tensors.
            column = table.column(index)
            plain = pa.chunked_array([chunk.storage for chunk in column.chunks], field.type.storage_type)
            table = table.set_column(index, pa.field(field.name, field.type.storage_type), plain)
    return pl.from_arrow(table)


def to_parquet(view: View, path: str | os.PathLike[str], columns: Sequence[str] | None) -> int:
    """Write a view to a Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    place = pathlib.Path(path).resolve()  # Of a link, the file that it points to.
    if not place.parent.is_dir() or place.is_dir():
        what = "it is a folder" if place.is_dir() else f"the folder `{place.parent}` does not exist"
        raise InvalidInputError(f"cannot write `{place}`: {what}", hint="give the path of a file in an existing folder")
    batches = view.scan(columns, batch_size=1 << 14)
    samples, held, held_bytes = 0, [], 0
    aside = place.with_name(f".{secrets.token_hex(8)}.parquet")
    try:
        with pq.ParquetWriter(aside, batches.schema, compression="zstd") as writer:
            for batch in batches:
                samples, held_bytes = samples + batch.num_rows, held_bytes + batch.nbytes
                held.append(batch)
                if held_bytes >= ROW_GROUP_BYTES:
                    writer.write_table(pa.Table.from_batches(held))
                    held, held_bytes = [], 0
            if held:
                writer.write_table(pa.Table.from_batches(held))
        with open(aside, "rb") as written:
            os.fsync(written.fileno())
        aside.replace(place)
    finally:
        aside.unlink(missing_ok=True)
    return samples

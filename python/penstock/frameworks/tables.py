"""Writes views to pandas and Polars frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import InvalidInputError, UnsupportedError
from penstock.views.sample import unwrap

if TYPE_CHECKING:
    import pandas as pd

    from penstock.views.view import View


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
    complex_numbers = [name for name in names if name in schema and (schema[name].read_dtype() or "").startswith("complex")]
    arrays = [name for name in names if name in complex_numbers or (name in schema and schema[name].is_array)]
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
            if name in complex_numbers and not schema[name].is_array and not isinstance(values, np.ma.MaskedArray):
                made[name] = pd.Series(values)
                continue
            each = np.empty(len(view), object)
            each[:] = [unwrap(values, index) for index in range(len(view))]
            made[name] = pd.Series(each)
        else:
            column = table.column(name)
            objects = schema[name].from_scan(column) if name in schema else column
            if objects is not column:
                made[name] = pd.Series(objects, dtype=object)
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

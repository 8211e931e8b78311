"""Tables that callers pass to `append` and other changes: dicts of columns, frames, Arrow tables, lists of dicts, and streams of these."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.changes.checks import naming
from penstock.changes.slices import size_of
from penstock.columns.column_type import ColumnType
from penstock.errors import InvalidInputError
from penstock.schema import noted

# What `append` accepts: columns by name, a frame, a table, rows, or a stream of these.
Table = Any

# Rows of a stream are appended in groups of this size.
ROWS_AT_ONCE, BYTES_AT_ONCE = 1024, 16 << 20
_ACCEPTED = "a dict of column names to values, a pandas, Polars or Arrow table, or a list of dicts"


def columns_of(given: Any, doing: str, schema: Mapping[str, ColumnType] | None = None, first_row: int = 0) -> Mapping[str, Any] | None:
    """Return the columns of a table in memory by name. Returns None for a stream, such as a generator of dicts or an Arrow reader. Boxes of
    which an Arrow table notes another format are converted to that of the schema. `first_row` is the number of the first row, for errors.
    """
    if isinstance(given, Mapping):
        if given and all(hasattr(part, "column_names") for part in given.values()):  # A Hugging Face DatasetDict.
            raise InvalidInputError(
                f"cannot {doing} a dict of datasets: {', '.join(given)}", hint=f'pass one of them: given["{next(iter(given))}"]'
            )
        return given
    module = type(given).__module__.partition(".")[0]
    if hasattr(given, "iloc") and hasattr(given, "columns"):
        names = list(given.columns)
        if not all(isinstance(name, str) for name in names) or len(set(names)) != len(names):
            raise InvalidInputError(f"cannot {doing}: the frame's columns are {names}, expected unique names", hint="rename them first")
        return {name: given[name] for name in names}
    if module == "polars" and hasattr(given, "collect"):
        raise InvalidInputError(f"cannot {doing} a {type(given).__name__}", hint="call .collect() first")
    if module == "polars" and hasattr(given, "get_columns"):
        check_objects(given, doing)
        return {series.name: series for series in given.get_columns()}
    if module == "pyarrow" and hasattr(given, "column_names") and hasattr(given, "column"):
        if len(set(given.column_names)) != len(given.column_names):
            raise InvalidInputError(f"cannot {doing}: two columns of the table have the same name", hint="rename one of them first")
        kinds = schema or {}
        found = {}
        for at, field in enumerate(given.schema):
            with naming(field.name, first_row, doing):
                found[field.name] = arrow_values(given.column(at), field, kinds.get(field.name))
        return found
    if isinstance(given, np.ndarray) and given.dtype.names:
        return {name: given[name] for name in given.dtype.names}
    if isinstance(given, list | tuple):
        if given and all(map(is_table, given)):
            return None  # A list of tables is a stream of them.
        return _transposed(list(given), doing)
    if isinstance(given, str | bytes | os.PathLike):
        raise InvalidInputError(
            f"cannot {doing} a {type(given).__name__}: expected {_ACCEPTED}", hint="ps.importers.import_data reads files and folders"
        )
    one_column = isinstance(given, np.ndarray) or any(hasattr(given, name) for name in ("detach", "isna", "null_count"))
    if one_column or not (isinstance(given, Iterable) or hasattr(given, "__arrow_c_stream__")):
        raise InvalidInputError(f"cannot {doing} a {type(given).__name__}: expected {_ACCEPTED}", hint='write {"column": values}')
    return None


def is_table(given: Any) -> bool:
    """Return whether something is a frame or an Arrow table, rather than a row or a column."""
    return any(hasattr(given, name) for name in ("column_names", "get_columns")) or (hasattr(given, "iloc") and hasattr(given, "columns"))


def check_transform(given: Any, doing: str) -> None:
    """Refuse a dataset of Hugging Face whose samples a function changes when they are read."""
    if (getattr(given, "format", None) or {}).get("type") == "custom":
        raise InvalidInputError(
            f"cannot {doing} a dataset with a transform, which is applied when samples are read",
            hint="pass source.with_format(None), and apply the transform in the loader: ds.loader(transform=[…])",
        )


def check_objects(given: Any, doing: str) -> None:
    """Refuse a Polars frame with Python objects, whose addresses it would export as values."""
    if type(given).__module__.startswith("polars."):
        objects = [
            name for name, kind in zip(getattr(given, "columns", ()), getattr(given, "dtypes", ()), strict=True) if str(kind) == "Object"
        ]
        if objects:
            raise InvalidInputError(
                f"cannot {doing} column `{objects[0]}`: its values are Python objects",
                hint="pass a dict of columns: frame.to_dict(as_series=False)",
            )


def arrow_values(values: Any, field: Any, kind: ColumnType | None = None) -> Any:
    """Return a column of an Arrow table in a form that column types accept: media as bytes or paths, JSON that Penstock wrote as objects, and
    boxes in the format of `kind`.
    """
    if str(values.type).startswith("struct<") and {part.name for part in values.type} == {"bytes", "path"}:
        # Hugging Face stores media this way. A path without bytes is that of a local file.
        each = (None if value is None else (value["bytes"], value["path"]) for value in values.to_pylist())
        return [None if one is None else one[0] if one[0] is not None else one[1] and pathlib.Path(one[1]) for one in each]
    before = noted(field)
    values = values if before is None else before.from_scan(values)
    return values if kind is None else kind.of_arrow(values, before)


def _transposed(rows: list[Any], doing: str) -> dict[str, list[Any]]:
    """Convert a list of rows to columns. A name that a row lacks is a null there."""
    for place, row in enumerate(rows):
        if not isinstance(row, Mapping):
            example = 'write {"column": values}, or [{"column": value}, …]'
            raise InvalidInputError(f"cannot {doing}: row {place} of the list is a {type(row).__name__}, expected a dict", hint=example)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def pieces(given: Any, schema: Mapping[str, ColumnType], doing: str) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of a stream as columns. A stream yields rows, which are dicts of values, or tables of any kind that `columns_of` accepts."""
    rows: list[Any] = []
    size = count = 0
    for part in _parts(given, schema):
        if isinstance(part, Mapping) and _is_row(part, schema):
            rows.append(part)
            count += 1
            size += sum(map(size_of, part.values()))
            if len(rows) >= ROWS_AT_ONCE or size >= BYTES_AT_ONCE:
                yield _transposed(rows, doing)
                rows, size = [], 0
            continue
        tables: Iterable[Mapping[str, Any]]
        if is_hugging_face(part):
            tables = pieces(part, schema, doing)
        elif (columns := columns_of(part, doing, schema, count)) is not None:
            tables = [columns]
        else:
            raise InvalidInputError(f"cannot {doing} a stream of {type(part).__name__}: expected dicts or tables")
        if rows:
            yield _transposed(rows, doing)
            rows, size = [], 0
        for table in tables:
            yield table
            values: Any = next(iter(table.values()), ())
            count += len(values) if hasattr(values, "__len__") else 0
    if rows:
        yield _transposed(rows, doing)


def is_hugging_face(given: Any) -> bool:
    """Return whether something is a Hugging Face dataset, or a stream of it that states its features, without an import of that library."""
    return type(given).__module__.startswith("datasets.") and hasattr(given, "iter") and getattr(given, "features", None) is not None


def _parts(given: Any, schema: Mapping[str, ColumnType]) -> Iterable[Any]:
    if is_hugging_face(given):
        check_transform(given, "append")
        tables = given.with_format("arrow").iter(ROWS_AT_ONCE)
        return (_with_names(table, given.features, schema) for table in tables)
    if hasattr(given, "__arrow_c_stream__"):
        import pyarrow as pa

        return pa.RecordBatchReader.from_stream(given)  # type: ignore[no-any-return]
    return given  # type: ignore[no-any-return]


def _with_names(table: Any, features: Mapping[str, Any], schema: Mapping[str, ColumnType]) -> Any:
    """Return a table of Hugging Face with the names of classes, because their codes have another meaning in another dataset."""
    import pyarrow as pa

    for place, name in enumerate(table.column_names):
        feature = features.get(name)
        inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", feature)
        if inner is None or not hasattr(inner, "str2int") or not (name in schema and schema[name].is_coded):
            continue

        def word(code: Any, names: Sequence[str] = inner.names, column: str = name) -> Any:
            if code in (None, -1):
                return None
            if not 0 <= code < len(names):
                raise InvalidInputError(f"cannot append to column `{column}`: none of the {len(names)} classes has code {code}")
            return names[code]

        codes = table.column(place).to_pylist()
        if inner is feature:
            words = pa.array([word(code) for code in codes], pa.string())
        else:
            if any(code == -1 for each in codes for code in each or ()):
                raise InvalidInputError(
                    f"cannot append to column `{name}`: a list contains -1, which means no class", hint="remove the -1 first"
                )
            words = pa.array([None if each is None else [word(code) for code in each] for each in codes], pa.list_(pa.string()))
        table = table.set_column(place, name, words)
    return table


def _is_row(columns: Mapping[str, Any], schema: Mapping[str, ColumnType]) -> bool:
    """Return whether a dict has one value per column, rather than one per sample and column. The first column for which this is clear decides."""
    for name, value in columns.items():
        if name in schema and (one := schema[name].is_one(value)) is not None:
            return one
    return True

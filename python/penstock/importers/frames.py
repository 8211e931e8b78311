"""Imports tables in memory and Arrow streams: pandas, Polars and pyarrow tables, dicts of columns, and Hugging Face datasets."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.changes.checks import naming
from penstock.changes.tables import arrow_values, check_objects, check_transform, columns_of, is_hugging_face
from penstock.columns.column_type import ColumnType
from penstock.columns.scalar import Scalar
from penstock.columns.tensor import Tensor
from penstock.errors import InvalidInputError
from penstock.importers import rows
from penstock.importers.shared import tables
from penstock.importers.shared.content import Content
from penstock.importers.shared.source import Chunk, OpenedSource, Options, numbered
from penstock.importers.shared.unread import boxes_in_type, boxes_in_values, without_objects
from penstock.values.arrow import types as arrow_types
from penstock.values.checks import is_arrow
from penstock.values.containers import container, rows_of, text_from_pandas
from penstock.values.dtypes import dtype_name

ROWS_AT_ONCE = 8192


def open_source(given: Any, options: Options) -> OpenedSource | None:
    """Open a table or an Arrow stream. Returns None for other iterables, which `rows` reads."""
    stream = _stream(given)
    if stream is not None:
        noted = tables.noted([stream.schema])
        fields = {field.name: pa.nulls(0, field.type) for field in stream.schema}
        return _opened(fields, _batches(stream, noted), noted, options)
    columns = None if isinstance(given, list | tuple) else columns_of(given, "import")
    if columns is None:
        return None
    return _table(columns, options)


def open_tables(given: Iterable[Any], options: Options) -> OpenedSource:
    """Open a stream of tables, which have the same columns."""

    def parts() -> Iterator[_Part]:
        for place, table in enumerate(given):
            stream = _stream(table)
            columns = columns_of(table, "import") if stream is None else None
            if stream is not None:
                yield from _batches(stream, tables.noted([stream.schema]))
            elif columns is not None:
                whole = {name: _container(values) for name, values in columns.items()}
                yield whole, len(next(iter(whole.values()), ())), {}
            else:
                raise InvalidInputError(f"cannot import: part {place} is a {type(table).__name__}, expected a table like the first part")

    made = parts()
    first = next(made, None)
    if first is None:
        raise InvalidInputError("cannot import: the tables have no rows")
    return _opened(first[0], itertools.chain([first], made), first[2], options)


# Columns by name, the number of rows, and the types that metadata note.
_Part = tuple[Mapping[str, Any], int, Mapping[str, ColumnType]]


def _batches(stream: pa.RecordBatchReader, noted: Mapping[str, ColumnType]) -> Iterator[_Part]:
    return ((dict(zip(batch.schema.names, batch.columns, strict=True)), batch.num_rows, noted) for batch in stream)


def _table(columns: Mapping[str, Any], options: Options) -> OpenedSource:
    whole = {name: _container(values) for name, values in columns.items()}
    lengths = {name: len(values) for name, values in whole.items()}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"`{name}` has {length}" for name, length in lengths.items())
        raise InvalidInputError(f"cannot import: columns differ in length: {found}", code="column-lengths-differ")
    count = next(iter(lengths.values()), 0)
    parts: Iterator[_Part] = (
        ({name: values[start : start + ROWS_AT_ONCE] for name, values in whole.items()}, min(ROWS_AT_ONCE, count - start), {})
        for start in range(0, count, ROWS_AT_ONCE)
    )
    return _opened(whole, parts, {}, options, count)


def _stream(given: Any) -> pa.RecordBatchReader | None:
    """Return a reader for what is Arrow already, or None."""
    if is_hugging_face(given):
        check_transform(given, "import")
        found = given.with_format("arrow")
        schema = found.features.arrow_schema
        return pa.RecordBatchReader.from_batches(schema, (batch for table in found.iter(1024) for batch in table.cast(schema).to_batches()))
    check_objects(given, "import")
    if hasattr(given, "__arrow_c_stream__") and not hasattr(given, "iloc") and not is_arrow(given):
        try:
            return pa.RecordBatchReader.from_stream(given)
        except pa.ArrowException as error:
            raise InvalidInputError(
                f"cannot import the {type(given).__name__}: {error}", hint="cast its columns to other types first"
            ) from error
    if isinstance(given, pa.RecordBatch):
        return pa.Table.from_batches([given]).to_reader()
    return None


def _container(values: Any) -> Any:
    """Return a column in a form that can be sliced: as `append` takes it, but a categorical of pandas as an Arrow dictionary."""
    if hasattr(values, "isna"):
        if hasattr(values.dtype, "categories"):
            return pa.array(getattr(values, "array", values))
        if isinstance(values.dtype, np.dtype) and values.dtype.kind != "O":
            return values.to_numpy()
        return getattr(values, "array", values)  # Slices of a series go by its labels; those of its array go by position.
    return container(values)


def _opened(
    columns: Mapping[str, Any],
    parts: Iterable[_Part],
    noted: Mapping[str, ColumnType],
    options: Options,
    total: int | None = None,
) -> OpenedSource:
    if not columns:
        raise InvalidInputError("cannot import: the table has no columns")
    parts = iter(parts)
    first = next(parts, None)
    begun = columns if first is None else first[0]
    options, names = options.named(list(columns), "the table")
    kinds = {name: options.types.get(name) or options.defaults.get(name) or noted.get(name) or _kind(name, begun[name]) for name in names}
    kinds |= {name: kind for name, kind in options.types.items() if name not in columns}
    kinds, unread = without_objects(
        kinds, options, lambda name: None if name in noted else _boxes_in(name, begun.get(name)), f"{total or 'the'} rows"
    )

    def chunks() -> Generator[Chunk, None, None]:
        done = 0
        for part, count, own in parts if first is None else itertools.chain([first], parts):
            if unknown := [name for name in part if name not in columns]:
                raise InvalidInputError(f"cannot import: a later table has the column `{unknown[0]}`, which the first one lacks")
            values = {}
            for name, kind in kinds.items():
                if name in part:
                    with naming(name, done, "import"):
                        values[name] = _values(name, part[name], kind, own.get(name))
            done += count
            yield Chunk(values, count, numbered("row", done - count), done=done)

    named = {name: names.get(name, name) for name in kinds}
    return OpenedSource(kinds, chunks(), total, "rows", unread=unread, names=named, content=Content(begun))


def _boxes_in(name: str, values: Any) -> str | None:
    return boxes_in_type(name, values.type) if is_arrow(values) else boxes_in_values(name, list(values[: rows.ROWS_TO_INFER]))


def _kind(name: str, values: Any) -> ColumnType:
    """Choose the type of a column."""
    if is_arrow(values):
        if arrow_types.is_media(values.type):
            return tables.media_type(next((body.as_py() for body in arrow_types.media(values)[0].drop_null()), None))
        return tables.without_nulls_within(tables.infer(values.type, name), [values])
    if isinstance(values, np.ndarray) and values.dtype.kind not in "OUS":
        return Scalar(dtype_name(values.dtype)) if values.ndim == 1 else Tensor(values.shape[1:], dtype_name(values.dtype))
    if hasattr(values, "isna"):
        found = rows_of(text_from_pandas(values))
        return rows.infer(found[: rows.ROWS_TO_INFER], name) if isinstance(found, list) else _kind(name, found)
    return rows.infer(list(values[: rows.ROWS_TO_INFER]), name)


def _values(name: str, values: Any, kind: ColumnType, noted: ColumnType | None) -> Any:
    if hasattr(values, "isna"):
        return kind.from_pandas(values)
    if not is_arrow(values):
        return values
    plain = kind.from_noted(values, noted)
    if plain is not None:
        return plain
    if pa.types.is_dictionary(values.type) and not (
        pa.types.is_string(values.type.value_type) or pa.types.is_large_string(values.type.value_type)
    ):
        values = arrow_types.decoded(values)
    found = arrow_values(values, pa.field(name, values.type))
    return tables.values(found, kind) if is_arrow(found) else found

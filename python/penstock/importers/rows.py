"""Imports any iterable of dicts. Types are given by the caller or inferred from the first thousand rows."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sized
from typing import Any

import numpy as np

from penstock.changes.slices import size_of
from penstock.columns.blob import Bytes
from penstock.columns.column_type import ColumnType
from penstock.columns.image import Image
from penstock.columns.json_text import Json
from penstock.columns.scalar import Scalar
from penstock.columns.tensor import Tensor
from penstock.columns.text import Text
from penstock.errors import Error, InvalidInputError
from penstock.importers.shared.chunks import grouped
from penstock.importers.shared.content import Content
from penstock.importers.shared.source import Chunk, OpenedSource, Options, Refusal, Unread, numbered
from penstock.importers.shared.unread import boxes_in_values, without_objects
from penstock.values.checks import is_null, is_null_word, is_whole
from penstock.values.containers import from_torch
from penstock.values.dtypes import dtype_name, is_exact

ROWS_TO_INFER = 1000
ROWS_AT_ONCE = 1024
CHUNK_BYTES = 16 << 20
# If the first rows reach this size, types are inferred from fewer than `ROWS_TO_INFER` rows.
HEAD_BYTES = 32 << 20


class BadRow:
    """A placeholder for input that is not a valid row. An empty message means an empty line, which is not counted."""

    def __init__(self, message: str) -> None:
        self.message = message


def open_source(iterable: Iterable[Any], options: Options) -> OpenedSource:
    """Infer types from the first rows, then read all rows."""
    iterator = iter(iterable)
    head: list[Any] = []
    size = 0
    for row in itertools.islice(iterator, ROWS_TO_INFER):
        head.append(row)
        size += size_of(row)
        if size >= HEAD_BYTES:
            break
    columns = columns_of(head, options, "the rows")
    chunks = chunks_of(itertools.chain(head, iterator), columns, 0, numbered("row"))
    try:
        total = len(iterable) if isinstance(iterable, Sized) else None
    except TypeError:  # A wrapper of an iterator, such as a progress bar, has `__len__` but no length.
        total = None
    return OpenedSource(columns.kinds, chunks, total, "rows", unread=columns.unread, names=columns.names, content=Content(head))


@dataclasses.dataclass(frozen=True)
class Columns:
    """The columns of rows: their types and their names in the dataset by their names in the source, and the annotations that are not imported.
    `leaves_out` returns whether another key is left out, rather than unknown.
    """

    kinds: dict[str, ColumnType]
    names: dict[str, str]
    unread: list[Unread]
    leaves_out: Callable[[str], bool]


def columns_of(head: list[Any], options: Options, source: str) -> Columns:
    """Choose the columns and their types: the given types, or else types inferred from the first rows."""
    good = [row for row in head if isinstance(row, Mapping)]
    if not good:
        why = "no row is an object with named values" if head else "there are no rows"
        raise InvalidInputError(f"cannot import {source}: {why}")
    columns: dict[str, list[Any]] = {}
    for row in good:
        for key, value in row.items():
            columns.setdefault(str(key), []).append(value)
    if not columns and not options.types:
        raise InvalidInputError(f"cannot import {source}: its first rows have no columns", hint="specify the column types")
    if columns:
        all_found = len(head) < ROWS_TO_INFER and sum(map(size_of, head)) < HEAD_BYTES
        options, names = options.named(list(columns), source.strip("`"), all_found)
    else:
        names = {}
    kinds = {key: options.types.get(key) or options.defaults.get(key) or infer(columns[key], key) for key in names}
    kinds |= {key: kind for key, kind in options.types.items() if key not in columns}
    every = f"{source}, as the first {len(good)} show"
    kinds, unread = without_objects(kinds, options, lambda key: boxes_in_values(key, columns.get(key, [])), every)
    ignored = set(names) - set(kinds)
    return Columns(kinds, {key: names.get(key, key) for key in kinds}, unread, lambda key: options.naming.leaves_out(key) or key in ignored)


def chunks_of(rows: Iterable[Any], columns: Columns, first: int, name: Callable[[int], str]) -> Generator[Chunk, None, None]:
    """Group rows into chunks. The first row has the number `first`, and `name` names rows by their numbers."""
    for group in grouped(rows, _bytes_of, ROWS_AT_ONCE, CHUNK_BYTES):
        yield _chunk(group, columns, first, name)
        first += len(group)


def _bytes_of(row: Any) -> int:
    return sum(map(size_of, row.values())) if isinstance(row, Mapping) else 0


def _chunk(group: list[Any], columns: Columns, first: int, name: Callable[[int], str]) -> Chunk:
    places: list[int] = []
    refused: list[Refusal] = []
    group = [_named(row) for row in group]
    for place, row in enumerate(group):
        unknown = [key for key in row if key not in columns.kinds and not columns.leaves_out(key)] if isinstance(row, Mapping) else []
        if not isinstance(row, Mapping):
            if getattr(row, "message", None) == "":
                continue
            refused.append(
                Refusal(name(first + place), "invalid-value", getattr(row, "message", f"it is a {type(row).__name__}, expected a dict"))
            )
        elif unknown:
            refused.append(
                Refusal(
                    name(first + place), "invalid-value",
                    f"column `{unknown[0]}` does not occur in the rows used to infer columns",
                    f'drop=["{unknown[0]}"] (--drop {unknown[0]}) leaves it out, and types={{"{unknown[0]}": …}} (--type {unknown[0]}=…) imports it',
                )
            )  # fmt: skip
        else:
            places.append(place)
    values = {key: [kind.from_json(group[place].get(key)) for place in places] for key, kind in columns.kinds.items()}
    return Chunk(values, len(places), lambda row: name(first + places[row]), refused, done=first + len(group))


def _named(row: Any) -> Any:
    """Convert the names in a row to text. Returns a `BadRow` if two names become equal."""
    if not isinstance(row, Mapping) or all(type(key) is str for key in row):
        return row
    named = {str(key): row[key] for key in row}
    return named if len(named) == len(row) else BadRow("two of its keys convert to the same string")


def infer(values: list[Any], name: str) -> ColumnType:
    """Choose a column type for Python values."""
    words = any(isinstance(value, str) for value in values)
    # Frames hold lists of text as arrays.
    values = [value.tolist() if isinstance(value, np.ndarray) and value.dtype.kind in "OUS" else value for value in values]
    present = [value for value in values if not (is_null_word(value) if words else is_null(value))]
    if not present:
        return Text()
    present = [from_torch(value)[()] if hasattr(value, "detach") else value for value in present]
    kinds = {type(value) for value in present}
    if all(issubclass(kind, datetime.timedelta | np.timedelta64) for kind in kinds):  # NumPy's durations are whole numbers as well.
        return Scalar("duration")
    if any(issubclass(kind, np.timedelta64) for kind in kinds):
        return Json()  # Appending refuses the durations, by their rows.
    if all(issubclass(kind, datetime.time) for kind in kinds):
        return Scalar("time")
    if all(issubclass(kind, str) for kind in kinds):
        return Text()
    if kinds <= {bool, np.bool_}:
        return Scalar("bool")
    if all(issubclass(kind, int | np.integer) and kind is not bool for kind in kinds):
        if all(-(2**63) <= int(value) < 2**63 for value in present):
            return Scalar("int64")
        return Scalar("uint64") if all(0 <= int(value) < 2**64 for value in present) else Json()
    if all(issubclass(kind, int | float | np.number) and kind is not bool for kind in kinds):
        rounded = any(is_whole(value) and abs(value) < 2**1023 and not is_exact(int(value), "float64") for value in present)
        return Json() if rounded and kinds == {int, float} else Scalar("float64")
    if all(issubclass(kind, bytes | bytearray | memoryview) for kind in kinds):
        return Bytes()
    if all(issubclass(kind, os.PathLike) for kind in kinds):
        return Image()
    if all(issubclass(kind, datetime.date | np.datetime64) for kind in kinds):
        return Scalar("timestamp")
    if all(isinstance(value, np.ndarray) for value in present):
        return _tensor(present, name)
    if all(hasattr(value, "__array_interface__") and not isinstance(value, np.generic) for value in present):  # PIL images
        return Image()
    return _list(present) or Json()


def _list(values: list[Any]) -> Tensor | None:
    """Return the type of lists of numbers or of bools, as for lists in Arrow. Returns None for others."""
    if not all(isinstance(value, list | tuple) for value in values):
        return None
    kinds = {type(number) for value in values for number in value}
    if kinds == {bool}:
        return Tensor((None,), "bool")
    if not kinds or not kinds <= {int, float}:
        return None
    limit = 2**63 if kinds == {int} else 2**53  # Larger whole numbers are not float64.
    if any(isinstance(number, int) and not -limit <= number < limit for value in values for number in value):
        return None
    return Tensor((None,), "int64" if kinds == {int} else "float64")


def _tensor(arrays: list[Any], name: str) -> ColumnType:
    ranks = {array.ndim for array in arrays}
    if len(ranks) != 1:
        raise InvalidInputError(f"cannot import column `{name}`: its arrays have {sorted(ranks)} dimensions, expected the same number")
    shapes = np.array([array.shape for array in arrays])
    shape = tuple(int(sizes[0]) if (sizes == sizes[0]).all() else None for sizes in shapes.T)
    try:
        common = np.result_type(*arrays)
        kind = Tensor(shape, dtype_name(common))
    except (TypeError, Error) as error:
        raise InvalidInputError(f"cannot import column `{name}`: {error}") from error
    dtypes = {array.dtype for array in arrays}
    whole_bits = np.finfo(common).nmant + 1 if common.kind in "fc" else 64
    if any(dtype.kind in "iu" and 8 * dtype.itemsize - (dtype.kind == "i") > whole_bits for dtype in dtypes):
        raise InvalidInputError(
            f"cannot import column `{name}`: its arrays have dtypes {', '.join(sorted(map(str, dtypes)))}, "
            f"but {common} cannot represent all of their values",
            hint="specify the column's type",
        )
    return kind

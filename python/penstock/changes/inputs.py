"""Columns that callers pass to a transaction: checks names and lengths, cuts large inputs, and prepares values for the core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock import _core
from penstock.changes.boxes import settle
from penstock.changes.checks import named_pull, naming
from penstock.changes.slices import slices
from penstock.changes.tables import columns_of
from penstock.errors import InvalidInputError, NotFoundError
from penstock.schema import Schema

Ids = npt.NDArray[np.int64]


def ready(schema: Schema, table: Any, verb: str) -> tuple[dict[str, Any], int]:
    """Do what `ready_columns` does for a table of any kind in memory."""
    doing = verb.split()[0]
    columns = columns_of(table, doing, schema)
    if columns is None:
        raise InvalidInputError(f"cannot {doing} a {type(table).__name__}: expected a table in memory", hint="only append takes streams")
    return ready_columns(schema, columns, verb)


def ready_columns(schema: Schema, columns: Mapping[str, Any], verb: str, first_row: int = 0) -> tuple[dict[str, Any], int]:
    """Check the names and lengths of columns. Returns values that can be sliced, and the number of samples. `first_row` is the number of the
    first row in the user's input, for errors.
    """
    found = {}
    for name, values in columns.items():
        if name not in schema:
            raise NotFoundError(
                f"cannot {verb} column `{name}`: the dataset has no such column",
                code="column-not-found",
                hint=f"columns: {', '.join(schema)}",
            )
        with naming(name, first_row, verb):
            schema[name].check_whole(values)
            found[name] = schema[name].rows(values)
    lengths = {name: len(values) for name, values in found.items()}
    if len(set(lengths.values())) > 1:
        differing = ", ".join(f"`{name}` has {length}" for name, length in lengths.items())
        raise InvalidInputError(
            f"cannot {verb.split()[0]}: columns differ in length: {differing}",
            code="column-lengths-differ",
            hint="give every column the same number of samples; use None for a null",
        )
    return found, next(iter(lengths.values()), 0)


def last(schema: Schema, found: Mapping[str, Any], ids: Ids) -> Ids | None:
    """Return the rows that remain if those are left out whose id occurs again later. Returns None if there are few, or if a value might be
    refused, which must not depend on other rows.
    """
    return _core.last_places(ids) if all(schema[name].fits(values) for name, values in found.items()) else None


def parts(schema: Schema, found: Mapping[str, Any], samples: int) -> list[tuple[int, int]]:
    """Cut the result of `ready` into parts that each fit into memory, given as first rows and ends."""
    return list(slices(found.values(), samples, [schema[name].row_bytes() for name in found]))


def chosen(values: Any, rows: list[int]) -> list[Any]:
    """Return the values of some rows, as plain Python objects where there are such."""
    found = [values[row] for row in rows]
    return [value.as_py() if hasattr(value, "as_py") else value.item() if isinstance(value, np.generic) else value for value in found]


def prepared(schema: Schema, found: Mapping[str, Any], start: int, end: int, verb: str, first_row: int = 0) -> dict[str, Any]:
    """Convert rows start…end to forms that the core accepts. `first_row` is the number of row 0 in the user's input, for errors."""
    made = {}
    for name, values in found.items():
        with naming(name, first_row + start, verb):
            made[name] = schema[name].prepare(values if start == 0 and end == len(values) else values[start:end])
            if made[name][0] == "pulled":
                made[name] = ("pulled", named_pull(name, first_row + start, verb, made[name][1]), *made[name][2:])
    settle(schema, made, verb, first_row + start)
    return made

"""Find the samples for which an SQL predicate is true, with DuckDB.

A leaf module: only `Transaction.delete(where=…)` imports it. Source: DuckDB's SQL, including `json_serialize_sql`, which parses it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock import arrow
from penstock.errors import InvalidInputError, NotFoundError, UnsupportedError

if TYPE_CHECKING:
    from penstock.view import View


def matching(view: View, where: str, doing: str, read: Callable[[list[str]], None]) -> npt.NDArray[np.int64]:
    """Return the row ids of the samples for which `where` is true. `read` gets the names of the columns that are read.

    Cost: scans these columns.
    """
    if not isinstance(where, str):
        raise InvalidInputError(f"cannot {doing}: the predicate is a {type(where).__name__}, expected SQL as str")
    try:
        import duckdb
    except ImportError as error:
        raise UnsupportedError(f"cannot {doing}: predicates need DuckDB", hint="pip install duckdb") from error
    connection = duckdb.connect(config={"enable_external_access": False})
    try:
        columns = _columns(connection, view, where, doing)
        read(columns)
        names = ["_row_id", *columns]
        connection.register("samples", arrow.reader(view, names, 1 << 16))
        found = connection.execute(f"SELECT _row_id FROM samples WHERE ({where}\n)").fetchnumpy()["_row_id"]
    except duckdb.Error as error:
        raise InvalidInputError(
            f"cannot {doing}: {error}", hint="a predicate is an SQL condition over columns, such as year < 2000"
        ) from error
    finally:
        connection.close()
    return np.asarray(found, np.int64)


def _columns(connection: Any, view: View, where: str, doing: str) -> list[str]:
    """Parse a predicate, and return the columns that it names."""
    parsed = json.loads(connection.execute("SELECT json_serialize_sql(?)", [f"SELECT 1 FROM samples WHERE ({where}\n)"]).fetchall()[0][0])
    if parsed["error"]:
        raise InvalidInputError(f"cannot {doing}: {parsed['error_message']}", hint="a predicate is an SQL condition, such as year < 2000")
    nodes = list(_nodes(parsed["statements"]))
    whole = len(parsed["statements"]) == 1 and parsed["statements"][0]["node"].get("type") == "SELECT_NODE"
    if not whole or any(node.get("class") == "SUBQUERY" for node in nodes):
        raise InvalidInputError(f"cannot {doing}: `{where}` is not a condition on single samples", hint="select the row ids first")
    names: dict[str, None] = {}
    for node in nodes:
        if node.get("class") == "COLUMN_REF":
            names[_column(view, node["column_names"][-1], doing)] = None
    names.pop("_row_id", None)
    return list(names)


def _column(view: View, name: str, doing: str) -> str:
    """Return the column with this name. As in SQL, case matters only if two columns differ in nothing else."""
    known = [*view.schema, "_row_id"]
    alike = [column for column in known if column.lower() == name.lower()]
    if name in known or len(alike) == 1:
        return name if name in known else alike[0]
    raise NotFoundError(
        f"cannot {doing}: the dataset has no column `{name}`",
        code="column-not-found",
        hint=f"columns: {', '.join(view.schema)}; text is written in single quotes",
    )


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """Return all nodes of a syntax tree."""
    if isinstance(tree, dict):
        yield tree
    for child in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from _nodes(child)

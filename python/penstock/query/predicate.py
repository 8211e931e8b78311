"""Find the samples for which an SQL predicate is true, with DuckDB.

A leaf module: only `Transaction.delete(where=…)` and `View.filter` import it. Source: DuckDB's SQL, including `json_serialize_sql`, which parses it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.errors import Error, InvalidInputError, NotFoundError, UnsupportedError
from penstock.frameworks import arrow

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.views.concat import Concat
    from penstock.views.view import View


def matching(view: View, where: str, read: Callable[[list[str]], None], row_id: str) -> npt.NDArray[np.int64]:
    """Return the row ids of the samples for which `where` is true. `read` gets the names of the columns that are read. `row_id` is an
    SQL expression for row ids, both in `where` and in the result.

    Cost: scans these columns.
    """
    return _found(view, where, "delete", read, row_id, "_row_id")


def positions(view: View | Concat, where: str) -> npt.NDArray[np.int64]:
    """Return the places in the view of the samples for which `where` is true, in rising order. `where` may name `_row_id` and `_position`.

    Cost: scans the columns that it names.
    """
    return np.sort(_found(view, where, "filter", lambda _: None, "_row_id", _PLACE))


def _found(
    view: View | Concat, where: str, doing: str, read: Callable[[list[str]], None], row_id: str, wanted: str
) -> npt.NDArray[np.int64]:
    """Return the row ids or the places, as `wanted` names them, of the samples for which a condition is true."""
    if not isinstance(where, str):
        raise InvalidInputError(f"cannot {doing}: the predicate is a {type(where).__name__}, expected SQL as str")
    try:
        import duckdb
    except ImportError as error:
        raise UnsupportedError(f"cannot {doing}: predicates need DuckDB", hint="pip install duckdb") from error
    connection = _connection(duckdb, doing)
    raised: list[BaseException] = []
    try:
        extras = ["_row_id"] if wanted == "_row_id" else ["_row_id", "_position"]
        columns = _columns(connection, [*view.schema, *extras], where, doing)
        read(columns)
        batches = arrow.reader(view, [*extras, *columns], 1 << 16, halves=False)  # DuckDB does not read float16.
        batches = batches if wanted == "_row_id" else _numbered(batches)
        connection.register("stored", _noting(batches, raised))
        connection.execute(f"CREATE TEMP VIEW samples AS SELECT * REPLACE ({row_id} AS _row_id) FROM stored")
        [(kind,)] = connection.execute(f"SELECT column_type FROM (DESCRIBE SELECT ({where}\n) FROM samples)").fetchall()
        if kind != "BOOLEAN":
            raise InvalidInputError(
                f"cannot {doing}: `{where}` is not a condition: it is of type {kind.lower()}, expected a boolean",
                hint="compare it, as in year < 2000",
            )
        found = connection.execute(f"SELECT {wanted} FROM samples WHERE ({where}\n)").fetchnumpy()[wanted]
    except Error:
        raise  # Some of ours are a RuntimeError as well.
    except (duckdb.Error, RuntimeError) as error:
        if raised:
            raise raised[0] from None
        if isinstance(error, duckdb.InterruptException) or not isinstance(error, duckdb.Error):
            raise KeyboardInterrupt from error  # DuckDB raises a RuntimeError if Ctrl-C ends a query.
        raise InvalidInputError(
            f"cannot {doing}: {error}", hint="a predicate is an SQL condition over columns, such as year < 2000"
        ) from error
    finally:
        connection.close()
    return np.asarray(found, np.int64)


def _connection(duckdb: Any, doing: str) -> Any:
    """Open a connection whose conditions mean the same on every machine: in UTC, whatever time zone and locale the machine has."""
    connection = duckdb.connect(config={"enable_external_access": False})
    try:
        connection.execute("SET TimeZone = 'UTC'")
        connection.execute("SET enable_progress_bar = false")  # A slow condition would draw it on the standard output.
    except duckdb.Error as error:
        connection.close()
        raise UnsupportedError(
            f"cannot {doing}: this build of DuckDB does not know time zones: {error}", hint="install its wheel: pip install duckdb"
        ) from error
    return connection


# Columns of datasets do not begin with an underscore.
_PLACE = "_place"
# How to choose samples by more than a condition on each.
_INSTEAD = {
    "delete": "select the row ids first, then delete them",
    "filter": 'query positions with full SQL over ds.to_arrow_dataset(["_position", …]), then pass them to ds.select',
}
# The parts of which a condition on single samples consists, as DuckDB names their classes.
_PARTS = {"BETWEEN", "CASE", "CAST", "COLLATE", "COLUMN_REF", "COMPARISON", "CONJUNCTION", "CONSTANT", "FUNCTION", "OPERATOR", "TYPE"}


def _columns(connection: Any, known: list[str], where: str, doing: str) -> list[str]:
    """Parse a predicate, and return those of the `known` columns that it names."""
    parsed, bare = _parsed(connection, where), _parsed(connection, where, bare=True)
    if parsed["error"]:
        raise InvalidInputError(f"cannot {doing}: {parsed['error_message']}", hint="a predicate is an SQL condition, such as year < 2000")
    condition = _condition(parsed)
    nodes = list(_nodes(condition))
    odd = [node["class"] for node in nodes if node.get("class", "COLUMN_REF") not in _PARTS]
    # Apart from the condition, the statement must be the one that any condition is in.
    # A text that is not a condition without the parentheses around it closes one of them.
    if odd or condition is None or bare["error"] or _without_condition(parsed) != _without_condition(_parsed(connection, "true")):
        what = f": {odd[0].lower().replace('_', ' ')} is not allowed" if odd else ""
        raise InvalidInputError(f"cannot {doing}: `{where}` is not a condition on single samples{what}", hint=_INSTEAD[doing])
    names = dict.fromkeys(_column(known, node["column_names"], doing) for node in nodes if node.get("class") == "COLUMN_REF")
    alike = {name.lower(): name for name in names}
    for name in names:
        if alike[name.lower()] != name:
            raise InvalidInputError(
                f"cannot {doing}: SQL does not distinguish the columns `{name}` and `{alike[name.lower()]}`", hint="name only one of them"
            )
    return [name for name in names if name not in ("_row_id", "_position")]


def _numbered(batches: pa.RecordBatchReader) -> pa.RecordBatchReader:
    """Add the place of each sample in the view."""
    import pyarrow as pa

    def numbered() -> Iterator[pa.RecordBatch]:
        first = 0
        for batch in batches:
            places = pa.array(np.arange(first, first := first + batch.num_rows))
            yield batch.append_column(field, places)

    field = pa.field(_PLACE, pa.int64(), nullable=False)
    return pa.RecordBatchReader.from_batches(batches.schema.append(field), numbered())


def _noting(batches: pa.RecordBatchReader, raised: list[BaseException]) -> pa.RecordBatchReader:
    """Keep what is raised while DuckDB reads: a KeyboardInterrupt, or an error of a damaged block, which DuckDB turns into an error of its own."""
    import pyarrow as pa

    def noted() -> Iterator[pa.RecordBatch]:
        try:
            yield from batches
        except GeneratorExit:
            raise
        except BaseException as error:
            raised.append(error)
            raise

    return pa.RecordBatchReader.from_batches(batches.schema, noted())


def _parsed(connection: Any, where: str, *, bare: bool = False) -> Any:
    """Parse the statement that selects samples, with the condition in parentheses or without, and return its syntax tree."""
    statement = f"SELECT 1 FROM samples WHERE {where}" if bare else f"SELECT 1 FROM samples WHERE ({where}\n)"
    return json.loads(connection.execute("SELECT json_serialize_sql(?)", [statement]).fetchall()[0][0])


def _condition(parsed: Any) -> Any:
    return parsed["statements"][0]["node"].get("where_clause") if len(parsed["statements"]) == 1 else None


def _without_condition(parsed: Any) -> Any:
    """Return a syntax tree without its condition and without positions in the text."""

    def stripped(tree: Any) -> Any:
        if isinstance(tree, dict):
            kept = {key: value for key, value in tree.items() if not key.startswith("query_location") and key != "where_clause"}
            return {key: stripped(value) for key, value in kept.items()}
        return [stripped(child) for child in tree] if isinstance(tree, list) else tree

    return stripped(parsed["statements"])


def _column(known: list[str], names: list[str], doing: str) -> str:
    """Return the column that a reference names. As in SQL, case matters only if two columns differ in nothing else."""
    name = names[-1]
    alike = [column for column in known if column.lower() == name.lower()]
    if len(names) == 1 and (name in known or len(alike) == 1):
        return name if name in known else alike[0]
    raise NotFoundError(
        f"cannot {doing}: the dataset has no column `{'.'.join(names)}`",
        code="column-not-found",
        hint=f"columns: {', '.join(name for name in known if not name.startswith('_'))}; text is written in single quotes",
    )


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """Return all nodes of a syntax tree."""
    if isinstance(tree, dict):
        yield tree
    for child in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from _nodes(child)

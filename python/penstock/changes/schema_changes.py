"""Changes of the schema in a transaction."""

from __future__ import annotations

from typing import Any

from penstock import _core
from penstock.changes.call import Calls
from penstock.changes.checks import naming, text_of
from penstock.schema import Schema, from_json, to_json
from penstock.values.dtypes import dtype_name


class SchemaChanges:
    """Adds, drops, renames and widens columns. Nothing is rewritten, and nobody sees the change before the commit."""

    _core: _core.Transaction
    _calls: Calls
    _known: Schema | None

    @property
    def _schema(self) -> Schema:
        """The schema with the changes so far. It is parsed when it is needed, because thousands of changes may follow each other."""
        if self._known is None:
            self._known = from_json(self._core.columns())
        return self._known

    def add_column(self, name: str, kind: Any, *, fill: Any = None) -> None:
        """Add a column at the end. `kind` is a column type or a dtype, as in `ps.create`.

        Existing samples have the value `fill`, or are null. So do samples that are appended without the column. The value is stored once. Calls
        that follow in this transaction can use the column.
        Cost: a data file with one value; nothing is rewritten. If another commit changes the schema in the meantime, the commit is a ConflictError.
        Raises: InvalidInputError (invalid-schema, invalid-value).

        >>> import penstock as ps
        >>> ds = ps.create("memory://add-column", {"n": "int32"})
        >>> ids = ds.append({"n": [1, 2, 3]}).row_ids
        >>> with ds.transaction("scores") as tx:
        ...     tx.add_column("score", "float32", fill=0.5)
        ...     tx.update({"score": [2.0]}, row_ids=ids[:1])
        >>> ds["score"][:].tolist(), list(ds.schema)
        ([2.0, 0.5, 0.5], ['n', 'score'])
        """
        column = to_json({name: kind})
        ready = {}
        if fill is not None:
            [made] = from_json(column).values()
            with naming(name, 0, "add"):
                made.check_whole([fill])
                ready[name] = made.prepare(made.rows([fill]))
        with self._calls.begin():
            self._core.add_column(column, ready)
            self._known = None

    def drop_column(self, name: str, *, force: bool = False) -> None:
        """Drop a column. Earlier snapshots keep it, and no file is rewritten. A column with values needs `force=True`.

        If another commit changes values of the column in the meantime, or the schema, the commit is a ConflictError.
        Raises: NotFoundError (column-not-found), InvalidInputError (invalid-argument without `force`, invalid-schema if boxes, masks or
        keypoints belong to the column).

        >>> import penstock as ps
        >>> ds = ps.create("memory://drop-column", {"n": "int32", "t": ps.Text()})
        >>> receipt = ds.append({"n": [1], "t": ["x"]})
        >>> with ds.transaction() as tx:
        ...     tx.drop_column("t", force=True)
        >>> list(ds.schema), list(ps.open("memory://drop-column", snapshot=receipt.snapshot).schema)
        (['n'], ['n', 't'])
        """
        with self._calls.begin():
            self._core.drop_column(text_of(name, "column", "drop a column"), bool(force))
            self._known = None

    def rename_column(self, old: str, new: str) -> None:
        """Rename a column. Its values, and boxes, masks and keypoints that belong to it, follow. No file is rewritten.

        Raises: NotFoundError (column-not-found), InvalidInputError (invalid-schema).

        >>> import penstock as ps
        >>> ds = ps.create("memory://rename-column", {"n": "int32"})
        >>> receipt = ds.append({"n": [1]})
        >>> with ds.transaction() as tx:
        ...     tx.rename_column("n", "number")
        >>> ds["number"][:].tolist()
        [1]
        """
        with self._calls.begin():
            self._core.rename_column(text_of(old, "column", "rename a column"), text_of(new, "column", "rename a column"))
            self._schema = from_json(self._core.columns())

    def widen_column(self, name: str, dtype: Any) -> None:
        """Give a column of numbers a dtype that represents all of its values exactly, such as int16 to int32, or float16 to float32.

        Data files keep the values as they are, and reads convert them. Appends and updates that began before continue to work.
        Cost: nothing is rewritten. If another commit changes the schema in the meantime, the commit is a ConflictError.
        Raises: NotFoundError (column-not-found), InvalidInputError (invalid-schema if a value might change).

        >>> import penstock as ps
        >>> ds = ps.create("memory://widen-column", {"n": "int16"})
        >>> receipt = ds.append({"n": [32767]})
        >>> with ds.transaction("larger numbers") as tx:
        ...     tx.widen_column("n", "int64")
        ...     ids = tx.append({"n": [1 << 40]})
        >>> ds["n"][:].tolist(), ds["n"][:].dtype
        ([32767, 1099511627776], dtype('int64'))
        """
        with naming(text_of(name, "column", "widen a column"), 0, "widen"):
            wider = dtype_name(dtype)
        with self._calls.begin():
            self._core.widen_column(name, wider)
            self._known = None

"""Changes of the schema in a transaction."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from penstock import _core
from penstock.changes.boxes import check_fill, settle, with_rule
from penstock.changes.call import Calls
from penstock.changes.checks import naming, text_of
from penstock.errors import InvalidInputError
from penstock.schema import BoxRule, Schema, from_json, to_json
from penstock.values.dtypes import dtype_name


class SchemaChanges:
    """Adds, drops, renames and widens columns, and adds and renames classes. Nothing is rewritten, and nobody sees the change before the commit."""

    _core: _core.Transaction
    _calls: Calls
    _known: Schema | None
    _boxes: BoxRule

    @property
    def _schema(self) -> Schema:
        """The schema with the changes so far. It is parsed when it is needed, because thousands of changes may follow each other."""
        if self._known is None:
            schema = from_json(self._core.columns())
            self._known = schema if self._boxes.action == "refuse" else with_rule(schema, self._boxes)
        return self._known

    def add_column(self, name: str, kind: Any, *, fill: Any = None) -> None:
        """Add a column at the end. `kind` is a column type or a dtype, as in `ps.create`.

        Existing samples have the value `fill`, or are null. So do samples that are appended without the column. The value is stored once. Calls
        that follow in this transaction can use the column. The rule of the transaction for wrong boxes applies to a fill of boxes, and labels
        that are `of` boxes have none, except with "keep".
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
                schema = with_rule(Schema({**self._schema, name: made}), self._boxes)
                check_fill(schema, name, ready[name])
                settle(schema, ready, "add", 0)
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
            self._known = None

    def add_classes(self, column: str, names: Iterable[str]) -> None:
        """Add classes to a `Label` or `Labels` column, after those that it has. Names that it has already are left out.

        Conflicts with nothing: other commits may add theirs in the meantime, append samples of them, or change the schema. Classes of branches
        are merged by name. A class of this transaction may then get another code, and its samples follow. Codes of committed classes never change.
        Cost: nothing is rewritten. Labels that are appended later take 8 bytes each before compression.
        Raises: NotFoundError (column-not-found), InvalidInputError (invalid-schema if the column is not one of labels).

        >>> import penstock as ps
        >>> ds = ps.create("memory://add-classes", {"label": ps.Label(["cat", "dog"])})
        >>> receipt = ds.append({"label": ["cat", "dog"]})
        >>> with ds.transaction("foxes") as tx:
        ...     tx.add_classes("label", ["fox"])
        ...     ids = tx.append({"label": ["fox"]})
        >>> ds["label"][:].tolist(), ds.schema["label"].names
        ([0, 1, 2], ('cat', 'dog', 'fox'))
        """
        doing = "add classes"
        if isinstance(names, str) or not isinstance(names, Iterable):
            raise InvalidInputError(
                f"cannot {doing}: names={names!r}, expected a list of str", hint='write tx.add_classes(column, ["fox"])'
            )
        classes = [text_of(name, "class", doing) for name in names]
        with self._calls.begin():
            self._core.add_classes(text_of(column, "column", doing), classes)
            self._known = None

    def rename_class(self, column: str, old: str, new: str) -> None:
        """Give a class of a `Label` or `Labels` column another name. Its samples follow, and codes stay the same.

        Cost: one change of the schema; nothing is rewritten. If another commit changes the schema in the meantime, the commit is a
        ConflictError, unless it only added classes. Raises: NotFoundError (column-not-found, class-not-found), InvalidInputError
        (invalid-schema if another class has the name).

        >>> import penstock as ps
        >>> ds = ps.create("memory://rename-class", {"label": ps.Label(["cat", "fox"])})
        >>> receipt = ds.append({"label": ["fox", "cat"]})
        >>> with ds.transaction() as tx:
        ...     tx.rename_class("label", "fox", "red fox")
        >>> ds.to_arrow()["label"].to_pylist(), ds["label"][:].tolist()
        (['red fox', 'cat'], [1, 0])
        """
        doing = "rename a class"
        with self._calls.begin():
            self._core.rename_class(text_of(column, "column", doing), text_of(old, "class", doing), text_of(new, "class", doing))
            self._known = None

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

"""Transactions, whose appended samples become one commit or are discarded."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock import _core
from penstock.errors import ClosedError, Error, InvalidInputError, NotFoundError
from penstock.schema import Schema, from_json
from penstock.values.checks import is_utf8
from penstock.values.slices import slices

if TYPE_CHECKING:
    from penstock.dataset import Dataset


@dataclasses.dataclass(frozen=True)
class Receipt:
    """The result of a commit: its snapshot and the row ids of the added samples, in input order."""

    snapshot: str
    row_ids: npt.NDArray[np.int64]


def _text(value: Any, what: str, doing: str = "begin a transaction") -> str:
    if not isinstance(value, str):
        raise InvalidInputError(f"cannot {doing}: the {what} is a {type(value).__name__}, expected str")
    if not is_utf8(value):
        raise InvalidInputError(f"cannot {doing}: the {what} is not UTF-8: it contains a lone surrogate")
    return value


class Transaction:
    """Appends that become one commit or are discarded.

    >>> import penstock as ps
    >>> ds = ps.create("memory://transaction", {"text": ps.Text()})
    >>> with ds.transaction("two parts") as tx:
    ...     tx.append({"text": ["a", "b"]})
    ...     tx.append({"text": ["c"]})
    >>> len(ds), ds.log()[0].message
    (3, 'two parts')
    """

    def __init__(self, dataset: Dataset, message: str, author: str, properties: dict[str, Any]) -> None:
        self._dataset = dataset
        self._schema: Schema = from_json(dataset._snapshot.columns)
        self._message, self._author = _text(message, "message"), _text(author, "author")
        try:
            self._properties = json.dumps(properties, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidInputError(f"cannot begin a transaction: its properties are not JSON: {error}") from error
        self._core = _core.begin(dataset._snapshot, self._message, self._author, self._properties)
        self._receipt: Receipt | None = None
        self._failed: BaseException | None = None
        self._aborted = False

    @property
    def receipt(self) -> Receipt:
        """The receipt for the commit. Raises: ClosedError before the commit."""
        if self._receipt is None:
            raise ClosedError("cannot return a receipt: the transaction has not been committed")
        return self._receipt

    def append(self, columns: Mapping[str, Any], *, validate: str = "header") -> None:
        """Add samples to the transaction. `columns` maps column names to one value per sample; see `Dataset.append`."""
        if not isinstance(columns, Mapping):
            raise InvalidInputError(f"cannot append a {type(columns).__name__}: expected a dict of column names to values")
        ready = {name: self._ready(name, values) for name, values in columns.items()}
        lengths = {name: len(values) for name, values in ready.items()}
        if len(set(lengths.values())) > 1:
            differing = ", ".join(f"`{name}` has {length}" for name, length in lengths.items())
            raise InvalidInputError(
                f"cannot append: columns differ in length: {differing}",
                code="column-lengths-differ",
                hint="give every column the same number of samples; use None for a null",
            )
        least = [self._schema[name].row_bytes() for name in ready]
        for start, end in slices(ready.values(), next(iter(lengths.values()), 0), least):
            try:
                self.append_slice(ready, start, end, validate)
            except BaseException as error:
                if start > 0:  # Earlier slices are already in the transaction, so it can no longer be committed.
                    self._failed = error
                raise

    def _ready(self, name: str, values: Any) -> Any:
        if name not in self._schema:
            raise NotFoundError(
                f"cannot append column `{name}`: the dataset has no such column",
                code="column-not-found",
                hint=f"columns: {', '.join(self._schema)}",
            )
        with _naming(name, 0):
            self._schema[name].check_whole(values)
            return self._schema[name].rows(values)

    def append_slice(self, ready: Mapping[str, Any], start: int, end: int, validate: str) -> None:
        """Append rows start…end of columns that can be sliced. One call to the core appends either all of these rows or none."""
        prepared = {}
        for name, values in ready.items():
            with _naming(name, start):
                prepared[name] = self._schema[name].prepare(values if start == 0 and end == len(values) else values[start:end])
                if prepared[name][0] == "pulled":
                    prepared[name] = ("pulled", _named(name, start, prepared[name][1]), *prepared[name][2:])
        self._core.append(prepared, validate, start)

    def commit(self) -> Receipt:
        """Commit now and move the dataset handle to the new snapshot. Cost: four syncs for a small commit on a local disk."""
        if self._failed is not None:
            self._core.abort()
            raise ClosedError(
                f"cannot commit: an earlier append failed ({self._failed})", hint="begin another transaction; nothing was committed"
            )
        snapshot, first, samples, core = self._core.commit(self._message, self._author, self._properties)
        self._receipt = Receipt(snapshot, np.arange(first, first + samples, dtype=np.int64))
        self._dataset._move(core)
        return self._receipt

    def abort(self) -> None:
        """Abort the transaction and delete the data that it wrote."""
        self._aborted = True
        self._core.abort()

    def __enter__(self) -> Transaction:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self.abort()
        elif self._receipt is None and not self._aborted:
            self.commit()


def _named(column: str, first_row: int, pull: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `pull` so that Penstock errors name the column and row. Exceptions from the value's source pass through unchanged."""

    def named(*arguments: Any) -> Any:
        try:
            return pull(*arguments)
        except Error as error:
            error._place(first_row, column)
            error._within(f"cannot append to column `{column}`")
            raise

    return named


@contextlib.contextmanager
def _naming(column: str, first_row: int) -> Iterator[None]:
    """Add the column and row to errors raised while preparing values. Python exceptions for invalid values become InvalidInputError."""
    what = f"cannot append to column `{column}`"
    try:
        yield
    except Error as error:
        error._place(first_row, column)
        error._within(what)
        raise
    except (TypeError, ValueError, OverflowError, AttributeError, RecursionError, KeyError, NotImplementedError) as error:
        ours = InvalidInputError(f"{what}: {type(error).__name__}: {error}", code="invalid-value")
        ours._place(first_row, column)
        raise ours from error

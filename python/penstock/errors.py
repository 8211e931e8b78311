"""The error classes, one per kind. The kind indicates what the caller can do next. `code` is stable; `hint` suggests a remedy.

Source: the error code table in crates/error/src/lib.rs. Tests keep the two files in sync.
"""

from __future__ import annotations

from typing import Any


class Error(Exception):
    """Base class for all Penstock errors. `code` is stable. `rows` lists the affected positions in the caller's request.

    `row_ids` lists the samples concerned: those that cannot be read, or the first ones in conflict. `column` and `object` name the affected column and stored object,
    and `commit` is the snapshot id of the other commit in a conflict, if known.
    Callers never need to parse the message.

    >>> import penstock as ps
    >>> try:
    ...     ps.open("/nowhere/at/all")
    ... except ps.Error as error:
    ...     error.code
    'dataset-not-found'
    """

    code: str = "internal"
    hint: str | None = None
    rows: list[int]
    row_ids: list[int]
    column: str | None = None
    object: str | None = None
    commit: str | None = None
    # Parts of the message: `prefix: row n reason`.
    _prefix: str = ""
    _row: int | None = None
    _placed: bool = False

    def __init__(
        self, message: str = "", *, code: str | None = None, hint: str | None = None, rows: list[int] | None = None, row: int | None = None
    ) -> None:
        self._reason, self._row = message, row
        super().__init__(message)
        self.code = code or type(self).code
        self.hint = hint
        self.rows = [row] if rows is None and row is not None else rows or []
        self.row_ids = []

    @property
    def message(self) -> str:
        """The failed operation and the reason, without the hint."""
        row = "" if self._row is None else f"row {self._row} "
        return f"{self._prefix}{': ' if self._prefix else ''}{row}{self._reason}"

    @property
    def reason(self) -> str:
        """The message without the row number, for callers that report the row themselves."""
        return f"{self._prefix}{': ' if self._prefix else ''}{self._reason}"

    def _within(self, prefix: str) -> None:
        """Prepend a description of the failed operation to the message."""
        self._prefix = f"{prefix}{': ' if self._prefix else ''}{self._prefix}"

    def _place(self, first_row: int, column: str | None = None) -> None:
        """Make rows relative to the start of the user's input, and set the column. Further calls have no effect."""
        if not self._placed:
            self.column = self.column or column
            self._row = None if self._row is None else self._row + first_row
            self.rows = [row + first_row for row in self.rows]
            self._placed = True

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (), {**self.__dict__, "args": self.args})


class NotFoundError(Error, KeyError):
    """A requested dataset, snapshot, column, row id or file does not exist."""

    code = "object-not-found"


class OutOfRangeError(NotFoundError, IndexError):
    """A position is outside the dataset or view."""

    code = "position-out-of-range"


class AlreadyExistsError(Error, FileExistsError):
    """A dataset already exists."""

    code = "dataset-exists"


class ConflictError(Error):
    """A concurrent commit conflicts with this one."""

    code = "conflict"


class UnavailableError(Error, OSError):
    """Storage failed or is full; the same call may work later."""

    code = "storage-failed"


class InvalidInputError(Error, ValueError):
    """The caller passed an invalid value."""

    code = "invalid-argument"


class CorruptError(Error):
    """Stored bytes, or media to be stored, are damaged."""

    code = "object-malformed"


class UnsupportedError(Error, NotImplementedError):
    """This release does not support the operation, the format version or the storage."""

    code = "unsupported-format"


class PermissionDeniedError(Error, PermissionError):
    """Storage denied access."""

    code = "permission-denied"


class ClosedError(Error):
    """The handle is closed or has already been used."""

    code = "transaction-closed"


class InternalError(Error, RuntimeError):
    """A bug in Penstock; please report it."""

    code = "internal"


def unpicklable(what: str, remedy: str) -> InvalidInputError:
    """Return the error for an object that can be neither pickled nor copied."""
    return InvalidInputError(f"cannot pickle or copy {what}", hint=remedy)


# The class of each kind of error of the core, by its name there.
_CLASSES: dict[str, type[Error]] = {
    name.removesuffix("Error"): kind for name, kind in vars().items() if isinstance(kind, type) and issubclass(kind, Error)
}


# Over 6 parameters: each is a field of the core's error.
def make(
    kind: str,
    code: str,
    said: tuple[str, int | None, str],
    hint: str | None,
    rows: list[int],
    row_ids: list[int],
    place: tuple[str | None, str | None, str | None],
) -> Error:
    """Build the exception for a core error; only `_core` calls this. `said` contains the prefix, the row and the reason, `place` the column,
    the object and the commit.
    """
    prefix, row, reason = said
    error = _CLASSES.get(kind, InternalError)(reason, code=code, hint=hint, rows=list(rows), row=row)
    error._prefix, error._placed = prefix, True
    error.column, error.object, error.commit = place
    error.row_ids = list(row_ids)
    error.args = (error.message,)
    return error

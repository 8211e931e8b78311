"""The error classes: one a kind, by what the caller does next; `code` is stable, `hint` is the remedy.

Source: crates/error/src/lib.rs, which holds the table of codes; tests keep the two in step.
"""

from __future__ import annotations


class Error(Exception):
    """Base of all errors of Penstock. `code` is stable; `rows` are positions in the caller's request, if any.

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

    def __init__(self, message: str = "", *, code: str | None = None, hint: str | None = None, rows: list[int] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.hint = hint
        self.rows = rows or []
        self.row_ids = []

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.code, self.hint, self.rows, self.row_ids))


def _rebuild(kind: type[Error], message: str, code: str, hint: str | None, rows: list[int], row_ids: list[int]) -> Error:
    error = kind(message, code=code, hint=hint, rows=rows)
    error.row_ids = row_ids
    return error


class NotFoundError(Error, KeyError):
    """What was asked for is not there: a dataset, snapshot, column, row id, file."""

    code = "object-not-found"


class OutOfRangeError(NotFoundError, IndexError):
    """A position that the dataset or view does not have; an IndexError, so that `for sample in ds` ends."""

    code = "position-out-of-range"


class AlreadyExistsError(Error, FileExistsError):
    """There is a dataset already."""

    code = "dataset-exists"


class ConflictError(Error):
    """Somebody else's commit collides with this one."""

    code = "conflict"


class UnavailableError(Error, OSError):
    """Storage failed or is full; the same call may work later."""

    code = "storage-failed"


class InvalidInputError(Error, ValueError):
    """The caller gave something that cannot be."""

    code = "invalid-argument"


class CorruptError(Error):
    """Stored bytes, or media offered for storing, are damaged."""

    code = "object-malformed"


class UnsupportedError(Error, NotImplementedError):
    """This release cannot do it: a newer format, another storage."""

    code = "unsupported-format"


class PermissionDeniedError(Error, PermissionError):
    """Storage does not let us."""

    code = "permission-denied"


class ClosedError(Error):
    """The handle is used up."""

    code = "transaction-closed"


class InternalError(Error, RuntimeError):
    """A defect of Penstock; please report it."""

    code = "internal"


_CLASSES: dict[str, type[Error]] = {
    "NotFound": NotFoundError,
    "OutOfRange": OutOfRangeError,
    "AlreadyExists": AlreadyExistsError,
    "Conflict": ConflictError,
    "Unavailable": UnavailableError,
    "InvalidInput": InvalidInputError,
    "Corrupt": CorruptError,
    "Unsupported": UnsupportedError,
    "PermissionDenied": PermissionDeniedError,
    "Closed": ClosedError,
    "Internal": InternalError,
}


def make(kind: str, code: str, message: str, hint: str | None, rows: list[int]) -> Error:
    """Build the exception for an error of the core; called by `_core` only."""
    return _CLASSES.get(kind, InternalError)(message, code=code, hint=hint, rows=list(rows))

"""Checks of what callers pass to a transaction. Errors name the column and the row."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from penstock.errors import Error, InvalidInputError
from penstock.values.checks import is_utf8
from penstock.values.streams import SOURCE_ROW


def text_of(value: Any, what: str, doing: str = "begin a transaction") -> str:
    if not isinstance(value, str):
        raise InvalidInputError(f"cannot {doing}: the {what} is a {type(value).__name__}, expected str")
    if not is_utf8(value):
        raise InvalidInputError(f"cannot {doing}: the {what} is not UTF-8: it contains a lone surrogate")
    return value


def json_of(properties: Mapping[str, Any] | None, doing: str) -> str:
    """Return a commit's properties as JSON."""
    if properties is None:
        return "{}"
    if not isinstance(properties, Mapping):
        raise InvalidInputError(f"cannot {doing}: the properties are a {type(properties).__name__}, expected a dict")
    try:
        return json.dumps(dict(properties), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"cannot {doing}: the properties are not JSON: {error}") from error


def named_pull(column: str, first_row: int, verb: str, pull: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `pull` so that Penstock errors name the column and row. Exceptions from the value's source get a note that does."""

    def named(*arguments: Any) -> Any:
        try:
            return pull(*arguments)
        except Error as error:
            error._place(first_row, column)
            error._within(f"cannot {verb} column `{column}`")
            raise
        except Exception as error:
            _note(error, column, first_row + arguments[0], verb)
            raise

    return named


def _note(error: BaseException, column: str, row: int, verb: str) -> None:
    error.add_note(f"cannot {verb} column `{column}`, row {row}: its source raised this error")


@contextlib.contextmanager
def naming(column: str, first_row: int, verb: str) -> Iterator[None]:
    """Add the column and row to errors raised while preparing values. Python exceptions for invalid values become InvalidInputError."""
    what = f"cannot {verb} column `{column}`"
    try:
        yield
    except Error as error:
        error._place(first_row, column)
        error._within(what)
        raise
    except Exception as error:
        if (row := getattr(error, SOURCE_ROW, None)) is not None:
            _note(error, column, first_row + row, verb)
            raise
        if not isinstance(error, TypeError | ValueError | OverflowError | AttributeError | RecursionError | KeyError | NotImplementedError):
            raise
        ours = InvalidInputError(f"{what}: {type(error).__name__}: {error}", code="invalid-value")
        ours._place(first_row, column)
        raise ours from error

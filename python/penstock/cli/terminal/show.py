"""Helpers that the verbs share, for tables, JSON, errors and type arguments."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, ProgressColumn
from rich.table import Table

from penstock.cli.terminal.at import TYPES_HELP
from penstock.columns import TYPES
from penstock.columns.column_type import ColumnType
from penstock.columns.scalar import Scalar
from penstock.errors import Error

# With COLUMNS=0, Rich would print tables of width 0.
WIDTH = 80 if os.environ.get("COLUMNS") == "0" else None
console = Console(width=WIDTH)
# Describes what the command has committed. `main` reports it even if printing fails, so that the user does not run the command again.
done = ""


def parse_type(text: str) -> ColumnType:
    """Parse a type argument, such as `int32`, `label:cat,dog` or `tensor:float32:3x?`."""
    name, _, rest = text.partition(":")
    try:
        return TYPES[name].from_text(rest) if name in TYPES and name != Scalar.type else Scalar.from_text(text)
    except ValueError as error:
        raise typer.BadParameter(f"`{text}` is not a column type: {error}; expected {TYPES_HELP}") from error


def parse_types(arguments: list[str]) -> dict[str, ColumnType]:
    """Parse `name=type` arguments."""
    types: dict[str, ColumnType] = {}
    for argument in arguments:
        name, sign, kind = argument.partition("=")
        if not sign or not name:
            raise typer.BadParameter(f"`{argument}`: expected {TYPES_HELP}")
        if name in types:
            raise typer.BadParameter(f"column `{name}` is given twice")
        types[name] = parse_type(kind)
    return types


def print_json(value: Any) -> None:
    """Print a value as one line of JSON, for use in scripts."""
    in_ascii = (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
    print(json.dumps(_finite(value), default=_plain, ensure_ascii=in_ascii))


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON cannot represent, with text."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    if isinstance(value, np.ndarray | np.generic):
        value = _plain(value)
        return _finite(value) if isinstance(value, list | float) else value
    return str(value) if isinstance(value, float) and not np.isfinite(value) else value


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item() if value.dtype.kind != "M" else str(value)
    if isinstance(value, np.ndarray):
        return {"shape": list(value.shape), "dtype": str(value.dtype)} if value.size > 64 else value.tolist()
    if isinstance(value, bytes):
        return {"bytes": len(value)}
    return str(value)


def print_error(error: Error, as_json: bool) -> None:
    """Print an error to stderr and, with --json, also as an object to stdout."""
    if as_json:
        print_json({"error": {"code": error.code, "message": error.message, "hint": error.hint}})
    print(f"error[{error.code}]: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)


def table(title: str, *columns: str) -> Table:
    """Create a table without rows."""
    made = Table(title=plain(title), title_justify="left")
    for column in columns:
        made.add_column(plain(column), overflow="fold")
    return made


def progress(as_json: bool, *columns: ProgressColumn) -> Progress:
    """Create a progress bar on the standard error, which shows nothing with --json and in scripts."""
    shown = Console(stderr=True, width=WIDTH)
    return Progress(*columns, console=shown, disable=as_json or not shown.is_terminal)


def count(number: int, what: str) -> str:
    """Return a number and what it counts.

    >>> count(1, "sample"), count(2000, "sample")
    ('1 sample', '2,000 samples')
    """
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def unreferenced_text(objects: int, count: int) -> str:
    """Describe objects that no snapshot refers to.

    >>> unreferenced_text(3, 1536)
    '3 objects (1.5 KiB) are not referenced by any snapshot, perhaps from a running or interrupted writer'
    """
    what = "1 object ({}) is" if objects == 1 else f"{objects:,} objects ({{}}) are"
    return f"{what.format(size_text(count))} not referenced by any snapshot, perhaps from a running or interrupted writer"


def size_text(count: float) -> str:
    """Format a number of bytes with its unit.

    >>> size_text(1536)
    '1.5 KiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def type_text(kind: ColumnType) -> str:
    """Describe a column type in a few words."""
    return kind.describe() if kind.codec == "none" else f"{kind.describe()}, {kind.codec}"


def cell(value: Any) -> str:
    """Format one value for a table."""
    if value is None:
        return "null"
    if isinstance(value, np.ndarray) and value.size > 8:
        return f"{value.dtype} {value.shape}"
    if isinstance(value, bytes):
        return size_text(len(value))
    text = str(value)
    return plain(text if len(text) <= 80 else text[:79] + "…")


def plain(text: str) -> str:
    """Escape text from users, so that Rich finds no markup in it and the terminal receives no control characters.

    >>> plain("a\x1b[2Jb")
    'a\\\\x1b[2Jb'
    """
    return escape(printable(text))


def printable(text: str) -> str:
    """Escape control characters and lone surrogates."""
    shown = "".join(one if one.isprintable() or one in "\n\t" else one.encode("unicode_escape").decode() for one in text)
    return shown.encode("utf-8", "backslashreplace").decode()


def names(known: dict[str, str], name: str, done: str, as_json: bool, titles: tuple[str, str, str]) -> None:
    """Print the names of snapshots: as JSON, what was `done` with one of them, or all as a table, with the titles of it and its columns."""
    if as_json:
        print_json(known)
    elif name:
        print(done + known.get(name, ""))
    else:
        listed = table(*titles)
        for own, snapshot in known.items():
            listed.add_row(plain(own), snapshot)
        console.print(listed)

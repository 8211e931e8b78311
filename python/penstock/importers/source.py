"""What an importer gives: a schema and chunks of rows, each row with a name for the report."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from penstock.schema import ColumnType


@dataclasses.dataclass(frozen=True)
class Options:
    """What a user may set. `types` gives columns a type by name; `include` and `exclude` are of folders of images; the rest are of CSV."""

    types: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    on_error: str = "raise"
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    encoding: str = "utf-8"
    delimiter: str | None = None
    quote: str = '"'
    header: bool = True


@dataclasses.dataclass
class Refusal:
    """One item that was not imported: where it came from, the error's code, and its message."""

    path: str
    code: str
    message: str


@dataclasses.dataclass
class Chunk:
    """Some rows: column → values; `name(i)` tells where row i came from. `refused` were never rows at all.

    `problems` are (row, column, refusal) of values that the source could not read, and gives as None.
    """

    columns: dict[str, Any]
    rows: int
    name: Callable[[int], str]
    refused: Sequence[Refusal] = ()
    problems: Sequence[tuple[int, str, Refusal]] = ()


@dataclasses.dataclass
class Source:
    """An opened source. `total` is in `unit` (files, bytes, rows), for the progress bar; `done()` tells how far it is.

    `left_out` are files of other kinds, or that were not chosen.
    """

    schema: dict[str, ColumnType]
    chunks: Iterator[Chunk]
    total: int | None
    unit: str
    done: Callable[[], int]
    left_out: list[str] = dataclasses.field(default_factory=list)

"""Prepares bytes that are read from a file object or an iterator while they are written."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from penstock.errors import Error, NotFoundError
from penstock.values.checks import Array, Prepared, fail

# Bytes are read and written in pieces of at most this size. Values that end within the first piece are like other bytes.
PIECE_BYTES = 1 << 20
# A larger file is read while it is written.
LARGE_FILE_BYTES = 8 << 20


def is_source(value: Any) -> bool:
    """Return whether bytes can be read from a value only once: a file object, or an iterator of bytes.

    >>> import io
    >>> is_source(io.BytesIO(b"")), is_source(b for b in [b""]), is_source(b"")
    (True, True, False)
    """
    return callable(getattr(value, "read", None)) or hasattr(value, "__next__")


def is_large_file(value: Any) -> bool:
    """Return whether a value is the path of a file that is too large to be read at once."""
    with contextlib.suppress(OSError):  # The core reports the unreadable file.
        return isinstance(value, os.PathLike) and os.stat(value).st_size >= LARGE_FILE_BYTES
    return False


# The attribute of an exception that a source raised while its first piece was read: the row of the value.
SOURCE_ROW = "_penstock_source_row"


class Source:
    """Reads one value piece by piece, and knows the first piece already."""

    def __init__(self, value: Any, row: int) -> None:
        self._row = row
        self._pieces = self._of_file(value) if callable(getattr(value, "read", None)) else self._of_items(value)
        head, more = [], PIECE_BYTES
        try:
            while more > 0 and (piece := next(self._pieces, None)) is not None:
                head.append(bytes(piece))
                more -= len(piece)
        except Exception as error:
            if not isinstance(error, Error):
                setattr(error, SOURCE_ROW, row)
            raise
        self.head = b"".join(head)
        self.is_whole = more > 0

    def pieces(self) -> Iterator[Any]:
        yield from _cut(memoryview(self.head))
        self.head = b""
        yield from self._pieces

    def _of_file(self, file: Any) -> Iterator[memoryview]:
        while len(piece := self._bytes_of(file.read(PIECE_BYTES), "`read` returned")):
            if len(piece) > PIECE_BYTES:
                raise fail(f"is a source whose `read({PIECE_BYTES})` returned {len(piece)} bytes", self._row)
            yield piece
        # Reads of a response in parts do not report that the connection was lost. `length` is what they still expect.
        client = sys.modules.get("http.client")
        if client is not None and isinstance(file, client.HTTPResponse) and file.length:
            raise fail(f"is an HTTP response that ended {file.length} bytes early", self._row, hint="request it again")

    def _of_items(self, items: Iterator[Any]) -> Iterator[memoryview]:
        for item in items:
            yield from _cut(self._bytes_of(item, "it yielded"))

    def _bytes_of(self, piece: Any, how: str) -> memoryview:
        with contextlib.suppress(TypeError):  # It is not a buffer, or not contiguous.
            view = memoryview(piece)
            if view.itemsize == 1:
                return view.cast("B")
        hint = {str: 'open the file in binary mode: open(path, "rb")', type(None): "use a blocking source"}.get(type(piece))
        raise fail(f"is a source of bytes, but {how} a {type(piece).__name__}", self._row, hint=hint)


def _cut(piece: memoryview) -> Iterator[memoryview]:
    return (piece[start : start + PIECE_BYTES] for start in range(0, len(piece), PIECE_BYTES))


def streamed(values: list[Any], plain: bool) -> Prepared:
    """Prepare bytes, paths, sources and None. Sources that end soon become bytes. `plain` says that large files may be read piece by piece: the
    column has no codec, which needs the whole value.
    """
    made = [Source(value, row) if is_source(value) else value for row, value in enumerate(values)]
    made = [value.head if isinstance(value, Source) and value.is_whole else value for value in made]
    if not any(isinstance(value, Source) or (plain and is_large_file(value)) for value in made):
        return ("items", made)
    begun: dict[int, Iterator[Any]] = {}

    def pull(row: int, box: list[tuple[int, int]]) -> Array:
        if row not in begun:
            begun.clear()
            begun[row] = _pieces_of(made[row], row)
        return np.frombuffer(next(begun[row], b""), np.uint8)

    validity = np.array([value is not None for value in made], dtype=bool)
    return ("pulled", pull, [[] for _ in made], validity)


def _pieces_of(value: Any, row: int) -> Iterator[Any]:
    if isinstance(value, Source):
        yield from value.pieces()
    elif isinstance(value, os.PathLike):
        try:
            with open(value, "rb") as file:
                yield from Source(file, row).pieces()
        except OSError as error:
            text = f"is `{os.fspath(value)}`, which cannot be read: {error}"
            raise NotFoundError(text, code="source-not-found", row=row) from error
    else:
        yield from _cut(memoryview(value))

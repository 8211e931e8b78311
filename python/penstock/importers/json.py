"""Reads a JSON file with one array of objects, an element at a time, so that the file need not fit in memory."""

from __future__ import annotations

import itertools
import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from penstock.errors import CorruptError, InvalidInputError
from penstock.importers import rows
from penstock.importers.shared.encoding import opened
from penstock.importers.shared.source import OpenedSource, TextOptions, import_pandas, numbered
from penstock.values.text.json_text import json_options

PIECE_BYTES = 1 << 20
# If an element is longer than this, the file is not a list of samples.
LONGEST_ELEMENT = 256 << 20
_SPACE = " \t\n\r"
# A string, which may lack its end, or a bracket.
_BRACKET = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)|[][{}]', re.DOTALL)


def is_array(path: pathlib.Path, encoding: str = "utf-8") -> bool:
    """Return whether a file begins as a JSON array."""
    try:
        head: str = opened(path, encoding).read(1024).decode("utf-8-sig", "ignore")
    except (OSError, InvalidInputError):
        return False
    return head.lstrip(_SPACE).startswith("[")


def open_source(path: pathlib.Path, options: TextOptions) -> OpenedSource:
    """Open the file. `.gz`, `.bz2` and `.zst` files are decompressed while reading."""
    import_pandas()
    elements = _elements(path, options.encoding)
    head = list(itertools.islice(elements, rows.ROWS_TO_INFER))
    columns = rows.columns_of(head, options, f"`{path}`")
    chunks = rows.chunks_of(itertools.chain(head, elements), columns, 0, numbered(f"{path}: element"))
    return OpenedSource(columns.kinds, chunks, None, "rows", files=[path], unread=columns.unread, names=columns.names)


def _elements(path: pathlib.Path, encoding: str) -> Iterator[Any]:
    """Yield the elements of the array. An element that is not an object becomes a `BadRow`.

    Raises: InvalidInputError (invalid-value) for a file that is not a JSON array.
    """
    text = _Text(path, encoding)
    decoder = json.JSONDecoder(**json_options())
    text.expect("[", "a JSON array of objects begins with `[`")
    count = 0
    while (letter := text.letter()) != "]":
        if count:
            text.expect(",", f"element {count - 1} is followed by {letter[:1]!r}, expected `,` or `]`")
            text.letter()
        value = text.value(decoder, count)
        yield value if isinstance(value, dict | rows.BadRow) else rows.BadRow(f"it is a {type(value).__name__}, expected an object")
        count += 1
    text.at += 1
    if text.letter():
        raise text.wrong("text follows the end of the array")


class _Text:
    """The text of a file that has not been parsed, which is read in pieces."""

    def __init__(self, path: pathlib.Path, encoding: str) -> None:
        self.path, self.at, self.text, self.ended = path, 0, "", False
        self._stream, self._rest, self._begun = opened(path, encoding), b"", False

    def wrong(self, why: str) -> InvalidInputError:
        return InvalidInputError(
            f"cannot import `{self.path}`: {why}", code="invalid-value", hint="for one object per line, pass --format jsonl"
        )

    def letter(self) -> str:
        """Skip white space, and return the next letter, or nothing at the end."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in _SPACE:
                self.at += 1
            if self.at < len(self.text) or not self._more(PIECE_BYTES):
                return self.text[self.at : self.at + 1]

    def expect(self, letter: str, why: str) -> None:
        if self.letter() != letter:
            raise self.wrong(why)
        self.at += 1

    def value(self, decoder: json.JSONDecoder, place: int) -> Any:
        """Parse the next value. Reads more, twice as much each time, while it may be incomplete.

        One that would lose information becomes a `BadRow`, as in JSON lines.
        """
        while True:
            try:
                value, end = _decoded(decoder, self.text, self.at)
            except json.JSONDecodeError as error:
                if _may_be_cut(error, self.text) and self._more(max(PIECE_BYTES, len(self.text) - self.at)):
                    continue
                raise self.wrong(f"element {place} is not JSON: {error}") from error
            # A number may continue in the next piece.
            if end < len(self.text) or not self._more(PIECE_BYTES):
                self.at = end
                return value

    def _more(self, size: int) -> bool:
        """Read more text. Returns whether there was any."""
        if self.ended:
            return False
        if len(self.text) - self.at > LONGEST_ELEMENT:
            raise self.wrong(f"an element is longer than {LONGEST_ELEMENT} characters")
        try:
            piece = self._rest + bytes(self._stream.read(size))
        except OSError as error:  # The compressed file is truncated or damaged.
            raise CorruptError(f"cannot import `{self.path}`: {error}") from error
        self.ended = len(piece) == len(self._rest)
        try:
            more, self._rest = piece.decode(), b""
        except UnicodeDecodeError as error:
            if self.ended or len(piece) - error.start > 3:
                raise self.wrong(f"it is not UTF-8: {error}") from error
            more, self._rest = piece[: error.start].decode(), piece[error.start :]
        if not self._begun and more:
            more, self._begun = more.removeprefix("\ufeff"), True
        self.text, self.at = self.text[self.at :] + more, 0
        return not self.ended


def _decoded(decoder: json.JSONDecoder, text: str, at: int) -> tuple[Any, int]:
    """Parse the value that begins at a place, and return it with its end. Raises: JSONDecodeError for text that is not JSON, or not yet."""
    try:
        return decoder.raw_decode(text, at)
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        bad = rows.BadRow(f"not JSON: {error}")
        try:
            return bad, json.JSONDecoder(parse_int=str).raw_decode(text, at)[1]
        except RecursionError:
            return bad, _end_of(text, at)


def _end_of(text: str, at: int) -> int:
    """Return where an array or object ends. Raises: JSONDecodeError if it is incomplete."""
    depth = 0
    for found in _BRACKET.finditer(text, at):
        depth += (found[0] in "[{") - (found[0] in "]}")
        if depth == 0:
            return found.end()
    raise json.JSONDecodeError("Unterminated value", text, at)


def _may_be_cut(error: json.JSONDecodeError, text: str) -> bool:
    """Return whether the text that follows may correct an error: it is one of the end, where a word or an escape has at most 12 letters, or
    of a string.
    """
    return error.msg.startswith("Unterminated") or error.pos + 12 > len(text)

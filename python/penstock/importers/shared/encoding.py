"""Converts text files from any encoding that Python supports to UTF-8, while reading them."""

from __future__ import annotations

import codecs
import pathlib
from typing import Any

import pyarrow as pa

from penstock.errors import InvalidInputError


def opened(path: pathlib.Path, encoding: str) -> Any:
    """Open a file, which is decompressed and converted to UTF-8 while it is read."""
    raw = pa.input_stream(str(path), compression="detect")
    try:
        name = codecs.lookup(encoding).name
        codecs.getincrementaldecoder(encoding)
        "".encode(encoding)  # Raises LookupError for a codec that does not encode text, such as hex.
    except (LookupError, TypeError, ValueError):
        raise InvalidInputError(f"cannot import `{path}`: unknown encoding {encoding!r}") from None
    return raw if name == "utf-8" else Recoded(raw, encoding, path)


class Recoded:
    """A file in an encoding other than UTF-8, read as UTF-8. A byte that is invalid in that encoding raises an error with its offset."""

    def __init__(self, raw: Any, encoding: str, path: pathlib.Path) -> None:
        self.raw, self.path, self.encoding, self.at = raw, path, encoding, 0
        self.decoder = codecs.getincrementaldecoder(encoding)("strict")
        self.rest = b""
        self.closed = False

    def read(self, size: int = -1) -> bytes:
        """Read up to `size` bytes of UTF-8."""
        while len(self.rest) < size or size < 0:
            piece = self.raw.read(1 << 20)
            try:
                self.rest += self.decoder.decode(piece, final=not piece).encode()
            except UnicodeError as error:
                place = self.at + getattr(error, "start", 0)
                raise InvalidInputError(
                    f"cannot import `{self.path}`: byte {place} is not valid {self.encoding}",
                    code="invalid-value",
                    hint="pass --encoding, for example latin-1 or utf-16",
                ) from error
            self.at += len(piece)
            if not piece:
                break
        taken, self.rest = (self.rest, b"") if size < 0 else (self.rest[:size], self.rest[size:])
        return taken

    def close(self) -> None:
        """Close the underlying file."""
        self.closed = True
        self.raw.close()

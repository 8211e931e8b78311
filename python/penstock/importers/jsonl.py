"""JSON lines: one object a line; types inferred over the first thousand lines, or given."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from penstock.errors import InvalidInputError
from penstock.importers import rows
from penstock.importers.encoding import recoded
from penstock.importers.source import Options, Source

# A longer line is no sample but a file of another format.
LONGEST_LINE_BYTES = 256 << 20


class BadLine:
    """Stands in the stream of rows for a line that is none; one without a message is an empty line, which is no item."""

    def __init__(self, message: str) -> None:
        self.message = message


def open_source(path: pathlib.Path, options: Options) -> Source:
    """Open the file; `.gz`, `.bz2` and `.zst` are unpacked on the way."""
    if path.stat().st_size == 0:
        raise InvalidInputError(f"cannot import `{path}`: it has 0 bytes")
    stream = recoded(pa.input_stream(str(path), compression="detect"), options.encoding, path)
    source = rows.open_source(_objects(stream), options, lambda row: f"{path}: line {row + 1}")
    source.total, source.unit = None, "rows"
    return source


def _objects(stream: Any) -> Iterator[Mapping[str, Any] | BadLine]:
    rest, first = b"", True
    while piece := stream.read(1 << 20):
        if first:
            piece, first = piece.removeprefix(b"\xef\xbb\xbf"), False
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > LONGEST_LINE_BYTES:
            raise InvalidInputError(f"a line is longer than {LONGEST_LINE_BYTES} bytes: this is no file of JSON lines")
        yield from map(_object, lines)
    if rest.strip():
        yield _object(rest)


def _object(line: bytes) -> Mapping[str, Any] | BadLine:
    if not line.strip():
        return BadLine("")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        return BadLine(f"no JSON: {error}")
    return value if isinstance(value, dict) else BadLine(f"a {type(value).__name__}, expected an object")

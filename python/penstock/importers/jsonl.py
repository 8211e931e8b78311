"""Reads JSON lines, with one object per line. Types are given by the caller or inferred from the first thousand lines.

pyarrow reads blocks of lines if all columns have plain types. A block that pyarrow does not accept, for any reason, is read line by line,
so that the error names the refused line.
"""

from __future__ import annotations

import functools
import itertools
import os
import pathlib
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from penstock.errors import CorruptError, InvalidInputError
from penstock.importers import rows
from penstock.importers.shared import tables
from penstock.importers.shared.encoding import opened
from penstock.importers.shared.source import Chunk, OpenedSource, TextOptions, ahead, import_pandas, numbered
from penstock.values.dtypes import whole_bits
from penstock.values.text.json_text import parse_json

# If a line is longer than this, the file is not JSON lines.
LONGEST_LINE_BYTES = 256 << 20
# Number of threads that parse blocks while earlier blocks are stored.
THREADS = min(4, os.cpu_count() or 1)


def open_source(path: pathlib.Path, options: TextOptions) -> OpenedSource:
    """Open the file. `.gz`, `.bz2` and `.zst` files are decompressed while reading."""
    if path.stat().st_size == 0:
        raise InvalidInputError(f"cannot import `{path}`: it has 0 bytes")
    import_pandas()
    blocks = _blocks(opened(path, options.encoding), path)
    begun: list[bytes] = []
    head: list[Any] = []
    while len(head) < rows.ROWS_TO_INFER and (block := next(blocks, None)) is not None:
        begun.append(block)
        head.extend(map(_object, _lines(block)[: rows.ROWS_TO_INFER - len(head)]))
    columns = rows.columns_of(head, options, f"`{path}`")
    kinds = columns.kinds

    def chunks() -> Generator[Chunk, None, None]:
        parse, first = functools.partial(_parsed, columns), 0
        for block, table in ahead((functools.partial(parse, block) for block in itertools.chain(begun, blocks)), THREADS):
            if table is not None:
                values = {key: tables.values(table.column(key), kind) for key, kind in kinds.items()}
                first += table.num_rows
                yield Chunk(values, table.num_rows, numbered(f"{path}: line", first - table.num_rows + 1), done=first)
            else:
                lines = _lines(block)
                yield from rows.chunks_of(map(_object, lines), columns, first, numbered(f"{path}: line", 1))
                first += len(lines)

    return OpenedSource(kinds, chunks(), None, "rows", files=[path], unread=columns.unread, names=columns.names)


BLOCK_BYTES = 4 << 20


def _read(stream: Any, path: pathlib.Path) -> bytes:
    try:
        return bytes(stream.read(BLOCK_BYTES))
    except OSError as error:  # The compressed file is truncated or damaged.
        raise CorruptError(f"cannot import `{path}`: {error}") from error


def _blocks(stream: Any, path: pathlib.Path) -> Iterator[bytes]:
    """Split a file into blocks of whole lines."""
    rest, first = b"", True
    while piece := _read(stream, path):
        if first:
            piece, first = piece.removeprefix(b"\xef\xbb\xbf"), False
        end = piece.rfind(b"\n") + 1
        if end:
            yield b"".join((rest, memoryview(piece)[:end]))
            rest = piece[end:]
        else:
            rest += piece
        if len(rest) > LONGEST_LINE_BYTES:
            raise InvalidInputError(f"cannot import `{path}`: a line is longer than {LONGEST_LINE_BYTES} bytes, expected JSON lines")
    if rest.strip():
        yield rest


def _lines(block: bytes) -> list[bytes]:
    return block.removesuffix(b"\n").split(b"\n")


def _parsed(columns: rows.Columns, block: bytes) -> tuple[bytes, pa.Table | None]:
    count = _plain_lines(block)
    table = None if count is None else _table(block, columns)
    return block, table if table is not None and table.num_rows == count else None


def _plain_lines(block: bytes) -> int | None:
    """Count the lines in a block. Returns None unless each line begins with `{` and ends with `}`.

    `_parsed` compares the count with the number of rows that pyarrow read, to ensure that each line is one object. NumPy releases the
    GIL while it searches, unlike `bytes.count`.
    """
    data = np.frombuffer(block, np.uint8)
    ends = np.flatnonzero(data == ord("\n"))
    if not block.endswith(b"\n"):
        ends = np.append(ends, len(data))
    last = data[ends - 1]
    if np.any(with_return := last == ord("\r")):
        last[with_return] = data[ends[with_return] - 2]
    plain = data[0] == ord("{") and np.all(data[ends[:-1] + 1] == ord("{")) and np.all(last == ord("}"))
    return len(ends) if plain else None


def _table(block: bytes, columns: rows.Columns) -> pa.Table | None:
    """Read a block with pyarrow. Returns None if a column type is not plain, or if a line does not fit the columns."""
    fields = []
    for name, kind in columns.kinds.items():
        if (arrow := kind.json_type()) is None:
            return None
        fields.append(pa.field(name, arrow))
    try:
        table = pj.read_json(
            pa.BufferReader(block), read_options=pj.ReadOptions(use_threads=False, block_size=max(len(block), 1)),
            parse_options=pj.ParseOptions(explicit_schema=pa.schema(fields), unexpected_field_behavior="infer"),
        )  # fmt: skip
    except (pa.ArrowException, UnicodeDecodeError):
        return None
    if any(name not in columns.kinds and not columns.leaves_out(name) for name in table.column_names):
        return None
    table = table.select(list(columns.kinds))
    return None if any(_may_be_rounded(table.column(name), kind.read_dtype()) for name, kind in columns.kinds.items()) else table


def _may_be_rounded(numbers: pa.ChunkedArray, dtype: str | None) -> bool:
    """Return whether floats may be whole numbers that were rounded, or are out of range."""
    return bool(
        dtype and pa.types.is_floating(numbers.type) and pc.any(pc.greater_equal(pc.abs(numbers), float(2 ** whole_bits(dtype)))).as_py()
    )


def _object(line: bytes) -> Mapping[str, Any] | rows.BadRow:
    if not line.strip():
        return rows.BadRow("")
    try:
        value = parse_json(line)
    except (ValueError, RecursionError) as error:
        return rows.BadRow(f"not JSON: {error}")
    return value if isinstance(value, dict) else rows.BadRow(f"it is a {type(value).__name__}, expected an object")

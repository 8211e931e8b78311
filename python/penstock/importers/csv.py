"""CSV and TSV by pyarrow's streaming reader: any encoding Python knows, quoting, types inferred over the first block or given."""

from __future__ import annotations

import codecs
import pathlib
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.csv as pc

from penstock.arrow import column_type
from penstock.errors import InvalidInputError
from penstock.importers import tables
from penstock.importers.source import Chunk, Options, Refusal, Source
from penstock.schema import Category, Label, Scalar, Text

BLOCK_BYTES = 4 << 20


class _Recoded:
    """A file of another encoding, read as UTF-8; a byte that is none of that encoding is an error that names its place."""

    def __init__(self, raw: Any, encoding: str, path: pathlib.Path) -> None:
        self.raw, self.path, self.encoding, self.at = raw, path, encoding, 0
        self.decoder = codecs.getincrementaldecoder(encoding)("strict")
        self.rest = b""
        self.closed = False

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        while len(self.rest) < size or size < 0:
            piece = self.raw.read(1 << 20)
            try:
                text = self.decoder.decode(piece, final=not piece)
            except UnicodeError as error:
                place = self.at + getattr(error, "start", 0)
                raise InvalidInputError(
                    f"cannot import `{self.path}`: byte {place} is not {self.encoding}", code="invalid-value",
                    hint="give --encoding, such as latin-1 or utf-16",
                ) from error  # fmt: skip
            self.at += len(piece)
            self.rest += text.encode()
            if not piece:
                break
        taken, self.rest = (self.rest, b"") if size < 0 else (self.rest[:size], self.rest[size:])
        return taken

    def close(self) -> None:
        self.closed = True
        self.raw.close()


def open_source(path: pathlib.Path, options: Options) -> Source:
    """Open the file; `.gz`, `.bz2` and `.zst` are unpacked on the way."""
    if path.stat().st_size == 0:
        raise InvalidInputError(f"cannot import `{path}`: it has 0 bytes")
    try:
        codecs.lookup(options.encoding)
    except LookupError:
        raise InvalidInputError(f"cannot import `{path}`: unknown encoding {options.encoding!r}") from None
    if options.delimiter is not None and len(options.delimiter) != 1:
        raise InvalidInputError(f"cannot import `{path}`: the delimiter {options.delimiter!r} is not one character")
    refused: list[Refusal] = []

    def invalid(row: Any) -> str:
        where = f"{path}: line {row.number}" if row.number is not None else f"{path}: a line `{row.text[:80]}`"
        refused.append(Refusal(where, "invalid-value", f"{row.actual_columns} fields, expected {row.expected_columns}"))
        return "skip"

    raw: Any = pa.input_stream(str(path), compression="detect")
    if codecs.lookup(options.encoding).name != "utf-8":
        raw = pa.PythonFile(_Recoded(raw, options.encoding, path), mode="r")
    given = {name: _arrow_type(kind) for name, kind in options.types.items()}
    try:
        stream = pc.open_csv(
            raw,
            read_options=pc.ReadOptions(block_size=BLOCK_BYTES, autogenerate_column_names=not options.header, use_threads=False),
            parse_options=pc.ParseOptions(
                delimiter=options.delimiter or ",", quote_char=options.quote or False, newlines_in_values=True, invalid_row_handler=invalid
            ),
            convert_options=pc.ConvertOptions(
                column_types=given, strings_can_be_null=False, null_values=["", "NA", "NaN", "nan", "null", "NULL", "None"]
            ),
        )
    except (pa.ArrowException, OSError) as error:
        if hasattr(error, "code"):
            raise
        raise _failed(path, error) from error
    schema = stream.schema
    try:
        list(schema.names)
    except UnicodeDecodeError as error:
        raise _failed(path, ValueError(f"UTF8: {error}")) from error
    if len(set(schema.names)) != len(schema.names):
        raise InvalidInputError(f"cannot import `{path}`: two columns have the same name", code="invalid-schema")
    binary = [name for name in schema.names if pa.types.is_binary(schema.field(name).type)]
    if binary:
        raise _failed(path, ValueError(f"UTF8 is broken in column `{binary[0]}`"))
    kinds = {name: options.types.get(name) or tables.infer(schema.field(name).type, name) for name in schema.names}
    progress = {"done": 0}

    def chunks() -> Iterator[Chunk]:
        first = 1 if options.header else 0
        while True:
            try:
                batch = stream.read_next_batch()
            except StopIteration:
                break
            except (pa.ArrowException, OSError) as error:
                if hasattr(error, "code"):
                    raise
                raise _failed(path, error) from error
            start = first
            first += batch.num_rows
            progress["done"] = min(progress["done"] + batch.nbytes, path.stat().st_size)
            taken, refused[:] = list(refused), []
            columns = {name: tables.values(batch.column(name), kinds[name]) for name in kinds}
            yield Chunk(columns, batch.num_rows, lambda row, start=start: f"{path}: row {start + row}", taken)  # type: ignore[misc]
        if refused:
            yield Chunk({name: [] for name in kinds}, 0, str, list(refused))

    return Source(kinds, chunks(), path.stat().st_size, "bytes", lambda: progress["done"])


def _arrow_type(kind: Any) -> pa.DataType:
    """What the reader makes of a column whose type was given."""
    if isinstance(kind, Scalar) and kind.dtype not in ("bfloat16", "complex64", "complex128"):
        return pa.timestamp("us") if kind.dtype == "timestamp" else column_type(kind)
    if isinstance(kind, Text | Category | Label):
        return pa.string()
    raise InvalidInputError(f"a CSV column cannot be of the type {kind}", hint="scalars, Text, Category and Label can be given")


def _failed(path: pathlib.Path, error: Exception) -> InvalidInputError:
    text = str(error).splitlines()[0]
    if "UTF8" in text:
        return InvalidInputError(
            f"cannot import `{path}`: it is not UTF-8 ({text})", code="invalid-value", hint="give --encoding, such as latin-1"
        )
    return InvalidInputError(f"cannot import `{path}`: {text}", code="invalid-value", hint="give the column's type with --type name=text")

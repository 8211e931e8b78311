"""Reads CSV and TSV with pyarrow's streaming reader. Supports quotes and every encoding that Python supports. Types are given by
the caller or inferred from the first block.

pyarrow reads all columns as bytes, and this file converts them. A bad value is refused and reported with its row number.
`on_error` decides whether the import continues.
"""

from __future__ import annotations

import atexit
import bisect
import dataclasses
import os
import pathlib
import secrets
import string
import time
import weakref
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.csv as pc

from penstock.columns.column_type import ColumnType
from penstock.columns.scalar import Scalar
from penstock.columns.text import Text
from penstock.errors import CorruptError, Error, InternalError, InvalidInputError
from penstock.importers.shared import tables
from penstock.importers.shared.encoding import opened
from penstock.importers.shared.naming import check_distinct
from penstock.importers.shared.source import Chunk, OpenedSource, Refusal, TextOptions, import_pandas
from penstock.values.arrow import types as arrow_types
from penstock.values.text import from_text

BLOCK_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True)
class CsvOptions(TextOptions):
    """Options for CSV. An empty `quote` means that quotes have no special meaning. Without a `header`, columns are named f0, f1, …"""

    delimiter: str | None = None
    quote: str = '"'
    header: bool = True


def open_source(path: pathlib.Path, options: CsvOptions) -> OpenedSource:
    """Open the file. `.gz`, `.bz2` and `.zst` files are decompressed while reading."""
    if path.stat().st_size == 0:
        raise InvalidInputError(f"cannot import `{path}`: it has 0 bytes")
    import_pandas()
    for what, text in (("delimiter", options.delimiter or ","), ("quote character", options.quote or '"')):
        if not isinstance(text, str) or len(text) != 1 or not text.isascii() or text in "\0\r\n":
            raise InvalidInputError(f"cannot import `{path}`: the {what} {text!r} is not a single ASCII character")
    inferred = _Reading(path, options, None, lambda _: None).schema
    options, named = options.named(every := _names(path, inferred, options), path)
    names = list(named)
    options.check_types(names, path)
    given = {name: kind for name, kind in options.defaults.items() if name in names and kind.has_text} | dict(options.types)
    kinds = {name: _infer(inferred.field(name).type, name) for name in names}
    kinds |= {name: kind for name, kind in _no_numbers(path, options, inferred) if name in kinds} | given
    for name, kind in kinds.items():
        if not kind.has_text:
            raise InvalidInputError(
                f"column `{name}` of a CSV file cannot be {kind}",
                hint="use a scalar, Text, Category, Label, Json or Bytes, or Image or Mask for file names",
            )

    def chunks() -> Generator[Chunk, None, None]:
        # A random row that is appended to the file. If an earlier quote is never closed, Arrow does not return this row separately.
        end = "".join(
            secrets.choice([letter for letter in string.ascii_letters if letter not in (options.delimiter, options.quote)])
            for _ in range(32)
        )
        closed = False
        refused: list[Refusal] = []
        gone: list[int] = []  # Numbers of the rows that Arrow refused in the next batch or later batches.
        open_row: int | None = None  # The refused row that contains `end`: its quote is never closed.

        def refuse(row: Any) -> None:
            nonlocal open_row, closed
            if row.text.endswith(end):
                closed = row.text == end
                open_row = None if closed or row.number is None else row.number - 1
                return
            place = f"a line `{row.text[:80]}`" if row.number is None else f"row {row.number - 1}"
            lines = row.text.count("\n") + 1
            why = f"{row.actual_columns} fields, expected {row.expected_columns}{f', over {lines} lines' if lines > 1 else ''}"
            refused.append(Refusal(f"{path}: {place}", "invalid-value", why))
            if row.number is not None:
                gone.append(row.number - 1)

        reading = _Reading(path, options, every, refuse, end)
        first = 1 if options.header else 0
        last_row, done = first - 1, 0
        while (batch := reading.next(first)) is not None:
            if batch.num_rows and batch.num_columns == 1 and batch.column(0)[-1].as_py() == end.encode():
                closed, batch = True, batch.slice(0, batch.num_rows - 1)
            number = _numbers(first, gone)
            last_row, first = number(batch.num_rows - 1) if batch.num_rows else last_row, number(batch.num_rows)
            gone[:] = [row for row in gone if row >= first]
            done = min(done + batch.nbytes, path.stat().st_size)
            chunk = _chunk(batch, kinds, given, partial(_name, path, number))
            chunk.refused, chunk.done = list(refused), done
            refused.clear()
            yield chunk
        if not closed:
            raise InvalidInputError(
                f"cannot import `{path}`: a quote in row {last_row if open_row is None else open_row} is never closed",
                code="invalid-value",
                hint="the file may be truncated; if it does not use quotes, import it with --quote ''",
            )
        if refused:
            yield Chunk({name: [] for name in kinds}, 0, str, list(refused), done=done)

    return OpenedSource(kinds, chunks(), path.stat().st_size, "bytes", files=[path], names=named)


class _Pieces:
    """A file with an extra line at its end, read in pieces that never end with a CR.

    If a piece ended with a CR, Arrow would drop an LF at the start of the next piece, even within quotes. If `skip_blank` is true, empty
    lines at the start of the file are skipped.
    """

    def __init__(self, raw: Any, end: str, skip_blank: bool) -> None:
        self._raw, self.closed = raw, False
        self._end: bytes | None = end.encode()
        self._next, self._last, self._skip_blank = b"", b"\n", skip_blank

    def read(self, size: int) -> bytes:
        """Read up to `size` bytes."""
        piece = self._take(size - size // 64)
        while self._skip_blank and piece:
            piece = piece.removeprefix(b"\xef\xbb\xbf").lstrip(b"\r\n")
            self._skip_blank = not piece
            piece = piece or self._take(size - size // 64)
        while piece.endswith(b"\r") and len(piece) < size and (more := self._take(1)):
            piece += more
        self._last = piece[-1:] or self._last
        self._next = self._take(1)
        if not self._next and self._end is not None:
            end = self._end if self._last == b"\n" else b"\n" + self._end
            if len(piece) + len(end) <= size:  # Arrow refuses a first piece that contains no complete line.
                piece, self._end = piece + end, None
        return piece

    def _take(self, size: int) -> bytes:
        begun, self._next = self._next, b""
        return begun + bytes(self._raw.read(size - len(begun)))

    def close(self) -> None:
        """Close the underlying file."""
        self.closed = True
        self._raw.close()


class _Reading:
    """Arrow's streaming reader for one file.

    Arrow's threads may keep the reader, and our handler for refused rows, slightly longer than we do. If a thread released the handler
    during Python's shutdown, the process would abort. Python therefore waits for these threads at exit.
    """

    under_way: weakref.WeakSet[_Reading] = weakref.WeakSet()
    functions: weakref.WeakSet[Callable[[Any], str]] = weakref.WeakSet()  # The handlers that Arrow still references.
    ending = False

    def __init__(
        self, path: pathlib.Path, options: CsvOptions, text_columns: list[str] | None, refuse: Callable[[Any], None], end: str = ""
    ) -> None:
        """Open the file. Reads `text_columns` as raw bytes and infers the types of other columns. `end` is read as an extra last line."""
        # In a file with one column, each empty line after the header is a null. In any other file, empty lines are ignored.
        one_column = text_columns is not None and len(text_columns) == 1
        raw = pa.PythonFile(_Pieces(opened(path, options.encoding), end, one_column and options.header), mode="r")
        types = {name: pa.binary() for name in text_columns or ()}
        self._check_ending()
        self.under_way.add(self)
        self._path = path
        try:
            self._stream = pc.open_csv(
                raw,
                read_options=pc.ReadOptions(block_size=BLOCK_BYTES, autogenerate_column_names=not options.header, use_threads=False),
                parse_options=pc.ParseOptions(
                    delimiter=options.delimiter or ",",
                    quote_char=options.quote or False,
                    newlines_in_values=True,
                    ignore_empty_lines=not one_column,
                    invalid_row_handler=self._invalid(refuse),
                ),
                convert_options=pc.ConvertOptions(column_types=types, strings_can_be_null=False, null_values=from_text.NULLS),
            )
        except (pa.ArrowException, OSError) as error:
            if hasattr(error, "code"):
                raise
            raise _failed(path, error) from error

    @classmethod
    def _invalid(cls, refuse: Callable[[Any], None]) -> Callable[[Any], str]:
        def invalid(row: Any) -> str:
            refuse(row)
            return "skip"

        cls.functions.add(invalid)
        return invalid

    @classmethod
    def _check_ending(cls) -> None:
        if cls.ending:  # Only daemon threads run this late.
            raise InternalError("cannot import: Python is shutting down", hint="join the importing thread before the program ends")

    @property
    def schema(self) -> pa.Schema:
        return self._stream.schema

    def next(self, first: int = 0) -> pa.RecordBatch | None:
        """Return the rows of the next block, or None at the end of the file. `first` is the row number, in the
        file, of the block's first row.
        """
        stream = self._stream  # Read this before the check, because `_release` sets `ending` and then removes the stream.
        self._check_ending()
        try:
            return stream.read_next_batch()
        except StopIteration:
            return None
        except (pa.ArrowException, OSError) as error:
            if hasattr(error, "code"):
                raise
            raise _failed(self._path, error, f"after row {first - 1}" if first > 1 else "near its beginning") from error


os.register_at_fork(after_in_child=_Reading.functions.clear)  # A forked child does not have these threads.


@atexit.register
def _release() -> None:
    """Wait up to 10 s for all Arrow threads to release our handlers."""
    _Reading.ending = True
    for reading in list(_Reading.under_way):
        reading._stream = None
    end = time.monotonic() + 10
    while _Reading.functions and time.monotonic() < end:
        time.sleep(0.001)  # Arrow does not signal when its threads are done.


def _names(path: pathlib.Path, schema: pa.Schema, options: CsvOptions) -> list[str]:
    try:
        names = list(schema.names)
    except UnicodeDecodeError as error:
        raise _failed(path, ValueError(f"UTF8: {error}")) from error
    check_distinct(names, path)
    binary = [name for name in names if pa.types.is_binary(schema.field(name).type)]
    if binary and options.on_error == "raise":
        raise _failed(path, ValueError(f"UTF8 is invalid in column `{binary[0]}`"))
    return names


def _infer(kind: pa.DataType, name: str) -> ColumnType:
    return Text() if pa.types.is_time(kind) or pa.types.is_binary(kind) else tables.infer(kind, name)


def _no_numbers(path: pathlib.Path, options: CsvOptions, inferred: pa.Schema) -> Iterator[tuple[str, ColumnType]]:
    """Find the columns that would lose information as numbers, although Arrow infers a number type for them.

    As floats, different whole numbers beyond 2^53 could become equal. Words such as `00501` and `0x7f` would lose their original spelling.
    After the first block, `from_text.converted` refuses such words and numbers. NaN beside whole numbers makes a column of floats.
    """
    plain = {field.name for field in inferred if arrow_types.is_number(field.type) or pa.types.is_null(field.type)}
    names = [name for name in inferred.names if name in plain and name not in options.types]
    first = _Reading(path, options, inferred.names, lambda _: None).next() if names else None
    if first is None:
        return
    for name in names:
        trimmed = compute.utf8_trim_whitespace(from_text.texts_of(first.column(name))[0])
        texts, kind = from_text.nulled(trimmed).drop_null(), inferred.field(name).type
        if compute.any(compute.match_substring_regex(texts, f"{from_text.FRONT_ZEROS}|{from_text.HEXADECIMAL}")).as_py():
            yield name, Text()
            continue
        has_nan = compute.any(compute.is_in(trimmed, pa.array(from_text.NANS))).as_py()
        if has_nan and not pa.types.is_floating(kind):
            yield name, Text() if from_text.rounded(texts, "float64") else Scalar("float64")
        if not pa.types.is_floating(kind) or not len(texts):
            continue
        if not has_nan and compute.all(compute.match_substring_regex(texts, from_text.WHOLE)).as_py():
            numbers = [int(text) for text in texts.to_pylist()]
            low, high = min(numbers), max(numbers)
            yield name, Scalar("int64") if -(2**63) <= low <= high < 2**63 else Scalar("uint64") if 0 <= low <= high < 2**64 else Text()
        elif from_text.rounded(texts, "float64"):
            yield name, Text()


def _numbers(first: int, gone: Sequence[int]) -> Callable[[int], int]:
    """Return a function that maps row numbers in a batch to row numbers in the file. The batch begins with row `first` and lacks the rows
    in `gone`.

    >>> number = _numbers(3, [4, 5])
    >>> [number(row) for row in range(3)]
    [3, 6, 7]
    """
    before = [row - place for place, row in enumerate(gone)]  # Each row number minus the number of refused rows before it.
    return lambda row: first + row + bisect.bisect_right(before, first + row)


def _name(path: pathlib.Path, number: Callable[[int], int], row: int) -> str:
    return f"{path}: row {number(row)}"


def _chunk(batch: pa.RecordBatch, kinds: dict[str, ColumnType], given: Collection[str], name: Callable[[int], str]) -> Chunk:
    """Convert a batch. In columns with an inferred type, values that would lose their original spelling are refused."""
    columns: dict[str, Any] = {}
    problems: list[tuple[int, str, Refusal]] = []
    for column, kind in kinds.items():
        texts, broken = from_text.texts_of(batch.column(column))
        why = "it is not UTF-8; if the whole file uses a different encoding, pass --encoding, for example latin-1"
        problems += [(row, column, Refusal.of_value(name(row), column, why)) for row in broken]
        columns[column], bad = kind.from_texts(texts, column in given)
        problems += [(row, column, Refusal.of_value(name(row), column, why)) for row, why in bad]
    return Chunk(columns, batch.num_rows, name, problems=problems)


def _failed(path: pathlib.Path, error: Exception, place: str = "near its beginning") -> Error:
    text = str(error).splitlines()[0]
    if isinstance(error, OSError):  # The compressed file is truncated or damaged.
        return CorruptError(f"cannot import `{path}`: {text}")
    if text.startswith("CSV parse error: Row"):  # The handler refuses such rows, unless their text is not UTF-8.
        text = f"UTF8: a row {place} has the wrong number of fields and cannot be decoded"
    if "UTF8" in text:
        return InvalidInputError(
            f"cannot import `{path}`: it is not UTF-8 ({text})", code="invalid-value", hint="pass --encoding, for example latin-1"
        )
    if "straddl" in text:
        return InvalidInputError(
            f"cannot import `{path}`: a row {place} has more than {BLOCK_BYTES >> 20} MiB, or a quote in it is never closed",
            code="invalid-value",
            hint="if the file does not use quotes, import it with --quote ''; import larger values from JSON lines, Parquet or an iterable",
        )
    return InvalidInputError(f"cannot import `{path}`: {text}", code="invalid-value", hint="set the column's type with --type name=text")

"""Reads Parquet and Arrow IPC/Feather files batch by batch with pyarrow, from one file or a folder of files."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.parquet as pq

from penstock.changes.checks import naming
from penstock.columns.category import Category
from penstock.columns.column_type import ColumnType
from penstock.columns.scalar import Scalar
from penstock.errors import CorruptError, InvalidInputError
from penstock.importers.pictures.images import SPLITS
from penstock.importers.shared import tables
from penstock.importers.shared.chunks import with_target
from penstock.importers.shared.naming import check_distinct
from penstock.importers.shared.source import Chunk, FolderOptions, OpenedSource, Refusal, ahead, import_pandas, numbered
from penstock.importers.shared.unread import boxes_in_type, without_objects
from penstock.values.arrow import types as arrow_types
from penstock.values.text import from_text
from penstock.values.times import TIMES

SUFFIXES = (".parquet", ".pq", ".arrow", ".feather", ".ipc")
# The first bytes of files. Those of Arrow that begin otherwise are streams.
_PARQUET, _IPC_FILE = (b"PAR1", b"PARE"), (b"ARROW1",)
ROWS_AT_ONCE = 65_536
# How many rows are decoded at a time. A file stores repeated values only once, so row sizes are known only after decoding. Each batch
# contains whole dictionaries, so files with dictionaries are decoded in larger batches.
ROWS_DECODED, ROWS_DECODED_WITH_DICTIONARIES = 1024, 8192
CHUNK_BYTES, JOINED_BYTES = 16 << 20, 4 << 20


@dataclasses.dataclass(frozen=True)
class ParquetOptions(FolderOptions):
    """Options for Parquet and Arrow. If `split` is true, files and folders named `train`, `val`, `test` and the like become a column."""

    split: bool = True


def open_source(path: pathlib.Path, options: ParquetOptions) -> OpenedSource:
    """Open a file, or all files in a folder and its sub-folders, which must have the same columns. Files of other kinds are left out.

    If files are named `train-…` and `test-…`, as Hugging Face names them, or are in folders named so, this becomes the column `split`.
    """
    files, left_out = _files(path, options) if path.is_dir() else ([path], [])
    schemas = [_guard(file, partial(_schema, file)) for file in files]
    schema = schemas[0]
    typed = {name: _type([found.field(name).type for found in schemas if name in found.names]) for name in schema.names}
    check_distinct(schema.names, files[0])
    options, named = options.named(list(typed), path)
    options.check_types(typed, path, "split")
    noted = tables.noted(schemas)
    kinds = {
        name: options.types.get(name)
        or (default if (default := options.defaults.get(name)) and default.box_format else noted.get(name))
        or _guard(files[0], partial(_infer, files, schemas, typed[name], name))
        for name in named
    }
    kinds, unread = without_objects(
        kinds, options, lambda name: None if name in noted else boxes_in_type(name, typed[name]), _rows_of(files)
    )
    named = {name: named[name] for name in kinds}
    # An exported column may belong to a column that was not exported.
    kinds = {name: with_target(kind, {other: other for other in kinds}) for name, kind in kinds.items()}
    for file, found in zip(files, schemas, strict=True):
        _check_columns(file, found, files[0], (typed, named), options)
    for name, theirs in typed.items():
        if name in named:
            _check_times(files[0], name, arrow_types.storage(theirs), options.types.get(name) or options.defaults.get(name))
    if any(kind.type != "bytes" for kind in kinds.values()):
        import_pandas()
    wanted = options.split and "split" not in kinds and (not options.defaults or "split" in options.defaults)
    known = "split" in {**options.defaults, **options.types}
    # If the destination has the column, the name of the source counts as well.
    top = path if not known else path.parent if path.is_dir() else path.parent.parent
    splits = _splits(top, files, known) if wanted and (known or path.is_dir()) else {}
    own = dict(kinds)
    if splits:
        kinds["split"] = options.types.get("split", Category())
        named["split"] = "split"
    read = None if len(own) == len(typed) else list(own)

    def chunks() -> Generator[Chunk, None, None]:
        done = 0
        for file in files:
            first = 0
            batches = _guard(file, partial(_batches, file, read))
            following = partial(_guard, file, partial(next, batches, None))
            # The next batch is read while the current one is stored.
            for batch in itertools.takewhile(lambda batch: batch is not None, ahead(itertools.repeat(following), 1)):
                chunk = _chunk(file, batch, own, first, noted)
                chunk.done = done
                if splits:
                    chunk.columns["split"] = [splits[file]] * chunk.rows
                first += batch.num_rows
                yield chunk
                del chunk, batch  # While the next batch is awaited, this one is not held.
            done += file.stat().st_size

    others = [str(file.relative_to(path)) for file in left_out]
    return OpenedSource(kinds, chunks(), sum(file.stat().st_size for file in files), "bytes", others, files, unread=unread, names=named)


def _rows_of(files: Sequence[pathlib.Path]) -> str:
    """Say how many rows Parquet files have. Others must be read to count them."""
    parquet = [file for file in files if _begins(file, _PARQUET)]
    return f"{sum(_parquet(file).metadata.num_rows for file in parquet):,} rows" if len(parquet) == len(files) else "the rows"


def _splits(folder: pathlib.Path, files: Sequence[pathlib.Path], known: bool) -> dict[pathlib.Path, str]:
    """Return the split of each file: the beginning of its name, or the nearest folder of a split. Returns nothing if there are fewer than
    two splits, unless the column is `known`.
    """
    found: dict[pathlib.Path, str] = {}
    for file in files:
        *above, name = file.relative_to(folder).parts
        inner = (name.partition("-")[0].partition(".")[0], *reversed(above))
        split = next((part for part in inner if part.lower() in SPLITS), None)
        if split is not None:
            found[file] = split
    if len(splits := sorted(set(found.values()))) < (1 if known else 2):
        return {}
    if outside := [str(file.relative_to(folder)) for file in files if file not in found]:
        raise InvalidInputError(
            f"cannot import `{folder}`: it has files in {' and '.join(splits)}, but `{outside[0]}` is outside them",
            hint=f"leave it out: exclude=[{outside[0]!r}] (--exclude), or pass split=False (--no-split)",
        )
    return found


def _type(kinds: list[pa.DataType]) -> pa.DataType:
    """Choose one type for a column in several files: a number type that is wide enough for all files, or else the first type that is
    not null.
    """
    kinds = [kind for kind in kinds if not pa.types.is_null(kind)] or [pa.null()]
    chosen_type = kinds[0]
    for kind in kinds[1:]:
        chosen_type = tables.wider(chosen_type, kind) or chosen_type
    return chosen_type


def _check_columns(
    file: pathlib.Path,
    schema: pa.Schema,
    first: pathlib.Path,
    every: tuple[dict[str, pa.DataType], Mapping[str, str]],
    options: FolderOptions,
) -> None:
    """Refuse a file if its columns differ from the first file's, use a different time unit, or would lose data in the inferred type. `every`
    has the types of all columns, and those that are imported.
    """
    typed, named = every
    if schema.names != list(typed):
        raise InvalidInputError(
            f"cannot import `{file}`: its columns are {schema.names}, expected {list(typed)} as in `{first}`", code="invalid-schema"
        )
    for name in named:
        mine, theirs = arrow_types.storage(schema.field(name).type), arrow_types.storage(typed[name])
        if pa.types.is_null(mine) or pa.types.is_null(theirs) or mine == theirs:
            continue
        counts = arrow_types.time_dtype(mine) != arrow_types.time_dtype(theirs)
        mixed = arrow_types.is_text(mine) != arrow_types.is_text(theirs) and (arrow_types.is_number(mine) or arrow_types.is_number(theirs))
        loses = name not in options.types and name not in options.defaults and (mixed or _loses(mine, theirs))
        if counts or loses:
            raise InvalidInputError(
                f"cannot import `{file}`: its column `{name}` is {mine}, expected {theirs} as in files such as `{first}`",
                code="invalid-schema",
                hint=f"cast one to the other's type first{', or specify the column type' if loses and not counts else ''}",
            )


def _loses(mine: pa.DataType, theirs: pa.DataType) -> bool:
    """Return whether numbers of the type `mine`, or lists of them, would lose information when converted to `theirs`."""
    mine, theirs = (kind.value_type if hasattr(kind, "value_type") else kind for kind in (mine, theirs))
    numbers = all(arrow_types.is_number(kind) or pa.types.is_boolean(kind) for kind in (mine, theirs))
    return numbers and tables.wider(mine, theirs) != theirs


def _check_times(file: pathlib.Path, name: str, theirs: pa.DataType, wanted: Any) -> None:
    """Refuse points in time, durations and times of day in scalar columns of other dtypes, and other values in theirs."""
    dtype = arrow_types.time_dtype(theirs)
    own = None if wanted is None or not wanted.has_number else wanted.read_dtype()
    if own is None or own == dtype or (dtype is None and own not in TIMES):
        return
    if dtype is None and (arrow_types.is_text(theirs) or pa.types.is_null(theirs) or (own == "timestamp" and pa.types.is_integer(theirs))):
        return
    what = {None: "not a time", "timestamp": "a point in time", "duration": "a length of time", "time": "a time of day"}[dtype]
    unit = "; as a number, it needs a unit: cast it to one first" if own not in TIMES else ""
    raise InvalidInputError(
        f"cannot import `{file}`: its column `{name}` is {theirs}, which is {what}, expected {own}",
        code="invalid-schema",
        hint=f"make the column {dtype}{unit}" if dtype else "cast it first",
    )


def _files(folder: pathlib.Path, options: FolderOptions) -> tuple[list[pathlib.Path], list[pathlib.Path]]:
    """List the files in a folder, ordered by name. Returns the files to import and the files left out."""
    files: list[pathlib.Path] = []
    left_out: list[pathlib.Path] = []
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        place = file.relative_to(folder)
        hidden = any(part.startswith((".", "_")) for part in place.parts)
        # With `include`, the user says which files are tables. A selected file that is not a table is refused later.
        a_table = bool(options.include) or file.suffix.lower() in SUFFIXES or _begins(file, _PARQUET) or _begins(file, _IPC_FILE)
        (files if options.selects(place.as_posix()) and not hidden and a_table else left_out).append(file)
    parted = next((part for file in files for part in file.relative_to(folder).parts[:-1] if "=" in part), None)
    if parted is not None:
        raise InvalidInputError(
            f"cannot import `{folder}`: the folder name `{parted}` contains a value that is missing from the files",
            code="unsupported-format",
            hint="read it with pyarrow.dataset and import the rows, or import the folders one by one",
        )
    if not files:
        raise InvalidInputError(f"cannot import `{folder}`: it contains no files that end in {', '.join(SUFFIXES)}", hint="see --include")
    return files, left_out


def _infer(files: list[pathlib.Path], schemas: list[pa.Schema], kind: pa.DataType, name: str) -> ColumnType:
    # Values of extension types are not media, and have no nulls within.
    plain = (file for file, schema in zip(files, schemas, strict=True) if not isinstance(schema.field(name).type, pa.BaseExtensionType))
    batches = itertools.chain.from_iterable(_batches(file, [name]) for file in plain)
    if not arrow_types.is_media(kind):
        return tables.without_nulls_within(tables.infer(kind, name), (batch.column(name) for batch in batches))
    for batch in batches:
        if arrow_types.is_media(batch.column(name).type) and len(bodies := arrow_types.media(batch.column(name))[0].drop_null()):
            return tables.media_type(bodies[0].as_py())
    return tables.media_type(None)


def _chunk(
    file: pathlib.Path, batch: pa.RecordBatch, kinds: Mapping[str, ColumnType], first: int, noted: Mapping[str, ColumnType]
) -> Chunk:
    named = numbered(f"{file}: row", first)
    columns: dict[str, Any] = {}
    problems: list[tuple[int, str, Refusal]] = []
    for name, kind in kinds.items():
        array = batch.column(name)
        if arrow_types.is_media(array.type):
            bodies, only_paths = _guard(file, partial(arrow_types.media, array))
            if only_paths and kind.is_picture:  # Hugging Face stores images of local files so, unless they are embedded.
                columns[name] = tables.with_paths(array, bodies, (row for row, _ in only_paths))
                continue
            array = bodies
            problems += [(row, name, Refusal.of_value(named(row), name, why)) for row, why in only_paths]
        if kind == Scalar("timestamp") and arrow_types.is_text(arrow_types.storage(array.type)):
            texts = arrow_types.decoded(array).cast(pa.string())
            array, bad = from_text.timestamps(texts)
            problems += [(row, name, Refusal.of_value(named(row), name, from_text.unlike(texts[row].as_py(), "timestamp"))) for row in bad]
        if f"{_FINE}{name}" in batch.schema.names:
            fine = batch.column(f"{_FINE}{name}")
            why = "has digits below a microsecond: cut them off first"
            problems += [(row, name, Refusal.of_value(named(row), name, why)) for row in np.flatnonzero(fine).tolist()]
            array = compute.if_else(fine, pa.scalar(None, array.type), array)
        try:
            with naming(name, first, "import"):
                plain = kind.from_noted(array, noted.get(name) or tables.restored([batch.schema.field(name)]))
        except InvalidInputError as error:
            error._within(f"cannot import `{file}`")
            raise
        if plain is not None:
            columns[name] = plain
            continue
        try:
            columns[name] = _guard(file, partial(tables.values, array, kind))
        except InvalidInputError as error:
            error._within(f"cannot import column `{name}` of `{file}`")
            raise
    return Chunk(columns, batch.num_rows, named, problems=problems)


def _begins(file: pathlib.Path, marks: tuple[bytes, ...]) -> bool:
    with file.open("rb") as handle:
        return handle.read(6).startswith(marks)


def _schema(file: pathlib.Path) -> pa.Schema:
    if file.stat().st_size == 0:
        raise pa.ArrowInvalid("it has 0 bytes")
    if _begins(file, _PARQUET):
        return _parquet(file).schema_arrow
    return pa.ipc.open_file(file).schema if _begins(file, _IPC_FILE) else pa.ipc.open_stream(file).schema


def _batches(file: pathlib.Path, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Read a file, or some of its columns if it is Parquet."""
    if _begins(file, _PARQUET):
        return _row_groups(file, columns)
    if _begins(file, _IPC_FILE):
        opened = pa.ipc.open_file(pa.memory_map(str(file)))
        return _bounded(opened.get_batch(index) for index in range(opened.num_record_batches))
    return _bounded(pa.ipc.open_stream(pa.memory_map(str(file))))


def _parquet(file: pathlib.Path, unit: str = "us") -> pq.ParquetFile:
    # Spark and Hive write 96-bit timestamps. In nanoseconds, times outside the years 1677 to 2262 would wrap around.
    return pq.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20, page_checksum_verification=True, coerce_int96_timestamp_unit=unit)


def _row_groups(file: pathlib.Path, columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
    """Read one row group at a time. Otherwise, pyarrow would read several groups ahead and keep them in memory."""
    opened = _parquet(file)
    if columns is not None and any("." in name for name in opened.schema_arrow.names):
        columns = None  # A name with a dot would mean a field of a struct.
    dictionaries = any(pa.types.is_dictionary(kind) for kind in opened.schema_arrow.types)
    wanted = opened.schema_arrow.names if columns is None else columns
    old = [column.name for column in opened.schema if column.physical_type == "INT96" and column.path in wanted]
    exact = _parquet(file, "ns") if old else None
    most = ROWS_DECODED_WITH_DICTIONARIES if dictionaries else ROWS_DECODED
    for index in range(opened.num_row_groups):
        group = opened.metadata.row_group(index)
        mean = max(1.0, group.total_byte_size / max(1, group.num_rows))
        rows = max(1, min(most, int(CHUNK_BYTES / mean)))
        batches = opened.iter_batches(rows, row_groups=[index], columns=columns, use_threads=False)
        if exact is not None:
            batches = map(_with_digits, batches, exact.iter_batches(rows, row_groups=[index], columns=old, use_threads=False))
        yield from _bounded(_joined(batches))


def _with_digits(batch: pa.RecordBatch, exact: pa.RecordBatch) -> pa.RecordBatch:
    """Add whether the 96-bit times of a batch have digits below a microsecond, in columns named `_FINE` and the column's name.

    A time that is out of the range of nanoseconds wraps around, as do its microseconds when they are multiplied.
    """
    for name in exact.schema.names:
        coarse, fine = (part.column(name).fill_null(0).cast(pa.int64()).to_numpy() for part in (batch, exact))
        batch = batch.append_column(f"{_FINE}{name}", pa.array(coarse * 1000 != fine))
    return batch


_FINE = "\0fine "


def _joined(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Join small batches."""
    held: list[pa.RecordBatch] = []
    held_bytes = held_rows = 0
    for batch in batches:
        held.append(batch)
        held_bytes, held_rows = held_bytes + batch.nbytes, held_rows + batch.num_rows
        if held_bytes >= JOINED_BYTES or held_rows >= ROWS_AT_ONCE:
            yield _one(held)
            held_bytes = held_rows = 0
    if held:
        yield _one(held)


def _one(held: list[pa.RecordBatch]) -> pa.RecordBatch:
    """Join the batches in a list and empty the list."""
    joined = held[0] if len(held) == 1 else pa.concat_batches(held)
    held.clear()
    return joined


def _bounded(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Split batches that are larger than a chunk."""
    for batch in batches:
        rows = max(1, min(ROWS_AT_ONCE, int(CHUNK_BYTES * batch.num_rows / max(1, batch.nbytes))))
        yield from (batch.slice(start, rows) for start in range(0, max(1, batch.num_rows), rows))


def _guard(file: pathlib.Path, work: Callable[[], Any]) -> Any:
    """Convert the errors that pyarrow raises for a damaged file to CorruptError."""
    try:
        return work()
    except (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        if hasattr(error, "code"):
            raise
        raise CorruptError(f"cannot import `{file}`: {str(error).splitlines()[0] if str(error) else type(error).__name__}") from error

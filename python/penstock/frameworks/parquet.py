"""Writes views to Parquet: one file or several, to a local folder or a store, with Arrow's tensors or with lists that every reader knows."""

from __future__ import annotations

import io
import json
import os
import pathlib
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock import _core
from penstock.errors import InvalidInputError

if TYPE_CHECKING:
    from penstock.columns.column_type import ColumnType
    from penstock.views.view import View

ROW_GROUP_BYTES = 64 << 20
TENSORS = ("arrow", "list")
# How Hugging Face datasets store images.
_IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def to_parquet(
    view: View,
    path: str | os.PathLike[str],
    columns: Sequence[str] | None,
    tensors: str,
    file_bytes: int | None,
    options: list[tuple[str, str]],
) -> int:
    """Write a view to Parquet; see `View.to_parquet`."""
    if tensors not in TENSORS:
        raise InvalidInputError(f'cannot write Parquet with tensors={tensors!r}: expected "arrow" or "list"')
    if file_bytes is not None and (isinstance(file_bytes, bool) or not isinstance(file_bytes, int) or file_bytes < 1):
        raise InvalidInputError(f"cannot write files of {file_bytes!r} bytes: expected a whole number above 0")
    batches = view.scan(columns, batch_size=1 << 14)
    kinds = dict(view.schema)
    schema = batches.schema
    if not schema.names or len(set(schema.names)) < len(schema.names):
        found = f"`{max(schema.names, key=schema.names.count)}` twice" if schema.names else "no columns"
        raise InvalidInputError(
            f"cannot write Parquet with {found}: expected one or more columns, each once", hint=f"columns: {', '.join(kinds)}"
        )
    if tensors == "list":
        schema = pa.schema([field.with_type(listed(field.type, kinds.get(field.name))) for field in schema])
        schema = schema.with_metadata({b"huggingface": _features(schema, kinds)})
    text = os.fspath(path)
    local = _core.local_path(text)
    if local is None:
        files = _of_objects(text, options) if file_bytes is not None else _of_object(text, options)
    else:
        files = _of_folder(pathlib.Path(local)) if file_bytes is not None else _of_path(pathlib.Path(local))
    with files as begin:
        return _written(batches, schema, begin, file_bytes)


class _File(Protocol):
    """A file that is written."""

    def write(self, data: Any, /) -> Any: ...
    def close(self) -> None: ...


def _written(batches: pa.RecordBatchReader, schema: pa.Schema, begin: Callable[[int], _File], file_bytes: int | None) -> int:
    """Write record batches to files, each of about `file_bytes`, and return the number of rows."""
    rows, number, group_bytes = 0, 0, min(ROW_GROUP_BYTES, file_bytes or ROW_GROUP_BYTES)
    groups = _grouped(batches, schema, group_bytes)
    group = next(groups, None)
    while group is not None or number == 0:
        file = pa.PythonFile(begin(number), "w")
        writer = pq.ParquetWriter(file, schema, compression="zstd")
        try:
            while group is not None:
                writer.write_table(group)
                rows, group = rows + group.num_rows, next(groups, None)
                if file_bytes is not None and file.tell() >= file_bytes:
                    break
        except BaseException:
            writer.is_open = False  # So that no footer is written, whose error would be raised instead.
            raise
        writer.close()
        file.close()  # Not after an error: a file of a store appears when it is closed.
        number += 1
    return rows


def _grouped(batches: pa.RecordBatchReader, schema: pa.Schema, group_bytes: int) -> Iterator[pa.Table]:
    """Join record batches to tables of about `group_bytes`, with the values as `schema` has them. A large batch is divided."""
    held, held_bytes = list[pa.RecordBatch](), 0
    for whole in batches:
        rows = max(1, whole.num_rows * group_bytes // max(whole.nbytes, 1))
        for first in range(0, whole.num_rows, rows):
            batch = whole.slice(first, rows)
            columns = [_as_list(array) if array.type != field.type else array for array, field in zip(batch.columns, schema, strict=True)]
            held.append(pa.RecordBatch.from_arrays(columns, schema=schema))
            held_bytes += batch.nbytes
            if held_bytes >= group_bytes:
                yield pa.Table.from_batches(held)
                held, held_bytes = [], 0
    if held:
        yield pa.Table.from_batches(held)


@contextmanager
def _of_path(path: pathlib.Path) -> Iterator[Callable[[int], _File]]:
    """Write one file under another name first, so that it is complete or absent. A file that it replaces gives it its mode."""
    place = path.resolve()  # Of a link, the file that it points to.
    if place.is_dir() or not place.parent.is_dir():
        what = "it is a folder" if place.is_dir() else f"the folder `{place.parent}` does not exist"
        raise InvalidInputError(
            f"cannot write `{place}`: {what}", hint="give the path of a file in an existing folder, or file_bytes to write several"
        )
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else None
    if mode is not None and not path.is_file():
        raise InvalidInputError(f"cannot write `{path}`: it is a device, pipe or socket, expected a file", hint="give the path of a file")
    aside = place.with_name(_hidden())
    try:
        if mode is not None:
            aside.touch(0o600)  # Nobody else reads it before it has its mode.
        yield lambda _: _Synced(io.FileIO(aside, "w"))
        if mode is not None:
            aside.chmod(mode)
        aside.replace(place)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def _of_folder(folder: pathlib.Path) -> Iterator[Callable[[int], _File]]:
    """Write files to a new folder, which appears when all are complete, or to an empty one, which gets them then."""
    place = folder.resolve()
    if folder.exists() and not folder.is_dir():
        raise InvalidInputError(
            f"cannot write several files to `{folder}`: it is not a folder", hint="give the path of a new or empty folder"
        )
    if not place.parent.is_dir():
        raise InvalidInputError(f"cannot write `{place}`: the folder `{place.parent}` does not exist", hint="create it first")
    new = not place.exists()
    aside = (place.parent if new else place) / _hidden()
    moved = list[pathlib.Path]()
    aside.mkdir()
    try:
        if not new:  # After the own folder was made, so that of two exports at the same time one sees the other.
            _check_others(place, min({*os.listdir(place)} - {aside.name}, default=None))
        yield lambda number: _Synced(io.FileIO(aside / f"part-{number:05d}.parquet", "w"))
        if new:
            aside.replace(place)
        else:
            _check_others(place, min({*os.listdir(place)} - {aside.name}, default=None))
            for file in sorted(aside.iterdir()):
                moved.append(file.rename(place / file.name))
    except BaseException:
        for file in moved:
            file.unlink(missing_ok=True)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def _of_object(uri: str, options: list[tuple[str, str]]) -> Iterator[Callable[[int], _File]]:
    """Write one file to a store. It appears when it is complete, and replaces an older one."""
    if "/" not in uri.partition("://")[2].strip("/"):
        raise InvalidInputError(
            f"cannot write `{uri}`: it has no file name", hint="write it as s3://bucket/name.parquet, or give file_bytes to write several"
        )
    output = _core.Output(uri, options)
    with _undone(output, uri, []):
        yield lambda _: _Stored(output, "")  # The core writes a URI literally, but encodes letters of names below it.


@contextmanager
def _of_objects(uri: str, options: list[tuple[str, str]]) -> Iterator[Callable[[int], _File]]:
    """Write files to a folder of a store, with names that no other call uses. Of two calls at the same time, one or both are refused."""
    output, call, begun = _core.Output(uri, options), secrets.token_hex(4), list[str]()

    def begin(number: int) -> _File:
        begun.append(f"part-{call}-{number:05d}.parquet")
        return _Stored(output, begun[-1])

    _check_others(uri, output.other(begun))
    with _undone(output, uri, begun):
        yield begin
        _check_others(uri, output.other(begun))


def _check_others(place: pathlib.Path | str, other: str | None) -> None:
    """Refuse a folder that has another file."""
    if other is not None:
        raise InvalidInputError(
            f"cannot write several files to `{place}`: it has `{other}`", hint="give each export its own new or empty folder"
        )


@contextmanager
def _undone(output: _core.Output, uri: str, begun: list[str]) -> Iterator[None]:
    """After an error, discard the file that was begun, and delete complete ones. If that fails as well, the first error says what is left."""
    try:
        yield
    except BaseException as error:
        try:
            output.delete(begun)
        except Exception as failure:
            error.add_note(f"`{uri}` may still have {', '.join(f'`{name}`' for name in begun)}: {failure}")
        raise


def _hidden() -> str:
    return f".{secrets.token_hex(8)}.parquet"


class _Synced(io.BufferedWriter):
    """A local file that is durable when it is closed."""

    def close(self) -> None:
        if not self.closed:
            self.flush()
            os.fsync(self.fileno())
        super().close()


class _Stored:
    """A file of a store. It appears when it is closed."""

    def __init__(self, output: _core.Output, name: str) -> None:
        self.output = output
        self.closed, self.failed = False, False
        output.begin(name)

    def write(self, data: Any, /) -> int:
        if not self.failed:  # Arrow writes again after an error, and would wait for a lost store again.
            self.failed = True
            self.output.write(bytes(data))
            self.failed = False
        return len(data)

    def flush(self) -> None:
        """Do nothing: the store sends what it has."""

    def close(self) -> None:
        if not self.closed:
            self.output.finish()
        self.closed = True


def listed(arrow: pa.DataType, kind: ColumnType | None) -> pa.DataType:
    """Return the type with nested lists instead of Arrow's tensors and of ragged tensors, and with Hugging Face's struct for images."""
    if kind is not None and (own := kind.parquet_type(arrow)) != arrow:
        return own
    value, depth = arrow, 0
    if isinstance(arrow, pa.FixedShapeTensorType):
        value, depth = arrow.value_type, len(arrow.shape)
    elif pa.types.is_struct(arrow) and [field.name for field in arrow] == ["data", "shape"]:
        value, depth = arrow.field("data").type.value_type, arrow.field("shape").type.list_size
    for _ in range(depth):
        value = pa.list_(value)
    return value


def _as_list(array: pa.Array) -> pa.Array:
    """Convert tensors to nested lists, and bytes of images to structs."""
    missing = array.is_null() if array.null_count else None
    if pa.types.is_large_binary(array.type):
        return pa.StructArray.from_arrays([array.cast(pa.binary()), pa.nulls(len(array), pa.string())], fields=list(_IMAGE), mask=missing)
    if isinstance(array.type, pa.FixedShapeTensorType):
        sizes = np.tile(np.array(array.type.shape, np.int64), (len(array), 1))
        flat, size = array.storage, array.storage.type.list_size
        values = flat.values.slice(flat.offset * size, len(flat) * size)  # They include those below nulls.
    else:
        data, shapes = array.field("data"), array.field("shape")
        present = np.asarray(array.is_valid())
        rank = shapes.type.list_size
        flat = np.asarray(shapes.values.slice(shapes.offset * rank, len(array) * rank)).reshape(len(array), rank)
        sizes = np.where(present[:, None], flat, 0)
        values = data.filter(array.is_valid()).flatten()
    counts = np.ones(len(array), np.int64)
    lengths = []
    for depth in range(sizes.shape[1]):
        lengths.append(np.repeat(sizes[:, depth], counts))
        counts = counts * sizes[:, depth]
    for depth, each in reversed(list(enumerate(lengths))):
        offsets = pa.array(np.concatenate([[0], np.cumsum(each)]), pa.int32())  # Refuses what 32 bits cannot count.
        values = pa.ListArray.from_arrays(offsets, values, mask=missing if depth == 0 else None)
    return values


def _features(schema: pa.Schema, kinds: dict[str, ColumnType]) -> str:
    """Return the features that Hugging Face datasets read. They count for images; what other columns are, they find in the schema."""
    images = {field.name: {"_type": "Image"} for field in schema if field.name in kinds and kinds[field.name].is_image}
    return json.dumps({"info": {"features": images}})

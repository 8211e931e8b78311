"""Bytes columns."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from penstock.columns.column_type import ColumnType
from penstock.values.checks import Prepared, fail
from penstock.values.containers import items_of
from penstock.values.from_arrow import flat_from_arrow
from penstock.values.media import blob
from penstock.values.streams import is_source, streamed

if TYPE_CHECKING:
    import pyarrow as pa


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bytes(ColumnType):
    """Bytes of any length up to 1 TiB: bytes, bytearray, memoryview, the Path of a file to store, or a source of bytes. Reads as bytes.

    A source is a binary file or another object with `read(size)`, such as the body of an HTTP response, or an iterator of bytes. It is read
    once, while its bytes are written, so that a film is never held whole. `ds["blob"].read` and `ds["blob"].open` read a part of it. Values
    of a source, and files of 8 MiB or more, are not compressed, because a codec needs the whole value; with a codec, files are. A transaction with
    a journal reads them whole, because a source cannot be read again.
    Cost: holds 1 MiB of a source, and up to 48 MiB for an upload. Raises: InvalidInputError if a source returns anything but bytes. An error that a source raises is
    raised again, with a note that names the column and the row; nothing of the call is stored.

    >>> import io, penstock as ps
    >>> ds = ps.create("memory://films", {"film": ps.Bytes()})
    >>> receipt = ds.append({"film": [io.BytesIO(b"moving pictures"), (part for part in [b"more", b" pictures"])]})
    >>> ds["film"].read(0, 7, 11), ds["film"][1]
    (b'pict', b'more pictures')
    """

    type = "bytes"
    takes_arrow = "plain"
    may_be_file = True

    def check_whole(self, values: Any) -> None:
        if callable(getattr(values, "read", None)):
            raise fail(f"a single {type(values).__name__}, expected one value per sample", hint="write [file]")

    def from_texts(self, texts: pa.Array, is_given: bool) -> tuple[Any, list[tuple[int, str]]]:
        import pyarrow as pa

        values, bad = super().from_texts(texts, is_given)
        return values.cast(pa.binary()), bad

    def prepare(self, values: Any) -> Prepared:
        if flat := flat_from_arrow(values):
            return flat
        items = items_of(values)
        if set(map(type, items)) <= {bytes, type(None)}:
            return ("items", items)
        made = [value if is_source(value) else blob(value, row) for row, value in enumerate(items)]
        return streamed(made, self.codec == "none")

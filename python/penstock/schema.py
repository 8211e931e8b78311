"""Column types: what a column holds, and its entry in the schema. `values.py` prepares the values."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from penstock.errors import InvalidInputError
from penstock.values import (
    DTYPES,
    Prepared,
    blob,
    coded_from_arrow,
    coded_from_strings,
    codes_or_words,
    dense,
    fail,
    flat_from_arrow,
    is_null,
    is_null_word,
    is_utf8,
    is_whole,
    items_of,
    numpy_dtype,
    pictures,
    plain_numbers,
    pulled,
    ragged,
    refuse_one_image,
    rows_of,
    short_strings,
    strings,
    text_from_pandas,
    without_torch,
)  # fmt: skip

MODES = ("RGB", "L", "RGBA", "I;16", "stored")
__all__ = ["DTYPES", "ColumnType", "Schema", "from_json", "numpy_dtype", "to_json"]


def dtype_name(dtype: Any) -> str:
    """Return the Penstock name of a dtype, given as a name, NumPy dtype or type."""
    if isinstance(dtype, str) and dtype in DTYPES:
        return dtype
    try:
        found = None if dtype is None else np.dtype(dtype)
    except TypeError:
        found = None
    if found is not None:
        if found.kind == "M":
            return "timestamp"
        if found.name in DTYPES:
            return str(found.name)
    raise InvalidInputError(f"unknown dtype {dtype!r}", code="invalid-schema", hint=f"one of {', '.join(DTYPES)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ColumnType:
    """Base of the column types. `codec` ("none", "lz4", "zstd") compresses blocks; media are compressed already."""

    codec: str = "none"
    type: ClassVar[str]

    def spec(self) -> dict[str, Any]:
        """Return the column's entry in the schema, without its name."""
        if self.codec not in ("none", "lz4", "zstd"):
            raise InvalidInputError(f"unknown codec {self.codec!r}", code="invalid-schema", hint="one of none, lz4, zstd")
        return {"type": self.type, "codec": self.codec}

    def check_whole(self, values: Any) -> None:
        """Refuse input that cannot be one value per sample, before samples are counted."""

    def rows(self, values: Any) -> Any:
        """Return all values as a container that can be sliced."""
        return rows_of(values)

    def row_bytes(self) -> int:
        """Return the bytes of each prepared value, nulls included; 0 if the size depends on the value."""
        return 0

    def prepare(self, values: Any) -> Prepared:
        """Convert one value per sample, or a slice of the result of `rows`, to a form for the core."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text(ColumnType):
    """Unicode text. Reads as str."""

    type = "text"

    def rows(self, values: Any) -> Any:
        values = text_from_pandas(values)
        whole = short_strings(values)
        return rows_of(values) if whole is None else whole

    def prepare(self, values: Any) -> Prepared:
        flat = flat_from_arrow(strings(values) if isinstance(values, list) else values)
        if flat is not None:
            return flat
        items = items_of(values)
        if not set(map(type, items)) <= {str, type(None)}:
            items = [None if is_null_word(value) else value for value in items]
            for row, value in enumerate(items):
                if value is not None and not isinstance(value, str):
                    raise fail(f"is a {type(value).__name__}, expected str", row)
        return ("items", items)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bytes(ColumnType):
    """Bytes of any length: bytes, bytearray, memoryview, or the Path of a file to store. Reads as bytes."""

    type = "bytes"

    def prepare(self, values: Any) -> Prepared:
        return flat_from_arrow(values) or ("items", [blob(value, row) for row, value in enumerate(items_of(values))])


def _has_keys_of_one_name(value: Any) -> bool:
    """Return whether any dict has keys such as 1 and "1", of which JSON would keep only one.

    >>> _has_keys_of_one_name([{1: "a", "1": "b"}]), _has_keys_of_one_name({1: "a", "2": {}})
    (True, False)
    """
    within = [value]
    while within:
        value = within.pop()
        if isinstance(value, dict):
            if any(type(key) is not str for key in value) and len(json.loads(json.dumps(dict.fromkeys(value)))) < len(value):
                return True
            value = value.values()
        elif not isinstance(value, list | tuple):
            continue
        within += [one for one in value if isinstance(one, dict | list | tuple)]
    return False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Json(ColumnType):
    """Anything that JSON can hold, stored as compact text. Reads as Python objects.

    Text is stored as a JSON string, even from Arrow. `scan` returns JSON as text, so parse that before you append it.
    """

    type = "json"

    def prepare(self, values: Any) -> Prepared:
        items: list[str | None] = []
        for row, value in enumerate(items_of(values)):
            try:
                text = None if is_null(value) else json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
                if text and _has_keys_of_one_name(value):
                    raise ValueError("two of its keys have the same name as text")
            except (TypeError, ValueError, RecursionError) as error:
                raise fail(f"is not JSON: {error}", row) from error
            items.append(text)
        return ("items", items)


@dataclasses.dataclass(frozen=True)
class Label(ColumnType):
    """One of a closed list of names. Append names or codes. Reads as int64 codes, or as strings in `scan`.

    >>> Label(["cat", "dog"]).names
    ('cat', 'dog')
    """

    names: Sequence[str]
    type = "label"

    def __post_init__(self) -> None:
        if isinstance(self.names, str) or not all(isinstance(name, str) for name in self.names):
            raise InvalidInputError(f"labels are {self.names!r}, expected a list of str", code="invalid-schema")
        object.__setattr__(self, "names", tuple(self.names))

    def spec(self) -> dict[str, Any]:
        return {**super().spec(), "names": list(self.names)}

    def rows(self, values: Any) -> Any:
        values = rows_of(text_from_pandas(values))
        return coded_from_arrow(values) or coded_from_strings(values) or values

    def prepare(self, values: Any) -> Prepared:
        return codes_or_words(values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Category(ColumnType):
    """One of an open list of words, which grows as words are appended. Reads as int64 codes, or as strings in `scan`.

    Append words, or codes of this dataset's own `vocabulary`. The same codes mean different words in other datasets.
    """

    type = "category"

    def rows(self, values: Any) -> Any:
        values = rows_of(text_from_pandas(values))
        return coded_from_arrow(values) or coded_from_strings(values) or values

    def prepare(self, values: Any) -> Prepared:
        return codes_or_words(values)


@dataclasses.dataclass(frozen=True)
class Scalar(ColumnType):
    """One number, bool or timestamp per sample. A plain dtype in a schema is short for this type."""

    dtype: str
    type = "scalar"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_name(self.dtype))

    def spec(self) -> dict[str, Any]:
        return {**super().spec(), "dtype": self.dtype}

    def rows(self, values: Any) -> Any:
        quick = plain_numbers(values, self.dtype) if isinstance(values, list) else None
        if quick is None:
            return rows_of(values)
        array, validity = quick
        return array if validity is None else np.ma.MaskedArray(array, ~validity)

    def row_bytes(self) -> int:
        return numpy_dtype(self.dtype).itemsize

    def prepare(self, values: Any) -> Prepared:
        return dense(values, (), self.dtype)


@dataclasses.dataclass(frozen=True)
class Tensor(ColumnType):
    """An n-dimensional array per sample; None means a free dimension.

    Shapes: if all dimensions are fixed, batches are (N, *shape) arrays; else they are `Ragged`. No fixed dimension may be 0.
    Samples of 8 MiB and more are stored as tiles of about 64 KiB, so `ds["volume"][7, 0:64, 10:20]` reads little more than it
    returns. `tile`, one side per dimension, sets the tile shape for samples of any size. A large sample may be any object that has
    a shape and a dtype and reads its parts (np.memmap, h5py, Zarr, TensorStore). It is never held in memory whole.

    >>> Tensor((None, 4), "float32").shape
    (None, 4)
    >>> Tensor((300, 1080, 1920, 3), "uint8", tile=(1, 270, 480, 3)).tile
    (1, 270, 480, 3)
    """

    shape: tuple[int | None, ...]
    dtype: str
    tile: tuple[int, ...] | None = None
    type = "tensor"

    def __post_init__(self) -> None:
        sizes = tuple(self.shape)
        for size in sizes:
            if size is not None and (not is_whole(size) or size < 0):
                raise InvalidInputError(f"dimension {size!r}, expected a whole number or None", code="invalid-schema")
        object.__setattr__(self, "shape", tuple(None if size is None else int(size) for size in sizes))
        if self.tile is not None:
            sides = tuple(self.tile) if isinstance(self.tile, tuple | list) else (None,)
            if len(sides) != len(sizes) or any(not is_whole(side) or side < 1 for side in sides):
                raise InvalidInputError(
                    f"tile={self.tile!r}, expected a whole number above 0 for each of {len(sizes)} dimensions", code="invalid-schema"
                )
            object.__setattr__(self, "tile", tuple(int(side) for side in sides))
        object.__setattr__(self, "dtype", dtype_name(self.dtype))

    def spec(self) -> dict[str, Any]:
        spec = {**super().spec(), "dtype": self.dtype, "shape": list(self.shape)}
        return spec if self.tile is None else {**spec, "tile": list(self.tile)}

    def rows(self, values: Any) -> Any:
        return rows_of(without_torch(values))

    def row_bytes(self) -> int:
        return math.prod(size or 0 for size in self.shape) * numpy_dtype(self.dtype).itemsize

    def prepare(self, values: Any) -> Prepared:
        large = pulled(values, self.shape, self.dtype, self.tile)
        if large is not None:
            return large
        if None in self.shape:
            return ragged(values, self.shape, self.dtype)
        return dense(values, tuple(size for size in self.shape if size is not None), self.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Image(ColumnType):
    """A JPEG or PNG, kept bit for bit. Arrays and Pillow images are stored as PNG of their pixels, without EXIF and its orientation.

    Shapes: reads as (H, W, C) uint8 or uint16 with C 1, 3 or 4, as stored. `exif_orientation=False` ignores the EXIF orientation.
    `mode` is the mode in loaders: "RGB" (alpha composited onto white), "L" (grey, by ITU-R 601), "RGBA", "I;16" (16-bit grey; 8-bit
    values times 257) or "stored". Loaders refuse images of 16 bits per channel in an 8-bit mode, and colours in "I;16".
    """

    mode: str = "RGB"
    exif_orientation: bool = True
    type = "image"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise InvalidInputError(f"mode={self.mode!r}", code="invalid-schema", hint=f"one of {', '.join(MODES)}")

    def spec(self) -> dict[str, Any]:
        return {**super().spec(), "exif_orientation": self.exif_orientation, "mode": self.mode}

    def check_whole(self, values: Any) -> None:
        refuse_one_image(values)

    def prepare(self, values: Any) -> Prepared:
        return pictures(values, mask=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mask(ColumnType):
    """One class number per pixel, stored as PNG. Shapes: reads as (H, W) uint8 or uint16; palettes are not applied.

    Files are stored unchanged. A JPEG file may contain class numbers that its own compression has blurred.
    """

    of: str | None = None
    type = "mask"

    def spec(self) -> dict[str, Any]:
        return {**super().spec(), "of": self.of}

    def prepare(self, values: Any) -> Prepared:
        return pictures(values, mask=True)


@dataclasses.dataclass(frozen=True)
class Boxes(ColumnType):
    """Boxes in an image. Shapes: (N, 4) float32, N free; reads as `Ragged`. `format`: xyxy, xywh or cxcywh, in pixels."""

    format: str = "xyxy"
    of: str | None = None
    type = "boxes"

    def spec(self) -> dict[str, Any]:
        return {**super().spec(), "format": self.format, "of": self.of}

    def prepare(self, values: Any) -> Prepared:
        return ragged(values, (None, 4), "float32")


@dataclasses.dataclass(frozen=True)
class Keypoints(ColumnType):
    """Points of the objects in an image. Shapes: (N, points, dimensions) float32, N free, points free if None."""

    points: int | None = None
    dimensions: int = 2
    of: str | None = None
    type = "keypoints"

    def spec(self) -> dict[str, Any]:
        return {**super().spec(), "points": self.points, "dimensions": self.dimensions, "of": self.of}

    def prepare(self, values: Any) -> Prepared:
        return ragged(values, (None, self.points, self.dimensions), "float32")


TYPES: dict[str, type[ColumnType]] = {
    kind.type: kind for kind in (Text, Bytes, Json, Label, Category, Scalar, Tensor, Image, Mask, Boxes, Keypoints)
}


class Schema(dict[str, ColumnType]):
    """Column name → type, in order."""

    def __repr__(self) -> str:
        return "Schema({\n" + "".join(f"    {name!r}: {kind},\n" for name, kind in self.items()) + "})"


def to_json(schema: Mapping[str, Any]) -> str:
    """Write a schema as JSON for the core; a plain dtype becomes a scalar."""
    if not isinstance(schema, Mapping):
        raise InvalidInputError(f"the schema is a {type(schema).__name__}, expected a dict of column name to type", code="invalid-schema")
    columns = []
    for name, kind in schema.items():
        if not isinstance(name, str):
            raise InvalidInputError(f"cannot create column {name!r}: expected a str as name", code="invalid-schema")
        if not isinstance(kind, ColumnType):
            if isinstance(kind, type) and issubclass(kind, ColumnType):
                raise InvalidInputError(
                    f"cannot create column `{name}`: {kind.__name__} is a class", code="invalid-schema", hint=f"write ps.{kind.__name__}()"
                )
            kind = Scalar(kind)
        columns.append({"name": name, **kind.spec()})
    text = json.dumps(columns, ensure_ascii=False)
    if not is_utf8(text):
        raise InvalidInputError("a name in the schema is not UTF-8 (a lone surrogate)", code="invalid-schema")
    return text


def from_json(text: str) -> Schema:
    """Read a schema from the core's JSON."""
    schema = Schema()
    for column in json.loads(text):
        kind = TYPES[column["type"]]
        fields = {field.name for field in dataclasses.fields(kind)}
        values = {key: value for key, value in column.items() if key in fields}
        schema[column["name"]] = kind(**values)
    return schema

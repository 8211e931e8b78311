"""The base class for all column types."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from penstock import _core
from penstock.errors import InvalidInputError
from penstock.values.checks import Prepared
from penstock.values.containers import rank_of, rows_of, text_from_pandas

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow as pa

    from penstock.views.view import View


CODECS = ("none", "lz4", "zstd")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ColumnType:
    """Base class for all column types. `codec`, one of `CODECS`, sets how blocks are compressed. Media are already compressed."""

    codec: str = "none"
    type: ClassVar[str]

    # What other files ask. These are the answers of most types.
    # Which Arrow values `prepare` takes: Python objects instead, arrays of plain values, or any.
    takes_arrow: ClassVar[Literal["objects", "plain", "any"]] = "objects"
    # Whether values are files with pixels, and whether the pixels are colours, rather than numbers of classes.
    is_picture: ClassVar[bool] = False
    is_image: ClassVar[bool] = False
    # Whether values are places in a picture, and move with it.
    moves: ClassVar[bool] = False
    # Whether an importer may take values from files that are named instead.
    may_be_file: ClassVar[bool] = False
    # Whether values are codes for words, or lists of them; whether each is one word; and whether each is an array.
    is_coded: ClassVar[bool] = False
    has_words: ClassVar[bool] = False
    is_array: ClassVar[bool] = False
    # Whether parts of a large value can be read on their own.
    has_parts: ClassVar[bool] = False
    # Whether each value is one number, bool or time.
    has_number: ClassVar[bool] = False
    # Whether the core numbers the different values of a column.
    has_codes: ClassVar[bool] = False

    def spec(self) -> dict[str, Any]:
        """Return the column's entry in the schema, without its name."""
        if self.codec not in CODECS:
            raise InvalidInputError(f"unknown codec {self.codec!r}", code="invalid-schema", hint=f"use one of {', '.join(CODECS)}")
        return {"type": self.type, **vars(self)}

    def check_whole(self, values: Any) -> None:
        """Refuse input that is not one value per sample. Called before samples are counted."""

    def rows(self, values: Any) -> Any:
        """Return all values as a container that can be sliced."""
        return rows_of(values)

    def is_one(self, value: Any) -> bool | None:
        """Return whether a value is that of one sample, rather than one per sample, or None if it may be either."""
        rank, own = rank_of(value), self.rank
        return None if rank is None or own is None else rank <= own

    @property
    def belongs_to(self) -> str | None:
        """The column that `of` names."""
        return getattr(self, "of", None)

    @property
    def classes(self) -> Sequence[str] | None:
        """The closed list of words whose numbers are the codes, or None if there is none."""
        return None

    @property
    def box_format(self) -> str | None:
        """The format of boxes, or None for other values."""
        return None

    @property
    def one_for_each(self) -> str | None:
        """The column that has as many values in each sample as this one."""
        return None

    @property
    def is_comparable(self) -> bool:
        """Whether values can be compared with one another, as whole columns."""
        return self.has_words

    @property
    def has_groups(self) -> bool:
        """Whether samples can be grouped by their values."""
        return self.is_comparable

    @property
    def is_key(self) -> bool:
        """Whether values can identify samples."""
        return False

    @property
    def has_text(self) -> bool:
        """Whether `from_texts` can make any value, from text or from the name of a file."""
        return self.may_be_file or self.has_words

    @property
    def rank(self) -> int | None:
        """The number of dimensions of one sample as callers give it, or None if it is not known."""
        return len(self.sample_shape())

    @property
    def form(self) -> str:
        """The form that batches use for the column: "fixed" for arrays, "ragged", or the type name."""
        if self.read_dtype() is None:
            return self.type
        return "ragged" if None in self.sample_shape() else "fixed"

    def row_bytes(self) -> int:
        """Return the size in bytes of each prepared value, including nulls; 0 if the sizes differ."""
        return 0

    def fits(self, values: Any) -> bool:
        """Return whether it is certain, without a look at the values, that `prepare` will accept them."""
        return False

    def prepare(self, values: Any) -> Prepared:
        """Convert one value per sample, or a slice of the result of `rows`, to a form that the core accepts."""
        raise NotImplementedError

    def read_dtype(self) -> str | None:
        """Return the dtype of the values that reads return, or None if they have none in common."""
        return None

    def sample_shape(self) -> tuple[int | None, ...]:
        """Return the shape of one sample, with None for each dimension whose size differs between samples."""
        return ()

    def arrow_type(self) -> pa.DataType:
        """Return the Arrow type of the column in a scan: that of its numbers or arrays, or binary."""
        from penstock.values.arrow import to_arrow

        return to_arrow.array_type(self.read_dtype(), self.sample_shape() if self.is_array else None)

    def to_arrow(self, values: tuple[Any, ...], words: pa.Array | None) -> pa.Array:
        """Convert values that were read in the "flat" form. `words` contains the result of the method `words` as an Arrow array."""
        from penstock.values.arrow import to_arrow

        dtype = self.read_dtype()
        if dtype is None:
            return to_arrow.flat(values, self.arrow_type())
        return to_arrow.array(values, dtype, self.sample_shape() if self.is_array else None)

    def of_codes(self, values: npt.NDArray[Any], words: Sequence[str]) -> pa.Array:
        """Return the values of the codes that the core gives different values, if it `has_codes` for them."""
        raise NotImplementedError

    def from_arrow(self, array: pa.Array) -> Any:
        """Convert Arrow values of any type to a form that `prepare` accepts. Extension types are those of Arrow."""
        from penstock.values.arrow import types as arrow_types

        if self.takes_arrow == "any":
            return array
        array = arrow_types.plain(array)
        return array if self.takes_arrow == "plain" else array.to_pylist()

    def from_noted(self, array: pa.Array, noted: ColumnType | None) -> Any:
        """Convert Arrow values whose metadata state a column type that gives them a meaning. Returns None for other values."""
        return None

    def from_scan(self, values: pa.Array | pa.ChunkedArray) -> Any:
        """Convert Arrow values that a scan of such a column returned to a form that `prepare` accepts."""
        return values

    def of_arrow(self, values: pa.Array | pa.ChunkedArray, stored: ColumnType | None) -> pa.Array | pa.ChunkedArray:
        """Convert Arrow values of another column of this type to what this one means by them."""
        return values

    def of_batch(self, values: Any, stored: ColumnType | None) -> Any:
        """The same for values of a batch."""
        return values

    def from_texts(self, texts: pa.Array, is_given: bool) -> tuple[Any, list[tuple[int, str]]]:
        """Convert texts, as in CSV files. Also returns the rows that cannot be converted, each with the reason. `is_given` says that the user chose
        the type. Otherwise, texts that would lose their spelling are refused, too.
        """
        from penstock.values.text import from_text

        return from_text.nulled(texts), []

    def json_type(self) -> pa.DataType | None:
        """Return the Arrow type as which values can be read from JSON lines without a loss, or None."""
        import pyarrow as pa

        return pa.string() if self.has_words or self.is_picture else None

    def from_json(self, value: Any) -> Any:
        """Convert a value that JSON had."""
        return value

    def from_pandas(self, values: Any) -> Any:
        """Convert a pandas series."""
        return rows_of(text_from_pandas(values))

    def codes_in(self, values: Any) -> Iterable[tuple[int, Any]]:
        """Yield the rows and values that are codes, which mean something in another dataset only."""
        return ()

    def parquet_type(self, arrow: pa.DataType) -> pa.DataType:
        """Return the type of a Parquet file for Hugging Face and others, which know neither tensors nor images of Arrow."""
        return arrow

    def check_media(self, bodies: list[bytes | None], how: str) -> list[Any]:
        """Return why each picture is refused, or None. `how` is header or decode."""
        return _core.check_media(bodies, None, how)

    def image_sizes(self, bodies: list[bytes | None]) -> list[tuple[int, int] | None]:
        """Return the height and width of each image as it is read, or None if they are not known."""
        return [None] * len(bodies)

    def to_torchvision(self, value: Any, size: tuple[int, int] | None, format: str | None) -> Any:
        """Convert a value of a sample to what torchvision calls it. `size` is that of the image, and `format` that of boxes, if it has changed."""
        from penstock.values import to_torch

        return to_torch.tensor(value) if self.is_array or self.classes is not None else value

    def from_torchvision(self, array: npt.NDArray[Any], before: Any) -> npt.NDArray[Any]:
        """Convert a result of torchvision to a value of a sample, which was `before`."""
        return array

    def with_box_format(self, format: str) -> Self:
        """Return the same type for boxes of another format."""
        return self

    def with_classes(self, names: Sequence[str]) -> Self:
        """Return the same type with another list of classes."""
        return self

    def without_halves(self) -> Self:
        """Return the same type with float32 instead of float16."""
        return self

    def words(self, view: View, column: str) -> list[str] | None:
        """Return the words that the column's codes refer to, or None if its values are not codes."""
        return None

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Parse the text after the type name on the command line, such as `cat,dog` in `label:cat,dog`.

        Raises: ValueError if the text does not describe a column.
        """
        if text:
            raise ValueError(f"{cls.type} takes no parameters, but `{text}` was given")
        return cls()

    def describe(self) -> str:
        """Describe the column in a few words, for tables on the command line."""
        return self.type

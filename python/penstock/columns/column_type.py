"""The base class for all column types."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from penstock.errors import InvalidInputError
from penstock.values.checks import Prepared
from penstock.values.containers import rank_of, rows_of

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.views.view import View


CODECS = ("none", "lz4", "zstd")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ColumnType:
    """Base class for all column types. `codec`, one of `CODECS`, sets how blocks are compressed. Media are already compressed."""

    codec: str = "none"
    type: ClassVar[str]

    def spec(self) -> dict[str, Any]:
        """Return the column's entry in the schema, without its name."""
        if self.codec not in CODECS:
            raise InvalidInputError(f"unknown codec {self.codec!r}", code="invalid-schema", hint=f"use one of {', '.join(CODECS)}")
        return {"type": self.type, "codec": self.codec}

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
    def rank(self) -> int | None:
        """The number of dimensions of one sample as callers give it, or None if it is not known."""
        return 0

    def row_bytes(self) -> int:
        """Return the size in bytes of each prepared value, including nulls; 0 if the sizes differ."""
        return 0

    def fits(self, values: Any) -> bool:
        """Return whether it is certain, without a look at the values, that `prepare` will accept them."""
        return False

    def prepare(self, values: Any) -> Prepared:
        """Convert one value per sample, or a slice of the result of `rows`, to a form that the core accepts."""
        raise NotImplementedError

    @classmethod
    def form_of(cls, spec: Mapping[str, Any]) -> str:
        """Return the form that batches use for the column: "fixed" for arrays, "ragged", or the type name. `spec` was returned by the
        method `spec`.
        """
        return cls.type

    def read_dtype(self) -> str | None:
        """Return the dtype of the values that reads return, or None if they have none in common."""
        return None

    def sample_shape(self) -> tuple[int | None, ...]:
        """Return the shape of one sample, with None for each dimension whose size differs between samples."""
        return ()

    def arrow_type(self) -> pa.DataType:
        """Return the Arrow type of the column in a scan. Column types that do not override this method become binary."""
        import pyarrow as pa

        return pa.large_binary()

    def to_arrow(self, values: tuple[Any, ...], words: pa.Array | None) -> pa.Array:
        """Convert values that were read in the "flat" form. `words` contains the result of the method `words` as an Arrow array."""
        from penstock.values import to_arrow

        return to_arrow.flat(values, self.arrow_type())

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

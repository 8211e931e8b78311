"""What every column type has."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from penstock.errors import InvalidInputError
from penstock.values.checks import Prepared
from penstock.values.containers import rows_of


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

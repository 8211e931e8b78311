"""Bytes columns."""

from __future__ import annotations

import dataclasses
from typing import Any

from penstock.columns.column_type import ColumnType
from penstock.values.checks import Prepared
from penstock.values.containers import items_of
from penstock.values.from_arrow import flat_from_arrow
from penstock.values.media import blob


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bytes(ColumnType):
    """Bytes of any length: bytes, bytearray, memoryview, or the Path of a file to store. Reads as bytes."""

    type = "bytes"

    def prepare(self, values: Any) -> Prepared:
        return flat_from_arrow(values) or ("items", [blob(value, row) for row, value in enumerate(items_of(values))])

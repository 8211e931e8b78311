"""The schema: column types by name, and their JSON form for the core. CONTRIBUTING.md lists the steps for adding one."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.columns import TYPES
from penstock.columns.column_type import ColumnType
from penstock.columns.scalar import Scalar
from penstock.errors import Error, InvalidInputError
from penstock.values.checks import is_utf8

if TYPE_CHECKING:
    import pyarrow as pa

# The key of a column's entry in the schema, in the metadata of an Arrow field.
COLUMN = b"penstock.column"


@dataclasses.dataclass
class BoxRule:
    """What happens to added boxes that are not finite or have a negative size: refuse, keep, clip or drop. Counts those that it changed."""

    action: str = "refuse"
    changed: int = 0


class Schema(dict[str, ColumnType]):
    """Maps column names to types, in order. `boxes` is the rule by which boxes are added."""

    boxes: BoxRule = BoxRule()

    def __repr__(self) -> str:
        return "Schema({\n" + "".join(f"    {name!r}: {kind},\n" for name, kind in self.items()) + "})"


def to_json(schema: Mapping[str, Any]) -> str:
    """Convert a schema to JSON for the core. A plain dtype becomes a scalar."""
    if not isinstance(schema, Mapping):
        raise InvalidInputError(f"the schema is a {type(schema).__name__}, expected a dict of column names to types", code="invalid-schema")
    columns = []
    for name, kind in schema.items():
        if not isinstance(name, str):
            raise InvalidInputError(f"cannot create column {name!r}: expected a str as the name", code="invalid-schema")
        if not isinstance(kind, ColumnType):
            if isinstance(kind, type) and issubclass(kind, ColumnType):
                raise InvalidInputError(
                    f"cannot create column `{name}`: {kind.__name__} is a class", code="invalid-schema", hint=f"write ps.{kind.__name__}()"
                )
            kind = Scalar(kind)
        columns.append({"name": name, **kind.spec()})
    text = json.dumps(columns, ensure_ascii=False)
    if not is_utf8(text):
        raise InvalidInputError("a name in the schema is not UTF-8: it contains a lone surrogate", code="invalid-schema")
    return text


def from_json(text: str) -> Schema:
    """Parse a schema from the core's JSON."""
    return Schema(_parsed(text))  # Column types never change, but the caller may change the dict.


@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> Schema:
    return Schema({column["name"]: _type(column) for column in json.loads(text)})


def noted(field: pa.Field) -> ColumnType | None:
    """Return the column type that Penstock noted in the metadata of an Arrow field when it wrote the values. Returns None if there is none."""
    text = (field.metadata or {}).get(COLUMN)
    if text is None:
        return None
    try:
        kind = _type(json.loads(text))
        kind.arrow_type()
    except (Error, ValueError, KeyError, TypeError):
        return None  # Other programs may write any text there, such as a dtype that does not exist.
    return kind


def _type(entry: dict[str, Any]) -> ColumnType:
    name = entry["type"]
    values = tuple((key, value) for key, value in entry.items() if key in _fields(name))
    try:
        return _made(name, values)
    except TypeError:  # A list, such as names of classes, has no hash.
        return TYPES[name](**dict(values))


@functools.cache
def _fields(name: str) -> frozenset[str]:
    """Return the parameters of a column type."""
    return frozenset(field.name for field in dataclasses.fields(TYPES[name]))


@functools.lru_cache(maxsize=1024)
def _made(name: str, values: tuple[tuple[str, Any], ...]) -> ColumnType:
    """Return a column type. Thousands of columns have few types, which never change."""
    return TYPES[name](**dict(values))

"""Annotations that a source has, but that no importer stores: they are refused by kind, unless the caller leaves them out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from penstock.columns.column_type import ColumnType
from penstock.columns.json_text import Json
from penstock.errors import InvalidInputError, UnsupportedError
from penstock.importers.shared.source import Options, Unread
from penstock.values.arrow.types import is_any_list

# Files that the user left out by include and exclude. They are counted, and never refused.
UNSELECTED = "unselected"
KINDS = (
    "arrays", "captions", "coco", "fields", "json", "keypoints", "lists", "masks", "objects", "polygons", "table", "voc", "xml", "yolo",
)  # fmt: skip
# Names of fields and columns that hold boxes, as datasets of Hugging Face call them.
_BOXES = ("bbox", "bboxes", "box", "boxes", "bounding_box", "bounding_boxes")


def checked_kinds(given: Sequence[str]) -> Sequence[str]:
    """Check kinds of annotations that are to be ignored."""
    if unknown := [kind for kind in given if kind not in KINDS]:
        raise InvalidInputError(f"ignore={unknown[0]!r} is not an annotation kind", hint=f"kinds: {', '.join(KINDS)}")
    return given


def refuse(name: str, unread: Sequence[Unread], ignored: Sequence[str]) -> None:
    """Refuse a source with annotations that would be dropped.

    Raises: UnsupportedError (unsupported-format).
    """
    lost = [one for one in unread if one.kind not in (*ignored, UNSELECTED)]
    if not lost:
        return
    found = "; ".join(f"{one.what} ({one.kind}){f', such as `{one.example}`' if one.example else ''}" for one in lost)
    kinds = sorted({one.kind for one in lost})
    options = f"ignore={kinds} ({' '.join(f'--ignore {kind}' for kind in kinds)}) leaves them out"
    remedies = dict.fromkeys(one.remedy for one in lost if one.remedy)
    raise UnsupportedError(
        f"cannot import `{name}` without loss: it has annotations that are not imported: {found}", hint="; ".join([*remedies, options])
    )


def counted(left_out: int, unread: Sequence[Unread]) -> dict[str, int]:
    """Return how many things are left out of each kind. `left_out` is the number of all files that are."""
    kinds = {one.kind: 0 for one in unread}
    for one in unread:
        kinds[one.kind] += one.count
    rest = left_out - sum(one.files for one in unread)
    return kinds | ({"other": rest} if rest else {})


def without_objects(
    kinds: Mapping[str, ColumnType], options: Options, field_of: Callable[[str], str | None], rows: str
) -> tuple[dict[str, ColumnType], list[Unread]]:
    """Find the columns that hold boxes, and would become JSON because nobody gave their type. Returns the columns to import: without
    these if they are ignored. `field_of` returns the field of a column that has boxes, and `rows` says of how many rows.
    """
    given = {**options.defaults, **options.types}
    found = {name: field for name, kind in kinds.items() if kind == Json() and name not in given and (field := field_of(name))}
    unread = []
    for name, field in found.items():
        what = f"column `{name}` of {rows}" + (f" with the field `{field}`" if field != name else ", which is a list of boxes")
        remedy = f"--type {name}=json stores column `{name}` as JSON" if field != name else f"--type {name}=boxes:xywh stores xywh boxes"
        unread.append(Unread("objects", 1, what, remedy))
    ignored = "objects" in options.ignore
    return {name: kind for name, kind in kinds.items() if not (ignored and name in found)}, unread


def boxes_in_type(name: str, kind: pa.DataType) -> str | None:
    """Return the name of the field within an Arrow type that holds boxes, or that of the column itself.

    >>> boxes_in_type("objects", pa.struct({"bbox": pa.list_(pa.list_(pa.float32())), "category": pa.list_(pa.int64())}))
    'bbox'
    """
    if isinstance(kind, pa.BaseExtensionType):
        return boxes_in_type(name, kind.storage_type)
    if is_any_list(kind):
        return name if name.lower() in _BOXES and is_any_list(kind.value_type) else boxes_in_type("", kind.value_type)
    if not pa.types.is_struct(kind):
        return None
    own = [field.name for field in kind if field.name.lower() in _BOXES and is_any_list(field.type)]
    return own[0] if own else next((found for field in kind if (found := boxes_in_type("", field.type))), None)


def boxes_in_values(name: str, values: Sequence[Any]) -> str | None:
    """Return the name of the key within Python values that holds boxes, or that of the column itself."""
    for value in values:
        if isinstance(value, Mapping):
            own = next((str(key) for key, inner in value.items() if str(key).lower() in _BOXES and isinstance(inner, list | tuple)), None)
            if found := own or boxes_in_values("", list(value.values())):
                return found
        elif isinstance(value, list | tuple) and value:
            if name.lower() in _BOXES and all(isinstance(inner, list | tuple) for inner in value):
                return name
            if isinstance(value[0], Mapping | list | tuple) and (found := boxes_in_values("", value)):
                return found
    return None

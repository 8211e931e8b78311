"""Checks boxes that are added, and that each has one label, for whole columns at once. A rule says what happens to boxes that are wrong."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.changes.checks import naming
from penstock.columns.column_type import ColumnType
from penstock.errors import InvalidInputError
from penstock.ragged import Ragged
from penstock.schema import BoxRule, Schema
from penstock.values.checks import Array, Prepared, fail

ACTIONS = ("refuse", "keep", "clip", "drop")
_HINT = 'correct the box, or pass boxes="clip", "drop" or "keep" to the call or its transaction'
_TOGETHER = 'give both columns in one call, or pass boxes="keep" to the call or its transaction'


def rule_of(action: Any) -> BoxRule:
    """Return a new rule. Its counts are those of the boxes that it changes."""
    if action not in ACTIONS:
        raise InvalidInputError(f"boxes={action!r}, expected {', '.join(ACTIONS[:-1])} or {ACTIONS[-1]}")
    return BoxRule(action)


def with_rule(schema: Schema, rule: BoxRule) -> Schema:
    """Return a schema whose boxes are checked by another rule."""
    made = Schema(schema)
    made.boxes = rule
    return made


def settle(schema: Schema, made: dict[str, Prepared], verb: str, first_row: int) -> None:
    """Check or correct boxes among prepared columns, and that each has one label. `first_row` is the number of the first row, for errors.

    Raises: InvalidInputError (invalid-value).
    """
    rule = schema.boxes
    if rule.action == "keep":
        return
    for name in made:
        kind = schema[name]
        if (other := kind.one_for_each) is not None and other in made:
            with naming(name, first_row, verb):
                _check_counts(made[name], made[other], other)
    for name in list(made):
        kind = schema[name]
        if kind.box_format is None:
            continue
        if rule.action == "clip":
            if kind.belongs_to is None or kind.belongs_to not in made:
                raise without_images(name, kind)
            sizes = _sizes_of(made[kind.belongs_to], schema[kind.belongs_to])
            made[name], count = _clipped(made[name], kind.box_format, sizes)
            rule.changed += count
        with naming(name, first_row, verb):
            bad = _wrong(made[name], kind.box_format, rule.action == "drop")
        if bad is not None:
            rule.changed += int(bad.sum())
            labels = [other for other in made if schema[other].one_for_each == name]
            for other in labels:
                made[other] = _without(made[other], _of_labels(bad, made[name], made[other]))
            made[name] = _without(made[name], bad)


def apart(schema: Schema, given: Iterable[str]) -> list[tuple[str, str]]:
    """Return the given columns of boxes whose labels are not given, and those of labels without their boxes, each with the other column.

    Nothing is checked with the rule "keep".
    """
    names = set(given) if schema.boxes.action != "keep" else ()
    pairs = [(name, other) for name, kind in schema.items() if (other := kind.one_for_each) is not None and other in schema]
    return [pair if pair[0] in names else pair[::-1] for pair in pairs if (pair[0] in names) != (pair[1] in names)]


def check_given_together(schema: Schema, given: Iterable[str], verb: str) -> None:
    """Refuse boxes without their labels, and labels without their boxes, where it is not known yet which samples get them."""
    for name, other in apart(schema, given):
        raise InvalidInputError(f"cannot {verb} `{name}` without `{other}`: each box has one label", hint=_TOGETHER)


def check_fill(schema: Schema, name: str, made: Prepared) -> None:
    """Refuse a fill of labels, one for all samples, whose number cannot be that of the boxes of each."""
    for _, other in apart(schema, [name]):
        raise fail(
            f"a fill gives each sample {np.asarray(made[3])[0, 0]}, regardless of its number of `{other}`: each box has one label",
            hint='leave out the fill and set the labels with ds.update, or begin the transaction with boxes="keep"',
        )


def check_stored(schema: Schema, made: Mapping[str, Prepared], other_of: Callable[[str], Ragged], first_row: int) -> None:
    """Refuse boxes or labels whose number differs from that of the other, which `other_of` reads for the same samples. `first_row` is the
    number of the first row, for errors.
    """
    for name, other in apart(schema, made):
        if schema.boxes.action == "drop" and schema[name].box_format:
            check_given_together(schema, [name], "drop boxes from")
        stored, counts = other_of(other), np.asarray(made[name][3])[:, 0]
        there = _present(made[name]) if stored.nulls is None else _present(made[name]) & ~stored.nulls
        wrong = there & (stored.shapes[:, 0] != counts)
        if wrong.any():
            row = int(np.argmax(wrong))
            text = f"has {counts[row]}, but `{other}` has {stored.shapes[row, 0]}: each box has one label"
            with naming(name, first_row, "update"):
                raise fail(text, row, hint=_TOGETHER)


def without_images(name: str, kind: ColumnType) -> InvalidInputError:
    """Return the error for boxes that cannot be clipped."""
    images = "it names no image column" if kind.belongs_to is None else f"its images, in `{kind.belongs_to}`, are not in the same call"
    return InvalidInputError(
        f'boxes="clip" cannot cut the boxes of `{name}`: {images}',
        hint='give both columns, or pass boxes="drop" or "keep"' if kind.belongs_to else 'declare the boxes with of="image", or pass boxes="drop" or "keep"',
    )  # fmt: skip


def _boxes_in(prepared: Prepared) -> npt.NDArray[np.float32]:
    return np.asarray(prepared[1]).view(np.float32).reshape(-1, 4)


def _wrong(prepared: Prepared, format: str, may_be: bool) -> npt.NDArray[np.bool_] | None:
    """Return which boxes are wrong, or None if none is. Raises the error for the first one, unless they may be."""
    boxes = _boxes_in(prepared)
    sizes = boxes[:, 2:] >= (boxes[:, :2] if format == "xyxy" else 0)
    if sizes.all() and np.isfinite(boxes).all():  # Much quicker than to find out which ones are good.
        return None
    good = np.asarray(np.isfinite(boxes).all(axis=1) & sizes.all(axis=1))
    if not may_be:
        place = int(np.argmin(good))
        row = int(np.searchsorted(np.asarray(prepared[2]), place * 16, side="right"))
        wanted = "x2 ≥ x1 and y2 ≥ y1" if format == "xyxy" else "no negative width or height"
        found = ", ".join(f"{value:g}" for value in boxes[place].tolist())
        raise fail(f"contains the {format} box [{found}], expected finite numbers and {wanted}", row, hint=_HINT)
    return ~good


def _check_counts(labels: Prepared, target: Prepared, name: str) -> None:
    """Refuse samples that have another number of labels than of what the labels belong to. Nulls are not lists."""
    both = _present(labels) & _present(target)
    counts, wanted = np.asarray(labels[3])[:, 0], np.asarray(target[3])[:, 0]
    if len(counts) == len(wanted) and (wrong := both & (counts != wanted)).any():
        row = int(np.argmax(wrong))
        raise fail(
            f"has {counts[row]} label{'s' if counts[row] != 1 else ''}, expected {wanted[row]}, one for each box in `{name}`",
            row,
            hint='give each box one label, or pass boxes="keep" to the call or its transaction to store them anyway',
        )


def _present(prepared: Prepared) -> npt.NDArray[np.bool_]:
    validity = prepared[4]
    return np.ones(len(prepared[2]), bool) if validity is None else np.asarray(validity, bool)


def _of_labels(bad: npt.NDArray[np.bool_], boxes: Prepared, labels: Prepared) -> npt.NDArray[np.bool_]:
    """Return which labels belong to wrong boxes. Where either is null, none does."""
    rows = np.arange(len(boxes[2]))
    of_box, of_label = (np.repeat(rows, np.asarray(one[3])[:, 0]) for one in (boxes, labels))
    found = np.zeros(len(of_label), bool)
    found[_present(boxes)[of_label]] = bad[_present(labels)[of_box]]
    return found


def _without(prepared: Prepared, bad: npt.NDArray[np.bool_]) -> Prepared:
    """Return a list column without some of its elements, which are numbered across all samples."""
    form, flat, ends, shapes, validity = prepared
    if not bad.any():
        return prepared
    size = len(flat) // len(bad)
    left = np.concatenate([[0], np.cumsum(~bad)])[np.asarray(ends) // size]
    counts: Array = np.diff(left, prepend=0).reshape(-1, 1)
    kept = np.ascontiguousarray(np.asarray(flat).reshape(len(bad), size)[~bad]).reshape(-1)
    return (form, kept, left * size, np.concatenate([counts, np.asarray(shapes)[:, 1:]], axis=1), validity)


def _clipped(prepared: Prepared, form: str, sizes: list[tuple[int, int] | None]) -> tuple[Prepared, int]:
    """Cut boxes at the borders of their images, and make negative sizes 0. Boxes within their image stay the same bit for bit."""
    boxes = _boxes_in(prepared).astype(np.float64)
    counts = np.diff(np.asarray(prepared[2]) // 16, prepend=0)
    limits = np.array([(np.inf, np.inf) if size is None else (size[1], size[0]) for size in sizes], np.float64).reshape(-1, 2)
    limits = np.repeat(limits, counts, axis=0)
    first, second = boxes[:, :2], boxes[:, 2:]
    if form != "xyxy":
        second = np.maximum(second, 0)
        first = first - second / 2 if form == "cxcywh" else first
        second = first + second
    low = np.minimum(np.maximum(first, 0), limits)
    high = np.maximum(np.minimum(np.maximum(second, 0), limits), low)
    wrong = (low != first).any(axis=1) | (high != second).any(axis=1) | (boxes[:, 2:] < (boxes[:, :2] if form == "xyxy" else 0)).any(axis=1)
    made = {"xyxy": (low, high), "xywh": (low, high - low), "cxcywh": ((low + high) / 2, high - low)}[form]
    boxes[wrong] = np.concatenate(made, axis=1)[wrong]
    flat = np.ascontiguousarray(boxes.astype(np.float32)).reshape(-1).view(np.uint8)
    return (prepared[0], flat, *prepared[2:]), int((wrong & np.isfinite(boxes).all(axis=1)).sum())


def _sizes_of(images: Prepared, kind: ColumnType) -> list[tuple[int, int] | None]:
    """Return the height and width of each image as it is read. Returns None for one whose size is not known."""
    if images[0] == "items":
        items = [_bytes_of(item) for item in images[1]]
    else:
        flat, ends = np.asarray(images[1]), np.asarray(images[2])
        items = [flat[start:end].tobytes() for start, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True)] if len(ends) else []
    sizes = kind.image_sizes([item if isinstance(item, bytes) else None for item in items])
    return [item[:2] if isinstance(item, tuple) else size for item, size in zip(items, sizes, strict=True)]


def _bytes_of(item: Any) -> Any:
    if isinstance(item, os.PathLike):
        try:
            with open(item, "rb") as opened:
                return opened.read()
        except OSError:
            return None  # The core refuses it.
    return bytes(item) if isinstance(item, bytearray) else item

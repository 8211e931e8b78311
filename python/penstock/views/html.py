"""Shows views as tables in notebooks: `_repr_html_`. Images become thumbnails, with their boxes drawn over them."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock import _core
from penstock.columns.column_type import ColumnType
from penstock.views.sample import brief, unwrap

if TYPE_CHECKING:
    from penstock.views.concat import Concat
    from penstock.views.view import View

Pixels = npt.NDArray[np.uint8]
# The number of samples in a table, of pixels along a thumbnail, and of boxes that are drawn in it.
SAMPLES, SIDE, BOXES = 5, 128, 200
_LETTERS, _NAMES = 200, 20
_STYLE = "text-align:left;vertical-align:top;max-width:24em;overflow-wrap:break-word"


def page(view: View | Concat, samples: int = SAMPLES) -> str:
    """Return the first samples of a view as an HTML table."""
    schema, count = view.schema, min(samples, len(view))
    batch = view._shown(count, on_corrupt="null") if schema else {}
    words = words_of(view)
    snapshot = f", snapshot <code>{html.escape(view.snapshot)}</code>" if hasattr(view, "snapshot") else ""
    title = f"<p><b>{html.escape(view.uri)}</b>: {len(view):,} samples, {len(schema)} columns{snapshot}</p>"
    names = "".join(
        f'<th style="{_STYLE}">{html.escape(name)}<br><small style="font-weight:normal">{html.escape(kind.describe())}</small></th>'
        for name, kind in schema.items()
    )
    rows = []
    for index in range(count):
        sample = {name: unwrap(column, index) for name, column in batch.items()}
        values = [f"<i>{index}</i>", *(_cell(name, sample, schema, words) for name in schema)]
        rows.append("<tr>" + "".join(f'<td style="{_STYLE}">{value}</td>' for value in values) + "</tr>")
    more = f"<p>… and {len(view) - count:,} more samples</p>" if len(view) > count else ""
    return f"<div>{title}<table><thead><tr><th></th>{names}</tr></thead><tbody>{''.join(rows)}</tbody></table>{more}</div>"


def words_of(view: View | Concat) -> dict[str, list[str]]:
    """Return the words of each label and category column."""
    return {name: view.vocabulary(name) for name, kind in view.schema.items() if kind.is_coded}


def named(codes: Any, words: list[str]) -> str:
    """Return the words of one code or of several.

    >>> named(np.array([1, 0]), ["cat", "dog"]), named(1, ["cat", "dog"])
    ('dog, cat', 'dog')
    """
    found = [words[code] for code in np.ravel(codes)[:_NAMES].tolist()]
    return ", ".join([*found, "…"] if np.size(codes) > _NAMES else found)


def _cell(name: str, sample: Mapping[str, Any], schema: Mapping[str, ColumnType], words: Mapping[str, list[str]]) -> str:
    value, kind = sample[name], schema[name]
    if value is None:
        return "<i>null</i>"
    if kind.is_picture and isinstance(value, np.ndarray):
        boxes = [(its.box_format, sample[other]) for other, its in schema.items() if its.box_format and its.belongs_to == name]
        return _picture(value, [(form, each) for form, each in boxes if each is not None], not kind.is_image)
    if name in words:
        return html.escape(named(value, words[name]))
    if isinstance(value, str):
        return html.escape(value if len(value) <= _LETTERS else f"{value[:_LETTERS]}…")
    return html.escape(str(value) if isinstance(value, np.generic) else brief(value))


def thumbnail(image: npt.NDArray[Any], side: int, mask: bool = False) -> Pixels:
    """Reduce an image (H, W[, C]) to at most `side` pixels in each dimension, as (h, w, C) uint8. C is 3 or 4.

    Each pixel is the mean of a square; in a mask, it is one of the square's values, in a colour of its own.

    >>> thumbnail(np.full((300, 200), 65535, np.uint16), 100).shape
    (100, 67, 3)
    """
    image = image[:, :, None] if image.ndim == 2 else image
    step = max(1, -(-max(image.shape[:2]) // side))
    if mask:
        numbers = image[::step, ::step, 0].astype(np.int64)
        return np.stack([numbers * factor % 256 for factor in (73, 151, 199)], axis=2).astype(np.uint8)
    image = (image >> 8).astype(np.uint8) if image.dtype == np.uint16 else image
    height, width = -(-image.shape[0] // step), -(-image.shape[1] // step)
    edges = ((0, height * step - image.shape[0]), (0, width * step - image.shape[1]), (0, 0))
    blocks = np.pad(image, edges, mode="edge").reshape(height, step, width, step, -1)
    small: Pixels = blocks.mean(axis=(1, 3), dtype=np.float32).astype(np.uint8)
    return np.repeat(small, 3, axis=2) if small.shape[2] == 1 else small


def _picture(image: npt.NDArray[Any], boxes: list[tuple[Any, npt.NDArray[np.float32]]], mask: bool) -> str:
    """Return a thumbnail as an SVG picture, in whose coordinates the boxes are drawn."""
    height, width = image.shape[:2]
    small = thumbnail(image, SIDE, mask)
    encoded = base64.b64encode(_core.encode_png(tuple(small.shape), np.ascontiguousarray(small).reshape(-1))).decode()
    scale = min(1.0, SIDE / max(height, width))
    drawn = "".join(_rectangle(box, form, width / SIDE) for form, each in boxes for box in each[:BOXES].tolist())
    return (
        f'<svg width="{max(1, round(width * scale))}" height="{max(1, round(height * scale))}" viewBox="0 0 {width} {height}">'
        f'<title>{image.dtype} {image.shape}</title><image width="{width}" height="{height}" href="data:image/png;base64,{encoded}"/>{drawn}</svg>'
    )


def _rectangle(box: list[float], form: str, stroke: float) -> str:
    left, top, third, fourth = box
    if not np.isfinite(box).all():
        return ""
    width, height = (third - left, fourth - top) if form == "xyxy" else (third, fourth)
    if form == "cxcywh":
        left, top = left - width / 2, top - height / 2
    place = f'x="{left:g}" y="{top:g}" width="{max(0.0, width):g}" height="{max(0.0, height):g}"'
    return f'<rect {place} fill="none" stroke="#e6007e" stroke-width="{max(1.0, 1.5 * stroke):g}"/>'

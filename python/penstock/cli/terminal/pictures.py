"""Thumbnails as text: each character shows two pixels, by a half block in two colours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.views.html import thumbnail

if TYPE_CHECKING:
    import numpy.typing as npt
    from rich.console import Console
    from rich.text import Text

# The width and height of a thumbnail in pixels: 16 characters in 8 lines.
SIDE = 16


def can_show(console: Console) -> bool:
    """Return whether the terminal has enough colours, and the half block."""
    return console.is_terminal and console.color_system in ("256", "truecolor") and console.encoding.lower().startswith("utf")


def blocks(image: npt.NDArray[Any], mask: bool) -> Text:
    """Return an image as lines of half blocks."""
    from rich.text import Text

    small = thumbnail(image, SIDE, mask)[:, :, :3]
    text = Text()
    for row in range(0, len(small), 2):
        for column in range(small.shape[1]):
            upper = "#{:02x}{:02x}{:02x}".format(*small[row, column])
            lower = "#{:02x}{:02x}{:02x}".format(*small[row + 1, column]) if row + 1 < len(small) else "default"
            text.append("▀", style=f"{upper} on {lower}")
        text.append("\n" if row + 2 < len(small) else "")
    return text

"""An extension of griffe for the site's reference: examples of docstrings become code, and headings such as "Cost:" become bold."""

from __future__ import annotations

import re
from typing import Any

import griffe

HEADINGS = re.compile(r"^(Shapes|Units|Cost|Memory|Raises|Source|Other `on`):", re.M)


def marked(text: str) -> str:
    """Return a docstring as Markdown.

    >>> marked("Add.\\n\\nCost: none.\\nRaises: nothing.\\n\\n>>> 1 + 1\\n2").split("\\n")
    ['Add.', '', '**Cost:** none.', '', '**Raises:** nothing.', '', '```pycon', '>>> 1 + 1', '2', '```']
    """
    lines = text.strip().splitlines()
    first = next((number for number, line in enumerate(lines) if line.lstrip().startswith(">>>")), len(lines))
    prose, examples = lines[:first], lines[first:]
    body = HEADINGS.sub(lambda found: f"\n**{found.group(1)}:**", "\n".join(line.strip() for line in prose)).strip()
    body = re.sub(r"\n{3,}", "\n\n", body)
    if not examples:
        return body
    return "\n".join(
        [body, "", "```pycon", *(line.strip() if line.lstrip().startswith((">>>", "...")) else line for line in examples), "```"]
    )


class Docstrings(griffe.Extension):
    """Marks up the docstring of each object."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = marked(obj.docstring.value)

"""Parses JSON without a loss of information."""

from __future__ import annotations

import collections
import json
import math
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Refuses text that would lose information when converted to Python values.

    Raises: ValueError, RecursionError.
    """
    return json.loads(text, **json_options())


def json_options() -> dict[str, Any]:
    """Return the options of a JSON decoder that refuses text that would lose information."""
    return {"parse_float": _finite, "object_pairs_hook": _object}


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:80]} is outside the range of float64")
    return number


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        [(twice, _)] = collections.Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"two values have the name {twice[:80]!r}")
    return made

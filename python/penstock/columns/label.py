"""Label columns, which store names from a closed list."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from penstock.columns.coded import Coded
from penstock.errors import InvalidInputError

if TYPE_CHECKING:
    from penstock.views.view import View


@dataclasses.dataclass(frozen=True)
class Label(Coded):
    """A name from a closed list. Append names or codes. Reads as int64 codes, or as strings in `scan`.

    >>> Label(["cat", "dog"]).names
    ('cat', 'dog')
    """

    names: Sequence[str]
    type = "label"

    def __post_init__(self) -> None:
        if isinstance(self.names, str) or not all(isinstance(name, str) for name in self.names):
            raise InvalidInputError(
                f"labels are {self.names!r}, expected a list of str", code="invalid-schema", hint='write ps.Label(["cat", "dog"])'
            )
        object.__setattr__(self, "names", tuple(self.names))

    def spec(self) -> dict[str, Any]:
        return {**super().spec(), "names": list(self.names)}

    def words(self, view: View, column: str) -> list[str] | None:
        return list(self.names)

    @classmethod
    def from_text(cls, text: str) -> Self:
        if not text:
            raise ValueError("a label needs names, as in label:cat,dog")
        return cls(text.split(","))

    def describe(self) -> str:
        shown = ", ".join(self.names[:4])
        return f"label of {len(self.names)} ({shown}{', …' if len(self.names) > 4 else ''})"

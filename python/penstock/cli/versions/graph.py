"""Draw the graph of commits in text: one lane per line of history, `*` for the commit itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from penstock.history.log import Commit


class Drawing(NamedTuple):
    """The line of a commit, and those above and below it, which are empty unless lanes meet or part."""

    above: str
    line: str
    below: str


def lanes(commits: Iterable[Commit]) -> list[Drawing]:
    """Return the drawing of each commit. Commits must come after all of their descendants.

    Lanes meet above the commit that is the parent of each (`/`). A lane begins below a commit with several parents (`\\`).
    """
    waiting: list[str] = []  # For each lane, the snapshot that comes next in it.
    drawings = []
    for commit in commits:
        if commit.snapshot not in waiting:
            waiting.append(commit.snapshot)
        at = waiting.index(commit.snapshot)
        ends = [lane for lane, snapshot in enumerate(waiting) if snapshot == commit.snapshot and lane != at]
        above = _joints(len(waiting), at, ends, "/")
        waiting = [snapshot for lane, snapshot in enumerate(waiting) if lane not in ends]
        line = " ".join("*" if lane == at else "|" for lane in range(len(waiting)))
        waiting[at : at + 1] = commit.parents[:1]
        begins = range(len(waiting), len(waiting) + len(commit.parents[1:]))
        waiting += commit.parents[1:]
        drawings.append(Drawing(above, line, _joints(len(waiting), at, begins, "\\")))
    return drawings


def _joints(count: int, at: int, others: Sequence[int], mark: str) -> str:
    """Draw `count` lanes, of which some meet lane `at`."""
    if not others:
        return ""
    row = list(" ".join("|" * count))
    for lane in others:
        row[2 * lane - 1 : 2 * lane + 1] = mark, " "
    # Lanes in between are crossed.
    for place in range(2 * at + 1, 2 * max(others) - 1):
        row[place] = "_" if row[place] == " " else row[place]
    return "".join(row).rstrip()

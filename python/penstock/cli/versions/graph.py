"""Draw the graph of commits in text: one lane per line of history, `*` for the commit itself."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.history.log import Commit


def lanes(commits: Iterable[Commit]) -> list[str]:
    """Return the drawing of each commit. Commits must come after all of their descendants.

    A second line shows lanes that begin (`\\`, a merge) or end (`/`, where a branch was created) below the commit.
    """
    waiting: list[str] = []  # For each lane, the snapshot that comes next in it.
    drawings = []
    for commit in commits:
        if commit.snapshot not in waiting:
            waiting.append(commit.snapshot)
        at = waiting.index(commit.snapshot)
        drawing = " ".join("*" if lane == at else "|" for lane in range(len(waiting)))
        ends = [lane for lane, snapshot in enumerate(waiting) if snapshot == commit.snapshot and lane != at]
        below = ["/" if lane in ends else "|" for lane in range(len(waiting))]
        waiting[at : at + 1] = commit.parents[:1]
        if not commit.parents:
            below[at] = " "
        shift = 0 if commit.parents else 1
        for lane in reversed(ends):
            del waiting[lane - (shift if lane > at else 0)]
        begins = [parent for parent in commit.parents[1:] if parent not in waiting]
        waiting += begins
        below += ["\\"] * len(begins)
        drawings.append(drawing + ("\n" + " ".join(below).rstrip() if ends or begins else ""))
    return drawings

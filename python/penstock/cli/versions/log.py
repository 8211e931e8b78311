"""`penstock log`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from penstock.cli.terminal import at

if TYPE_CHECKING:
    from penstock.history.log import Commit


# Over 6 parameters: each is an option of the command line.
def log(
    uri: str = typer.Argument(help="A dataset."),
    limit: int = typer.Option(20, "--limit", "-n", min=1, help="The maximum number of commits."),
    branch: str = at.BRANCH,
    snapshot: str = at.SNAPSHOT,
    tag: str = at.TAG,
    as_of: str = at.AS_OF,
    graphic: bool = typer.Option(False, "--graph", "-g", help="Draw the graph of branches and merges, one line per commit."),
    as_json: bool = typer.Option(False, "--json", help="Print a JSON list of objects."),
) -> None:
    """List commits, newest first."""
    from rich.text import Text

    from penstock.cli.terminal import show
    from penstock.cli.versions import graph

    commits: Sequence[Commit] = at.opened(uri, snapshot, tag, as_of, branch).log(limit)
    if as_json:
        show.print_json([{**dataclasses.asdict(commit), "time": commit.time.isoformat()} for commit in commits])
        return
    if graphic:
        for drawing, commit in zip(graph.lanes(commits), commits, strict=True):
            if drawing.above:
                print(drawing.above)
            # Messages may contain line breaks and control characters.
            message = " ".join(show.printable(commit.message).split())
            show.console.print(Text(f"{drawing.line}  {commit.snapshot}  {message}"), soft_wrap=True)
            if drawing.below:
                print(drawing.below)
        return
    # In a narrow terminal, the time and the author give way. A snapshot id is never broken, so that it can be copied.
    width = show.console.width
    table = show.table(str(uri), "snapshot")
    table.columns[0].no_wrap = True
    for name, least in (("time", 100), ("author", 120), ("samples", 0), ("change", 0), ("message", 0)):
        if width >= least:
            table.add_column(name, overflow="fold", no_wrap=name in ("time", "samples", "change"))
    for commit in commits:
        deleted = f" -{commit.samples_deleted:,}" if commit.samples_deleted else ""
        cells = {
            "snapshot": commit.snapshot,
            "time": commit.time.strftime("%Y-%m-%d %H:%M:%S"),
            "author": show.plain(commit.author),
            "samples": f"{commit.samples:,}",
            "change": f"+{commit.samples_added:,}{deleted}",
            "message": show.plain(commit.message),
        }
        table.add_row(*(cells[str(column.header)] for column in table.columns))
    show.console.print(table)

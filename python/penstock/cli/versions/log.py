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
    """List commits, newest first, with their tags."""
    from rich.text import Text

    from penstock.cli.terminal import show
    from penstock.cli.versions import graph

    ds = at.opened(uri, snapshot, tag, as_of, branch)
    commits: Sequence[Commit] = ds.log(limit)
    tags: dict[str, list[str]] = {}
    for name, tagged in sorted(ds.tags().items()):
        tags.setdefault(tagged, []).append(name)
    if as_json:
        show.print_json(
            [{**dataclasses.asdict(commit), "time": commit.time.isoformat(), "tags": tags.get(commit.snapshot, [])} for commit in commits]
        )
        return

    def described(commit: Commit) -> str:
        named = "".join(f"({name}) " for name in tags.get(commit.snapshot, []))
        return named + commit.message

    if graphic:
        for drawing, commit in zip(graph.lanes(commits), commits, strict=True):
            if drawing.above:
                print(drawing.above)
            # Messages may contain line breaks and control characters.
            message = " ".join(show.printable(described(commit)).split())
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
            "message": show.plain(described(commit)),
        }
        table.add_row(*(cells[str(column.header)] for column in table.columns))
    show.console.print(table)

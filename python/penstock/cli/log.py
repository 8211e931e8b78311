"""`penstock log`."""

from __future__ import annotations

import typer

from penstock.cli import at


def log(
    uri: str = typer.Argument(help="A dataset."),
    limit: int = typer.Option(20, "--limit", "-n", min=1, help="The maximum number of commits."),
    snapshot: str = at.SNAPSHOT,
    tag: str = at.TAG,
    as_of: str = at.AS_OF,
    as_json: bool = typer.Option(False, "--json", help="Print a JSON list of objects."),
) -> None:
    """List commits, newest first."""
    from penstock.cli import show

    commits = at.opened(uri, snapshot, tag, as_of).log(limit)
    if as_json:
        show.print_json([{**vars(commit), "time": commit.time.isoformat()} for commit in commits])
        return
    table = show.table(str(uri), "snapshot", "time", "author", "samples", "added", "deleted", "message")
    for commit in commits:
        table.add_row(
            commit.snapshot,
            commit.time.strftime("%Y-%m-%d %H:%M:%S"),
            show.plain(commit.author),
            f"{commit.samples:,}",
            f"+{commit.samples_added:,}",
            f"-{commit.samples_deleted:,}" if commit.samples_deleted else "",
            show.plain(commit.message),
        )
    show.console.print(table)

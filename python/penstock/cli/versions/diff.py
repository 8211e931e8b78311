"""`penstock diff`."""

from __future__ import annotations

import sys

import typer

from penstock.cli.terminal import at


# Over 6 parameters: each is an option of the command line.
def diff(
    uri: str = typer.Argument(help="A dataset."),
    since: str = typer.Argument(help="The earlier snapshot: an id, a branch or a tag."),
    until: str = typer.Argument("", help="The later snapshot: an id, a branch or a tag; by default, the one that the options choose."),
    branch: str = at.BRANCH,
    snapshot: str = at.SNAPSHOT,
    tag: str = at.TAG,
    as_of: str = at.AS_OF,
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object per group of samples, with their row ids."),
) -> None:
    """Count the samples that were added, deleted or changed between two snapshots, by column, and list columns that differ."""
    from collections import Counter

    from penstock.cli.terminal import show

    if until and (snapshot or tag or as_of or branch != "main"):
        raise typer.BadParameter("give the later snapshot as an argument or by options, not both")
    chosen = snapshot or tag or (f"{branch} as of {as_of}" if as_of else branch)
    counts: Counter[tuple[str, str]] = Counter()
    with show.progress(as_json) as progress:
        task = progress.add_task("comparing", total=None)
        for found in at.opened(uri, snapshot, tag, as_of, branch).diff(since, until or None):
            counts[found.kind, found.column or ""] += len(found.row_ids)
            progress.update(task, completed=sum(counts.values()))
            if as_json:
                show.print_json({"kind": found.kind, "column": found.column, "row_ids": found.row_ids.tolist()})
    if as_json:
        return
    if not counts:
        print("the snapshots have the same samples and columns", file=sys.stderr)
        return
    table = show.table(f"{uri}: {since} to {until or chosen}", "what", "column", "samples")
    for (kind, column), samples in counts.items():
        table.add_row(kind, show.plain(column), f"{samples:,}")
    show.console.print(table)

"""`penstock info`."""

from __future__ import annotations

import typer

from penstock.cli.terminal import at


# Over 6 parameters: each is an option of the command line.
def info(
    uri: str = typer.Argument(help="A dataset."),
    branch: str = at.BRANCH,
    snapshot: str = at.SNAPSHOT,
    tag: str = at.TAG,
    as_of: str = at.AS_OF,
    as_json: bool = typer.Option(False, "--json", help="Print the information as JSON."),
) -> None:
    """Show the columns, the number of samples, and the bytes stored."""
    from penstock.cli.terminal import show

    dataset = at.opened(uri, snapshot, tag, as_of, branch)
    layout = dataset.layout()
    newest = dataset.log(1)[0]
    if as_json:
        columns = [{"name": name, "type": show.type_text(kind), **layout[name]} for name, kind in dataset.schema.items()]
        show.print_json(
            {"uri": dataset.uri, "snapshot": dataset.snapshot, "samples": len(dataset), "time": newest.time.isoformat(), "columns": columns}
        )
        return
    table = show.table(
        f"{dataset.uri}: {len(dataset):,} samples, snapshot {dataset.snapshot}", "column", "type", "stored", "blocks", "data files"
    )
    for name, kind in dataset.schema.items():
        row = layout[name]
        table.add_row(
            show.plain(name),
            show.plain(show.type_text(kind)),
            show.size_text(row["stored_bytes"]),
            f"{row['blocks']:,}",
            str(row["data_files"]),
        )
    show.console.print(table)

"""`penstock create`."""

from __future__ import annotations

import typer

from penstock.cli.terminal import at


def create(
    uri: str = typer.Argument(help="Where to create the dataset: a new folder or a URI."),
    columns: list[str] = typer.Argument(None, metavar="COLUMN…", help=at.TYPES_HELP),
    message: str = typer.Option("create", "--message", "-m", help="The commit message."),
    as_json: bool = typer.Option(False, "--json", help="Print {uri, snapshot}."),
) -> None:
    """Create a new, empty dataset."""
    import penstock
    from penstock.cli.terminal import show

    dataset = penstock.create(uri, show.parse_types(columns or []), message=message, storage_options=at.storage_options or None)
    show.done = f"created {dataset.uri} with {len(dataset.schema)} columns, snapshot {dataset.snapshot}"
    if as_json:
        show.print_json({"uri": dataset.uri, "snapshot": dataset.snapshot})
    else:
        print(show.done)

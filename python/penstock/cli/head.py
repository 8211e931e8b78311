"""`penstock head`."""

from __future__ import annotations

import typer

from penstock.cli.terminal import at


# Over 6 parameters: each is an option of the command line.
def head(
    uri: str = typer.Argument(help="A dataset."),
    count: int = typer.Option(5, "--count", "-n", min=1, help="The number of samples."),
    columns: list[str] = typer.Option([], "--column", "-c", help="Only these columns."),
    branch: str = at.BRANCH,
    snapshot: str = at.SNAPSHOT,
    tag: str = at.TAG,
    as_of: str = at.AS_OF,
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object per line."),
) -> None:
    """Show the first samples."""
    from penstock.cli.terminal import show
    from penstock.views.sample import unwrap

    dataset = at.opened(uri, snapshot, tag, as_of, branch)
    names = columns or list(dataset.schema)
    batch = dataset.take(range(min(count, len(dataset))), columns=names)
    samples = [{name: unwrap(values, index) for name, values in batch.items()} for index in range(min(count, len(dataset)))]
    if as_json:
        for sample in samples:
            show.print_json(sample)
        return
    table = show.table(f"{uri}: {len(dataset):,} samples", *names)
    for sample in samples:
        table.add_row(*(show.cell(sample[name]) for name in names))
    show.console.print(table)

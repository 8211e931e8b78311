"""`penstock head`."""

from __future__ import annotations

from typing import Any

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
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object per line, with labels as codes."),
) -> None:
    """Show the first samples: names of labels, and thumbnails if the terminal has colours."""
    from penstock.cli.terminal import pictures, show
    from penstock.views.html import named, words_of
    from penstock.views.sample import unwrap

    dataset = at.opened(uri, snapshot, tag, as_of, branch)
    names = columns or list(dataset.schema)
    batch = dataset._shown(min(count, len(dataset)), names)
    samples = [{name: unwrap(values, index) for name, values in batch.items()} for index in range(min(count, len(dataset)))]
    if as_json:
        for sample in samples:
            show.print_json(sample)
        return
    words, schema = words_of(dataset), dataset.schema
    table = show.table(f"{uri}: {len(dataset):,} samples", *names)
    for column, name in zip(table.columns, names, strict=True):
        if name in schema and schema[name].is_picture and pictures.can_show(show.console):
            column.min_width, column.no_wrap = pictures.SIDE, True  # A broken line would scramble a thumbnail.
    for sample in samples:
        cells: list[Any] = []
        for name in names:
            value, kind = sample[name], schema.get(name)
            if kind is not None and kind.is_picture and value is not None and pictures.can_show(show.console):
                cells.append(pictures.blocks(value, not kind.is_image))
            else:
                cells.append(show.cell(named(value, words[name]) if name in words and value is not None else value))
        table.add_row(*cells)
    show.console.print(table)

"""`penstock stats`."""

from __future__ import annotations

import typer

from penstock.cli.terminal import at


# Over 6 parameters: each is an option of the command line.
def stats(
    uri: str = typer.Argument(help="A dataset."),
    branch: str = at.BRANCH,
    snapshot: str = at.SNAPSHOT,
    tag: str = at.TAG,
    as_of: str = at.AS_OF,
    as_json: bool = typer.Option(False, "--json", help="Print the numbers as a JSON object."),
) -> None:
    """Count what a snapshot consists of: samples, fragments, data files and their bytes, overlays, names, and objects that no snapshot refers to."""
    from penstock.cli.terminal import show

    dataset = at.opened(uri, snapshot, tag, as_of, branch)
    found: dict[str, int | None] = {**dataset.structure(), "branches": len(dataset.branches()), "tags": len(dataset.tags())}
    left = dataset.unreferenced()
    objects, count = (None, None) if left is None else (left["objects"], left["bytes"])
    found |= {"pins": len(dataset.pins()), "unreferenced_objects": objects, "unreferenced_bytes": count}
    if as_json:
        show.print_json({"uri": dataset.uri, "snapshot": dataset.snapshot, **found})
        return
    table = show.table(f"{dataset.uri}, snapshot {dataset.snapshot}", "what", "number")
    for name, value in found.items():
        number = "unknown" if value is None else show.size_text(value) if name.endswith("_bytes") else f"{value:,}"
        table.add_row(name.removesuffix("_bytes").replace("_", " "), number)
    show.console.print(table)
    if objects:
        print(show.unreferenced_text(objects, count or 0))

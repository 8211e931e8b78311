"""`penstock reset`."""

from __future__ import annotations

import typer

from penstock.cli.terminal import at


def reset(
    uri: str = typer.Argument(help="A dataset."),
    target: str = typer.Argument(help="The snapshot whose state the branch gets: a snapshot id, a tag or a branch."),
    branch: str = typer.Option("main", "--branch", "-b", help="The branch to reset."),
    message: str = at.MESSAGE,
    as_json: bool = typer.Option(False, "--json", help="Print the result as a JSON object."),
) -> None:
    """Give a branch the state of another snapshot, as a new commit. The commits in between remain in the log."""
    from penstock.cli.terminal import show

    dataset = at.opened(uri, "", "", "", branch)
    receipt = dataset.reset(target, message=message or None)
    show.done = f"reset to {target}; the newest snapshot is {receipt.snapshot}"
    if as_json:
        show.print_json({"snapshot": receipt.snapshot, "samples": len(dataset)})
    else:
        print(f"reset to {show.plain(target)}: {len(dataset):,} samples; the newest snapshot is {receipt.snapshot}")

"""`penstock branch`."""

from __future__ import annotations

import typer

from penstock.cli.terminal import at


# Over 6 parameters: each is an option of the command line.
def branch(
    uri: str = typer.Argument(help="A dataset."),
    name: str = typer.Argument("", help="The branch to create or delete; without a name, list all branches."),
    start: str = typer.Option("", "--start", help="Where the branch begins: a branch, a tag or a snapshot id; main by default."),
    as_of: str = at.AS_OF,
    delete: bool = typer.Option(False, "--delete", "-d", help="Delete the branch. Its snapshots remain."),
    as_json: bool = typer.Option(False, "--json", help="Print a JSON object that maps branches to the ids of their newest snapshots."),
) -> None:
    """List branches, create a branch, or delete a branch."""
    from penstock.cli.terminal import show

    if (delete or start or as_of) and not name:
        raise typer.BadParameter("give the name of the branch")
    if (delete and (start or as_of)) or (start and as_of):
        raise typer.BadParameter("--delete takes only the name of the branch, and --start and --as-of cannot be combined")
    dataset = at.opened(uri, "", "", as_of)
    if delete:
        dataset.delete_branch(name)
    elif name:
        dataset.create_branch(name, start or None)
    text = f"deleted branch {show.plain(name)}" if delete else f"branch {show.plain(name)} begins at snapshot "
    show.names(dataset.branches(), name, text, as_json, (uri, "branch", "newest snapshot"))

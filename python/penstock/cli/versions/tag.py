"""`penstock tag`."""

from __future__ import annotations

import typer

from penstock.cli.terminal import at


# Over 6 parameters: each is an option of the command line.
def tag(
    uri: str = typer.Argument(help="A dataset."),
    name: str = typer.Argument("", help="The tag to make or delete; without a name, list all tags."),
    branch: str = at.BRANCH,
    snapshot: str = at.SNAPSHOT,
    as_of: str = at.AS_OF,
    delete: bool = typer.Option(False, "--delete", "-d", help="Delete the tag."),
    as_json: bool = typer.Option(False, "--json", help="Print a JSON object that maps tags to snapshot ids."),
) -> None:
    """List tags, name a snapshot, or delete a tag."""
    from penstock.cli.terminal import show

    if (delete or snapshot or as_of or branch != "main") and not name:
        raise typer.BadParameter("give the name of the tag")
    if delete and (snapshot or as_of or branch != "main"):
        raise typer.BadParameter("--delete takes only the name of the tag")
    dataset = at.opened(uri, snapshot, "", as_of, branch)
    if delete:
        dataset.delete_tag(name)
    elif name:
        dataset.create_tag(name)
    text = f"deleted tag {show.plain(name)}" if delete else f"{show.plain(name)} names snapshot "
    show.names(dataset.tags(), name, text, as_json, (uri, "tag", "snapshot"))

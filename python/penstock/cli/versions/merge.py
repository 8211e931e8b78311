"""`penstock merge` and `penstock cherry-pick`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from penstock.cli.terminal import at

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.changes.receipt import Receipt
    from penstock.dataset import Dataset


# Over 6 parameters: each is an option of the command line.
def merge(
    uri: str = typer.Argument(help="A dataset."),
    other: str = typer.Argument(help="What to merge: a branch, a tag or a snapshot id."),
    branch: str = typer.Option("main", "--branch", "-b", help="The branch that gets the changes."),
    on_conflict: list[str] = at.ON_CONFLICT,
    message: str = at.MESSAGE,
    as_json: bool = typer.Option(False, "--json", help="Print the result as a JSON object."),
) -> None:
    """Merge a branch, a tag or a snapshot into a branch, as one commit with two parents."""
    policies = at.policies(on_conflict)
    _commit(uri, branch, lambda dataset: dataset.merge(other, on_conflict=policies, message=message or None), f"merged {other}", as_json)


# Over 6 parameters: each is an option of the command line.
def cherry_pick(
    uri: str = typer.Argument(help="A dataset."),
    commit: str = typer.Argument(help="The commit to copy: a snapshot id, or a tag or a branch for its newest commit."),
    branch: str = typer.Option("main", "--branch", "-b", help="The branch that gets the changes."),
    on_conflict: list[str] = at.ON_CONFLICT,
    message: str = at.MESSAGE,
    as_json: bool = typer.Option(False, "--json", help="Print the result as a JSON object."),
) -> None:
    """Copy the changes of one commit to a branch."""
    policies = at.policies(on_conflict)
    _commit(
        uri, branch, lambda dataset: dataset.cherry_pick(commit, on_conflict=policies, message=message or None), f"copied {commit}", as_json
    )


def _commit(uri: str, branch: str, change: Callable[[Dataset], Receipt], what: str, as_json: bool) -> None:
    """Change a branch, and report the commit."""
    from penstock.cli.terminal import show

    dataset = at.opened(uri, "", "", "", branch)
    before = dataset.snapshot
    receipt = change(dataset)
    commit = dataset.log(1)[0]
    changed = receipt.snapshot != before
    show.done = f"{what}; the newest snapshot is {receipt.snapshot}" if changed else ""
    added, deleted = (commit.samples_added, commit.samples_deleted) if changed else (0, 0)
    if as_json:
        show.print_json({"snapshot": receipt.snapshot, "commit": changed, "samples_added": added, "samples_deleted": deleted})
    elif changed:
        print(f"{show.plain(what)}: {added:,} samples added, {deleted:,} deleted; the newest snapshot is {receipt.snapshot}")
    else:
        print("nothing to do: the branch already has these changes", file=sys.stderr)

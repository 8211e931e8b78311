"""The options by which every verb chooses a snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from penstock.dataset import Dataset

SNAPSHOT: str = typer.Option("", "--snapshot", help="A snapshot id; the newest by default.")
TAG: str = typer.Option("", "--tag", help="The name of a tag, instead of a snapshot id.")
AS_OF: str = typer.Option("", "--as-of", help="A time such as 2026-11-20T12:00:00Z: the newest snapshot at that time.")


def opened(uri: str, snapshot: str, tag: str, as_of: str) -> Dataset:
    """Open a dataset at the chosen snapshot."""
    import penstock

    return penstock.open(uri, snapshot=snapshot or None, tag=tag or None, as_of=as_of or None)

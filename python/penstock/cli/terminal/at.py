"""The options that several verbs have, above all those by which they choose a snapshot or a branch. Imports little, so that `--help` is fast."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from penstock.dataset import Dataset

BRANCH: str = typer.Option("main", "--branch", "-b", help="The newest snapshot of this branch.")
SNAPSHOT: str = typer.Option("", "--snapshot", help="A snapshot id; the newest by default.")
TAG: str = typer.Option("", "--tag", help="The name of a tag, instead of a snapshot id.")
AS_OF: str = typer.Option("", "--as-of", help="A time such as 2026-11-20T12:00:00Z: the newest snapshot at that time.")
MESSAGE: str = typer.Option("", "--message", "-m", help="The message of the commit.")
ON_CONFLICT: list[str] = typer.Option(
    [], "--on-conflict", help="fail (the default), ours or theirs; or column=ours for one column. Can be repeated."
)

TYPES_HELP = "name=type; type is a dtype (int32, timestamp, duration, time, …), text, bytes, json, category, image (or image:L, RGBA, I;16, stored), boxes:xywh (or xyxy, cxcywh), mask, keypoints, label:cat,dog, labels:cat,dog (a list for each sample; an import takes missing names from the data) or tensor:float32:3x?x? (? is a free dimension)"

# The options of `penstock --option name=value VERB`, for all stores that the verb opens.
storage_options: dict[str, str] = {}


def options_of(given: list[str]) -> dict[str, str]:
    """Parse options of the form name=value."""
    pairs = [option.partition("=") for option in given]
    if wrong := [option for option, (_, sign, _) in zip(given, pairs, strict=True) if not sign]:
        raise typer.BadParameter(f"`{wrong[0]}`: expected name=value")
    return {name: value for name, _, value in pairs}


def check(snapshot: str, tag: str, as_of: str, branch: str) -> None:
    """Refuse options that exclude each other."""
    if sum(map(bool, (snapshot, tag, as_of))) > 1 or (branch != "main" and (snapshot or tag)):
        raise typer.BadParameter("give one of --snapshot, --tag, --as-of and --branch; only --as-of and --branch can be combined")


def opened(uri: str, snapshot: str = "", tag: str = "", as_of: str = "", branch: str = "main", cache: str | None = None) -> Dataset:
    """Open a dataset at the chosen snapshot."""
    import penstock

    check(snapshot, tag, as_of, branch)
    return penstock.open(
        uri, branch=branch, snapshot=snapshot or None, tag=tag or None, as_of=as_of or None, cache=cache, storage_options=storage_options or None
    )  # fmt: skip


def policies(given: list[str]) -> dict[str, str]:
    """Parse the values of --on-conflict."""
    chosen: dict[str, str] = {}
    for text in given:
        column, sign, policy = text.rpartition("=")
        name = column if sign else "*"
        if name in chosen:
            raise typer.BadParameter(f"--on-conflict is given twice for {'all columns' if name == '*' else f'column `{name}`'}")
        if policy not in ("fail", "ours", "theirs"):
            raise typer.BadParameter(f"--on-conflict {text}: expected fail, ours or theirs")
        chosen[name] = policy
    return chosen

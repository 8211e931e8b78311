"""`penstock verify`."""

from __future__ import annotations

import sys

import typer

from penstock.cli.terminal import at


# Over 6 parameters: each is an option of the command line.
def verify(
    uri: str = typer.Argument(help="A dataset."),
    branch: str = at.BRANCH,
    snapshot: str = at.SNAPSHOT,
    tag: str = at.TAG,
    as_of: str = at.AS_OF,
    as_json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
) -> None:
    """Read and check every byte of a snapshot; exit with 1 if anything is damaged."""
    from penstock.cli.terminal import show
    from penstock.dataset import open_incomplete

    at.check(snapshot, tag, as_of, branch)
    dataset = open_incomplete(
        uri, branch=branch, snapshot=snapshot or None, tag=tag or None, as_of=as_of or None, storage_options=at.storage_options or None
    )
    with show.progress(as_json) as progress:
        task = progress.add_task("verifying", total=None)
        report = dataset.verify(lambda files, _bytes: progress.update(task, completed=files))
    problems = report["problems"]
    if as_json:
        report["problems"] = [{"object": name, "code": error.code, "message": error.message} for name, error in problems]
        show.print_json(report)
    else:
        print(
            f"{report['commits']} commits, {report['data_files']} data files, {show.size_text(report['data_bytes'])}, {report['samples']:,} samples: {len(problems)} problems"
        )
        for name, error in problems:
            print(f"{name}: {error}", file=sys.stderr)
        if report["unreferenced_objects"]:
            print(show.unreferenced_text(report["unreferenced_objects"], report["unreferenced_bytes"]))
    if problems:
        raise typer.Exit(1)

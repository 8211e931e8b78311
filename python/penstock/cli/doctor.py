"""`penstock doctor`."""

from __future__ import annotations

import pathlib

import typer
from rich.markup import escape
from rich.table import Table

from penstock import _core
from penstock.cli import show
from penstock.errors import NotFoundError


def doctor(
    uri: str = typer.Argument(help="A place for datasets: s3://bucket/prefix, a folder, …"),
    as_json: bool = typer.Option(False, "--json", help="Print the findings as JSON."),
) -> None:
    """Try what a dataset does at a place, and measure it: rights, create-only puts, latency, rates, clock.

    Writes one object of 32 MiB and removes it again. Exit 1 if something that datasets need does not work.
    """
    local = "://" not in uri or uri.startswith("file://")
    if local and not pathlib.Path(uri.removeprefix("file://")).is_dir():
        raise NotFoundError(f"cannot examine `{uri}`: there is no such folder", code="source-not-found", hint="make it first")
    # Past the page cache, so that it is the disk that is measured.
    findings = _core.doctor(uri, None if local else [("timeout_seconds", "15")], "direct" if local else "auto")
    bad = [finding for finding in findings if finding[1] is False]
    if as_json:
        rows = [
            {
                "name": name,
                "good": good,
                "value": measured and measured[0],
                "unit": measured and measured[1],
                "told": told,
                "advice": advice,
            }
            for name, good, measured, told, advice in findings
        ]
        show.print_json({"uri": uri, "good": not bad, "findings": rows})
    else:
        table = Table(title=escape(uri), title_justify="left")
        for heading in ("", "what", "measured", "found", "advice"):
            table.add_column(heading, justify="right" if heading == "measured" else "left", overflow="fold")
        for name, good, measured, told, advice in findings:
            mark = {True: "ok", False: "FAILED", None: "-"}[good]
            value = f"{measured[0]:,.1f} {measured[1]}" if measured else ""
            table.add_row(mark, name, value, escape(told), escape(advice))
        show.console.print(table)
    if bad:
        raise typer.Exit(1)

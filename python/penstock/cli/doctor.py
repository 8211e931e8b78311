"""`penstock doctor`."""

from __future__ import annotations

import pathlib

import typer

from penstock.cli.terminal import at


def doctor(
    uri: str = typer.Argument(help="A location for datasets: s3://bucket/prefix, a folder, …"),
    options: list[str] = typer.Option(
        [], "--option", "-o", help="A storage option, such as endpoint_url=http://127.0.0.1:9000. Can be repeated."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the findings as JSON."),
) -> None:
    """Test and measure a location for datasets: permissions, create-only puts, latency, rates and clock.

    Writes test objects (one of 32 MiB) and removes them. Exits with 1 if a feature that datasets need does not work.
    """
    from rich.markup import escape
    from rich.table import Table

    from penstock import _core
    from penstock.cli.terminal import show
    from penstock.errors import NotFoundError

    folder = _core.local_path(uri)
    if folder is not None and not pathlib.Path(folder).is_dir():
        raise NotFoundError(f"cannot examine `{uri}`: no such folder", code="source-not-found", hint="create it first")
    # Bypass the page cache to measure the disk itself.
    pairs = [("timeout_seconds", "15"), *{**at.storage_options, **at.options_of(options)}.items()]
    findings = _core.doctor(uri, pairs if folder is None else None, "auto" if folder is None else "direct")
    bad = [found for found in findings if found[1] is False]
    if as_json:
        rows = [
            {
                "name": name,
                "good": good,
                "value": measured and measured[0],
                "unit": measured and measured[1],
                "finding": finding,
                "advice": advice,
            }
            for name, good, measured, finding, advice in findings
        ]
        show.print_json({"uri": uri, "good": not bad, "findings": rows})
    else:
        table = Table(title=escape(uri), title_justify="left")
        for heading in ("", "what", "measured", "found", "advice"):
            table.add_column(heading, justify="right" if heading == "measured" else "left", overflow="fold")
        for name, good, measured, finding, advice in findings:
            mark = {True: "ok", False: "FAILED", None: "-"}[good]
            value = f"{measured[0]:,.1f} {measured[1]}" if measured else ""
            table.add_row(mark, name, value, escape(finding), escape(advice))
        show.console.print(table)
    if bad:
        raise typer.Exit(1)

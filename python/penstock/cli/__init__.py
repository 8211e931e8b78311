"""The command line, with one file per verb. Exit codes: 0 (success), 1 (error), 2 (incorrect usage), 130 (interrupted)."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import NoReturn

import typer

from penstock.cli import cache, create, doctor, head, importing, info, load, serve, stats, top, verify
from penstock.cli.terminal import at
from penstock.cli.versions import branch, diff, log, merge, reset, tag

app = typer.Typer(
    name="penstock",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help="A versioned, transactional store for multimodal datasets.",
)


def _version(asked: bool) -> None:
    if asked:
        import penstock

        print(penstock.__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
    option: list[str] = typer.Option(
        [], "--option", "-o", help="name=value, an option of the store, such as endpoint_url. Can be repeated."
    ),
) -> None:
    at.storage_options.update(at.options_of(option))


app.command("create")(create.create)
app.command("import")(importing.import_)
app.command("info")(info.info)
app.command("log")(log.log)
app.command("head")(head.head)
app.command("diff")(diff.diff)
app.command("tag")(tag.tag)
app.command("branch")(branch.branch)
app.command("merge")(merge.merge)
app.command("cherry-pick")(merge.cherry_pick)
app.command("reset")(reset.reset)
app.command("stats")(stats.stats)
app.command("verify")(verify.verify)
app.command("doctor")(doctor.doctor)
app.add_typer(cache.app, name="cache")
app.command("serve")(serve.serve)
app.command("top")(top.top)
app.command("load")(load.load)


def main() -> None:
    """Run the command line."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  # The parent process closed it.
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # The terminal may be unable to display some characters in names and values.
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        from penstock.cli.terminal import show

        _leave(130, partial(print, f"stopped; {show.done or 'nothing was committed'}", file=sys.stderr))
    except Exception as error:
        from penstock.cli.terminal import show
        from penstock.errors import Error

        if isinstance(error, Error):
            _leave(1, partial(show.print_error, error, "--json" in sys.argv))
        if isinstance(error, BrokenPipeError):
            _leave(0, partial(print, file=sys.stderr, end=""))  # The reader closed the pipe, which is not an error.
        if not isinstance(error, OSError):
            raise
        # If the work is done, exit with 0. Otherwise, a script would repeat the work.
        done = show.done
        what = f"{done}; the rest of this report cannot be printed" if done else "cannot print"
        _leave(0 if done else 1, partial(print, f"{'note' if done else 'error'}: {what}: {error}", file=sys.stderr))


def _leave(code: int, tell: Callable[[], None]) -> NoReturn:
    """Print the reason, if possible, and exit."""
    with contextlib.suppress(OSError):
        tell()
        sys.stdout.flush()
    for stream in (sys.stdout, sys.stderr):  # Prevent Python from flushing the remaining output again at exit.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)

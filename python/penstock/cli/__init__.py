"""The command line: one file a verb. `main` turns errors into exit codes: 0 done, 1 error, 2 usage."""

from __future__ import annotations

import io
import os
import sys

import typer

from penstock import __version__
from penstock.cli import create, doctor, head, importing, info, log, verify
from penstock.cli.show import print_error
from penstock.errors import Error

app = typer.Typer(
    name="penstock",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help="Multimodal datasets as a versioned, transactional store.",
)


def _version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def _root(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version.")) -> None:
    pass


app.command("create")(create.create)
app.command("import")(importing.import_)
app.command("info")(info.info)
app.command("log")(log.log)
app.command("head")(head.head)
app.command("verify")(verify.verify)
app.command("doctor")(doctor.doctor)


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # Names and values may be beyond what a terminal can show.
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except Error as error:
        print_error(error, "--json" in sys.argv)
        sys.exit(1)
    except KeyboardInterrupt:
        print("stopped; nothing was committed", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()  # The reader of our output has gone: that is its business.
        sys.exit(0)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # What was not printed is not tried again at exit.
        print(f"error: cannot print: {error}", file=sys.stderr)
        sys.exit(1)

"""`penstock import`."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING

import typer

from penstock.cli.terminal import at

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.importers import Report


# Over 6 parameters: each is a command-line option.
# Over 80 lines: most of them are these options.
def import_(
    source: str = typer.Argument(
        help="A folder of images (class = parent folder), COCO or YOLO annotations, or a CSV, TSV, JSON, JSONL, Parquet or Arrow file."
    ),
    destination: str = typer.Argument(help="A new dataset, or an existing one with these columns, to append to."),
    format: str = typer.Option("auto", help="auto, images, coco, yolo, csv, tsv, json, jsonl, parquet, arrow."),
    types: list[str] = typer.Option([], "--type", "-t", help=at.TYPES_HELP),
    validate: str = typer.Option("header", help="header: check image headers; decode: check every pixel."),
    on_error: str = typer.Option("raise", help="raise: commit nothing; skip: leave out the item; null: store a null."),
    encoding: str = typer.Option("utf-8", help="The encoding of a CSV, JSON or JSONL file."),
    delimiter: str = typer.Option("", help="The delimiter in a CSV file."),
    quote: str = typer.Option('"', help="The quote character in a CSV file; empty for none."),
    header: bool = typer.Option(True, help="Whether the first line of a CSV file names the columns."),
    include: list[str] = typer.Option([], help="Import only files that match: --include '*.jpg'."),
    exclude: list[str] = typer.Option([], help="Leave out files that match: --exclude 'thumbnails/*'."),
    mode: str = typer.Option(
        "", help="append: import again what was already imported; skip-existing: leave it out; create: only a new dataset."
    ),
    key: str = typer.Option(
        "", help="The column that identifies samples: --mode skip-existing leaves out those whose key the dataset already has."
    ),
    limit: int = typer.Option(0, help="Import at most this many samples; 0 for all."),
    shuffle_seed: int | None = typer.Option(None, help="Shuffle the images of a folder before they are stored."),
    files: list[str] = typer.Option([], help="Columns of type bytes whose text names files; image and mask columns need no option."),
    root: str = typer.Option("", help="The folder of the files that a table or annotations name; by default, the folder of the source."),
    split: bool = typer.Option(True, help="Whether folders named train, val or test become a column."),
    masks: str = typer.Option("", help="class or instance: draw the objects of COCO annotations as masks."),
    columns: str = typer.Option("", help="Import only these columns: --columns name,age."),
    drop: list[str] = typer.Option([], help="Leave out a column."),
    rename: list[str] = typer.Option([], help="Give a column another name: --rename old=new."),
    ignore: list[str] = typer.Option([], help="Leave out annotations that cannot be imported, by kind: --ignore polygons."),
    boxes: str = typer.Option(
        "refuse", help="Boxes that are not finite or have a negative size: refuse, keep, clip (at the borders of the image), or drop."
    ),
    branch: str = typer.Option("main", "--branch", "-b", help="The branch of an existing dataset to append to."),
    message: str = typer.Option("", "--message", "-m", help="The commit message."),
    memory_bytes: int = typer.Option(0, help="Memory budget in bytes; 0 uses the default, at most 512 MiB."),
    as_json: bool = typer.Option(
        False,
        "--json",
        help="Print {samples, refused: [{path, code, message, hint}], left_out, left_out_kinds, renamed, corrected_boxes, skipped, snapshot}.",
    ),
) -> None:
    """Import files as one commit, and report every refused item."""
    # Imported here so that `--help` is fast: importing pyarrow alone takes a third of a second.
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    import penstock
    from penstock.cli.terminal import show
    from penstock.importers import import_data

    if memory_bytes:
        penstock.configure(memory_bytes=memory_bytes)
    parts = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with show.progress(as_json, *parts) as progress:
        task = progress.add_task("importing", total=None, unit="")
        report = import_data(
            source, destination, format=format, types=show.parse_types(types), validate=validate, on_error=on_error, message=message or None,
            branch=branch, mode=mode or None, key=key or None, limit=limit or None, shuffle_seed=shuffle_seed, files=files, root=root or None, split=split,
            masks=masks or None, storage_options=at.storage_options or None,
            progress=lambda done, total, unit: progress.update(task, completed=done, total=total, unit=unit), encoding=encoding, delimiter=delimiter or None, quote=quote, header=header,
            include=include, exclude=exclude, columns=[name for name in columns.split(",") if columns], drop=drop, rename=_renamed(rename), ignore=ignore, boxes=boxes,
        )  # fmt: skip
        show.done = f"imported {show.count(report.samples, 'sample')} into {destination}, snapshot {report.snapshot}"
        if report.skipped:
            show.done += f"; skipped {show.count(report.skipped, 'sample')} that it already has"
    _print(report, progress.console, as_json)


def _renamed(arguments: list[str]) -> dict[str, str]:
    """Parse `old=new` arguments."""
    pairs = {}
    for argument in arguments:
        old, sign, new = argument.rpartition("=")
        if not sign or not new or old in pairs:
            raise typer.BadParameter(f"`{argument}`: expected old=new, once for each column")
        pairs[old] = new
    return pairs


def _print(report: Report, console: Console, as_json: bool) -> None:
    """Print what was imported, left out and refused."""
    from penstock.cli.terminal import show

    if as_json:
        show.print_json(dataclasses.asdict(report))
        return
    print(show.done, flush=True)
    for old, new in report.renamed.items():
        print(
            f"column `{show.plain(old)}` is named `{show.plain(new)}`, because its own name is not allowed in a dataset; --rename {show.plain(old)}=… chooses another"
        )
    if report.left_out_kinds:
        kinds = ", ".join(f"{number:,} {kind}" for kind, number in report.left_out_kinds.items())
        some = ", ".join(map(show.plain, report.left_out[:3])) + (", …" if len(report.left_out) > 3 else "")
        print(f"left out {kinds}{': ' if some else ''}{some}")
    if report.corrected_boxes:
        print(f"corrected {report.corrected_boxes:,} boxes, as --boxes specifies")
    if report.refused:
        refused_table = show.table(f"refused {show.count(len(report.refused), 'item')}", "item", "code", "message")
        for refusal in report.refused[:50]:
            refused_table.add_row(show.plain(refusal.path), refusal.code, show.plain(refusal.message))
        console.print(refused_table)
        if len(report.refused) > 50:
            print(f"… and {len(report.refused) - 50} more; --json lists them all", file=sys.stderr)

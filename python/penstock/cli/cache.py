"""`penstock cache`: the caches of this machine."""

from __future__ import annotations

import json
import os
import sys

import typer

from penstock.cli.terminal import at

app = typer.Typer(no_args_is_help=True, help="Show, fill, check or empty a cache on this machine.")

CACHE: str = typer.Option("", "--cache", "-c", help="The cache, such as /nvme/penstock:200GB; PENSTOCK_CACHE by default.")
AS_JSON: bool = typer.Option(False, "--json", help="Print JSON.")


def _cache(given: str) -> str:
    cache = given or os.environ.get("PENSTOCK_CACHE", "")
    if not cache:
        raise typer.BadParameter("give --cache, or set PENSTOCK_CACHE")
    return cache


def _store(uri: str, cache: str) -> str:
    """Return the identity of a dataset's store in the keys of a cache. A store that the cache has need not be reached."""
    from penstock import _core
    from penstock.errors import Error

    stores = {store for _, _, stores in _core.cache_status(cache) for store, _ in stores}
    # Longer names are cut, and may be those of several stores.
    if uri in stores and len(uri.encode()) < 250:
        return uri
    try:
        return at.opened(uri, cache="")._snapshot.identity()
    except Error:
        names = "".join(f"\n  {store}" for store in sorted(stores)) or " none"
        print(f"note: this cache has no store `{uri}` either. Its stores:{names}", file=sys.stderr)
        raise


@app.command()
def status(cache: str = CACHE, as_json: bool = AS_JSON) -> None:
    """Show what a cache holds, and what was read through it since it was created."""
    from penstock import _core
    from penstock.cli.terminal import show

    drives = [
        (folder, dict(counts), [(store, dict(own)) for store, own in stores])
        for folder, counts, stores in _core.cache_status(_cache(cache))
    ]
    if as_json:
        show.print_json(
            [
                {"folder": folder, **counts, "stores": [{"store": store, **own} for store, own in stores]}
                for folder, counts, stores in drives
            ]
        )
        return
    for folder, counts, stores in drives:
        sizes = {name: show.size_text(counts[f"{name}_bytes"]) for name in ("hit", "cold", "bypassed", "evicted")}
        print(f"{folder}: {show.size_text(counts['bytes'])} of {show.size_text(counts['budget_bytes'])}")
        print(f"{counts['hits']:,} hits served {sizes['hit']}; {counts['misses']:,} misses; {sizes['cold']} fetched")
        print(f"{sizes['bypassed']} not kept; {sizes['evicted']} evicted; {counts['corrupt_pages']:,} corrupt pages")
        if not stores:
            continue
        table = show.table("", "store", "cached", "limit", "from the cache", "fetched")
        for store, own in stores:
            limit = show.size_text(own["budget_bytes"]) if own["budget_bytes"] else "-"
            table.add_row(
                show.plain(store) + (" (pinned)" if own["pinned"] else ""),
                show.size_text(own["bytes"]),
                limit,
                show.size_text(own["hit_bytes"]),
                show.size_text(own["cold_bytes"]),
            )
        show.console.print(table)


# Over 6 parameters: each is an option of the command line.
@app.command()
def warm(
    uri: str = typer.Argument(help="A dataset, or s3://bucket/prefix to read all objects there through a `penstock serve` node."),
    branch: str = at.BRANCH,
    snapshot: str = at.SNAPSHOT,
    tag: str = at.TAG,
    as_of: str = at.AS_OF,
    cache: str = CACHE,
    workers: int = typer.Option(16, "--workers", "-w", min=1, max=10_000, help="Number of objects to read concurrently. Not for datasets."),
    as_json: bool = AS_JSON,
) -> None:
    """Read all data files of a snapshot into a cache. Ends with 1 if they do not fit.

    If s3://bucket/prefix is not a dataset, read each object whose key begins with the prefix once, through the endpoint of `penstock --option endpoint_url=…`. The node there then has them. Ends with 1 if some could not be read.
    """
    from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

    from penstock import _core
    from penstock.cli.terminal import show
    from penstock.errors import Error

    chosen = bool(snapshot or tag or as_of or branch != "main" or cache)
    if uri.startswith("s3://") and not chosen:
        try:
            at.opened(uri, cache="")
        except Error as error:
            # A key with rights on a prefix may not look for a dataset everywhere. The listing says what it may do.
            if error.code not in ("dataset-not-found", "permission-denied"):
                raise
            return _warm_objects(uri, workers, as_json)
        if not os.environ.get("PENSTOCK_CACHE"):
            raise typer.BadParameter(
                f"{uri} is a dataset: give --cache, or set PENSTOCK_CACHE; to read its data files through a node, name {uri.rstrip('/')}/d/"
            )
    dataset = at.opened(uri, snapshot, tag, as_of, branch, _cache(cache))
    total = dataset.structure()["data_bytes"]
    with show.progress(as_json, *Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn()) as progress:
        task = progress.add_task("warming", total=total)
        files, read_bytes = dataset._snapshot.warm(lambda _files, done: progress.update(task, completed=done))
    store = dataset._snapshot.identity()
    kept = [dict(own)["bytes"] for _, _, stores in _core.cache_status(_cache(cache)) for name, own in stores if name == store]
    if as_json:
        answer = {"uri": dataset.uri, "snapshot": dataset.snapshot, "data_files": files, "data_bytes": read_bytes}
        show.print_json({**answer, "cached_bytes": sum(kept)})
    else:
        print(
            f"read {show.count(files, 'data file')}, {show.size_text(read_bytes)}; the cache holds {show.size_text(sum(kept))} of the dataset"
        )
    if sum(kept) < read_bytes:
        print("hint: the cache has no room for the rest: increase its size, or evict another dataset", file=sys.stderr)
        raise typer.Exit(1)


def _warm_objects(uri: str, workers: int, as_json: bool) -> None:
    """Read each object below a prefix once, through the endpoint."""
    from rich.progress import DownloadColumn, SpinnerColumn, TextColumn, TimeElapsedColumn, TransferSpeedColumn

    from penstock import _core
    from penstock.cli.terminal import show

    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    if not bucket:
        raise typer.BadParameter(f"`{uri}`: write it as s3://bucket/prefix")
    config = json.dumps(dict(bucket=bucket, prefix=prefix, workers=workers, storage_options=at.storage_options))
    # How many objects there are is only known at the end.
    columns = (SpinnerColumn(), TextColumn("{task.description}"), DownloadColumn(), TransferSpeedColumn(), TimeElapsedColumn())
    with show.progress(as_json, *columns) as progress:
        task = progress.add_task("warming", total=None)

        def see(objects: int, done: int) -> None:
            progress.update(task, completed=done, description=f"warming, {show.count(objects, 'object')}")

        objects, read_bytes, failed, failures = _core.warm_objects(config, see)
    if as_json:
        named = [{"key": key, "error": why} for key, why in failures]
        show.print_json({"uri": uri, "objects": objects, "bytes": read_bytes, "failed": failed, "failures": named})
    else:
        print(f"read {show.count(objects, 'object')}, {show.size_text(read_bytes)}; {failed:,} failed")
    for key, why in failures:
        print(f"cannot read `{show.printable(key)}`: {show.printable(why)}", file=sys.stderr)
    if failed > len(failures):
        print(f"and {failed - len(failures):,} more", file=sys.stderr)
    if failed:
        raise typer.Exit(1)


@app.command()
def verify(cache: str = CACHE, as_json: bool = AS_JSON) -> None:
    """Verify every page of a cache, remove damaged ones, and count again. Ends with 1 if there were damaged ones."""
    from penstock import _core
    from penstock.cli.terminal import show

    with show.progress(as_json) as progress:
        task = progress.add_task("verifying", total=None)
        found = _core.cache_verify(_cache(cache), lambda _extents, pages: progress.update(task, completed=pages))
    if as_json:
        show.print_json([{"folder": folder, **dict(counts)} for folder, counts in found])
    else:
        for folder, numbers in found:
            counts = dict(numbers)
            print(
                f"{folder}: {show.count(counts['extents'], 'extent')}, {counts['pages']:,} pages, {counts['corrupt_pages']:,} corrupt, "
                f"{counts['other_files']:,} other files; {show.size_text(counts['bytes'])}, counted before: {show.size_text(counts['counted_bytes'])}"
            )
    if any(dict(counts)["corrupt_pages"] for _, counts in found):
        print(
            "hint: damaged pages were removed and will be fetched again; if this happens again, check the health of the drive",
            file=sys.stderr,
        )
        raise typer.Exit(1)


@app.command()
def pin(
    uri: str = typer.Argument(help="A dataset, or a store as `penstock cache status` names it."),
    cache: str = CACHE,
    remove: bool = typer.Option(False, "--remove", help="Remove the pin."),
) -> None:
    """Keep a dataset in a cache: other datasets do not push it out."""
    from penstock import _core

    _core.cache_pin(_cache(cache), _store(uri, _cache(cache)), not remove)
    print("unpinned" if remove else "pinned")


@app.command()
def evict(
    uri: str = typer.Argument("", help="A dataset, or a store as `penstock cache status` names it; everything by default."),
    cache: str = CACHE,
    as_json: bool = AS_JSON,
) -> None:
    """Remove a dataset, or everything, from a cache."""
    from penstock import _core
    from penstock.cli.terminal import show

    freed = _core.cache_evict(_cache(cache), _store(uri, _cache(cache)) if uri else None)
    if as_json:
        show.print_json({"evicted_bytes": freed})
    else:
        print(f"evicted {show.size_text(freed)}")

"""`penstock load`: load on an S3 endpoint."""

from __future__ import annotations

import json
import re
import secrets
import sys

import typer

from penstock.cli.terminal import at

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def _bytes(text: str) -> int:
    """Return a size such as 1MiB or 100KB in bytes.

    >>> _bytes("1MiB"), _bytes("100KB"), _bytes("7")
    (1048576, 100000, 7)
    """
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise typer.BadParameter(f"`{text}` is not a size: write it as 100KB or 1MiB")
    number, unit, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** ("kmgt".index(unit.lower()) + 1 if unit else 0))


def _line(operation: str, line: dict[str, float]) -> str:
    from penstock.cli.terminal.show import size_text

    latencies = "".join(f"{line[f'{name}_ms']:10.2f} ms" for name in ("least", "mean", "p99", "most"))
    return (
        f"{line['at_seconds']:5.0f}s  {operation}  {line['workers']:8.0f}  {line['requests']:8,.0f}  {size_text(line['bytes']):>11}"
        f"   {latencies}  {size_text(line['bytes_per_second']) + '/s':>11}  {line['errors']:6,.0f}"
    )


# Over 6 parameters: each is an option of the command line.
def load(
    bucket: str = typer.Argument(help="The bucket, such as s3://bucket/prefix. Objects are written under the prefix."),
    size: str = typer.Option("1MiB", "--size", help="The size of an object, such as 100KB or 10MiB."),
    objects: int = typer.Option(
        100, "--objects", min=1, max=10_000_000, help="Number of objects. They are written first, and then read and overwritten."
    ),
    puts: float = typer.Option(0.0, "--puts", min=0.0, max=1.0, help="Share of writes, from 0 (only reads) to 1 (only writes)."),
    workers: int = typer.Option(16, "--workers", "-w", min=1, max=10_000, help="Concurrent requests (the maximum with --tune)."),
    seconds: float = typer.Option(30.0, "--seconds", help="Duration of the load. With --tune, each step lasts a tenth of it."),
    tune: bool = typer.Option(False, "--tune", help="Search for the fewest workers that reach nearly the best throughput."),
    existing: bool = typer.Option(
        False, "--existing", help="Use the objects from an earlier run with --keep and the same size and number. They are kept."
    ),
    keep: bool = typer.Option(False, "--keep", help="Do not delete the objects at the end."),
    verify: bool = typer.Option(False, "--verify", help="Verify the checksum of each body."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON at the end."),
) -> None:
    """Read and write objects of an S3 endpoint, and print what it reached every 10 seconds.

    Endpoint and keys come from `penstock --option` or from the variables that AWS's tools use.
    """
    from penstock import _core
    from penstock.cli.terminal import show

    if not bucket.startswith("s3://") or bucket == "s3://":
        raise typer.BadParameter(f"`{bucket}`: write it as s3://bucket/prefix")
    if not 0.001 <= seconds <= 1e9 or not 0 <= puts <= 1:
        raise typer.BadParameter(
            f"--seconds {seconds:g} --puts {puts:g}: seconds must be from 0.001 to 1e9, and the share of puts from 0 to 1"
        )
    if tune and _bytes(size) == 0:
        raise typer.BadParameter("--tune compares bytes per second: give a --size above 0")
    name, _, prefix = bucket.removeprefix("s3://").partition("/")
    # Loads at the same time must not delete each other's objects.
    folder = "penstock-load" if keep or existing else f"penstock-load-{secrets.token_hex(4)}"
    header = "  time  op   workers     count         size   latency: min         mean          p99          max   throughput  errors"
    printed: list[bool] = []

    def see(lines: list[tuple[str, list[tuple[str, float]]]]) -> None:
        if as_json:
            return
        if not printed:
            print(header)
        printed.append(True)
        print("\n".join(_line(operation, dict(values)) for operation, values in lines), flush=True)

    config = dict(
        bucket=name,
        prefix=f"{prefix.rstrip('/')}/{folder}/".lstrip("/"),
        puts=puts,
        object_bytes=_bytes(size),
        objects=objects,
        workers=workers,
        seconds=seconds / 10 if tune else seconds,
        interval_seconds=10.0,
        verifies=verify,
        reuses=existing,
        cleans_up=not keep and not existing,
        storage_options=at.storage_options,
    )
    total, tuned, error = _core.load(json.dumps(config), tune, see)
    if error is not None:
        print(f"some requests failed, such as: {error}", file=sys.stderr)
    if tuned is not None:
        knee, rate, mean, steps = tuned
        full = steps[-1]
        if as_json:
            names = ("workers", "bytes_per_second", "mean_ms")
            show.print_json(
                {
                    "workers": knee,
                    "bytes_per_second": rate,
                    "mean_ms": mean,
                    "steps": [dict(zip(names, step, strict=True)) for step in steps],
                }
            )
            return
        print(f"knee: {knee} workers, {show.size_text(rate)}/s, {mean:.2f} ms on average")
        print(f"with {full[0]} workers: {show.size_text(full[1])}/s, {full[2]:.2f} ms on average")
    elif as_json:
        show.print_json([{"operation": operation, **dict(values)} for operation, values in total])
    else:
        print("total")
        see(total)

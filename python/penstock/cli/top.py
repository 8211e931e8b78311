"""`penstock top`: what a running server does, and what limits it."""

from __future__ import annotations

import json
import time
from typing import Any

import typer


def _sample(url: str) -> dict[str, Any]:
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(f"{url}/status.json", timeout=5) as answer:
            sample: dict[str, Any] = json.load(answer)
            return sample
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise typer.BadParameter(f"no status at {url}: {reason}; start the server with --status, and name that address") from None


def _lines(sample: dict[str, Any]) -> list[str]:
    from penstock.cli.terminal.show import size_text

    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.0%}"

    def rate(name: str) -> str:
        return f"{size_text(sample[f'{name}_bytes_per_second'])}/s"

    gets = sample["warm_gets"] + sample["cold_gets"]
    verdict = "idle" if sample["verdict"] == "idle" else f"the limit is: {sample['verdict']}"
    lines = [
        f"{verdict} ({sample['why']})",
        f"sent {rate('sent')}, received {rate('received')}, from the cold store {rate('cold')}",
        f"processor {share(sample['processor'])}, network {share(sample['network'])}, {sample['connections']} connections, "
        f"{sample['running']} requests, {sample['cold_waits']} waiting, {sample['refused']:,} refused",
        f"{share(sample['warm_gets'] / gets if gets else None)} of {gets:,} reads warm",
    ]
    if sample["pending_objects"]:
        lines.append(f"{sample['pending_objects']:,} objects ({size_text(sample['pending_bytes'])}) are not in the cold store yet")
    for drive in sample["drives"]:
        state = "" if drive["is_usable"] else " (left alone: it failed, or its folder is gone)"
        lines.append(
            f"{drive['folder']}{state}: {size_text(drive['bytes'])} of {size_text(drive['budget_bytes'])}, busy {share(drive['busy'])}, "
            f"{drive['corrupt_pages']:,} corrupt pages"
        )
    return lines


def top(
    address: str = typer.Argument("127.0.0.1:9101", help="The address that the server was given as --status."),
    once: bool = typer.Option(False, "--once", help="Print once and end."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON once."),
) -> None:
    """Show what a running server does, each second, and which resource is its limit."""
    from penstock.cli.terminal import show

    url = address if "://" in address else f"http://{address}"
    sample = _sample(url)
    if as_json:
        show.print_json(sample)
    elif once or not show.console.is_terminal:
        print("\n".join(_lines(sample)))
    else:
        from rich.live import Live
        from rich.text import Text

        with Live(Text("\n".join(_lines(sample))), console=show.console, auto_refresh=False) as live:
            while True:
                time.sleep(1)
                live.update(Text("\n".join(_lines(_sample(url)))), refresh=True)

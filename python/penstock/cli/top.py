"""`penstock top`: what a running server does, and what limits it."""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import ssl
import time
import urllib.error
import urllib.request
from typing import Any

import typer


@dataclasses.dataclass(frozen=True)
class _Status:
    """The status of a server: its address, its token, and the certificates that it is verified with."""

    url: str
    token: str
    trusted: ssl.SSLContext | None

    def sample(self) -> dict[str, Any]:
        request = urllib.request.Request(f"{self.url}/status.json")
        if self.token:
            # Another address that the server names does not get the token.
            request.add_unredirected_header("Authorization", f"Bearer {self.token}")
        try:
            with urllib.request.urlopen(request, timeout=5, context=self.trusted) as answer:
                sample: dict[str, Any] = json.load(answer)
                return sample
        except urllib.error.HTTPError as error:
            if error.code != 401:
                raise typer.BadParameter(f"no status at {self.url}: {error.code} {error.reason}") from None
            found = "the token is wrong" if self.token else "a token is required"
            raise typer.BadParameter(f"no status at {self.url}: {found}; give --token FILE, the file of --status-token") from None
        except (urllib.error.URLError, OSError, ValueError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, ssl.SSLCertVerificationError):
                text = f"{reason.verify_message}; give --ca FILE with its CA certificate"
            else:
                text = f"{reason}; start the server with --status, and give that address, with https:// if --status-tls is set"
            raise typer.BadParameter(f"no status at {self.url}: {text}") from None


def _token_of(path: str) -> str:
    """Read a token. As the server does, refuse a file that others can use."""
    try:
        with open(path, encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            if mode & 0o027:
                raise typer.BadParameter(f"cannot use the token in `{path}`: its mode {mode:o} lets others use it; run chmod 600 {path}")
            token = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"cannot use the token in `{path}`: {error}") from None
    if not token.isascii() or not token.isprintable() or not token:
        raise typer.BadParameter(f"cannot use the token in `{path}`: expected one line of ASCII characters")
    return token


def _trust(path: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=path)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"cannot use the certificates in `{path}`: {error}; give a file in PEM format") from None


def _lines(sample: dict[str, Any]) -> list[str]:
    from penstock.cli.terminal.show import size_text

    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.0%}"

    def rate(name: str) -> str:
        return f"{size_text(sample[f'{name}_bytes_per_second'])}/s"

    gets = sample["warm_gets"] + sample["cold_gets"]
    verdict = "idle" if sample["verdict"] == "idle" else f"limiting factor: {sample['verdict']}"
    lines = [
        f"{verdict} ({sample['why']})",
        f"sent {rate('sent')}, received {rate('received')}, from the cold store {rate('cold')}",
        f"processor {share(sample['processor'])}, network {share(sample['network'])}, {sample['connections']} connections, "
        f"{sample['running']} requests, {sample['cold_waits']} waiting, {sample['refused']:,} refused",
        f"{share(sample['warm_gets'] / gets if gets else None)} of {gets:,} reads warm",
    ]
    if sample["pending_objects"]:
        lines.append(f"{sample['pending_objects']:,} objects ({size_text(sample['pending_bytes'])}) are not in the cold store yet")
    lines += [f"quota {quota['name']}: {size_text(quota['used_bytes'])} of {size_text(quota['limit_bytes'])}" for quota in sample["quotas"]]
    for drive in sample["drives"]:
        state = "" if drive["is_usable"] else " (not used: it failed, or its folder is gone)"
        lines.append(
            f"{drive['folder']}{state}: {size_text(drive['bytes'])} of {size_text(drive['budget_bytes'])}, busy {share(drive['busy'])}, "
            f"{drive['corrupt_pages']:,} corrupt pages"
        )
    return lines


def top(
    address: str = typer.Argument("127.0.0.1:9101", help="The address of the server's --status option."),
    token: str = typer.Option("", "--token", help="The file of --status-token. Only its owner may read it."),
    ca: str = typer.Option("", "--ca", help="A PEM file with the server's CA certificate, for https:// addresses."),
    once: bool = typer.Option(False, "--once", help="Print once and exit."),
    as_json: bool = typer.Option(False, "--json", help="Print the status as JSON once and exit."),
) -> None:
    """Show what a running server does, each second, and which resource is its limit."""
    from penstock.cli.terminal import show

    url = address.rstrip("/") if "://" in address else f"http://{address}"
    if not url.startswith(("http://", "https://")):
        raise typer.BadParameter(f"`{address}`: write it as 127.0.0.1:9101 or https://host:9101")
    if ca and url.startswith("http://"):
        raise typer.BadParameter(f"--ca verifies the certificate of an https:// address, but the address is {url}")
    server = _Status(url, _token_of(token) if token else "", _trust(ca) if ca else None)
    sample = server.sample()
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
                live.update(Text("\n".join(_lines(server.sample()))), refresh=True)

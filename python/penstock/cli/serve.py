"""`penstock serve`: an S3 endpoint before a cold store or a folder."""

from __future__ import annotations

import json
import sys

import typer

from penstock.cli.terminal import at


# Over 6 parameters: each is an option of the command line.
def serve(
    cold: str = typer.Option(
        ..., "--cold", help="What to serve: s3://bucket, s3:// for all buckets, or a folder with a folder per bucket."
    ),
    cache: list[str] = typer.Option([], "--cache", "-c", help="A drive of the cache and its size, such as /nvme1:2TB. Can be repeated."),
    write_back: str = typer.Option(
        "",
        "--write-back",
        help="A folder and a size, such as /nvme2/pending:50GB. Puts are acknowledged when this folder has them, and sent to the cold store later. "
        "Risk: until then, its drive has the only copy of at most so many bytes, and a later write by others to the cold store is overwritten.",
    ),
    listen: str = typer.Option("127.0.0.1:9100", "--listen", "-l", help="Address and port."),
    keys: str = typer.Option("", "--keys", help="A JSON file with access keys and their rights."),
    signature_v2: bool = typer.Option(
        False, "--signature-v2", help="Also take signatures of version 2, of old clients. They cover neither the host nor the body."
    ),
    anonymous: bool = typer.Option(False, "--anonymous", help="Answer requests without a signature; only at a loopback address."),
    tls_certificate: str = typer.Option("", "--tls-certificate", help="A PEM file with the chain of certificates, to serve HTTPS."),
    tls_key: str = typer.Option("", "--tls-key", help="A PEM file with the private key."),
    status: str = typer.Option("", "--status", help="Address and port of the status page and of /metrics, such as 127.0.0.1:9101."),
    access_log: str = typer.Option("", "--access-log", help="A file that gets a line of JSON for each request; - for the standard output."),
    domain: list[str] = typer.Option(
        [], "--domain", help="A domain whose subdomains are buckets, such as s3.example.com. Can be repeated."
    ),
    revalidate: str = typer.Option(
        "always", "--revalidate", help="When to ask the cold store for the current version: always, never, or a time such as 60s."
    ),
    memory: int = typer.Option(
        1 << 30,
        "--memory-bytes",
        help="Memory for bodies that are being fetched or uploaded, and, in a quarter of it, for what is read often.",
    ),
    connections: int = typer.Option(1024, "--connections", min=1, help="The most connections. More are answered with 503."),
    requests: int = typer.Option(
        512, "--requests", min=1, help="The most requests at once, with those whose responses are being sent. More are answered with 503."
    ),
    idle: float = typer.Option(60.0, "--idle-seconds", min=1.0, help="How long a connection may send or receive nothing."),
    drain: float = typer.Option(30.0, "--drain-seconds", min=0.0, help="How long requests may take to end after SIGTERM."),
) -> None:
    """Serve objects by the protocol of S3, from a cache of local drives. Ends on SIGTERM or Ctrl-C, after the requests that are running.

    SIGHUP reads keys and certificates again, and opens the access log again. Objects of datasets never change and are never asked for again. For all others, --revalidate says how old an answer may be.
    """
    from penstock import _core

    if anonymous == bool(keys):
        raise typer.BadParameter("give either --keys FILE or --anonymous")

    if bool(tls_certificate) != bool(tls_key):
        raise typer.BadParameter("give --tls-certificate and --tls-key together")

    def ready(address: str, status_address: str | None) -> None:
        scheme = "https" if tls_key else "http"
        page = f", status at http://{status_address}" if status_address else ""
        print(f"serving {cold} at {scheme}://{address}{page}", file=sys.stderr, flush=True)

    config = dict(
        cold=cold,
        cache=",".join(cache) or None,
        write_back=write_back or None,
        listen=listen,
        status=status or None,
        keys=keys or None,
        signature_v2=signature_v2,
        tls=(tls_certificate, tls_key) if tls_key else None,
        access_log=access_log or None,
        domains=domain,
        revalidate=revalidate,
        memory_bytes=memory,
        connections=connections,
        requests=requests,
        idle_seconds=idle,
        drain_seconds=drain,
        storage_options=at.storage_options,
    )
    _core.serve(json.dumps(config), ready)

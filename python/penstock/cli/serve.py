"""`penstock serve`: an S3 endpoint before a cold store or a folder."""

from __future__ import annotations

import json
import sys

import typer

from penstock.cli.terminal import at, config_file

MOST = 1_000_000


# Over 6 parameters: each is an option of the command line, whose name the server's configuration has, too.
# Over 80 lines: the options, with their help.
def serve(
    context: typer.Context,
    cold: str = typer.Option(
        ..., "--cold", help="What to serve: s3://bucket, s3:// for all buckets, or a folder with a folder per bucket."
    ),
    cache: list[str] = typer.Option([], "--cache", "-c", help="A drive of the cache and its size, such as /nvme1:2TB. Can be repeated."),
    write_back: str = typer.Option(
        "",
        "--write-back",
        help="A folder and a size, such as /nvme2/pending:50GB. Puts are acknowledged once they are in this folder, and sent to the cold store later. "
        "Risk: until then, its drive holds the only copy of up to that many bytes, and later writes by others to the cold store are overwritten.",
    ),
    listen: str = typer.Option("127.0.0.1:9100", "--listen", "-l", help="Address and port."),
    keys: str = typer.Option("", "--keys", help="A JSON file with access keys and their rights."),
    signature_v2: bool = typer.Option(
        False, "--signature-v2", help="Also accept version 2 signatures, for old clients. They cover neither the host nor the body."
    ),
    anonymous: bool = typer.Option(False, "--anonymous", help="Accept unsigned requests. Allowed only on a loopback address."),
    tls_certificate: str = typer.Option("", "--tls-certificate", help="A PEM file with the certificate chain, to serve HTTPS."),
    tls_key: str = typer.Option("", "--tls-key", help="A PEM file with the private key."),
    status: str = typer.Option("", "--status", help="Address and port of the status page and of /metrics, such as 127.0.0.1:9101."),
    status_token: str = typer.Option(
        "", "--status-token", help="A file with a token. All status pages except /health require it, and it allows POST /purge."
    ),
    status_tls: bool = typer.Option(False, "--status-tls", help="Serve the status page over HTTPS, too."),
    access_log: str = typer.Option(
        "", "--access-log", help="A file for the access log, with a line of JSON per request; - for standard output."
    ),
    domain: list[str] = typer.Option(
        [], "--domain", help="A domain whose subdomains are buckets, such as s3.example.com. Can be repeated."
    ),
    revalidate: str = typer.Option(
        "always", "--revalidate", help="When to ask the cold store for the current version: always, never, or a time such as 60s."
    ),
    stale_if_error: float = typer.Option(
        86400.0,
        "--stale-if-error",
        min=0.0,
        max=3650 * 86400.0,
        help="While the cold store is failing, serve objects that were confirmed at most this many seconds ago, with the headers Age and Warning.",
    ),
    immutable: list[str] = typer.Option(
        [], "--immutable", help="A prefix, such as bucket/folder/, whose objects never change and need no revalidation. Can be repeated."
    ),
    quota: list[str] = typer.Option(
        [],
        "--quota",
        help="The maximum size of a bucket or a prefix, such as bucket=1TB or bucket/folder/=100GB. Writes beyond it are refused with 403, "
        "QuotaExceeded. Can be repeated.",
    ),
    memory_bytes: int = typer.Option(
        1 << 30,
        "--memory-bytes",
        min=1,
        max=1 << 50,
        help="Memory for bodies that are being fetched or uploaded. A quarter of it keeps frequently read data.",
    ),
    connections: int = typer.Option(
        1024, "--connections", min=1, max=MOST, help="The maximum number of connections. Further ones are answered with 503."
    ),
    requests: int = typer.Option(
        512,
        "--requests",
        min=1,
        max=MOST,
        help="The maximum number of concurrent requests, including responses being sent. Further ones are answered with 503.",
    ),
    idle_seconds: float = typer.Option(60.0, "--idle-seconds", min=1.0, max=86400.0, help="How long a connection may be idle."),
    lame_duck: float | None = typer.Option(
        None,
        "--lame-duck",
        min=0.0,
        max=86400.0,
        help="How many seconds to accept connections after SIGTERM while /health returns 503. 5 with --status, otherwise 0.",
        show_default=False,
    ),
    config: str = typer.Option(
        "",
        "--config",
        is_eager=True,
        callback=config_file.read,
        help="A file in TOML with these options, such as memory-bytes = 1073741824, and a table \\[option] for the store. Command-line options take precedence.",
    ),
    check: bool = typer.Option(False, "--check", help="Check the options and their files, and exit without serving or creating anything."),
    drain_seconds: float = typer.Option(
        30.0, "--drain-seconds", min=0.0, max=86400.0, help="How long requests may take to finish once the server accepts no connections."
    ),
) -> None:
    """Serve objects by the protocol of S3, from a cache of local drives. Ends on SIGTERM or Ctrl-C, after the requests that are running.

    SIGHUP reads keys and certificates again, and opens the access log again. For objects of datasets, which never change, the cold store is asked once an hour. For all others, --revalidate says how old an answer may be.
    """
    from penstock import _core

    contradictions = (
        (anonymous == bool(keys), "give either --keys FILE or --anonymous"),
        (bool(tls_certificate) != bool(tls_key), "give --tls-certificate and --tls-key together"),
        (bool(status_token) and not status, "--status-token requires --status, the address of the status page"),
        (status_tls and not status, "--status-tls requires --status, the address of the status page"),
        (status_tls and not tls_key, "--status-tls requires --tls-certificate and --tls-key"),
        (signature_v2 and anonymous, "--signature-v2 has no effect with --anonymous, which accepts no signatures"),
        (bool(immutable) and not cache, "--immutable has no effect without --cache"),
    )
    if said := next((text for is_wrong, text in contradictions if is_wrong), ""):
        raise typer.BadParameter(said)

    def ready(address: str, status_address: str | None) -> None:
        scheme = "https" if tls_key else "http"
        page = f", status at {'https' if status_tls else 'http'}://{status_address}" if status_address else ""
        print(f"serving {cold} at {scheme}://{address}{page}", file=sys.stderr, flush=True)

    given = {name: value for name, value in context.params.items() if value not in ("", None)}
    for name in ("anonymous", "cache", "tls_certificate", "tls_key", "config", "check"):
        given.pop(name, None)
    given |= dict(
        cache=",".join(cache) or None,
        tls=(tls_certificate, tls_key) if tls_key else None,
        lame_duck=(5.0 if status else 0.0) if lame_duck is None else lame_duck,
        storage_options=at.storage_options,
    )
    if check:
        _core.check_serve(json.dumps(given))
        print("the options are valid")
        return
    _core.serve(json.dumps(given), ready)

"""Signatures of version 4 as clients make them, for requests that no library would send."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import hmac
import http.client
from typing import Any

import servers

HASH_OF_NOTHING = hashlib.sha256(b"").hexdigest()


@dataclasses.dataclass
class Signer:
    """The key of a day and a region."""

    region: str = "us-east-1"
    date: str = dataclasses.field(default_factory=lambda: datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ"))

    @property
    def scope(self) -> str:
        return f"{self.date[:8]}/{self.region}/s3/aws4_request"

    def sign(self, kind: str, text: str) -> str:
        key = b"AWS4" + servers.SECRET.encode()
        for part in self.scope.split("/"):
            key = hmac.digest(key, part.encode(), "sha256")
        return hmac.digest(key, f"{kind}\n{self.date}\n{self.scope}\n{text}".encode(), "sha256").hex()

    def headers(self, server: Any, method: str, path: str, covered: list[str] | None = None, **given: str) -> dict[str, str]:
        """Return headers with a signature that covers `covered`, or all of them. Underscores in names are hyphens."""
        names = {name.replace("_", "-"): value for name, value in given.items()}
        headers = {"host": f"127.0.0.1:{server.port}", "x-amz-date": self.date, "x-amz-content-sha256": "UNSIGNED-PAYLOAD", **names}
        covered = sorted(headers) if covered is None else covered
        lines = "".join(f"{name}:{headers[name]}\n" for name in covered)
        path, _, query = path.partition("?")
        canonical = f"{method}\n{path}\n{query}\n{lines}\n{';'.join(covered)}\n{headers['x-amz-content-sha256']}"
        signature = self.sign("AWS4-HMAC-SHA256", hashlib.sha256(canonical.encode()).hexdigest())
        value = f"AWS4-HMAC-SHA256 Credential={servers.KEY}/{self.scope}, SignedHeaders={';'.join(covered)}, Signature={signature}"
        return {**headers, "authorization": value}

    def in_chunks(self, seed: str, chunks: list[bytes], trailer: str = "") -> list[bytes]:
        """Return a body in signed chunks, each as it is sent. The last one is empty, and may have a trailer."""
        sent = []
        for chunk in [*chunks, b""]:
            seed = self.sign("AWS4-HMAC-SHA256-PAYLOAD", f"{seed}\n{HASH_OF_NOTHING}\n{hashlib.sha256(chunk).hexdigest()}")
            sent.append(f"{len(chunk):x};chunk-signature={seed}\r\n".encode() + chunk + (b"\r\n" if chunk or not trailer else b""))
        if trailer:
            hashed = hashlib.sha256(trailer.encode() + b"\n").hexdigest()
            seed = self.sign("AWS4-HMAC-SHA256-TRAILER", f"{seed}\n{hashed}")
            sent.append(f"{trailer}\r\nx-amz-trailer-signature:{seed}\r\n\r\n".encode())
        return sent


def signature_of(headers: dict[str, str]) -> str:
    return headers["authorization"].rpartition("=")[2]


def answer(server: Any, method: str, target: str, headers: dict[str, Any], body: bytes = b"") -> tuple[int, bytes]:
    """Send a request with exactly these headers. A dict's list gives a header several times."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
    given = {"host": f"127.0.0.1:{server.port}", "content-length": str(len(body)), **headers}
    for name, values in given.items():
        for value in values if isinstance(values, list) else [values]:
            connection.putheader(name, value)
    connection.endheaders(body)
    response = connection.getresponse()
    text = response.read()
    connection.close()
    return response.status, text

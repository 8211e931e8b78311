"""The status of `penstock serve` with a certificate and a token, `penstock top` that reads it, and certificates that expire."""

import datetime
import http.client
import http.server
import json
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import pytest
import servers
import trustme
from typer.testing import CliRunner
from waiting import until

TOKEN = "a-long-token"


class Secure:
    """A server with a certificate, whose status needs a token."""

    def __init__(self, folder, *options, expires=None):
        self.folder, self.status = folder, servers.free_port()
        (folder / "node").mkdir()
        self.authority = trustme.CA()
        self.ca = folder / "authority.pem"
        self.authority.cert_pem.write_to_path(self.ca)
        self.issue(expires)
        servers.write_secret(folder / "token", TOKEN + "\n")
        options = (
            "--tls-certificate", str(folder / "chain.pem"), "--tls-key", str(folder / "key.pem"), "--status", f"127.0.0.1:{self.status}",
            "--lame-duck", "0", *options
        )  # fmt: skip

        class Node(servers.Penstock):
            def make_bucket(self):
                (self.folder / "data" / "penstock").mkdir()

        self.server = Node(folder / "node", "", *options)
        self.url = f"https://127.0.0.1:{self.status}"

    def issue(self, expires=None):
        issued = self.authority.issue_cert("127.0.0.1", not_after=expires)
        (self.folder / "chain.pem").write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
        servers.write_secret(self.folder / "key.pem", issued.private_key_pem.bytes().decode())

    def get(self, path, token=TOKEN, ca=True):
        """Return the status and the body of an answer, from a client that verifies the certificate."""
        request = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {token}"} if token else {})
        trusted = ssl.create_default_context(cafile=str(self.ca) if ca else None)
        try:
            with urllib.request.urlopen(request, timeout=300, context=trusted) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def said(self):
        return (self.folder / "node" / "log").read_text()

    def expiry(self):
        """Return the time of expiry that the status shows."""
        counts = self.get("/metrics")[1]
        return int(re.search(r"^penstock_certificate_expires_seconds\{file=\"(.*)\"\} (\d+)$", counts, re.M)[2])


@pytest.fixture
def secure(tmp_path):
    started = []

    def start(*options, **more):
        started.append(Secure(tmp_path, *options, **more))
        return started[-1]

    yield start
    for one in started:
        one.server.stop()


@pytest.fixture
def node(secure, tmp_path):
    return secure("--status-tls", "--status-token", str(tmp_path / "token"))


def test_the_status_is_verified_and_needs_its_token(node):
    assert node.get("/health", token="") == (200, "ok\n")
    for path in ("/", "/metrics", "/status.json"):
        assert [node.get(path, token)[0] for token in ("", "a-long-tokem", TOKEN + "x", TOKEN[:-1])] == [401] * 4
        code, text = node.get(path)
        assert code == 200 and text
    until(lambda: json.loads(node.get("/status.json")[1])["connections"] == 0, "the end of the connections is noticed")
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        node.get("/health", ca=False)
    # A client without TLS gets no page.
    with pytest.raises((OSError, http.client.HTTPException)):
        urllib.request.urlopen(f"http://127.0.0.1:{node.status}/health", timeout=300)


def test_half_closed_clients_of_the_encrypted_status_get_the_page_once(node):
    context = ssl.create_default_context(cafile=str(node.ca))
    # Both sides are memory, so that the end of what the client sends goes before the answer.
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    session = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with socket.create_connection(("127.0.0.1", node.status), 300) as connection:

        def flush():
            if data := outgoing.read():
                connection.sendall(data)

        def exchanged(call):
            while True:
                try:
                    found = call()
                    flush()
                    return found
                except ssl.SSLWantReadError:
                    flush()
                    part = connection.recv(1 << 16)
                    incoming.write(part) if part else incoming.write_eof()

        exchanged(session.do_handshake)
        exchanged(lambda: session.write(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"))
        connection.shutdown(socket.SHUT_WR)
        received = b""
        try:
            while part := exchanged(lambda: session.read(1 << 16)):
                received += part
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            pass
    assert received.count(b"HTTP/1.1 200") == 1 and received.endswith(b"ok\n")


def top(*arguments):
    from penstock.cli import app

    found = CliRunner().invoke(app, ["top", *map(str, arguments), "--once"], env={"COLUMNS": "400"})
    return found.exit_code, found.stdout, " ".join(re.sub(r"[│╭╮╰╯─]", " ", found.stderr).split())


def test_top_reads_an_encrypted_status_with_a_token(node, tmp_path):
    code, shown, said = top(node.url, "--token", tmp_path / "token", "--ca", node.ca)
    assert code == 0 and "sent 0 B/s" in shown and "0 refused" in shown, said
    assert top(node.url + "/", "--token", tmp_path / "token", "--ca", node.ca)[0] == 0
    servers.write_secret(tmp_path / "wrong", "another-token")
    servers.write_secret(tmp_path / "odd", "line\nline")
    servers.write_secret(tmp_path / "empty", "\n")
    (tmp_path / "open").write_text(TOKEN)
    (tmp_path / "open").chmod(0o644)
    (tmp_path / "no.pem").write_text("no certificate")
    for arguments, expected in [
        ((node.url, "--ca", node.ca), "a token is required; give --token FILE"),
        ((node.url, "--ca", node.ca, "--token", tmp_path / "wrong"), "the token is wrong"),
        ((node.url, "--token", tmp_path / "token"), "give --ca FILE"),
        ((node.url, "--token", tmp_path / "open", "--ca", node.ca), "its mode 644 lets others use it; run chmod 600"),
        ((node.url, "--token", tmp_path / "missing", "--ca", node.ca), "No such file"),
        ((node.url, "--token", tmp_path / "odd", "--ca", node.ca), "one line of ASCII characters"),
        ((node.url, "--token", tmp_path / "empty", "--ca", node.ca), "one line of ASCII characters"),
        ((node.url, "--ca", tmp_path / "no.pem"), "give a file in PEM format"),
        ((node.url, "--ca", tmp_path / "missing"), "cannot use the certificates in"),
        ((f"127.0.0.1:{node.status}", "--ca", node.ca), "--ca verifies the certificate of an https:// address"),
        ((f"127.0.0.1:{node.status}",), "with https:// if --status-tls is set"),
        ((f"ftp://127.0.0.1:{node.status}",), "write it as 127.0.0.1:9101"),
    ]:
        code, shown, said = top(*arguments)
        assert code == 2 and shown == "" and expected in said, (arguments, said)
        assert TOKEN not in said


def test_a_status_elsewhere_does_not_get_the_token(tmp_path, node):
    """A server that answers with another address must not learn more than its own token."""
    seen = []

    class Elsewhere(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append(self.headers.get("Authorization"))
            self.send_response(302 if self.path == "/status.json" else 404)
            self.send_header("Location", f"http://127.0.0.1:{self.server.server_port}/other")
            self.end_headers()

        def log_message(self, *_):
            """Print nothing."""

    other = http.server.ThreadingHTTPServer(("127.0.0.1", servers.free_port()), Elsewhere)
    threading.Thread(target=other.serve_forever, daemon=True).start()
    try:
        code, _, said = top(f"http://127.0.0.1:{other.server_port}", "--token", tmp_path / "token")
    finally:
        other.shutdown()
        other.server_close()
    assert code == 2 and "404" in said and seen == [f"Bearer {TOKEN}", None]


def test_certificates_that_expire_are_counted_and_noted(secure, tmp_path):
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    soon = now + datetime.timedelta(days=13)
    node = secure("--status-tls", expires=soon)
    assert node.expiry() == int(soon.timestamp())
    assert re.search(r"the certificate `.*chain.pem` expires in 1[23]\.\d days; replace the files and send SIGHUP", node.said())
    # `--check` says it, too.
    command = [sys.executable, "-m", "penstock", "serve", "--cold", str(tmp_path / "node" / "data"), "--anonymous", "--check"]
    found = subprocess.run(
        [*command, "--tls-certificate", tmp_path / "chain.pem", "--tls-key", tmp_path / "key.pem"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0 and "expires in 1" in found.stderr and found.stdout == "the options are valid\n"
    later = now + datetime.timedelta(days=400)
    node.issue(later)
    node.server.process.send_signal(signal.SIGHUP)
    until(lambda: node.expiry() == int(later.timestamp()), "the new certificate counts")
    assert node.said().count("the certificate `") == 1, "nothing is said of one that is valid for long"
    node.issue(now - datetime.timedelta(days=1))
    node.server.process.send_signal(signal.SIGHUP)
    until(lambda: "has expired, and clients will refuse it" in node.said(), "a certificate that has expired is noted")
    # It is used nevertheless, and clients see why they cannot connect.
    with pytest.raises(urllib.error.URLError, match="certificate has expired"):
        node.get("/health")


def test_a_certificate_that_is_replaced_by_a_wrong_one_stays(secure):
    node = secure("--status-tls")
    before = node.expiry()
    (node.folder / "chain.pem").write_text("no certificate")
    node.server.process.send_signal(signal.SIGHUP)
    until(lambda: "the previous one remains in use" in node.said(), "the wrong file is noted")
    assert node.expiry() == before

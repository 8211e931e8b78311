"""What `penstock serve` does with odd clients and odd cold stores: empty bodies after `Expect`, bytes now and then, pages of portals."""

import concurrent.futures
import contextlib
import http.server
import json
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest
import servers


@pytest.fixture
def anonymous(tmp_path):
    """Return a function that starts a server without keys."""
    started = []

    def start(cold="", *options, environment=None):
        folder = tmp_path / f"served-{len(started)}"
        folder.mkdir()
        started.append(servers.Penstock(folder, cold, "--anonymous", *options, environment=environment))
        (folder / "data" / "penstock").mkdir(exist_ok=True)
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.mark.parametrize(("length", "closes"), [(0, True), (3, False)])
def test_an_empty_body_after_expect_ends_the_connection(anonymous, length, closes):
    """botocore reads the 100 of a later request as the answer to it otherwise, waits, and fails."""
    server = anonymous()
    head = f"PUT /penstock/a HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {length}\r\nExpect: 100-continue\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), 300) as connection:
        connection.sendall(head.encode())
        if length:
            assert connection.recv(1 << 16) == b"HTTP/1.1 100 Continue\r\n\r\n"
            connection.sendall(b"abc")
        answer = connection.recv(1 << 16).decode().lower()
    assert answer.startswith("http/1.1 200") and ("connection: close" in answer) == closes
    assert (server.folder / "data" / "penstock" / "a").stat().st_size == length


def test_a_request_after_a_refused_one_is_not_read_as_its_body(anonymous):
    """A client that waits for 100 and is refused sends its next request. Whatever of that were taken for the body would be lost, or run as a third."""
    server = anonymous("", "--quota", "penstock=1MB")
    server.put("penstock", "full", bytes(1_000_000))
    refused = b"PUT /penstock/a HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1\r\nExpect: 100-continue\r\n\r\n"
    for path in (b"a", b"a?unknown", b"%00"):
        for wait in (0, 0.2):
            with socket.create_connection(("127.0.0.1", server.port), 300) as connection:
                connection.sendall(refused.replace(b"/a", b"/" + path))
                time.sleep(wait)  # Both requests come at once, or one after the other.
                connection.sendall(b"GET /penstock/full HTTP/1.1\r\nHost: 127.0.0.1\r\nRange: bytes=0-0\r\n\r\n")
                answers = b""
                with contextlib.suppress(ConnectionError):
                    while more := connection.recv(1 << 16):
                        answers += more
            assert answers.startswith((b"HTTP/1.1 403", b"HTTP/1.1 400", b"HTTP/1.1 501")) and answers.count(b"HTTP/1.1 ") == 1, answers
            assert b"connection: close" in answers.lower()


def test_a_client_that_sends_a_byte_now_and_then_is_cut(anonymous):
    server = anonymous("", "--idle-seconds", "1")
    with socket.create_connection(("127.0.0.1", server.port), 300) as connection:
        connection.sendall(b"PUT /penstock/slow HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000000\r\n\r\n")
        connection.settimeout(0.2)
        with pytest.raises(OSError):
            while True:
                connection.sendall(b"x")
                try:
                    assert connection.recv(1 << 16).startswith(b"HTTP/1.1 4")
                    raise OSError("answered")
                except TimeoutError:
                    time.sleep(0.1)  # A client that sends slowly.
    assert not (server.folder / "data" / "penstock" / "slow").exists()


@pytest.mark.parametrize("cached", [False, True])
def test_a_page_of_a_portal_is_not_an_object(anonymous, tmp_path, cached):
    class Portal(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = b"<html>please log in</html>"
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body if self.command == "GET" else b"")

        do_HEAD = do_GET

        def log_message(self, *_):
            """Print nothing."""

    portal = http.server.ThreadingHTTPServer(("127.0.0.1", servers.free_port()), Portal)
    threading.Thread(target=portal.serve_forever, daemon=True).start()
    environment = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{portal.server_port}", "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}
    options = ("--cache", f"{tmp_path / 'cache'}:10MB") if cached else ()
    server = anonymous("s3://penstock", *options, environment={**environment, "AWS_REGION": "us-east-1"})
    try:
        for method in ("GET", "HEAD"):
            with pytest.raises(urllib.error.HTTPError) as raised:
                urllib.request.urlopen(urllib.request.Request(f"{server.endpoint}/penstock/a", method=method), timeout=300)
            assert raised.value.code == 503 and (method == "HEAD" or b"web page" in raised.value.read())
    finally:
        portal.shutdown()
        portal.server_close()


def test_half_closed_clients_of_the_status_get_the_page_once(anonymous):
    status = servers.free_port()
    anonymous("", "--status", f"127.0.0.1:{status}")
    with socket.create_connection(("127.0.0.1", status), 300) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        received = b""
        while part := connection.recv(1 << 16):
            received += part
    assert received.count(b"HTTP/1.1 200") == 1 and received.endswith(b"ok\n")


def test_many_batches_of_a_folder_do_not_wait_for_each_other(anonymous, tmp_path):
    """Reads of the cache wait in threads for files of the folder, which are read in such threads as well. More than there are threads must all end."""
    server = anonymous("", "--cache", f"{tmp_path / 'cache'}:1GB")
    size, batches, ranges = 64 << 10, 60, 40
    with open(server.folder / "data" / "penstock" / "large", "wb") as file:
        file.truncate(batches * ranges * size)

    def read(number):
        begins = range(number * size, batches * ranges * size, batches * size)
        asked = {"ranges": [{"key": "large", "begin": begin, "end": begin + size} for begin in begins]}
        with urllib.request.urlopen(f"{server.endpoint}/penstock/-?batch", json.dumps(asked).encode(), timeout=300) as answer:
            return len(answer.read())

    with concurrent.futures.ThreadPoolExecutor(batches) as threads:
        assert min(threads.map(read, range(batches))) > ranges * size
    server.process.terminate()
    assert server.process.wait(300) == 0

"""`penstock serve` when clients, cold stores, drives and the machine fail."""

import concurrent.futures
import contextlib
import hashlib
import http.client
import http.server
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import botocore.exceptions
import pytest
import servers
from botocore.config import Config
from waiting import until

MIB = 1 << 20


@pytest.fixture
def served(tmp_path):
    """Return a function that starts a server before a folder or another store, with a cache if asked."""
    started = []

    def start(cold="", *options, cache=None, environment=None):
        folder = tmp_path / f"served-{len(started)}"
        folder.mkdir()
        drives = ("--cache", f"{folder / 'cache'}:{cache}") if cache else ()
        started.append(servers.Penstock(folder, cold, *drives, *options, environment=environment))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.mark.parametrize("is_damaged", [False, True])
def test_what_a_drive_has_does_not_wait_behind_a_slow_cold_store(served, proxy, minio, is_damaged):
    """Damaged pages are fetched from the cold store again. Reads of sound pages do not wait for that."""
    size, batches = 64 << 10, 18
    minio.client().put_object(Bucket="penstock", Key="warm", Body=b"warm" * 10_000)
    minio.client().put_object(Bucket="penstock", Key="cold", Body=bytes(16 * batches * size))
    environment, port = {**minio.environment, "AWS_ENDPOINT_URL": proxy.endpoint}, servers.free_port()
    options = ("--anonymous", "--revalidate", "never", "--status", f"127.0.0.1:{port}", "--lame-duck", "0")
    server = served("s3://", *options, cache="1GB", environment=environment)
    url = f"{server.endpoint}/penstock"

    def waits():
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=300) as answer:
            return int(re.search(r"^penstock_cold_waits (\d+)", answer.read().decode(), re.MULTILINE)[1])

    for key, last in (("warm", 39999), ("cold", 16 * batches * size - 1 if is_damaged else 39999)):
        with urllib.request.urlopen(urllib.request.Request(f"{url}/{key}", headers={"Range": f"bytes=0-{last}"}), timeout=300) as answer:
            assert len(answer.read()) == last + 1
    server.process.terminate()
    server.process.wait(300)
    server.restart()  # Nothing is in memory.
    os.sync()
    for path in (server.folder / "cache").rglob("*"):
        if path.is_file():
            with path.open("r+b") as file:
                if is_damaged and path.stat().st_size > 16 * batches * size:
                    file.write(b"\1" * (16 * batches * size))
                    os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    proxy.faults("delay_ms=15000")
    answered = []

    def read(number):
        ranges = [{"key": "cold", "begin": size * at, "end": size * (at + 1)} for at in range(16 * number, 16 * (number + 1))]
        with urllib.request.urlopen(f"{url}/-?batch", json.dumps({"ranges": ranges}).encode(), timeout=300) as answer:
            answer.read(size)
            answered.append(number)
            return len(answer.read())

    with concurrent.futures.ThreadPoolExecutor(batches) as threads:
        reads = [threads.submit(read, number) for number in range(batches)]
        until(lambda: waits() >= 16 * batches, "the reads wait")
        with urllib.request.urlopen(f"{url}/warm", timeout=300) as answer:
            assert answer.read() == b"warm" * 10_000
        assert not answered
        assert all(read.result() > 0 for read in reads)
    proxy.faults()


def test_too_many_requests_are_503(served, proxy, minio):
    """Clients of S3 do not know 429."""
    server = served("s3://", environment={**minio.environment, "AWS_ENDPOINT_URL": proxy.endpoint})
    client = server.client()
    proxy.faults("toomany=1000")
    calls = [
        lambda: client.list_objects_v2(Bucket="penstock"),
        lambda: client.put_object(Bucket="penstock", Key="busy", Body=b"1"),
        lambda: client.head_object(Bucket="penstock", Key="busy"),
        lambda: client.copy_object(Bucket="penstock", Key="copy", CopySource="penstock/busy"),
    ]
    found = set()
    client.meta.events.register("after-call.s3", lambda http_response, **_: found.add(http_response.status_code))
    client.meta.events.register("needs-retry.s3", lambda response, **_: response and found.add(response[0].status_code), unique_id="seen")
    for call in 5 * calls:
        with contextlib.suppress(botocore.exceptions.ClientError):
            call()
    assert 503 in found and found <= {200, 404, 503}, found
    proxy.faults()


def test_many_readers_of_a_cold_object_fetch_it_once(served, proxy, minio):
    body = os.urandom(9 * MIB)
    minio.client().put_object(Bucket="penstock", Key="herd", Body=body)
    proxy.faults()
    server = served("s3://", "--revalidate", "never", cache="100MB", environment={**minio.environment, "AWS_ENDPOINT_URL": proxy.endpoint})
    until(lambda: proxy.counts()["requests"] == 1, "the server has tried the cold store")
    proxy.faults("delay_ms=50")
    client = server.client()
    with concurrent.futures.ThreadPoolExecutor(24) as threads:
        got = list(threads.map(lambda _: client.get_object(Bucket="penstock", Key="herd")["Body"].read() == body, range(24)))
    assert got == [True] * 24
    # The first MiB with the version, 3, 4 and 1 MiB, and the checksums that boto3 asks for.
    assert proxy.counts()["requests"] == 5
    proxy.faults()


class WrongStore(http.server.BaseHTTPRequestHandler):
    """A cold store with an object of 3 MiB, which misbehaves as its server's `fault` says."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.do_GET(head=True)

    def do_PUT(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.seen += 1
        slow = self.server.fault == "slow down" and self.server.seen % 3
        if not slow:
            self.server.put = body
        text = b"<Error><Code>SlowDown</Code><Message>later</Message></Error>" if slow else b""
        self.send_response(503 if slow else 200)
        self.send_header("ETag", f'"{hashlib.md5(body).hexdigest()}"')
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self, head=False):
        server = self.server
        server.seen += 1
        fault, body = server.fault, server.body
        if fault in ("403", "404", "500", "503"):
            self.send_response(int(fault))
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        given = self.headers.get("Range")
        first, last = 0, len(body) - 1
        if given and fault != "ignores ranges":
            first, last = given.removeprefix("bytes=").split("-")
            first, last = int(first), min(int(last), len(body) - 1)
        etag = server.etag
        if fault == "changes" and first > 0:
            etag = '"another"'
        wanted = self.headers.get("If-Match")
        if wanted and wanted != etag and fault != "ignores conditions":
            self.send_response(412)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        part = body[first : last + 1]
        self.send_response(206 if given and fault != "ignores ranges" else 200)
        if given and fault != "ignores ranges":
            shift = 1 if fault == "other range" else 0
            self.send_header("Content-Range", f"bytes {first + shift}-{last + shift}/{len(body)}")
        self.send_header("Content-Length", str(len(part)))
        self.send_header("ETag", etag)
        self.send_header("Last-Modified", "Fri, 27 Nov 2026 10:00:00 GMT")
        self.end_headers()
        if not head:
            short = fault == "stalls" or (fault == "short" and server.seen % 2)
            self.wfile.write(part[: len(part) // 2] if short else part)
            if fault == "stalls":
                self.rfile.read(1)  # Until the client closes the connection.
            self.close_connection = bool(short)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def wrong_store():
    store = http.server.ThreadingHTTPServer(("127.0.0.1", servers.free_port()), WrongStore)
    store.fault, store.seen, store.etag, store.body = "", 0, '"version-1"', random.Random(1).randbytes(3 * MIB)
    threading.Thread(target=store.serve_forever, daemon=True).start()
    yield store
    store.shutdown()
    store.server_close()


def environment_of(store):
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{store.server_port}", "AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_REGION": "us-east-1"
    }  # fmt: skip


def read(client, key="a", **asked):
    """Return a body, or the status of an error, or `broken` if the connection broke off."""
    try:
        return client.get_object(Bucket="bucket", Key=key, **asked)["Body"].read()
    except botocore.exceptions.ClientError as error:
        return error.response["ResponseMetadata"]["HTTPStatusCode"]
    except (botocore.exceptions.ConnectionClosedError, botocore.exceptions.IncompleteReadError, botocore.exceptions.ResponseStreamingError,
            botocore.exceptions.HTTPClientError):  # fmt: skip
        return "broken"


@pytest.mark.parametrize(
    ("fault", "expected"),
    [("", None), ("short", None), ("ignores ranges", 503), ("ignores conditions", None), ("403", 403), ("404", 404), ("500", 503), ("503", 503),
     ("changes", "broken"), ("other range", 503)],
)  # fmt: skip
def test_a_wrong_cold_store_never_gives_wrong_bytes(served, wrong_store, fault, expected):
    wrong_store.fault = fault
    server = served("s3://", cache="50MB", environment=environment_of(wrong_store))
    client = boto(server)
    for _ in range(3 if expected is None else 1):  # Requests that fail are sent again with growing waits.
        found = read(client)
        assert found == (wrong_store.body if expected is None else expected)
    # When the store works again, so does the server.
    wrong_store.fault = ""
    assert read(client) == wrong_store.body


def boto(server, **config):
    """Return a client that tries once."""
    import boto3

    return boto3.client(
        "s3", endpoint_url=server.endpoint, aws_access_key_id=servers.KEY, aws_secret_access_key=servers.SECRET, region_name="us-east-1",
        config=Config(retries={"total_max_attempts": 1}, **config)
    )  # fmt: skip


def test_a_changed_object_is_seen_as_the_policy_says(served, wrong_store):
    old, new = wrong_store.body, random.Random(2).randbytes(3 * MIB)
    clients = {
        policy: boto(served("s3://", "--revalidate", policy, cache="50MB", environment=environment_of(wrong_store)))
        for policy in ("always", "never", "1s")
    }
    for client in clients.values():
        assert read(client) == old
    wrong_store.body, wrong_store.etag = new, '"version-2"'
    assert read(clients["always"]) == new
    assert read(clients["never"]) == old
    time.sleep(1.1)  # The answer of the first read is valid for a second.
    assert read(clients["1s"]) == new


def test_what_is_cached_is_not_received_again_after_a_restart(served, wrong_store):
    """The cold store is asked for the version, but the body of its answer, which never ends here, is not waited for."""
    server = served("s3://", "--revalidate", "never", cache="50MB", environment=environment_of(wrong_store))
    assert read(boto(server)) == wrong_store.body
    server.process.kill()
    server.process.wait()
    wrong_store.fault = "stalls"
    server.restart()
    before = wrong_store.seen
    assert read(boto(server)) == wrong_store.body
    assert wrong_store.seen - before <= 3, "the server's first request, one for the version, and one for the checksums that boto3 asks for"


def test_a_hanging_cold_store_is_the_limit(served, minio):
    """While a put waits for the cold store, the verdict names it."""
    status = f"127.0.0.1:{servers.free_port()}"
    server = served("s3://", "--status", status, environment=minio.environment)
    client = boto(server)
    client.put_object(Bucket="penstock", Key="hangs", Body=b"x")
    minio.process.send_signal(signal.SIGSTOP)
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            put = pool.submit(client.put_object, Bucket="penstock", Key="hangs", Body=b"y")

            def sample():
                return json.load(urllib.request.urlopen(f"http://{status}/status.json", timeout=300))

            until(lambda: sample()["verdict"] == "cold store" and sample()["cold_running"] == 1, "the verdict names the cold store")
            minio.process.send_signal(signal.SIGCONT)
            put.result(60)
    finally:
        minio.process.send_signal(signal.SIGCONT)
    until(lambda: sample()["verdict"] != "cold store", "the verdict changes")


def test_corrupt_pages_are_fetched_again(served, minio):
    body = random.Random(3).randbytes(5 * MIB)
    minio.client().put_object(Bucket="penstock", Key="flipped", Body=body)
    server = served("s3://", "--revalidate", "never", cache="50MB", environment=minio.environment)
    client = boto(server)
    assert client.get_object(Bucket="penstock", Key="flipped")["Body"].read() == body
    files = [path for path in (server.folder / "cache" / "stores").rglob("*") if path.is_file()]
    assert files
    choose = random.Random(4)
    for _ in range(40):
        for path in files:
            with path.open("r+b") as file:
                for _ in range(8):
                    at = choose.randrange(path.stat().st_size)
                    file.seek(at)
                    byte = file.read(1)[0]
                    file.seek(at)
                    file.write(bytes([byte ^ (1 << choose.randrange(8))]))
        first = choose.randrange(len(body))
        assert client.get_object(Bucket="penstock", Key="flipped", Range=f"bytes={first}-")["Body"].read() == body[first:]
    assert client.get_object(Bucket="penstock", Key="flipped")["Body"].read() == body


def raw(server, text, timeout=300):
    """Send bytes and return all that is answered."""
    with socket.create_connection(("127.0.0.1", server.port), timeout) as connection:
        connection.sendall(text)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(65536):
                answer += part
        return answer


@pytest.mark.long
def test_odd_requests_are_refused(served):
    server = served("", "--anonymous", "--idle-seconds", "1")
    (server.folder / "data" / "penstock").mkdir()
    end = b"Host: localhost\r\nConnection: close\r\n\r\n"
    cases = [
        (b"GET /penstock/../../etc/passwd HTTP/1.1\r\n" + end, b"404"),
        (b"GET /penstock/%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\n" + end, b"404"),
        (b"GET /penstock/%ff HTTP/1.1\r\n" + end, b"400"),
        (b"GET /penstock/" + b"k" * 1025 + b" HTTP/1.1\r\n" + end, b"400"),
        (b"GET /..%2f/x HTTP/1.1\r\n" + end, b"400"),
        (b"GET /.penstock-serve/lock HTTP/1.1\r\n" + end, b"400"),
        (b"GET /penstock/a HTTP/1.1\r\nX: " + b"y" * 200_000 + b"\r\n" + end, b"431"),
        (b"PUT /penstock/a HTTP/1.1\r\nContent-Length: -1\r\n" + end, b"400"),
        (b"PUT /penstock/a HTTP/1.1\r\nContent-Length: 99999999999999\r\n" + end, b"400"),
        (b"PUT /penstock/a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + end + b"zz\r\n", b"411"),
        (b"BREW /penstock/a HTTP/1.1\r\n" + end, b"501"),
        (b"POST /penstock?delete HTTP/1.1\r\nContent-Length: 5\r\n" + end + b"<a><b", b"400"),
        (b"\x16\x03\x01\x02\x00", b""),
        (b"POST /penstock HTTP/1.1\r\nContent-Type: multipart/form-data; boundary=b\r\nContent-Length: 9\r\n" + end, b"501"),
        # A page in a browser can send requests to this machine, under any name.
        (b"GET /penstock HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n", b"403"),
        (b"GET /penstock HTTP/1.1\r\nOrigin: http://evil.example\r\n" + end, b"403"),
        # Without keys, no signature is verified, and no signed chunks can be taken apart.
        (
            b"PUT /penstock/a HTTP/1.1\r\nx-amz-content-sha256: STREAMING-UNSIGNED-PAYLOAD-TRAILER\r\nContent-Length: 3\r\n" + end + b"abc",
            b"400",
        ),
        (b"GET /penstock/none?X-Amz-Signature=0 HTTP/1.1\r\n" + end, b"404"),
    ]
    for text, status in cases:
        answer = raw(server, text)
        assert answer[9:].startswith(status) or (not status and not answer.startswith(b"HTTP/1.1 2")), (text[:80], answer[:200])
    # A body that ends early leaves nothing behind, and a client that sends nothing is cut off.
    assert b" 200 " not in raw(server, b"PUT /penstock/a HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nshort")
    assert raw(server, b"") == b"" and b" 200 " not in raw(
        server, b"GET /penstock/a HT"
    )  # If it is not cut off, this fails after its own time.
    assert list((server.folder / "data" / "penstock").iterdir()) == []
    assert list((server.folder / "data" / ".penstock-serve" / "temporary").iterdir()) == []


def test_too_many_connections_and_requests_are_refused(served):
    server = served("", "--connections", "4", "--requests", "2")
    held, answer = [], b""
    while not answer.startswith(b"HTTP/1.1 503"):
        held.append(socket.create_connection(("127.0.0.1", server.port), 300))
        with contextlib.suppress(ConnectionError):
            held[-1].sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = held[-1].recv(1000)
        assert answer.startswith((b"HTTP/1.1 403", b"HTTP/1.1 503"))
    # The client that made the bucket may still have a connection.
    assert 4 <= len(held) <= 5 and b"retry-after: 1" in answer.lower()
    for connection in held:
        connection.close()
    client = server.client()
    client.put_object(Bucket="penstock", Key="a", Body=bytes(40 * MIB))

    def slow():
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
        url = client.generate_presigned_url("get_object", {"Bucket": "penstock", "Key": "a"})
        connection.request("GET", url.partition(str(server.port))[2])
        return connection, connection.getresponse()

    reading = [slow() for _ in range(2)]
    assert [response.status for _, response in reading] == [200, 200]
    refused, response = slow()
    assert response.status == 503 and response.getheader("Retry-After") == "1" and b"SlowDown" in response.read()
    refused.close()
    assert all(len(response.read()) == 40 * MIB for _, response in reading)
    assert slow()[1].status == 200


def test_sigterm_lets_running_requests_end(served):
    status = f"127.0.0.1:{servers.free_port()}"
    server = served("", "--drain-seconds", "20", "--status", status)
    client = server.client()
    body = os.urandom(60 * MIB)
    client.put_object(Bucket="penstock", Key="a", Body=body)
    stream = client.get_object(Bucket="penstock", Key="a")["Body"]
    begun = stream.read(MIB)
    # A request runs until its response is sent.
    running = lambda: json.load(urllib.request.urlopen(f"http://{status}/status.json", timeout=300))["running"]  # noqa: E731
    until(lambda: running() == 1, "the sample of the last second has the request")
    assert urllib.request.urlopen(f"http://{status}/health", timeout=300).read() == b"ok\n"
    server.process.send_signal(signal.SIGTERM)

    def is_closed():
        try:
            socket.create_connection(("127.0.0.1", server.port), 1).close()
        except OSError:
            return True
        return False

    until(is_closed, "no new connections are accepted")
    # Balancers learn that it ends.
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(f"http://{status}/health", timeout=300)
    assert raised.value.code == 503 and raised.value.read() == b"draining\n"
    assert begun + stream.read() == body
    assert server.process.wait(300) == 0


WRITER = """
import hashlib, sys, boto3, botocore.config, random, pathlib
endpoint, seed, log = sys.argv[1:]
client = boto3.client("s3", endpoint_url=endpoint, aws_access_key_id="penstock-test", aws_secret_access_key="penstock-test-secret",
                      region_name="us-east-1", config=botocore.config.Config(retries={"total_max_attempts": 1}))
choose, log = random.Random(seed), open(log, "a", buffering=1)
for number in range(10**6):
    key = choose.choice(["a", "a/b", "a/b/c", "d", f"d/{choose.randrange(20)}", f"e/{choose.randrange(20)}"]) + f"-{seed}"
    body = random.Random(f"{seed} {number}").randbytes(choose.choice([0, 10, 5000, 200_000]))
    log.write(f"begin {key} {number}\\n")
    if choose.random() < 0.2:
        upload = client.create_multipart_upload(Bucket="penstock", Key=key)["UploadId"]
        etag = client.upload_part(Bucket="penstock", Key=key, UploadId=upload, PartNumber=1, Body=body)["ETag"]
        client.complete_multipart_upload(Bucket="penstock", Key=key, UploadId=upload, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": etag}]})
    elif choose.random() < 0.2:
        client.delete_object(Bucket="penstock", Key=key)
        log.write(f"deleted {key} {number}\\n")
        continue
    else:
        client.put_object(Bucket="penstock", Key=key, Body=body)
    log.write(f"done {key} {number} {hashlib.md5(body).hexdigest()}\\n")
    if choose.random() < 0.5:
        assert client.get_object(Bucket="penstock", Key=key)["Body"].read() == body
"""


def killed_rounds(served, tmp_path, rounds, cold, environment, is_written_back=False):
    """Kill the server while two writers use it, again and again, and compare the objects with the acknowledged writes."""
    seed = random.randrange(10**6)
    back = ("--write-back", f"{tmp_path / 'pending'}:50MB") if is_written_back else ()
    server = served(cold, *back, cache="20MB", environment=environment)
    if cold:
        with contextlib.suppress(botocore.exceptions.ClientError):
            server.client().create_bucket(Bucket="penstock")
    choose = random.Random(seed)
    for round_number in range(rounds):
        logs = [tmp_path / f"log-{seed}-{round_number}-{writer}" for writer in range(2)]
        names = [f"{round_number}x{writer}x{seed}" for writer in range(2)]
        writers = [
            subprocess.Popen([sys.executable, "-c", WRITER, server.endpoint, name, str(log)], stderr=subprocess.DEVNULL)
            for name, log in zip(names, logs, strict=True)
        ]
        until(lambda logs=logs: all(log.exists() and "done" in log.read_text() for log in logs), "both write")
        time.sleep(choose.random() * 0.5)  # The moment of the kill.
        server.process.kill()
        server.process.wait()
        for writer in writers:
            writer.wait(300)
        began = time.monotonic()
        server.restart()
        restart_seconds = time.monotonic() - began
        client = server.client()
        for name, log in zip(names, logs, strict=True):
            state, open_number = {}, {}
            for line in log.read_text().splitlines():
                word, key, number, *digest = line.split()
                if word == "begin":
                    open_number[key] = int(number)
                else:
                    state[key] = (int(number), digest[0] if digest else None)
                    open_number.pop(key, None)
            for key, (number, digest) in state.items():
                # Any write that was not acknowledged may have happened.
                bodies = [digest]
                if key in open_number:
                    sizes = (0, 10, 5000, 200_000)
                    bodies.append(None)
                    bodies += [hashlib.md5(random.Random(f"{name} {open_number[key]}").randbytes(size)).hexdigest() for size in sizes]
                found = read_digest(client, key)
                assert found in bodies, (key, number, found, bodies)
    return restart_seconds


def read_digest(client, key):
    try:
        return hashlib.md5(client.get_object(Bucket="penstock", Key=key)["Body"].read()).hexdigest()
    except botocore.exceptions.ClientError as error:
        assert error.response["Error"]["Code"] == "NoSuchKey"
        return None


@pytest.mark.long
@pytest.mark.parametrize("kind", ["folder", "minio", "written back"])
def test_kill_loses_no_acknowledged_write(served, tmp_path, kind, request):
    environment = None if kind == "folder" else request.getfixturevalue("minio").environment
    killed_rounds(served, tmp_path, 4, "" if kind == "folder" else "s3://", environment, kind == "written back")


@pytest.mark.soak
def test_kill_at_many_moments_loses_no_acknowledged_write(served, tmp_path, minio):
    for cold, environment, is_written_back in (("", None, False), ("s3://", minio.environment, False), ("s3://", minio.environment, True)):
        killed_rounds(served, tmp_path, 250, cold, environment, is_written_back)


def test_the_access_log_and_messages_may_share_a_file(tmp_path):
    (tmp_path / "served" / "bucket").mkdir(parents=True)
    port, path = servers.free_port(), tmp_path / "output"
    command = [sys.executable, "-m", "penstock", "serve", "--cold", str(tmp_path / "served"), "--anonymous", "--access-log", "-"]
    with path.open("wb") as output:
        process = subprocess.Popen([*command, "--listen", f"127.0.0.1:{port}"], stdout=output, stderr=output)
    until(lambda: b"serving" in path.read_bytes(), "it serves")
    for _ in range(3):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/bucket?list-type=2", timeout=300).close()
    until(lambda: path.read_bytes().count(b"\n") == 4, "three requests are logged")
    process.terminate()
    assert process.wait(300) == 0
    serving, *lines, ending = path.read_text().splitlines()
    assert serving.startswith("serving ") and ending.startswith("stopping") and len(lines) == 3
    assert [json.loads(line)["status"] for line in lines] == [200] * 3


def test_a_lost_cache_only_costs_time(served, minio):
    body = os.urandom(2 * MIB)
    minio.client().put_object(Bucket="penstock", Key="lost", Body=body)
    status = f"127.0.0.1:{servers.free_port()}"
    server = served("s3://", "--status", status, cache="50MB", environment=minio.environment)
    client = boto(server)
    assert client.get_object(Bucket="penstock", Key="lost")["Body"].read() == body
    os.rename(server.folder / "cache", server.folder / "gone")
    pathlib.Path(server.folder / "cache").write_bytes(b"not a folder")
    for _ in range(3):
        assert client.get_object(Bucket="penstock", Key="lost")["Body"].read() == body
    minio.client().put_object(Bucket="penstock", Key="new", Body=body)
    assert client.get_object(Bucket="penstock", Key="new")["Body"].read() == body

    def sample():
        return json.load(urllib.request.urlopen(f"http://{status}/status.json", timeout=300))

    until(lambda: not sample()["drives"][0]["is_usable"], "the status shows that the folder is gone")


def test_a_put_is_sent_again_when_the_cold_store_is_busy(served, wrong_store):
    client = boto(served("s3://", environment=environment_of(wrong_store)))
    until(lambda: wrong_store.seen, "the server has tried the cold store")
    wrong_store.fault, wrong_store.seen = "slow down", 0
    client.put_object(Bucket="bucket", Key="a", Body=b"again and again")
    assert (wrong_store.put, wrong_store.seen) == (b"again and again", 3)
    # A put with a condition may have succeeded although its response was lost, so only the client may send it again.
    wrong_store.seen = 0
    with pytest.raises(botocore.exceptions.ClientError) as raised:
        client.put_object(Bucket="bucket", Key="b", Body=b"once", IfNoneMatch="*")
    assert (raised.value.response["Error"]["Code"], wrong_store.seen) == ("SlowDown", 1)
    assert raised.value.response["ResponseMetadata"]["HTTPHeaders"]["retry-after"] == "1"


def test_slow_uploads_do_not_take_the_memory_of_others(served):
    server = served("", "--anonymous", "--memory-bytes", str(64 * MIB))
    (server.folder / "data" / "penstock").mkdir()
    head = b"PUT /penstock/slow HTTP/1.1\r\nHost: localhost\r\nContent-Length: 16777216\r\n\r\n1"
    slow = [socket.create_connection(("127.0.0.1", server.port), 300) for _ in range(100)]
    for connection in slow:
        connection.sendall(head)
    answer = raw(server, b"PUT /penstock/a HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 1\r\n\r\n1")
    assert answer.startswith(b"HTTP/1.1 200")
    for connection in slow:
        connection.close()


def test_a_pipe_in_a_folder_is_not_an_object(served):
    server = served("", "--requests", "2")
    client = boto(server)
    os.mkfifo(server.folder / "data" / "penstock" / "pipe")
    for _ in range(5):
        assert "Contents" not in client.list_objects_v2(Bucket="penstock")
        with pytest.raises(botocore.exceptions.ClientError) as raised:
            client.get_object(Bucket="penstock", Key="pipe")
        assert raised.value.response["ResponseMetadata"]["HTTPStatusCode"] == 404


def test_idle_connections_to_the_cold_store_are_bounded(served, proxy, minio):
    """Four hundred requests at once need a connection each. Afterwards, 256 at most stay open."""
    proxy.faults("delay_ms=2000")
    server = served("s3://", "--anonymous", environment={**minio.environment, "AWS_ENDPOINT_URL": proxy.endpoint})
    port = int(proxy.endpoint.rpartition(":")[2])

    def opened():
        """Count connections to the proxy. Its only client is the server."""
        lines = [line.split() for line in pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return sum(fields[2] == f"0100007F:{port:04X}" and fields[3] == "01" for fields in lines)

    def head(number):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
        connection.request("HEAD", f"/penstock/idle-{number}")
        status = connection.getresponse().status
        connection.close()
        return status

    with concurrent.futures.ThreadPoolExecutor(400) as threads:
        # On a loaded machine, it takes longer until so many are under way.
        for delay_ms in (2000, 8000, 32000, 128000):
            proxy.faults(f"delay_ms={delay_ms}")
            answers = [threads.submit(head, number) for number in range(400)]
            until(lambda answers=answers: opened() > 300 or all(answer.done() for answer in answers), "requests wait for the cold store")
            are_many = opened() > 300
            assert {answer.result() for answer in answers} == {404}
            if are_many:
                break
        assert are_many, "many requests wait for the cold store at once"
    until(lambda: opened() <= 256, "connections that are not needed are closed")
    assert opened() > 0, "some stay open for later requests"

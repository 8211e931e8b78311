"""What clients read often is held in the server's memory, from which the kernel sends it."""

from __future__ import annotations

import os
import random
import re
import socket
import time
import urllib.parse
import urllib.request

import pytest
import servers
from waiting import until

MIB = 1 << 20
# 300 KB are a piece and a part of one, as large as what is held.
BODY = 300_000
# Reads count as two if this much time is between them.
APART_SECONDS = 0.6


class Served:
    """A server with a cache of its own before MinIO, and its counts."""

    def __init__(self, folder, minio, *options):
        folder.mkdir()
        self.status = servers.free_port()
        options = ("--cache", f"{folder / 'cache'}:100MB", "--status", f"127.0.0.1:{self.status}", *options)
        self.server = servers.Penstock(folder, "s3://", *options, environment=minio.environment)
        self.client = self.server.client()

    def count(self, name):
        text = urllib.request.urlopen(f"http://127.0.0.1:{self.status}/metrics", timeout=300).read().decode()
        return int(re.search(rf"^penstock_{name} (\d+)$", text, re.M)[1])

    def get(self, key, begin=0, end=None):
        more = {} if end is None else {"Range": f"bytes={begin}-{end - 1}"}
        return self.client.get_object(Bucket="penstock", Key=key, **more)["Body"].read()

    def hold(self, key, body):
        """Read an object until it comes from memory."""
        before = self.count("memory_hits_total")

        def is_held():
            assert self.get(key) == body
            return self.count("memory_hits_total") > before

        until(is_held, "the object is held in memory")


@pytest.fixture
def served(tmp_path, minio):
    one = Served(tmp_path / "served", minio)
    yield one
    one.server.stop()


def test_what_is_read_often_comes_from_memory(served):
    body = os.urandom(BODY)
    served.client.put_object(Bucket="penstock", Key="hot/a", Body=body)
    for _ in range(3):
        assert served.get("hot/a") == body
    assert served.count("memory_hits_total") == 0, "reads at about the same time count as one"
    served.hold("hot/a", body)
    until(lambda: served.count("memory_bytes") == BODY, "the bytes are counted")
    hits = served.count("memory_hits_total")
    chosen = random.Random(1)
    for number in range(100):
        begin, end = sorted(chosen.sample(range(BODY + 1), 2))
        assert served.get("hot/a", begin, end) == body[begin:end], (begin, end)
        assert served.count("memory_hits_total") > hits + number, "parts come from memory, too"
    small = os.urandom(30_000)
    served.client.put_object(Bucket="penstock", Key="hot/small", Body=small)
    for _ in range(3):
        time.sleep(APART_SECONDS)  # Or the reads count as one.
        assert served.get("hot/small") == small
    assert served.count("memory_bytes") == BODY, "small objects are not held"


def test_what_is_written_replaces_what_is_held(served, minio):
    first, second, third = (os.urandom(BODY) for _ in range(3))
    served.client.put_object(Bucket="penstock", Key="hot/b", Body=first)
    served.hold("hot/b", first)
    served.client.put_object(Bucket="penstock", Key="hot/b", Body=second)
    assert served.get("hot/b") == second
    until(lambda: served.count("memory_bytes") == 0, "the old pieces are forgotten")
    served.hold("hot/b", second)
    minio.client().put_object(Bucket="penstock", Key="hot/b", Body=third)
    assert served.get("hot/b") == third
    served.client.delete_object(Bucket="penstock", Key="hot/b")
    with pytest.raises(served.client.exceptions.NoSuchKey):
        served.get("hot/b")


def test_what_is_on_its_way_stays_as_it_was_verified(served):
    """A slow client has begun to receive an object when the memory of its pieces is used for others."""
    old, new = os.urandom(4 * MIB), os.urandom(4 * MIB)
    served.client.put_object(Bucket="penstock", Key="hot/c", Body=old)
    served.hold("hot/c", old)
    url = urllib.parse.urlsplit(served.client.generate_presigned_url("get_object", Params={"Bucket": "penstock", "Key": "hot/c"}))
    slow = []
    for _ in range(5):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        connection.connect((url.hostname, url.port))
        connection.sendall(f"GET {url.path}?{url.query} HTTP/1.1\r\nHost: {url.netloc}\r\nConnection: close\r\n\r\n".encode())
        connection.settimeout(300)
        received = b""
        while b"\r\n\r\n" not in received:
            received += connection.recv(1000)
        head, _, rest = received.partition(b"\r\n\r\n")
        assert b" 200 " in head.splitlines()[0]
        slow.append((connection, rest))
    time.sleep(0.3)  # Until the server has filled the buffers of all five connections and waits.
    served.client.put_object(Bucket="penstock", Key="hot/c", Body=new)
    served.hold("hot/c", new)
    lengths = []
    for connection, received in slow:
        with connection:
            # The rest of the old version cannot be read any more, so the response may end early.
            while part := connection.recv(1 << 16):
                received += part
        assert received == old[: len(received)]
        lengths.append(len(received))
    assert min(lengths) > 64 << 10, lengths


def test_a_client_that_ended_its_side_gets_the_whole_response(served):
    body = os.urandom(8 * MIB)
    served.client.put_object(Bucket="penstock", Key="hot/d", Body=body)
    url = urllib.parse.urlsplit(served.client.generate_presigned_url("get_object", Params={"Bucket": "penstock", "Key": "hot/d"}))
    for _ in range(4):
        with socket.create_connection((url.hostname, url.port), 300) as connection:
            connection.sendall(f"GET {url.path}?{url.query} HTTP/1.1\r\nHost: {url.netloc}\r\n\r\n".encode())
            connection.shutdown(socket.SHUT_WR)
            received = b"".join(iter(lambda connection=connection: connection.recv(1 << 16), b""))
        assert received.partition(b"\r\n\r\n")[2] == body
        time.sleep(APART_SECONDS)  # So that later responses come from memory.


@pytest.mark.long
def test_a_cold_store_that_is_down_is_named_with_the_cause(tmp_path):
    environment = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{servers.free_port()}", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    server = servers.Penstock(tmp_path, "s3://penstock", environment=environment)
    try:
        with pytest.raises(server.client().exceptions.ClientError, match="refused"):
            server.client().get_object(Bucket="penstock", Key="a")
    finally:
        server.stop()

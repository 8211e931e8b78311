"""What `penstock serve` does with files and folders that others use or change: keys, caches, states of other versions, drives that vanish."""

import concurrent.futures
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import threading
import uuid

import botocore.exceptions
import google_crc32c
import pytest
import servers
from waiting import until


class Node:
    """A server before a bucket of MinIO, behind a proxy that counts what it asks MinIO for."""

    def __init__(self, folder, minio, bucket, *options, beside=None):
        folder.mkdir(exist_ok=True)
        self.bucket, self.cache, self.cold = bucket, beside.cache if beside else folder / "cache", minio.client()
        self.is_beside = beside is not None
        # The endpoint is a part of the name of a store.
        self.proxy = beside.proxy if beside else servers.Proxy(minio.port)
        environment = {**minio.environment, "AWS_ENDPOINT_URL": self.proxy.endpoint}
        options = ("--cache", f"{self.cache}:100MB", *options)
        self.server = servers.Penstock(folder, f"s3://{bucket}", *options, environment=environment)
        until(lambda: self.proxy.counts()["requests"] > 0, "the server has tried the cold store")
        self.counts()

    def counts(self):
        """Return the requests since the last call and the bytes of their bodies."""
        counts = self.proxy.counts()
        self.proxy.faults()
        return counts["requests"], counts["body_bytes"]

    def get(self, key):
        return self.server.get(self.bucket, key)

    def put(self, key, body):
        self.server.put(self.bucket, key, body)

    def stop(self):
        self.server.stop()
        if not self.is_beside:
            self.proxy.stop()


@pytest.fixture
def start(tmp_path, minio):
    """Return a function that starts a node before a new bucket, or before the bucket of another one."""
    started = []

    def node(*options, bucket=None, beside=None):
        if bucket is None:
            bucket = f"b{uuid.uuid4().hex}"
            minio.client().create_bucket(Bucket=bucket)
        started.append(Node(tmp_path / f"node-{len(started)}", minio, bucket, *options, beside=beside))
        return started[-1]

    yield node
    for one in started:
        one.stop()


def keys_of(*names):
    own = {"access_key": servers.KEY, "secret_key": servers.SECRET}
    return json.dumps({"keys": [own, *({"access_key": name, "secret_key": "a-long-secret"} for name in names)]})


def test_a_keys_file_that_is_replaced_while_it_is_read_never_locks_a_key_out(tmp_path):
    folder = tmp_path / "node"
    folder.mkdir()
    server = servers.Penstock(folder, "", "--lame-duck", "0")
    keys, ends, codes = folder / "keys.json", threading.Event(), []

    def read():
        client = server.client()
        while not ends.is_set():
            codes.append(client.list_objects_v2(Bucket="penstock")["ResponseMetadata"]["HTTPStatusCode"])

    def works(name):
        try:
            server.client(key=name, secret="a-long-secret").list_objects_v2(Bucket="penstock")
            return True
        except botocore.exceptions.ClientError as error:
            assert error.response["Error"]["Code"] == "InvalidAccessKeyId"
            return False

    try:
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            readers = [threads.submit(read) for _ in range(2)]
            try:
                for turn in range(5):
                    whole = keys_of(f"key-{turn}")
                    for end in (0, 1, len(whole) // 2, len(whole) - 1):
                        # Written in place, as an editor may do it: the server sees a part.
                        said = (folder / "log").read_text().count("the previous one remains in use")
                        keys.write_text(whole[:end])
                        server.process.send_signal(signal.SIGHUP)
                        until(
                            lambda said=said: (folder / "log").read_text().count("the previous one remains in use") > said,
                            "the part is refused",
                        )
                    servers.write_secret(folder / "new.json", whole)
                    os.rename(folder / "new.json", keys)
                    server.process.send_signal(signal.SIGHUP)
                    until(lambda turn=turn: works(f"key-{turn}"), "the new key works")
                    assert not turn or not works(f"key-{turn - 1}")
                # Many replacements and signals at once end with one of the files.
                for turn in range(200):
                    servers.write_secret(folder / "new.json", keys_of(f"last-{turn}"))
                    os.rename(folder / "new.json", keys)
                    server.process.send_signal(signal.SIGHUP)
                until(lambda: works("last-199"), "the last file counts")
            finally:
                ends.set()
            [reader.result() for reader in readers]
    finally:
        server.stop()
    assert codes and set(codes) == {200}


@pytest.mark.parametrize("has_writer", [False, True])
def test_a_keys_file_that_is_a_pipe_holds_nothing_up(tmp_path, has_writer):
    keys = tmp_path / "keys.json"
    servers.write_secret(keys, keys_of())
    server = servers.Penstock(tmp_path, "")
    said = lambda text: (tmp_path / "log").read_text().count(text)  # noqa: E731
    writer = None
    try:
        keys.unlink()
        os.mkfifo(keys, 0o600)
        writer = os.open(keys, os.O_RDWR) if has_writer else None
        server.process.send_signal(signal.SIGHUP)
        until(lambda: said("the previous one remains in use") == 1, "the pipe is refused")
        assert said("a pipe without a writer") == has_writer
        servers.write_secret(tmp_path / "new.json", keys_of("new"))
        os.rename(tmp_path / "new.json", keys)
        server.process.send_signal(signal.SIGHUP)
        until(lambda: said("reloaded keys and certificates") == 1, "the file is read")
        assert server.client(key="new", secret="a-long-secret").list_buckets()["Buckets"]
    finally:
        server.stop()
        if writer is not None:
            os.close(writer)


def test_keys_of_a_pipe_are_read_to_its_end(tmp_path):
    """As of `--keys <(command)`, which may take a time."""
    (tmp_path / "keys.json").write_text(keys_of(*(f"key-{number}" for number in range(5000))))
    keys = "<(sleep 0.3; head -c 70000 keys.json; sleep 0.3; tail -c +70001 keys.json)"
    command = f"{sys.executable} -m penstock serve --cold {tmp_path} --keys {keys} --check"
    checked = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert checked.returncode == 0, checked.stderr


def test_two_nodes_with_one_cache_before_one_store_answer_right(start):
    one = start()
    other = start(bucket=one.bucket, beside=one)
    choose = random.Random(11)
    for turn in range(40):
        writer, reader = choose.sample([one, other], 2)
        key, body = f"k{choose.randrange(6)}", choose.randbytes(choose.choice([1, 5000, 1_200_000]))
        writer.put(key, body)
        assert reader.get(key) == body == writer.get(key), turn
    # What one has fetched, the other finds on the drive.
    one.put("shared", body := choose.randbytes(2_000_000))
    assert one.get("shared") == body
    other.counts()
    assert other.get("shared") == body and other.counts()[1] < 500_000


def test_two_nodes_with_one_cache_before_two_stores_do_not_mix_them(start):
    one = start()
    other = start(beside=one)
    choose = random.Random(12)
    bodies = {(node, key): choose.randbytes(300_000) for node in (one, other) for key in ("a", "b")}
    for (node, key), body in bodies.items():
        node.put(key, body)
    for _ in range(2):
        assert all(node.get(key) == body for (node, key), body in bodies.items())


def changed(path, change):
    """Change the note and the magic of a cached object, and make its checksum right."""
    whole = path.read_bytes()
    footer = bytearray(whole[-32:])
    identity, note = struct.unpack("<II", footer[20:28])
    tail = whole[-32 - identity - note : -32]
    tail = tail[:identity] + change(tail[identity:], footer)
    footer[24:28] = struct.pack("<I", len(tail) - identity)
    footer[28:] = struct.pack("<I", google_crc32c.value(bytes(tail + footer[:28])))
    path.write_bytes(whole[: -32 - identity - note] + tail + footer)


def of_version_2(note, _):
    assert b'"version":1' in note
    return note.replace(b'"version":1', b'"version":2')


def of_a_later_layout(note, footer):
    footer[7] += 1
    return note


def with_other_fields(note, _):
    return json.dumps({"version": 1, "a new field": True}).encode()


@pytest.mark.long
@pytest.mark.parametrize("policy", ["never", "always"])
@pytest.mark.parametrize("change", [of_version_2, of_a_later_layout, with_other_fields, lambda note, _: b"", lambda *_: b"\xff" * 40])
def test_states_of_another_version_are_ignored_and_asked_for_again(start, policy, change):
    node, choose = start("--revalidate", policy), random.Random(4)
    bodies = {str(n): choose.randbytes(6000) for n in range(8)}
    for key, body in bodies.items():
        node.put(key, body)
        assert node.get(key) == body
    node.server.process.kill()
    node.server.process.wait(300)
    files = [path for path in (node.cache / "stores").rglob("*") if path.is_file()]
    assert len(files) == 8
    for path in files:
        changed(path, change)
    # The objects change meanwhile: nothing of the old notes may be believed.
    for key in list(bodies)[:4]:
        bodies[key] = choose.randbytes(7000)
        node.cold.put_object(Bucket=node.bucket, Key=key, Body=bodies[key])
    node.proxy.faults()
    node.server.restart()
    until(lambda: node.proxy.counts()["requests"] > 0, "the server has tried the cold store")
    node.counts()
    for _ in range(2):
        assert all(node.get(key) == body for key, body in bodies.items())
    assert node.counts()[0] >= 8
    assert all(node.get(key) == body for key, body in bodies.items())
    assert node.counts() == ((0 if policy == "never" else 8), 0), "new notes are written"


@pytest.mark.long
@pytest.mark.parametrize("policy", ["never", "always"])
def test_a_drive_that_vanishes_while_states_are_read_costs_only_time(start, policy):
    node, choose, ends = start("--revalidate", policy, "--memory-bytes", str(64 << 20)), random.Random(6), threading.Event()
    bodies = {f"{n}": choose.randbytes(choose.choice([900, 40_000, 300_000])) for n in range(20)}
    for key, body in bodies.items():
        node.put(key, body)
        assert node.get(key) == body

    def read(seed):
        mine, reads = random.Random(seed), 0
        client = node.server.client()
        while not ends.is_set():
            key = mine.choice(list(bodies))
            assert client.get_object(Bucket=node.bucket, Key=key)["Body"].read() == bodies[key], key
            reads += 1
        return reads

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        readers = [threads.submit(read, seed) for seed in range(2)]
        try:
            moved = node.cache.with_name("moved")
            for step in (
                lambda: os.rename(node.cache, moved),
                lambda: node.cache.write_bytes(b"not a folder"),
                lambda: node.cache.unlink(),
                lambda: os.rename(moved, node.cache),
                lambda: shutil.rmtree(node.cache / "stores"),
                lambda: (node.cache / "stores").write_bytes(b"not a folder either"),
            ):
                step()
                # Each state of the drive is met by reads of every object.
                assert all(node.get(key) == body for key, body in bodies.items())
                assert not any(reader.done() for reader in readers)
        finally:
            ends.set()
        assert all(reader.result() > 0 for reader in readers)
    # Writes work as well, and are seen.
    node.put("0", b"new")
    assert node.get("0") == b"new"

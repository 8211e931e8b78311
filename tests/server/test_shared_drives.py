"""What `penstock serve` believes of a cache's drives that other servers use as well, that were away for a while, or that were left out."""

import contextlib
import fcntl
import hashlib
import http.server
import os
import pathlib
import re
import shutil
import signal
import socket
import struct
import subprocess
import threading
import urllib.request

import botocore.exceptions
import pytest
import servers
from waiting import until

BUCKET = "penstock"
POLICIES = ["never", "3600s", "always"]


class Store(http.server.ThreadingHTTPServer):
    """A cold store with a few objects. The response to a read of `slow…` begins as things are then, and ends when `may_end` is set."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", servers.free_port()), Answer)
        self.objects, self.reads, self.may_end, self.began = {}, 0, threading.Event(), threading.Event()
        self.fails = self.takes_no_puts = False
        self.environment = {
            "AWS_ACCESS_KEY_ID": servers.KEY,
            "AWS_SECRET_ACCESS_KEY": servers.SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.server_port}",
        }
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def tag(self, body):
        """Return the ETag of an object."""
        return hashlib.md5(body).hexdigest()


class Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, code, body=b"", **headers):
        self.send_response(code)
        for name, value in {"Content_Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        if self.server.fails:
            return self.answer(503, b"<Error><Code>SlowDown</Code></Error>")
        key = self.path.partition("?")[0].partition(f"/{BUCKET}")[2].lstrip("/")
        if key not in self.server.objects:
            return self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>") if key else self.answer(200)
        self.server.reads += 1
        body = self.server.objects[key]
        whole = {"ETag": f'"{self.server.tag(body)}"', "Last_Modified": "Sun, 09 Sep 2001 01:46:40 GMT"}
        if key.startswith("slow") and self.command == "GET":
            self.server.began.set()
            assert self.server.may_end.wait(300)
        if self.command == "HEAD":
            return self.answer(200, Content_Length=len(body), **whole)
        first, last = (int(number) for number in re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"]).groups())
        part = body[first : last + 1]
        self.answer(206, part, Content_Range=f"bytes {first}-{first + len(part) - 1}/{len(body)}", **whole)

    do_HEAD = do_GET

    def do_PUT(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.takes_no_puts:
            return self.answer(503, b"<Error><Code>SlowDown</Code></Error>")
        self.server.objects[self.path.partition("?")[0].removeprefix(f"/{BUCKET}/")] = body
        self.answer(200, ETag=f'"{self.server.tag(body)}"')

    def do_DELETE(self):
        self.server.objects.pop(self.path.partition("?")[0].removeprefix(f"/{BUCKET}/"), None)
        self.answer(204)


class Node:
    def __init__(self, folder, store, *options):
        folder.mkdir()
        self.server = servers.Penstock(folder, f"s3://{BUCKET}", *options, environment=store.environment)

    def get(self, key):
        """Return an object, or None if there is none."""
        try:
            return self.server.get(BUCKET, key)
        except botocore.exceptions.ClientError as error:
            assert error.response["Error"]["Code"] == "NoSuchKey"
            return None

    def put(self, key, body):
        self.server.put(BUCKET, key, body)

    def kill(self):
        self.server.process.send_signal(signal.SIGKILL)
        self.server.process.wait(300)

    def again(self, *options):
        """Kill the server and start it again, with other options if there are some."""
        self.kill()
        self.server.options = options or self.server.options
        self.server.restart()


def starting(tmp_path, store):
    """Yield a cold store, and a function that starts a server before it. End all of them afterwards."""
    nodes = []

    def node(*options):
        nodes.append(Node(tmp_path / f"node-{len(nodes)}", store, *options))
        return nodes[-1]

    yield store, node
    store.may_end.set()
    [one.server.stop() for one in nodes]
    store.shutdown()
    store.server_close()


@pytest.fixture
def start(tmp_path):
    """Return a cold store, and a function that starts a server before it."""
    yield from starting(tmp_path, Store())


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def known(one, cache, keys, body=b"old"):
    """Put objects and read them, until each has a state beside its pages, with the checksums that boto3 asks for. That one is written last."""
    for key in keys:
        one.put(key, body)
        assert one.get(key) == body
    noted(cache, len(keys), b'"sums":true')


def noted(cache, count, text=b'{"version":1'):
    """Wait until this many objects have a state beside their pages."""

    until(lambda: sum(text in path.read_bytes() for path in files_of(cache)) == count, "the states are beside the pages")


def files_of(cache):
    return [path for path in (cache / "stores").rglob("*") if path.is_file()]


@pytest.mark.long
@pytest.mark.parametrize("policy", POLICIES)
def test_a_server_reads_what_it_wrote_though_another_one_fetched_what_was_there_before(start, cache, policy):
    store, node = start
    options = ("--cache", f"{cache}:1GB", "--revalidate", policy)
    one, other = node(*options), node(*options)
    for number, (key, writer, reader) in enumerate((("slow-a", one, other), ("slow-b", other, one)), 1):
        store.objects[key] = b"old" * 4000
        store.may_end.clear()
        store.began.clear()
        late = threading.Thread(target=reader.get, args=(key,))
        late.start()
        assert store.began.wait(300)
        writer.put(key, b"new" * 4000)
        store.may_end.set()
        late.join()
        noted(cache, number)
        assert writer.get(key) == b"new" * 4000
        # The servers are replaced one after the other.
        for restarted in (writer, reader, writer):
            restarted.again()
            assert [restarted.get(key) for _ in range(2)] == [b"new" * 4000] * 2
    one.kill()
    other.again()
    assert other.get("slow-a") == other.get("slow-b") == b"new" * 4000


@pytest.mark.long
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("restarts", ["while it is away", "when it is back", "never"])
def test_a_drive_that_is_away_while_objects_are_written_is_not_believed(start, cache, policy, restarts):
    _, node = start
    one, away = node("--cache", f"{cache}:1GB", "--revalidate", policy, "--status", "127.0.0.1:0"), cache.with_name("away")
    known(one, cache, ["replaced", "deleted", "left"], b"old" * 4000)
    os.rename(cache, away)
    one.put("replaced", b"new" * 4000)
    one.server.client().delete_object(Bucket=BUCKET, Key="deleted")
    if restarts == "while it is away":
        one.again()
    shutil.rmtree(cache, ignore_errors=True)
    os.rename(away, cache)
    if restarts == "when it is back":
        one.again()
    expected = {"replaced": b"new" * 4000, "deleted": None, "left": b"old" * 4000}
    for _ in range(3):
        assert {key: one.get(key) for key in expected} == expected
    one.again()
    assert {key: one.get(key) for key in expected} == expected


def test_missed_removals_are_counted(start, cache):
    _, node = start
    port = servers.free_port()
    one = node("--cache", f"{cache}:1GB", "--status", f"127.0.0.1:{port}")

    def missed():
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=300) as page:
            return int(re.search(r"^penstock_missed_removals_total (\d+)$", page.read().decode(), re.M)[1])

    one.put("a", b"old")
    assert one.get("a") == b"old" and missed() == 0
    os.rename(cache, cache.with_name("away"))
    one.put("a", b"new")
    assert missed() == 1


@pytest.mark.long
@pytest.mark.parametrize("policy", POLICIES)
def test_drives_that_are_left_out_for_a_while_are_not_believed(start, tmp_path, policy):
    _, node = start
    both = ("--cache", f"{tmp_path / 'a'}:1GB,{tmp_path / 'b'}:1GB", "--revalidate", policy)
    others = [("--cache", f"{tmp_path / name}:1GB", "--revalidate", policy) for name in "ab"]
    # With other sizes, other drives have the objects.
    others.append(("--cache", f"{tmp_path / 'a'}:9GB,{tmp_path / 'b'}:1GB", "--revalidate", policy))
    one, keys = node(*both), [f"key-{number}" for number in range(12)]
    for turn, other in enumerate(others):
        bodies = {key: f"{turn} {key}".encode() * 500 for key in keys}
        for key, body in bodies.items():
            one.put(key, body)
            assert one.get(key) == body
        one.again(*other)
        bodies |= {key: f"new {turn} {key}".encode() * 500 for key in keys[:6]}
        for key in keys[:6]:
            one.put(key, bodies[key])
        one.again(*both)
        assert {key: one.get(key) for key in keys} == bodies


@pytest.mark.parametrize("policy", ["never", "3600s"])
@pytest.mark.parametrize("between", ["no cache", "another cache", "swapped drives"])
def test_what_was_written_without_the_drives_ends_what_is_believed(start, tmp_path, policy, between):
    _, node = start
    a, b = tmp_path / "a", tmp_path / "b"
    own = ("--cache", f"{a}:1GB,{b}:1GB", "--revalidate", policy)
    others = {
        "no cache": ("--lame-duck", "0"),
        "another cache": ("--cache", f"{tmp_path / 'c'}:1GB", "--revalidate", policy),
        "swapped drives": own,
    }

    def swap():
        if between == "swapped drives":
            os.rename(a, tmp_path / "away")
            os.rename(b, a)
            os.rename(tmp_path / "away", b)

    one, keys = node(*own), [f"key-{number}" for number in range(6)]
    for key in keys:
        one.put(key, b"old")
        assert one.get(key) == b"old"
    one.kill()
    swap()
    one.server.options = others[between]
    one.server.restart()
    for key in keys[:3]:
        one.put(key, b"new")
    one.server.client().delete_object(Bucket=BUCKET, Key=keys[3])
    one.kill()
    swap()
    one.server.options = own
    one.server.restart()
    assert [one.get(key) for key in keys] == [b"new"] * 3 + [None] + [b"old"] * 2


@pytest.mark.parametrize("policy", ["never", "3600s"])
def test_what_waited_to_be_sent_is_newer_than_what_is_known(start, cache, tmp_path, policy):
    store, node = start
    plain = ("--cache", f"{cache}:1GB", "--revalidate", policy)
    one = node(*plain, "--write-back", f"{tmp_path / 'pending'}:1GB")
    store.objects["a"] = b"old"
    assert one.get("a") == b"old"
    store.takes_no_puts = True
    one.put("a", b"new")
    one.again(*plain)
    # The page says that only the folder has what was acknowledged.
    assert one.get("a") == b"old"
    noted(cache, 1)
    store.takes_no_puts = False
    one.again(*plain, "--write-back", f"{tmp_path / 'pending'}:1GB")
    until(lambda: store.objects["a"] == b"new", "the object is sent")
    for _ in range(3):
        assert one.get("a") == b"new"
    one.again()
    assert one.get("a") == b"new"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("part", ["stores", "stores/*", "servers"])
def test_a_folder_of_a_cache_that_is_away_for_a_while_is_not_believed(start, cache, policy, part):
    _, node = start
    one, away = node("--cache", f"{cache}:1GB", "--revalidate", policy), cache.with_name("away")
    known(one, cache, "ab")
    [moved] = [path for path in cache.glob(part) if path.is_dir()]
    os.rename(moved, away)
    one.put("a", b"new")
    one.server.client().delete_object(Bucket=BUCKET, Key="b")
    shutil.rmtree(moved, ignore_errors=True)
    os.rename(away, moved)
    for _ in range(2):
        assert (one.get("a"), one.get("b")) == (b"new", None)
        one.again()


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_not_believed_is_not_served_when_the_cold_store_fails(start, cache, policy):
    store, node = start
    one, away = node("--cache", f"{cache}:1GB", "--revalidate", policy, "--memory-bytes", str(64 << 20)), cache.with_name("away")
    known(one, cache, "ab")
    os.rename(cache, away)
    one.put("a", b"new")
    os.rename(away, cache)
    one.again()
    store.fails = True
    for key in ("a", "b"):
        with pytest.raises(botocore.exceptions.ClientError) as raised:
            one.server.get(BUCKET, key)
        assert raised.value.response["ResponseMetadata"]["HTTPStatusCode"] == 503
    store.fails = False
    assert (one.get("a"), one.get("b")) == (b"new", b"old")
    noted(cache, 2)
    store.fails = True
    assert (one.get("a"), one.get("b")) == (b"new", b"old")


@pytest.mark.parametrize("policy", POLICIES)
def test_named_objects_are_asked_for_when_what_is_known_is_not_believed(start, cache, policy):
    _, node = start
    one, away = node("--cache", f"{cache}:1GB", "--revalidate", policy, "--immutable", f"{BUCKET}/"), cache.with_name("away")
    known(one, cache, "ab")
    os.rename(cache, away)
    one.put("a", b"new")
    one.server.client().delete_object(Bucket=BUCKET, Key="b")
    os.rename(away, cache)
    assert (one.get("a"), one.get("b")) == (b"new", None)


@pytest.mark.parametrize(("policy", "requests"), [("never", 0), ("3600s", 0), ("always", 3)])
def test_the_next_server_of_a_drive_believes_what_it_finds(start, cache, policy, requests):
    store, node = start
    one = node("--cache", f"{cache}:1GB", "--revalidate", policy)
    for end in ("kill -9", "a stop", "another one beside it"):
        known(one, cache, "abc", body := end.encode() * 900)
        until(lambda body=body: sum(body in extent.read_bytes() for extent in files_of(cache)) == 3, "the pages are on the drive")
        if end == "a stop":
            one.server.process.terminate()
            one.server.process.wait(300)
            one.server.restart()
        elif end == "kill -9":
            one.again()
        else:
            other = node("--cache", f"{cache}:1GB", "--revalidate", policy)
            one.again()
            other.kill()
        for expected in (requests if end != "another one beside it" else 3, requests):
            store.reads = 0
            assert [one.get(key) for key in "abc"] == [body] * 3
            assert store.reads == expected, end


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cache_that_is_deleted_below_a_server_is_not_missed(start, cache, policy):
    _, node = start
    one = node("--cache", f"{cache}:1GB", "--revalidate", policy)
    known(one, cache, "ab")
    shutil.rmtree(cache)
    expected = {"a": b"new", "b": None, "c": b"first"}
    one.put("a", b"new")
    one.server.client().delete_object(Bucket=BUCKET, Key="b")
    one.put("c", b"first")
    for _ in range(3):
        assert {key: one.get(key) for key in expected} == expected
    one.again()
    assert {key: one.get(key) for key in expected} == expected
    one.put("a", b"last")
    one.again()
    assert (one.get("a"), one.get("b"), one.get("c")) == (b"last", None, b"first")


@contextlib.contextmanager
def mounted(image, folder):
    """Mount a file that is a file system. Each time, it is on another device."""
    folder.mkdir(exist_ok=True)
    if os.geteuid() or subprocess.run(["mount", "-o", "loop", str(image), str(folder)], capture_output=True).returncode:
        pytest.skip("root without the right to mount")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_drive_that_lost_its_last_writes_is_not_believed(start, tmp_path, policy):
    _, node = start
    image, earlier, drive = tmp_path / "image", tmp_path / "earlier", tmp_path / "drive"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    cache = drive / "cache"
    with mounted(image, drive):
        one = node("--cache", f"{cache}:30MB", "--revalidate", policy)
        known(one, cache, "ab")
        os.sync()
        shutil.copyfile(image, earlier)
        one.put("a", b"new")
        one.server.client().delete_object(Bucket=BUCKET, Key="b")
        one.kill()
    shutil.copyfile(earlier, image)
    with mounted(image, drive):
        one.server.restart()
        noted(cache, 2)
        assert (one.get("a"), one.get("b")) == (b"new", None)
        one.kill()


def marks_of(one):
    """Return the files in shared memory that a server has open."""
    found = set()
    for descriptor in pathlib.Path(f"/proc/{one.server.process.pid}/fd").iterdir():
        # It may be closed in the meantime.
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(descriptor))
    return {path for path in found if path.startswith("/dev/shm/penstock-servers-")}


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_missed_is_known_though_shared_memory_is_away_as_well(start, cache, policy):
    _, node = start
    one = node("--cache", f"{cache}:1GB", "--revalidate", policy)
    known(one, cache, "ab")
    places = [str(cache), *marks_of(one)]
    assert len(places) == 2
    for place in places:
        os.rename(place, place + "-away")
    one.put("a", b"new")
    one.server.client().delete_object(Bucket=BUCKET, Key="b")
    shutil.rmtree(cache, ignore_errors=True)
    for place in places:
        os.rename(place + "-away", place)
    for _ in range(2):
        assert (one.get("a"), one.get("b")) == (b"new", None)
        one.again()


@pytest.mark.parametrize(("policy", "requests"), [("never", 0), ("3600s", 0), ("always", 3)])
def test_a_server_with_mounts_of_its_own_believes_what_it_finds(start, cache, policy, requests):
    if os.geteuid() or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("root without the right to mount")
    store, node = start
    one = node("--cache", f"{cache}:1GB", "--revalidate", policy)
    known(one, cache, "abc")
    one.server.runner = ["unshare", "-m"]
    for _ in range(2):
        one.again()
        store.reads = 0
        assert [one.get(key) for key in "abc"] == [b"old"] * 3 and store.reads == requests


def test_a_server_waits_for_another_one_that_starts(start, cache):
    _, node = start
    one = node("--cache", f"{cache}:1GB")
    [mark] = marks_of(one)
    one.kill()
    with open(mark, "r+b") as other:
        # A server holds this lock while it starts: `GATE` in crates/cache/src/flight.rs.
        fcntl.fcntl(other, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 1 << 62, 1, 0))
        one.server.restart(waits=False)
        until(lambda: marks_of(one) == {mark}, "it has opened the mark")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", one.server.port))
    one.server.wait()
    one.put("a", b"new")
    assert one.get("a") == b"new"

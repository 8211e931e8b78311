"""What `penstock serve` remembers of objects: over memory and restarts, when the cold store fails, and after writes."""

import concurrent.futures
import fcntl
import functools
import hashlib
import http.client
import pathlib
import random
import shutil
import signal
import stat
import struct
import threading
import time
import urllib.error
import urllib.request
import uuid

import botocore.exceptions
import counting
import penstock as ps
import pytest
import servers
from waiting import until

AWKWARD = ["plain", "a b", "a+b", "50%", "what?", "a&b=c", "größe/ü", "?", "%3F"]


class Served:
    """A server before MinIO, behind a proxy that counts what it asks MinIO for."""

    def __init__(self, folder, minio, *options):
        folder.mkdir()
        self.proxy, self.bucket = servers.Proxy(minio.port), f"b{uuid.uuid4().hex}"
        self.cold = minio.client()
        self.cold.create_bucket(Bucket=self.bucket)
        environment = {**minio.environment, "AWS_ENDPOINT_URL": self.proxy.endpoint}
        options = ("--cache", f"{folder / 'cache'}:200MB", *options)
        self.node = servers.Penstock(folder, "s3://" + self.bucket, *options, environment=environment)
        self.settle()

    def settle(self):
        """Forget the requests so far, with the one that the server sends when it starts."""
        until(lambda: self.proxy.counts()["requests"] > 0, "the server has tried the cold store")
        self.proxy.faults()

    def kill(self):
        self.node.process.send_signal(signal.SIGKILL)
        self.node.process.wait(300)

    def again(self):
        """Kill the server and start it again."""
        self.kill()
        self.proxy.faults()
        self.node.restart()
        self.settle()

    def files(self):
        """Return the files of the cache with objects."""
        return [path for path in (self.node.folder / "cache" / "stores").rglob("*") if path.is_file()]

    def counts(self):
        """Return the requests since the last call and the bytes of their bodies."""
        counts = self.proxy.counts()
        self.proxy.faults()
        return counts["requests"], counts["body_bytes"]

    def get(self, key, **asked):
        return self.node.client().get_object(Bucket=self.bucket, Key=key, **asked)["Body"].read()

    def put(self, key, body, **more):
        return self.cold.put_object(Bucket=self.bucket, Key=key, Body=body, **more)

    def stop(self):
        self.node.stop()
        self.proxy.stop()


@pytest.fixture
def serve(tmp_path, minio):
    """Return a function that starts a server with these options."""
    started = []

    def start(*options):
        started.append(Served(tmp_path / f"served-{len(started)}", minio, *options))
        return started[-1]

    yield start
    for served in started:
        served.stop()


def code(raised):
    return raised.value.response["Error"]["Code"]


@pytest.mark.parametrize(("policy", "requests"), [("always", 1), ("never", 0), ("3600s", 0)])
def test_what_was_cached_is_not_fetched_again(serve, policy, requests):
    served, choose = serve("--revalidate", policy), random.Random(7)
    objects = {key: choose.randbytes(choose.choice([1, 1000, 40_000, 1_500_000])) for key in [*AWKWARD, *(f"{n:03d}" for n in range(15))]}
    for key, body in objects.items():
        served.cold.put_object(Bucket=served.bucket, Key=key, Body=body, ContentType=f"text/{len(body)}", Metadata={"owner": "me"})
        assert served.get(key) == body
    served.counts()
    for start in ("the same server", "after kill -9"):
        client = served.node.client()
        for key, body in objects.items():
            got = client.get_object(Bucket=served.bucket, Key=key)
            assert got["Body"].read() == body and got["ContentType"] == f"text/{len(body)}", (key, start)
            assert got["Metadata"] == {"owner": "me"}
            assert client.head_object(Bucket=served.bucket, Key=key)["ContentLength"] == len(body)
        assert served.counts() == (2 * requests * len(objects), 0), start
        served.again()


def test_memory_for_few_states_is_enough(tmp_path):
    """The least memory holds about 700 states with so much metadata. The others are found on the drive."""
    node = counting.Node(tmp_path / "node", "200MB", "--memory-bytes", str(64 << 20))
    try:
        node.state.headers["x-amz-meta-text"] = "x" * 10_000
        keys = [f"{n % 7}/{n}" for n in range(900)]
        node.state.objects.update({f"bucket/{key}": key.encode() * 10 for key in keys})
        connection = http.client.HTTPConnection("127.0.0.1", node.server.port, timeout=300)

        def get(key):
            connection.request("GET", f"/bucket/{key}")
            answer = connection.getresponse()
            assert answer.headers["x-amz-meta-text"] == "x" * 10_000
            return answer.read()

        for asked in (len(keys), 0):
            del node.state.asked[:]
            assert all(get(key) == key.encode() * 10 for key in keys)
            assert len(node.state.asked) == asked
        connection.close()
    finally:
        node.stop()


def test_foreign_names_like_those_of_datasets_are_not_immutable(serve):
    served = serve()
    key = "sums/d/" + hashlib.md5(b"x").hexdigest()
    served.put(key, b"one")
    assert served.get(key) == b"one"
    served.put(key, b"another")
    assert served.get(key) == b"another"
    served.cold.delete_object(Bucket=served.bucket, Key=key)
    for _ in range(2):
        with pytest.raises(botocore.exceptions.ClientError) as raised:
            served.get(key)
        assert code(raised) == "NoSuchKey"
    # A marker that is none of a dataset proves nothing.
    served.put("fake/log/0000000000000000/18446744073709551615", b"PNS")
    served.put("fake/d/" + key[-32:], b"one")
    assert served.get("fake/d/" + key[-32:]) == b"one"
    served.put("fake/d/" + key[-32:], b"two")
    assert served.get("fake/d/" + key[-32:]) == b"two"


def test_objects_of_datasets_are_not_asked_for(serve, minio):
    served = serve()
    ds = ps.create(f"s3://{served.bucket}/deep/pets", {"n": "int64"}, storage_options={"endpoint_url": minio.endpoint})
    ds.append({"n": range(50_000)})
    listed = served.cold.list_objects_v2(Bucket=served.bucket, Prefix="deep/pets/d/")["Contents"]
    keys = [entry["Key"] for entry in listed]
    bodies = [served.get(key) for key in keys]
    # The second read asks whether they are in a dataset.
    assert [served.get(key) for key in keys] == bodies and served.counts()[0] > 0
    assert [served.get(key) for key in keys] == bodies and served.counts() == (0, 0)
    served.again()
    # That they never change is beside their pages. The log is asked for each time.
    assert [served.get(key) for key in keys] == bodies and served.counts() == (0, 0)
    record = "deep/pets/log/0000000000000000/18446744073709551615"
    for _ in range(2):
        assert served.get(record).startswith(b"PNSL")
    assert served.counts()[0] >= 2


def test_prefixes_of_immutable_objects_are_not_asked_for(serve):
    served, other = serve(), serve("--immutable", "nothing/")
    other.node.options = (*other.node.options[:2], "--immutable", f"{other.bucket}/frozen/")
    other.again()
    for one in (served, other):
        one.put("frozen/a", b"a" * 100)
        one.put("frozen-not/a", b"b" * 100)
        [one.get(key) for key in ("frozen/a", "frozen-not/a")]
        one.counts()
    assert other.get("frozen/a") == b"a" * 100 and other.counts() == (0, 0)
    assert other.get("frozen-not/a") == b"b" * 100 and other.counts() == (1, 0)
    assert served.get("frozen/a") == b"a" * 100 and served.counts() == (1, 0)


def objects_that_never_change_are_served(served, minio):
    ds = ps.create(f"s3://{served.bucket}/pets", {"n": "int64"}, storage_options={"endpoint_url": minio.endpoint})
    ds.append({"n": range(50_000)})
    [key] = [entry["Key"] for entry in served.cold.list_objects_v2(Bucket=served.bucket, Prefix="pets/d/")["Contents"]]
    body = served.get(key)
    served.put("other", b"x")
    assert served.get(key) == body and served.get("other") == b"x"
    # The note on the drive is written in the background.
    until(lambda: any(b'"immutable":true' in path.read_bytes() for path in served.files()), "the proof is beside the pages")
    served.kill()
    served.proxy.faults("throttle=1000&in_a_row=0")
    served.node.restart()
    assert served.get(key) == body
    with pytest.raises(botocore.exceptions.ClientError) as raised:
        served.node.client().head_object(Bucket=served.bucket, Key="other")
    assert raised.value.response["ResponseMetadata"]["HTTPStatusCode"] == 503


def what_is_known_is_served(served, restarted):
    served.put("a", b"known" * 1000)
    assert served.get("a") == b"known" * 1000
    if restarted:
        served.again()
    served.proxy.faults("throttle=1000&in_a_row=0")
    client = served.node.client()
    for call in (client.get_object, client.head_object):
        answer = call(Bucket=served.bucket, Key="a")
        headers = answer["ResponseMetadata"]["HTTPHeaders"]
        assert int(headers["age"]) < 300 and headers["warning"].startswith("111 ") and answer["ContentLength"] == 5000
    assert client.get_object(Bucket=served.bucket, Key="a")["Body"].read() == b"known" * 1000
    with pytest.raises(botocore.exceptions.ClientError) as raised:
        client.get_object(Bucket=served.bucket, Key="unknown")
    assert raised.value.response["ResponseMetadata"]["HTTPStatusCode"] == 503
    served.proxy.faults()

    def is_asked():
        return "age" not in client.head_object(Bucket=served.bucket, Key="a")["ResponseMetadata"]["HTTPHeaders"]

    until(is_asked, "the cold store is asked again")


def nothing_stale_is_served(served):
    served.put("a", b"known")
    assert served.get("a") == b"known"
    served.proxy.faults("throttle=1000&in_a_row=0")
    with pytest.raises(botocore.exceptions.ClientError) as raised:
        served.node.client().head_object(Bucket=served.bucket, Key="a")
    assert raised.value.response["ResponseMetadata"]["HTTPStatusCode"] == 503


def what_is_known_ends_after_its_time(served):
    served.put("a", b"known")
    assert served.get("a") == b"known"
    served.proxy.faults("throttle=1000&in_a_row=0")

    def is_refused():
        try:
            served.node.client().head_object(Bucket=served.bucket, Key="a")
        except botocore.exceptions.ClientError as error:
            return error.response["ResponseMetadata"]["HTTPStatusCode"] == 503
        return False

    until(is_refused, "what is known is older than a second", seconds=60)


@pytest.mark.long
def test_a_cold_store_that_fails_leaves_what_is_known(serve, minio):
    """Each of these waits for tries of the cold store to end, so they wait at the same time."""
    works = [
        (objects_that_never_change_are_served, serve("--stale-if-error", "0"), minio),
        (what_is_known_is_served, serve(), False),
        (what_is_known_is_served, serve(), True),
        (nothing_stale_is_served, serve("--stale-if-error", "0")),
        (what_is_known_ends_after_its_time, serve("--stale-if-error", "1")),
    ]
    with concurrent.futures.ThreadPoolExecutor(len(works)) as threads:
        running = [threads.submit(*work) for work in works]
    for work in running:
        work.result()


@pytest.mark.parametrize("policy", ["always", "never"])
def test_writes_through_the_server_outlive_a_kill(serve, policy):
    served = serve("--revalidate", policy)
    client = served.node.client()
    for key in ("replaced", "deleted", "copied", "in parts", "many", "many more"):
        served.put(key, b"old" * 2000)
        assert served.get(key) == b"old" * 2000
    client.put_object(Bucket=served.bucket, Key="replaced", Body=b"new")
    client.delete_object(Bucket=served.bucket, Key="deleted")
    client.copy_object(Bucket=served.bucket, Key="copied", CopySource={"Bucket": served.bucket, "Key": "replaced"})
    upload = client.create_multipart_upload(Bucket=served.bucket, Key="in parts")["UploadId"]
    part = {"Bucket": served.bucket, "Key": "in parts", "UploadId": upload}
    etag = client.upload_part(**part, PartNumber=1, Body=b"new")["ETag"]
    client.complete_multipart_upload(**part, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": etag}]})
    client.delete_objects(Bucket=served.bucket, Delete={"Objects": [{"Key": "many"}, {"Key": "many more"}]})
    for _ in range(2):
        assert [served.get(key) for key in ("replaced", "copied", "in parts")] == [b"new"] * 3
        for key in ("deleted", "many", "many more"):
            with pytest.raises(botocore.exceptions.ClientError) as raised:
                served.get(key)
            assert code(raised) == "NoSuchKey"
        served.again()


@pytest.mark.long
@pytest.mark.parametrize("policy", ["always", "never"])
def test_no_read_is_older_than_an_acknowledged_put(serve, policy):
    """One writer, several readers, and a kill in the middle. A read that begins after a put was acknowledged returns it or a later one."""
    served = serve("--revalidate", policy)
    acknowledged, ends = {"a": 0, "b": 0}, threading.Event()
    client = served.node.client()
    for key in acknowledged:
        client.put_object(Bucket=served.bucket, Key=key, Body=b"0" * 9000)

    def read(key):
        client = served.node.client()
        while not ends.is_set():
            least = acknowledged[key]
            body = client.get_object(Bucket=served.bucket, Key=key)["Body"].read()
            assert int(body[:9]) >= least and len(body) == 9000, (key, least)

    for _ in range(2):
        ends.clear()
        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            readers = [threads.submit(read, key) for key in [*acknowledged, *acknowledged]]
            try:
                for _ in range(30):
                    for key in acknowledged:
                        number = acknowledged[key] + 1
                        client.put_object(Bucket=served.bucket, Key=key, Body=b"%09d" % number + b"0" * 8991)
                        acknowledged[key] = number
            finally:
                ends.set()
            [reader.result() for reader in readers]
        served.again()
        client = served.node.client()


def test_a_read_after_a_put_does_not_join_a_read_before_it(tmp_path):
    """The cold store answers the first read with the old object, long after the put was acknowledged."""
    node = counting.Node(tmp_path / "node", "50MB")
    get = lambda: urllib.request.urlopen(f"{node.server.endpoint}/bucket/a", timeout=300).read()  # noqa: E731
    try:
        node.state.objects["bucket/a"] = b"old"
        node.state.hold = held = threading.Event()
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            try:
                early = threads.submit(get)
                until(lambda: len(node.state.asked) == 1, "the first read has asked the cold store")
                put = urllib.request.Request(f"{node.server.endpoint}/bucket/a", data=b"new", method="PUT")
                urllib.request.urlopen(put, timeout=300).close()
                late = threads.submit(get)
                until(lambda: len(node.state.asked) == 2, "the second read asks on its own", seconds=60)
                assert late.result() == b"new"
            finally:
                held.set()
            assert early.result() == b"old"
        # What the first read brought is not kept.
        assert get() == b"new" and node.state.objects["bucket/a"] == b"new"
    finally:
        node.stop()


def test_a_reader_that_comes_late_waits_for_the_bytes_that_others_wait_for(tmp_path):
    """The cold store has sent the state of the object, but not its bytes yet."""
    node = counting.Node(tmp_path / "node", "50MB")
    get = lambda: urllib.request.urlopen(f"{node.server.endpoint}/bucket/a", timeout=300).read()  # noqa: E731
    try:
        node.add("a", 200_000)
        node.state.hold_body = held = threading.Event()
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            first = threads.submit(get)
            until(lambda: node.state.hold_body is None, "the headers are sent")
            time.sleep(0.3)  # Until the server has read them.
            late = threads.submit(get)
            time.sleep(0.3)  # Until the server has read the request.
            held.set()
            assert first.result() == late.result() == node.state.objects["bucket/a"]
        assert len([name for _, name, _ in node.state.asked if name == "bucket/a"]) == 1
    finally:
        node.stop()


def test_a_version_that_is_gone_is_looked_up_again(serve):
    """Under `never`, a part of an old version may be cached. The rest of it does not exist any more."""
    served = serve("--revalidate", "never")
    served.put("a", b"1" * 3_000_000)
    assert served.get("a", Range="bytes=0-9") == b"1" * 10
    served.put("a", b"2" * 2_500_000)
    for _ in range(2):
        assert served.get("a") == b"2" * 2_500_000
        served.again()


def test_a_version_whose_end_is_gone_breaks_off_once(serve):
    """Under `never`, the beginning is served before the cold store is asked for the rest."""
    served = serve("--revalidate", "never")
    served.put("a", b"1" * 3_000_000)
    assert served.get("a", Range=f"bytes=0-{(1 << 20) - 1}") == b"1" * (1 << 20)
    served.put("a", b"2" * 2_500_000)
    with pytest.raises(http.client.IncompleteRead) as raised:
        urllib.request.urlopen(
            served.node.client().generate_presigned_url("get_object", Params={"Bucket": served.bucket, "Key": "a"})
        ).read()
    assert raised.value.partial == b"1" * (1 << 20)
    assert [served.get("a") for _ in range(2)] == [b"2" * 2_500_000] * 2


def test_a_state_that_was_not_kept_with_its_pages_is_kept_later(tmp_path):
    """What was read while another object was written is not known, if both share the count of writes. A HEAD finds the state again."""
    node = counting.Node(tmp_path / "node", "50MB")
    try:
        body = read_beside_a_write(node)
        assert node.extent("a").note_bytes == 0
        asked(node, "HEAD", "a")
        until(lambda: node.extent("a").note_bytes > 0, "the state is beside the pages")
        node.restart()
        del node.state.asked[:]
        asked(node, "HEAD", "a")
        assert asked(node, "GET", "a") == body and node.state.asked == []
    finally:
        node.stop()


@pytest.mark.parametrize(("keys", "most"), [(1, 2), (150, 64)])
def test_states_that_wait_for_a_lock_hold_few_threads(tmp_path, keys, most):
    """A process that is stopped holds the locks of all cached objects. Each question finds a state that is not believed beside its pages."""
    node = counting.Node(tmp_path / "node", "50MB", "--revalidate", "always")
    names = [f"a{number}" for number in range(keys)]
    try:
        for key in names:
            node.add(key, 5000)
            asked(node, "GET", key)
        node.server.process.kill()
        node.server.process.wait(300)
        shutil.rmtree(node.cache / "servers")
        node.server.restart()
        tasks = pathlib.Path(f"/proc/{node.server.process.pid}/task")
        before = len(list(tasks.iterdir()))
        with (node.cache / "fetching").open("r+b") as locks:
            fcntl.fcntl(locks, 37, struct.pack("hhqqi", fcntl.F_WRLCK, 0, 0, 1 << 62, 0))  # F_OFD_SETLK
            connection = http.client.HTTPConnection("127.0.0.1", node.server.port, timeout=300)
            for key in names * (300 // keys):
                connection.request("HEAD", f"/bucket/{key}")
                assert connection.getresponse().read() == b""
            connection.close()
            assert len(list(tasks.iterdir())) <= before + most + 4
    finally:
        node.stop()


def asked(node, method, key, data=None):
    request = urllib.request.Request(f"{node.server.endpoint}/bucket/{key}", data=data, method=method)
    with urllib.request.urlopen(request, timeout=300) as answer:
        return answer.read()


def read_beside_a_write(node):
    """Read the object `a` while another one with the same count of writes is written, so that its state is not kept. Return its bytes."""
    node.add("a", 5000)
    node.state.hold = held = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        early = threads.submit(asked, node, "GET", "a")
        until(lambda: len(node.state.asked) == 1, "the read has asked the cold store")
        asked(node, "PUT", next(key for n in range(100_000) if stripe_of(key := f"b{n}") == stripe_of("a")), b"new")
        held.set()
        assert early.result() == node.state.objects["bucket/a"]
    return node.state.objects["bucket/a"]


def stripe_of(key):
    """Objects of a bucket with equal numbers share the count of their writes. See `crates/server/src/read/states.rs`."""
    return functools.reduce(lambda number, byte: (number * 31 + byte) % 1024, key.encode(), 0)


def test_damaged_states_are_asked_for_again(serve):
    served, choose = serve("--revalidate", "never"), random.Random(5)
    bodies = {str(n): choose.randbytes(3000) for n in range(40)}
    for key, body in bodies.items():
        served.put(key, body)
        assert served.get(key) == body
    served.kill()
    files = served.files()
    for path in files:
        whole = bytearray(path.read_bytes())
        whole[choose.randrange(3000, len(whole))] ^= 1 << choose.randrange(8)
        path.write_bytes(whole)
    served.proxy.faults()
    served.node.restart()
    served.settle()
    assert len(files) == 40 and all(served.get(key) == body for key, body in bodies.items())
    # What was damaged came again, and nothing else had to.
    requests, _ = served.counts()
    assert 20 <= requests <= 2 * 40
    assert all(served.get(key) == body for key, body in bodies.items()) and served.counts() == (0, 0)


def test_others_cannot_read_what_is_kept(tmp_path, serve):
    log = tmp_path / "access.log"
    served = serve("--access-log", str(log), "--write-back", f"{tmp_path / 'pending'}:10MB")
    served.put("secret", b"x" * 5000)
    assert served.get("secret") == b"x" * 5000
    served.node.client().put_object(Bucket=served.bucket, Key="written", Body=b"y")
    closed = [served.node.folder / "cache" / "stores", tmp_path / "pending"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in [*closed, log]] == [0o700, 0o700, 0o600]
    files = served.files()
    assert files and all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)


@pytest.mark.parametrize("mode", [0o644, 0o606, 0o660])
def test_files_with_secrets_that_others_can_use_are_refused(tmp_path, serve, mode):
    served = serve()
    served.kill()
    keys = served.node.folder / "keys.json"
    keys.chmod(mode)
    with pytest.raises(RuntimeError, match="chmod 600"):
        served.node.restart()
    keys.chmod(0o640)
    served.node.restart()


def test_balancers_notice_the_end_before_connections_are_refused(serve):
    status = f"127.0.0.1:{servers.free_port()}"
    served = serve("--status", status, "--lame-duck", "600")
    served.put("a", b"x")
    served.node.process.send_signal(signal.SIGTERM)

    def health():
        try:
            return urllib.request.urlopen(f"http://{status}/health", timeout=300).status
        except urllib.error.HTTPError as error:
            return error.code

    until(lambda: health() == 503, "the status says that the server ends")
    # New connections are accepted meanwhile, until the second signal.
    assert served.get("a") == b"x" and served.node.process.poll() is None
    served.node.process.send_signal(signal.SIGTERM)
    assert served.node.process.wait(300) == 0

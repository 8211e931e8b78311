"""What a cold store or a drive does while an object is written, and files that are none: acknowledged writes are seen, and the server starts."""

import contextlib
import os
import threading
import urllib.error
import urllib.request

import botocore.exceptions
import pytest
import servers
from test_shared_drives import BUCKET, POLICIES, Answer, Node, Store, known
from waiting import until


class Hostile(Answer):
    """Fails for some keys, carries out some puts after it refused them, and changes sources of copies before they are copied."""

    def do_GET(self):
        key = self.path.partition("?")[0].partition(f"/{BUCKET}")[2].lstrip("/")
        if key in self.server.failing:
            return self.answer(500, b"<Error><Code>InternalError</Code></Error>")
        super().do_GET()
        if key == "flips":
            self.server.objects[key] = b"another one" * 1000

    do_HEAD = do_GET

    def do_PUT(self):
        key = self.path.partition("?")[0].removeprefix(f"/{BUCKET}/")
        source = self.headers["x-amz-copy-source"]
        if source:
            wanted, found = self.headers["x-amz-copy-source-if-match"], self.server.objects[source.rpartition("/")[2]]
            if wanted and wanted.strip('"') != self.server.tag(found):
                return self.answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            self.server.objects[key] = found
            return self.answer(200, f'<CopyObjectResult><ETag>"{self.server.tag(found)}"</ETag></CopyObjectResult>'.encode())
        if self.server.is_late:
            self.server.late[key] = self.rfile.read(int(self.headers["Content-Length"]))
            return self.answer(504, b"<Error><Code>GatewayTimeout</Code></Error>")
        super().do_PUT()


@pytest.fixture
def start(tmp_path):
    """Return a hostile cold store, and a function that starts a server before it."""
    store, nodes = Store(), []
    store.RequestHandlerClass = Hostile
    store.failing, store.late, store.is_late = set(), {}, False

    def node(*options):
        nodes.append(Node(tmp_path / f"node-{len(nodes)}", store, *options))
        return nodes[-1]

    yield store, node
    [one.server.stop() for one in nodes]
    store.shutdown()
    store.server_close()


@pytest.mark.parametrize("policy", ["always", "0s"])
def test_an_object_that_fails_makes_no_other_one_stale(start, tmp_path, policy):
    store, node = start
    one = node("--cache", f"{tmp_path / 'cache'}:1GB", "--revalidate", policy)
    known(one, tmp_path / "cache", ["bad", "good"])
    store.failing.add("bad")
    assert one.get("bad") == b"old", "what is known is served"
    store.objects["good"] = b"new"
    for _ in range(5):
        assert (one.get("bad"), one.get("good")) == (b"old", b"new")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("restarts", [0, 1, 2])
def test_a_put_that_is_carried_out_after_it_failed_is_seen(start, tmp_path, policy, restarts):
    store, node = start
    one = node("--cache", f"{tmp_path / 'cache'}:1GB", "--revalidate", policy)
    known(one, tmp_path / "cache", ["a"])
    store.is_late = True
    url = one.server.client().generate_presigned_url("put_object", Params={"Bucket": BUCKET, "Key": "a"})
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(urllib.request.Request(url, b"new", method="PUT"), timeout=300)
    assert raised.value.code >= 500
    for _ in range(restarts):
        one.again()
    assert [one.get("a") for _ in range(3)] == [b"old"] * 3
    store.objects |= store.late
    assert one.get("a") == b"new"


def damage(path, how):
    """Damage the file of an extent, and return what makes it right again."""
    body = path.read_bytes()
    if how == "flipped":
        path.write_bytes(body[:-10] + bytes([body[-10] ^ 1]) + body[-9:])
    else:
        os.truncate(path, len(body) - 1)

    def mend():
        if path.exists():
            with path.open("r+b") as file:
                file.write(body)

    return mend


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("how", ["flipped", "shorter"])
def test_a_part_of_a_cache_that_is_damaged_for_a_while_is_not_believed(start, tmp_path, policy, how):
    _, node = start
    one = node("--cache", f"{tmp_path / 'cache'}:1GB", "--revalidate", policy)
    known(one, tmp_path / "cache", ["a"])
    [extent] = [path for path in (tmp_path / "cache" / "stores").rglob("*") if path.is_file()]
    mend = damage(extent, how)
    one.put("a", b"new")
    mend()
    for _ in range(2):
        assert one.get("a") == b"new"
        one.again()


@pytest.mark.parametrize("condition", [None, "*", "the later one", "the earlier one"])
def test_a_copy_counts_what_it_copies(start, condition):
    store, node = start
    one = node("--quota", f"{BUCKET}/copies/=1KB")
    client = one.server.client()
    store.objects["flips"] = b"small"
    etags = {"the later one": store.tag(b"another one" * 1000), "the earlier one": store.tag(b"small")}
    more = {"CopySourceIfMatch": etags.get(condition, condition)} if condition else {}
    with pytest.raises(botocore.exceptions.ClientError) as raised:
        client.copy_object(Bucket=BUCKET, Key="copies/a", CopySource={"Bucket": BUCKET, "Key": "flips"}, **more)
    assert raised.value.response["ResponseMetadata"]["HTTPStatusCode"] in (403, 412, 503)
    assert "copies/a" not in store.objects
    store.objects["steady"] = b"small"
    client.copy_object(Bucket=BUCKET, Key="copies/b", CopySource={"Bucket": BUCKET, "Key": "steady"})
    assert store.objects["copies/b"] == b"small"


def fifo(path, _):
    os.mkfifo(path)


def endless(path, _):
    path.symlink_to("/dev/zero")


def huge(path, _):
    with path.open("wb") as file:
        file.truncate(1 << 33)


def elsewhere(path, other):
    path.symlink_to(other)


@pytest.mark.parametrize("place", ["penstock-cache", "servers", "mark"])
@pytest.mark.parametrize("make", [fifo, endless, huge, elsewhere])
def test_files_of_a_cache_that_are_none_do_not_hold_up_a_server(start, tmp_path, place, make):
    store, node = start
    cache, other = tmp_path / "cache", tmp_path / "other"
    other.write_text("not of a cache")
    one = node("--cache", f"{cache}:1GB", "--revalidate", "never")
    known(one, cache, ["a"])
    files = {path for path in map(os.path.realpath, _open_files(one)) if "penstock-servers-" in path or "/servers/" in path}
    [path] = (
        {path for path in files if path.startswith(str(cache) if place != "mark" else "/dev/shm")}
        if place != "penstock-cache"
        else [cache / place]
    )
    one.kill()
    path = type(cache)(path)
    path.unlink()
    make(path, other)
    try:
        one.server.restart()
    except RuntimeError as error:
        assert "cannot use cache" in str(error) and place == "penstock-cache"
    else:
        store.objects["a"] = b"new"
        assert one.get("a") == b"new", "it is not believed"
    assert other.read_text() == "not of a cache"
    if place == "mark":
        one.kill()
        path.unlink()


def _open_files(one):
    folder = f"/proc/{one.server.process.pid}/fd"
    return [f"{folder}/{name}" for name in os.listdir(folder)]


def test_a_quota_is_listed_soon_after_the_store_is_back(tmp_path):
    port = servers.free_port()

    class Later(servers.Minio):
        def command(self):
            self.port, self.endpoint = port, f"http://127.0.0.1:{port}"
            return super().command()

        def make_bucket(self):
            with contextlib.suppress(botocore.exceptions.ClientError):
                super().make_bucket()

    (tmp_path / "minio").mkdir()
    minio = Later(tmp_path / "minio")
    minio.client().put_object(Bucket=BUCKET, Key="there", Body=bytes(900))
    minio.process.kill()
    minio.process.wait(300)
    status = servers.free_port()
    (tmp_path / "node").mkdir()
    server = servers.Penstock(
        tmp_path / "node", f"s3://{BUCKET}", "--quota", f"{BUCKET}=1KB", "--status", f"127.0.0.1:{status}", environment=minio.environment
    )

    def metric(name):
        page = urllib.request.urlopen(f"http://127.0.0.1:{status}/metrics", timeout=300).read().decode()
        return next(int(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(name + "{"))

    try:
        until(lambda: metric("penstock_quota_failures_total") > 0, "a listing fails")
        minio = Later(tmp_path / "minio")
        until(lambda: metric("penstock_quota_used_bytes") == 900, "what is there counts")
    finally:
        server.stop()
        minio.stop()


def test_write_back_makes_the_folder_of_a_bucket_again(start, tmp_path):
    store, node = start
    one = node("--write-back", f"{tmp_path / 'pending'}:1GB")
    one.put("a", b"one")
    until(lambda: store.objects.get("a") == b"one", "it is sent")
    until(lambda: not any(path.is_file() for path in (tmp_path / "pending" / BUCKET).rglob("*")), "the folder is empty")
    (tmp_path / "pending" / BUCKET).rmdir()
    # The client tries again after 503.
    one.put("b", b"two")
    until(lambda: store.objects.get("b") == b"two", "it is sent")


def test_what_waits_counts_although_the_store_takes_nothing(start, tmp_path):
    store, node = start
    one = node("--write-back", f"{tmp_path / 'pending'}:1GB", "--quota", f"{BUCKET}=1KB")
    store.takes_no_puts = True
    one.put("a", bytes(900))
    for _ in range(2):
        one.again()
        with pytest.raises(botocore.exceptions.ClientError) as raised:
            one.put("b", bytes(900))
        assert raised.value.response["Error"]["Code"] == "QuotaExceeded"
    store.takes_no_puts = False


@pytest.mark.parametrize("query", ["annotation", "renameObject", "encryption", "annotation&annotationName=x"])
def test_operations_that_are_not_known_do_not_become_plain_writes(start, query):
    store, node = start
    one = node()
    one.put("a", b"kept")
    for method in ("PUT", "DELETE", "POST"):
        url = one.server.client().generate_presigned_url("put_object", Params={"Bucket": BUCKET, "Key": "a"})
        request = urllib.request.Request(f"{url}&{query}", b"other" if method != "DELETE" else None, method=method)
        with pytest.raises(urllib.error.HTTPError) as raised:
            urllib.request.urlopen(request, timeout=300)
        assert raised.value.code in (403, 501), "it is refused before, or because the signature does not cover it"
    assert store.objects["a"] == b"kept"
    # Without signatures, nothing else refuses it.
    open_to_all = node("--anonymous")
    for method in ("PUT", "DELETE", "POST"):
        request = urllib.request.Request(f"{open_to_all.server.endpoint}/{BUCKET}/a?{query}", b"other", method=method)
        with pytest.raises(urllib.error.HTTPError, match="501"):
            urllib.request.urlopen(request, timeout=300)
    assert store.objects["a"] == b"kept"


def test_a_copy_of_a_file_that_is_rewritten_meanwhile_fails(tmp_path):
    """A served folder: another program writes into the source while it is copied."""
    (tmp_path / "node").mkdir()
    server = servers.Penstock(tmp_path / "node")
    client = server.client()
    try:
        client.put_object(Bucket=BUCKET, Key="a", Body=bytes(50_000_000))
        path = tmp_path / "node" / "data" / BUCKET / "a"
        stop, copied = threading.Event(), []

        def rewrite():
            with path.open("r+b") as file:
                while not stop.is_set():
                    file.seek(0)
                    file.write(b"other")
                    file.flush()

        for _ in range(3):
            client.put_object(Bucket=BUCKET, Key="a", Body=bytes(50_000_000))
            stop.clear()
            thread = threading.Thread(target=rewrite)
            thread.start()
            try:
                copied.append(client.copy_object(Bucket=BUCKET, Key="b", CopySource={"Bucket": BUCKET, "Key": "a"}))
            except botocore.exceptions.ClientError as error:
                assert error.response["ResponseMetadata"]["HTTPStatusCode"] == 503
            stop.set()
            thread.join()
        assert not copied, "the file was changed many times meanwhile"
    finally:
        server.stop()

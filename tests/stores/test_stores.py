"""Object storage on a real MinIO server: exact request and byte counts, faults, and clear errors."""

import contextlib
import http.client
import http.server
import io
import json
import os
import pathlib
import pickle
import signal
import socket
import ssl
import subprocess
import sys
import threading

import measured
import numpy as np
import penstock as ps
import pytest
import servers
import trustme
from handles import spent
from PIL import Image as Pillow
from waiting import until

pytestmark = [pytest.mark.local, pytest.mark.usefixtures("empty_cache")]  # These tests choose their own stores.

SAMPLES = 4096


@pytest.fixture
def cifar(bucket):
    """Create fixed-shape samples with labels and texts, in one commit."""
    ds = ps.create(bucket, {"image": ps.Tensor((32, 32, 3), "uint8"), "label": "int64", "text": ps.Text()})
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (SAMPLES, 32, 32, 3), dtype=np.uint8)
    ds.append({"image": images, "label": np.arange(SAMPLES), "text": [f"text {number}" for number in range(SAMPLES)]})
    return bucket, images


# Requests and bytes


def test_open_is_three_requests(cifar):
    uri, _ = cifar
    ds = ps.open(uri)
    assert ds.stats()["requests"] == 3 and ds.stats()["lists"] == 1 and ds.stats()["reads"] == 2
    again = ps.open(uri, snapshot=ds.snapshot)
    assert again.stats()["requests"] == 2, "the record and the root"


def test_a_cold_sample_is_a_tail_and_a_range_then_nothing(cifar):
    uri, images = cifar
    ds = ps.open(uri)
    cost = spent(ds, lambda: np.testing.assert_array_equal(ds.take([17], columns=["image"])["image"][0], images[17]))
    assert cost["requests"] == 2 and cost["ranges"] == 2, "one range for the tail, one for the block"
    cost = spent(ds, lambda: ds.take([4000], columns=["image"]))
    assert cost == {"requests": 1, "ranges": 1, "range_bytes": 3072, "received_bytes": 3072}, "only the bytes of the sample"
    assert spent(ds, lambda: ds.take([17, 4000], columns=["image"])) == {}, "both blocks are in the cache"


def test_neighbours_are_one_range_and_no_byte_is_read_twice(cifar):
    uri, images = cifar
    ds = ps.open(uri)
    ds.take([0], columns=["image"])
    cost = spent(ds, lambda: np.testing.assert_array_equal(ds.take(np.arange(1000, 1512), columns=["image"])["image"], images[1000:1512]))
    assert cost["requests"] <= 8 and cost["received_bytes"] == 512 * 3072
    cost = spent(ds, lambda: ds.take(np.arange(1256, 1768), columns=["image"]))
    assert cost["received_bytes"] == 256 * 3072, "half of the samples are in the cache"
    cost = spent(ds, lambda: ds.take(np.repeat([3000, 3001], 50), columns=["image"]))
    assert cost["received_bytes"] == 2 * 3072, "duplicates are read once"
    whole = ps.open(uri)
    for _ in whole.scan(batch_size=500):
        pass
    size = sum(path.stat().st_size for path in uri.rglob("*") if "/d/" in path)
    assert whole.stats()["range_bytes"] <= size


def test_all_columns_of_a_take_are_planned_at_once(cifar):
    uri, images = cifar
    ds = ps.open(uri)
    ds.take([0], columns=["image"])
    positions = np.random.default_rng(1).permutation(SAMPLES)[:64]
    cost = spent(ds, lambda: _check(ds, images, positions))
    # Allow one request for each scattered image, and a few for the adjacent blocks of labels and texts.
    assert cost["requests"] <= 64 + 3
    assert cost["received_bytes"] <= 13_000_000


def _check(ds, images, positions):
    batch = ds.take(positions)
    np.testing.assert_array_equal(batch["image"], images[positions])
    assert batch["label"].tolist() == positions.tolist() and batch["text"] == [f"text {position}" for position in positions]


def test_a_small_data_file_is_one_request(bucket):
    ds = ps.create(bucket, {"text": ps.Text()})
    ds.append({"text": ["a", "b", "c"]})
    fresh = ps.open(bucket)
    assert spent(fresh, lambda: fresh.take([2]))["requests"] == 1, "one range covers the tail and the block"
    assert spent(fresh, lambda: fresh.take([0])) == {}


def test_many_data_files_are_opened_side_by_side(bucket, proxy):
    ds = ps.create(bucket, {"blob": ps.Bytes()})
    for number in range(20):
        ds.append({"blob": [bytes([number]) * 300_000]})
    with servers.environment(AWS_ENDPOINT_URL=proxy.endpoint):
        slow = ps.open(bucket)
        proxy.faults("delay_ms=100")
        try:
            assert [blob[0] for blob in slow.take(np.arange(20))["blob"]] == list(range(20))
            assert proxy.counts()["most_at_once"] >= 10
        finally:
            proxy.faults()


def test_commits_cost_so_many_requests(bucket):
    ds = ps.create(bucket, {"n": "int32"})
    ds.append({"n": [1]})
    cost = spent(ds, lambda: ds.append({"n": [2]}))
    # The record has the data. The handle has committed the newest record, so it only reads that record again.
    assert (cost["requests"], cost["creates"], cost["reads"], cost.get("puts", 0)) == (2, 1, 1, 0), cost
    other = ps.open(bucket)
    cost = spent(other, lambda: other.append({"n": range(1000)}))
    # One request each for the data file, a listing, the newest record (its root is cached), and the commit record.
    assert cost["requests"] == 4, cost
    for number in range(30):  # Only every 16th commit writes the hint.
        other.append({"n": [number]})
    assert spent(other, lambda: [other.append({"n": [number]}) for number in range(16)])["requests"] <= 2 * 16 + 1 + 2 * 2


def test_large_uploads_are_multipart_and_bounded(bucket):
    body = np.random.default_rng(0).integers(0, 256, 20_000_000, dtype=np.uint8)
    ds = ps.create(bucket, {"blob": ps.Bytes()})
    cost = spent(ds, lambda: ds.append({"blob": [body.tobytes()] * 3}))
    # The upload begins, sends 60 MB in eight parts of up to 8 MiB, and completes. The commit itself then needs three requests.
    assert cost["requests"] == 1 + 8 + 1 + 3, cost
    assert ps.open(bucket)["blob"][2] == body.tobytes()


def test_an_upload_that_is_given_up_leaves_no_parts(bucket, minio):
    ds = ps.create(bucket, {"blob": ps.Bytes()})
    with pytest.raises(RuntimeError, match="enough"), ds.transaction("no") as tx:
        for _ in range(3):
            tx.append({"blob": [bytes(20_000_000)]})
        raise RuntimeError("enough")
    key = str(bucket).removeprefix(f"s3://{servers.BUCKET}/")
    uploads = minio.client().list_multipart_uploads(Bucket=servers.BUCKET, Prefix=key).get("Uploads", [])
    assert uploads == [] and len(ps.open(bucket)) == 0
    assert not [path for path in bucket.rglob("*") if "/d/" in path], "no partial data file remains"


def test_memory_of_remote_reads_and_writes_is_bounded(bucket):
    code = """
import sys, numpy as np, penstock as ps
ps.configure(memory_bytes=64 << 20)
uri = sys.argv[1]
# Unlike `ru_maxrss`, this is not the peak of the parent before the fork.
peak = lambda: int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM:")).split()[1])
before = peak()
ds = ps.create(uri, {"x": ps.Tensor((1 << 20,), "uint8")})
with ds.transaction() as tx:
    for number in range(400):
        tx.append({"x": np.full((1, 1 << 20), number % 256, np.uint8)})
ds = ps.open(uri)
for start in range(0, 400, 8):
    assert (ds.take(np.arange(start, start + 8))["x"][:, 0] == np.arange(start, start + 8) % 256).all()
print((peak() - before) // 1024)
"""
    grown = int(subprocess.run([sys.executable, "-c", code, bucket], check=True, capture_output=True, text=True).stdout)
    # Allow the 64 MiB budget, four 8 MiB parts being uploaded, an 8 MiB batch being returned, and 32 MiB more.
    assert grown <= 64 + 40 + 32, f"memory grew by {grown} MiB for 400 MiB of samples"


# Processes


def test_handles_are_pickled_without_secrets(cifar, minio):
    uri, images = cifar
    options = {"access_key_id": servers.KEY, "secret_access_key": servers.SECRET, "endpoint_url": minio.endpoint, "region": "us-east-1"}
    ds = ps.open(uri, storage_options=options)
    body = pickle.dumps(ds)
    assert servers.SECRET.encode() not in body and servers.KEY.encode() not in body and minio.endpoint.encode() in body
    np.testing.assert_array_equal(pickle.loads(body)[3]["image"], images[3])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_data_loader_workers_read_from_the_bucket(cifar, method):
    from torch.utils.data import DataLoader

    uri, images = cifar
    ds = ps.open(uri)
    ds.take([0])  # Children must not depend on the parent's connections or threads.
    loader = DataLoader(
        ds.torch(["image", "label"]), batch_size=64, num_workers=2, multiprocessing_context=method, collate_fn=ps.torch.collate
    )
    seen = [int(label) for batch in loader for label in batch["label"]]
    assert seen == list(range(SAMPLES))
    np.testing.assert_array_equal(ds[5]["image"], images[5])


def test_a_forked_child_leaves_the_parents_upload_alone(bucket):
    ds = ps.create(bucket, {"blob": ps.Bytes()})
    with ds.transaction() as tx:
        tx.append({"blob": [bytes(20_000_000)]})
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                del tx, ds
            os._exit(0)
        os.waitpid(child, 0)
        tx.append({"blob": [b"after"]})
    assert [len(blob) for blob in ps.open(bucket)["blob"]] == [20_000_000, 5]


# Faults


def test_faults_are_survived_and_counted(bucket, proxy):
    with servers.environment(AWS_ENDPOINT_URL=proxy.endpoint):
        proxy.faults("seed=3&lose=40&reset=40&throttle=40&toomany=20&fail=40&truncate=60&late=40&stale=100")
        try:
            ds = ps.create(bucket, {"n": "int32", "blob": ps.Bytes()})
            for number in range(10):
                ds.append({"n": [number], "blob": [bytes([number]) * 500_000]})
            fresh = ps.open(bucket)
            assert len(ds) == 10
            while len(fresh) < 10:  # A stale listing leads to an older snapshot, never to a wrong one.
                fresh.refresh()
            assert fresh["n"][:].tolist() == list(range(10))
            assert [blob == bytes([number]) * 500_000 for number, blob in enumerate(fresh["blob"])] == [True] * 10
            counts = proxy.counts()
            assert min(counts[name] for name in ("lose", "reset", "throttle", "fail", "truncate")) > 0, counts
            assert ds.stats()["retries"] + fresh.stats()["retries"] > 0
        finally:
            proxy.faults()


def test_hedging_asks_again_for_a_slow_range(cifar, proxy):
    uri, images = cifar
    with servers.environment(AWS_ENDPOINT_URL=proxy.endpoint):
        ds = ps.open(uri, storage_options={"hedge": True})
        plain = ps.open(uri)
        for position in range(0, 2000, 60):
            ds.take([position], columns=["image"])
            plain.take([position], columns=["image"])
        # Each range has at most one hedge, and none without the `hedge` option, regardless of the machine's speed.
        assert ds.stats()["hedges"] <= 34 and plain.stats()["hedges"] == 0
        proxy.faults("seed=5&late=150&late_ms=1000")
        try:
            before = ds.stats()["hedges"]
            positions = np.arange(1, 4000, 97)
            for position in positions:
                np.testing.assert_array_equal(ds.take([position], columns=["image"])["image"][0], images[position])
            assert 3 <= ds.stats()["hedges"] - before <= len(positions)
        finally:
            proxy.faults()


def test_a_dead_store_is_an_error_by_its_deadline(cifar, proxy):
    uri, _ = cifar
    options = {"endpoint_url": proxy.endpoint, "timeout_seconds": 1.0}
    ds = ps.open(uri, storage_options=options)
    place = uri.with_name("writer")
    writer = ps.create(place, {"n": "int32"}, storage_options=options)
    proxy.faults("fail=1000&in_a_row=0")
    try:
        for work, code in (
            (lambda: ds.take([1]), "storage-failed"),
            (lambda: ds.refresh(), "storage-failed"),
            (lambda: ps.open(uri, storage_options=options), "storage-failed"),
            (lambda: writer.append({"n": [1]}), "storage-failed"),
        ):
            proxy.faults("fail=1000&in_a_row=0")
            with pytest.raises(ps.UnavailableError) as caught:
                work()
            assert caught.value.code == code and "500" in str(caught.value)
            # The wait doubles after each attempt, so a deadline of one second allows only a few attempts.
            assert 2 <= proxy.counts()["requests"] <= 20, proxy.counts()
    finally:
        proxy.faults()
    assert writer.append({"n": [2]}).row_ids.size == 1 and len(ps.open(place)) == 1, "no part of the failed append is committed"


def test_a_lost_answer_to_a_commit_is_reported(bucket, proxy):
    options = {"endpoint_url": proxy.endpoint, "timeout_seconds": 1.5}
    ds = ps.create(bucket, {"n": "int32"}, storage_options=options)
    # The proxy will forward every request but return no replies.
    transaction = ds.transaction("two").__enter__()
    transaction.append({"n": [2]})
    proxy.faults("lose=1000&in_a_row=0")
    try:
        with pytest.raises(ps.UnavailableError) as caught:
            transaction.commit()
        assert caught.value.code in ("commit-state-unknown", "storage-failed")
    finally:
        proxy.faults()
    assert len(ps.open(bucket)) in (0, 1)


# Failures


def _expect(code, kind, work, *texts):
    with pytest.raises(kind) as caught:
        work()
    assert caught.value.code == code, f"{caught.value.code}: {caught.value}"
    assert caught.value.hint
    for text in texts:
        assert text in str(caught.value)


def test_wrong_credentials(cifar, proxy, monkeypatch):
    uri, _ = cifar
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(variable)
    base = {"endpoint_url": proxy.endpoint, "timeout_seconds": 3}

    def opened(**options):
        def work():
            proxy.faults()
            try:
                ps.open(uri, storage_options=base | options)
            finally:
                assert proxy.counts()["requests"] <= 2, "a refusal is not retried"

        return work

    _expect("credentials-refused", ps.PermissionDeniedError, opened(access_key_id="nobody", secret_access_key="x"), "AWS_ACCESS_KEY_ID")
    _expect("credentials-refused", ps.PermissionDeniedError, opened(access_key_id=servers.KEY, secret_access_key="x"), "secret")
    _expect("permission-denied", ps.PermissionDeniedError, opened(anonymous=True), "penstock doctor")
    _expect("credentials-missing", ps.PermissionDeniedError, opened(access_key_id=servers.KEY))
    expired = opened(access_key_id=servers.KEY, secret_access_key=servers.SECRET, session_token="old")
    _expect("credentials-refused", ps.PermissionDeniedError, expired)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", "/nowhere")
    _expect("credentials-missing", ps.PermissionDeniedError, opened(), "AWS_PROFILE")


def test_missing_rights(minio, bucket):
    """Use temporary MinIO keys that permit reads but not writes. The first key pair also lacks the permission to list objects."""
    ds = ps.create(bucket, {"n": "int32"})
    ds.append({"n": [1]})
    sts = _session(
        minio, '{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":["s3:GetObject"],"Resource":["arn:aws:s3:::*"]}]}'
    )
    _expect("permission-denied", ps.PermissionDeniedError, lambda: ps.open(bucket, storage_options=sts), "list")
    sts = _session(
        minio,
        '{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":["s3:GetObject","s3:ListBucket"],"Resource":["arn:aws:s3:::*"]}]}',
    )
    reader = ps.open(bucket, storage_options=sts)
    assert reader["n"][0] == 1
    _expect("permission-denied", ps.PermissionDeniedError, lambda: reader.append({"n": [2]}), "create")
    _expect("permission-denied", ps.PermissionDeniedError, lambda: reader.append({"n": range(1000)}), "write")
    assert len(ps.open(bucket)) == 1


def _session(minio, policy):
    import boto3

    sts = boto3.client(
        "sts", endpoint_url=minio.endpoint, region_name="us-east-1", aws_access_key_id=servers.KEY, aws_secret_access_key=servers.SECRET
    )
    made = sts.assume_role(RoleArn="arn:x:ignored:by:minio:", RoleSessionName="test", Policy=policy, DurationSeconds=900)["Credentials"]
    return {
        "access_key_id": made["AccessKeyId"],
        "secret_access_key": made["SecretAccessKey"],
        "session_token": made["SessionToken"],
        "endpoint_url": minio.endpoint,
    }


def test_places_that_are_not_there(minio):
    _expect("bucket-not-found", ps.NotFoundError, lambda: ps.open("s3://no-such-bucket/x"))
    _expect("bucket-not-found", ps.NotFoundError, lambda: ps.create("s3://no-such-bucket/x", {"n": "int32"}))
    _expect("dataset-not-found", ps.NotFoundError, lambda: ps.open(f"s3://{servers.BUCKET}/nothing/here"))
    fast = {"timeout_seconds": 1}
    unreachable = [f"http://127.0.0.1:{servers.free_port()}", "http://no-such-host.invalid"]
    for endpoint in unreachable:
        options = fast | {"endpoint_url": endpoint}
        _expect(
            "storage-unreachable", ps.UnavailableError, lambda options=options: ps.open(f"s3://{servers.BUCKET}/x", storage_options=options)
        )
    for uri in ("s3://", "s3:///x", f"s3://{servers.BUCKET}/../x"):
        with pytest.raises(ps.InvalidInputError) as caught:
            ps.open(uri)
        assert caught.value.code == "invalid-uri"
    for options in (
        {"nonsense": "1"},
        {"anonymous": "perhaps"},
        {"timeout_seconds": -1},
        {"ca_bundle": "/nowhere"},
        {"region": ["x"]},
        "x",
    ):
        with pytest.raises(ps.InvalidInputError):
            ps.open(f"s3://{servers.BUCKET}/x", storage_options=options)
    with pytest.raises(ps.InvalidInputError):
        ps.open("/tmp", io="fast")


def test_a_server_that_says_nothing(bucket):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(16)
        options = {"endpoint_url": f"http://127.0.0.1:{silent.getsockname()[1]}", "timeout_seconds": 1}
        _expect("storage-failed", ps.UnavailableError, lambda: ps.open(bucket, storage_options=options))


def test_a_bucket_that_vanishes(minio):
    minio.client().create_bucket(Bucket="vanishing")
    ds = ps.create("s3://vanishing/x", {"blob": ps.Bytes()})
    ds.append({"blob": [bytes(400_000)] * 3})
    ds = ps.open("s3://vanishing/x")
    ds.take([0])
    for path in servers.BucketPath.of(minio, "s3://vanishing/x").rglob("*"):
        path.unlink()
    minio.client().delete_bucket(Bucket="vanishing")
    assert ds.take([0])["blob"][0] == bytes(400_000), "cached blocks are still readable"
    _expect("bucket-not-found", ps.NotFoundError, lambda: ds.take([1]))
    _expect("bucket-not-found", ps.NotFoundError, lambda: ds.append({"blob": [b"x"]}))


def test_objects_that_vanish_or_change(bucket):
    ds = ps.create(bucket, {"blob": ps.Bytes()})
    ds.append({"blob": [bytes([number]) * 400_000 for number in range(3)]})
    [data] = [path for path in bucket.rglob("*") if "/d/" in path]
    body = data.read_bytes()
    ds = ps.open(bucket)
    ds.take([0])

    def one(position):
        return lambda: ds.take([position])

    data.write_bytes(body[:-1])
    with pytest.raises(ps.CorruptError) as caught:
        one(1)()
    assert caught.value.code == "object-truncated" and "bytes, expected" in str(caught.value)
    flipped = bytearray(body)
    flipped[24 + 400_000 + 70_000] ^= 1
    data.write_bytes(bytes(flipped))
    with pytest.raises(ps.CorruptError) as caught:
        one(1)()
    assert caught.value.code == "block-checksum" and caught.value.rows == [0]
    assert ds.take([1, 2], on_corrupt="null")["blob"][0] is None
    assert [problem.code for _, problem in ds._snapshot.verify()["problems"]] == ["block-checksum"]
    data.unlink()
    _expect_code("object-not-found", one(1))
    data.write_bytes(body)
    assert ds.take([1])["blob"][0] == bytes([1]) * 400_000, "no corrupt bytes were cached"


def _expect_code(code, work):
    with pytest.raises(ps.Error) as caught:
        work()
    assert caught.value.code == code


class S3Like(http.server.BaseHTTPRequestHandler):
    """A minimal S3 server without conditional puts."""

    objects: dict[str, bytes] = {}
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def _answer(self, status, body=b""):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Fri, 20 Nov 2026 00:00:00 GMT")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_PUT(self):
        self.objects[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200)

    def do_DELETE(self):
        self.objects.pop(self.path, None)
        self._answer(204)

    def do_HEAD(self):
        self._answer(200 if self.path in self.objects else 404)

    def do_GET(self):
        if "list-type" in self.path:
            empty = b"<?xml version='1.0'?><ListBucketResult><KeyCount>0</KeyCount><IsTruncated>false</IsTruncated></ListBucketResult>"
            return self._answer(200, empty)
        found = self.path in self.objects
        return self._answer(200 if found else 404, self.objects.get(self.path, b""))


@contextlib.contextmanager
def serving(handler, context=None):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    if context:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_server_without_conditional_puts_is_refused(minio):
    with serving(S3Like) as port:
        options = {"endpoint_url": f"http://127.0.0.1:{port}"}
        work = lambda: ps.create("s3://any/x", {"n": "int32"}, storage_options=options)  # noqa: E731
        _expect("unsupported-storage", ps.UnsupportedError, work, "an existing name was not rejected")
        assert S3Like.objects == {}, "the probe was deleted"


def test_tls_wants_a_known_authority(tmp_path, minio):
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(tmp_path / "cert.pem")
    with serving(S3Like, context) as port:
        endpoint = {"endpoint_url": f"https://127.0.0.1:{port}", "timeout_seconds": 3}
        _expect("storage-unreachable", ps.UnavailableError, lambda: ps.open("s3://any/x", storage_options=endpoint), "ca_bundle")
        trusted = endpoint | {"ca_bundle": tmp_path / "cert.pem"}
        _expect("dataset-not-found", ps.NotFoundError, lambda: ps.open("s3://any/x", storage_options=trusted))


def test_profiles(tmp_path, cifar, minio, monkeypatch):
    uri, images = cifar
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.delenv(variable)
    (tmp_path / "credentials").write_text(
        f"[lab]\naws_access_key_id = {servers.KEY}\naws_secret_access_key = {servers.SECRET}\n[none]\nx = 1\n"
    )
    (tmp_path / "config").write_text(f"[profile lab]\nregion = us-east-1\nendpoint_url = {minio.endpoint}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    np.testing.assert_array_equal(ps.open(uri, storage_options={"profile": "lab"})[1]["image"], images[1])
    monkeypatch.setenv("AWS_PROFILE", "lab")
    np.testing.assert_array_equal(ps.open(uri)[1]["image"], images[1])
    _expect("credentials-missing", ps.PermissionDeniedError, lambda: ps.open(uri, storage_options={"profile": "nobody"}), "nobody")
    _expect("credentials-missing", ps.PermissionDeniedError, lambda: ps.open(uri, storage_options={"profile": "none"}), "no keys")


def test_public_data_is_read_without_credentials(minio, monkeypatch, bucket):
    ds = ps.create(bucket, {"n": "int32"})
    ds.append({"n": [7]})
    key = str(bucket).removeprefix(f"s3://{servers.BUCKET}/")
    policy = (
        '{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Principal":{"AWS":["*"]},"Action":["s3:GetObject"],'
        f'"Resource":["arn:aws:s3:::{servers.BUCKET}/{key}/*"]}},{{"Effect":"Allow","Principal":{{"AWS":["*"]}},"Action":["s3:ListBucket"],'
        f'"Resource":["arn:aws:s3:::{servers.BUCKET}"]}}]}}'
    )
    minio.client().put_bucket_policy(Bucket=servers.BUCKET, Policy=policy)
    try:
        assert ps.open(bucket, storage_options={"anonymous": True})["n"][0] == 7
    finally:
        minio.client().delete_bucket_policy(Bucket=servers.BUCKET)


# Plain HTTP


class Files(http.server.SimpleHTTPRequestHandler):
    """Serve static files and byte ranges, like any web server."""

    protocol_version = "HTTP/1.1"
    root: pathlib.Path

    def log_message(self, *_):
        pass

    def do_GET(self):
        path = self.root / self.path.lstrip("/")
        if not path.is_file():
            return self.send_error(404)
        body = path.read_bytes()
        begin, end = 0, len(body)
        if "Range" in self.headers:
            first, last = self.headers["Range"].removeprefix("bytes=").split("-")
            begin, end = int(first), int(last) + 1
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(body)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(end - begin))
        self.send_header("Last-Modified", "Fri, 20 Nov 2026 00:00:00 GMT")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[begin:end])
        return None

    do_HEAD = do_GET


def test_http_reads_what_a_web_server_serves(tmp_path):
    ds = ps.create(tmp_path / "set", {"image": ps.Image(), "n": "int64"})
    images = []
    for number in range(30):
        with io.BytesIO() as out:
            Pillow.effect_noise((200, 200), 50 + number).convert("RGB").save(out, "JPEG")
            images.append(out.getvalue())
    ds.append({"image": images, "n": np.arange(30)})
    ds.append({"image": images[:3], "n": np.arange(3)})
    handler = type("Here", (Files,), {"root": tmp_path})
    with serving(handler) as port:
        remote = ps.open(f"http://127.0.0.1:{port}/set")
        assert len(remote) == 33 and remote.snapshot == ds.snapshot
        batch = remote.take([32, 5, 0], decode=False)
        assert batch["image"] == [images[2], images[5], images[0]] and batch["n"].tolist() == [2, 5, 0]
        assert remote._snapshot.verify()["problems"] == []
        assert len(remote.log()) == 3
        _expect_code("read-only", lambda: remote.append({"n": [1], "image": images[:1]}))
        _expect_code("dataset-not-found", lambda: ps.open(f"http://127.0.0.1:{port}/nothing"))
        _expect_code("read-only", lambda: ps.create(f"http://127.0.0.1:{port}/new", {"n": "int32"}))


# The command line


def _penstock(*arguments):
    return subprocess.run([sys.executable, "-m", "penstock", *arguments], capture_output=True, text=True, timeout=300)


def test_every_verb_works_on_a_bucket(bucket, tmp_path):
    (tmp_path / "rows.csv").write_text("name,age\nada,36\nalan,41\n")
    assert _penstock("import", str(tmp_path / "rows.csv"), bucket, "--json").returncode == 0
    for arguments, text in (
        (["info", bucket], "age"),
        (["log", bucket], "import"),
        (["head", bucket], "alan"),
        (["verify", bucket], "0 problems"),
    ):
        done = _penstock(*arguments)
        assert done.returncode == 0 and text in done.stdout, done.stdout + done.stderr
    done = _penstock("info", f"s3://{servers.BUCKET}/nothing/there")
    assert done.returncode == 1 and "it is not a dataset" in done.stderr


# Local files without memory maps


@pytest.mark.parametrize("io_mode", ["direct", "buffered"])
def test_local_ranges_are_as_exact_as_remote_ones(tmp_path, io_mode):
    ds = ps.create(tmp_path / "set", {"image": ps.Tensor((32, 32, 3), "uint8"), "blob": ps.Bytes()})
    images = np.random.default_rng(0).integers(0, 256, (2000, 32, 32, 3), dtype=np.uint8)
    blobs = [bytes([number % 256]) * 1500 for number in range(2000)]
    ds.append({"image": images, "blob": blobs})
    ds = ps.open(tmp_path / "set", io=io_mode)
    ds.take([0], columns=["image"])
    cost = spent(ds, lambda: np.testing.assert_array_equal(ds.take(np.arange(500, 1012), columns=["image"])["image"], images[500:1012]))
    direct = {"direct_bytes": 512 * 3072} if io_mode == "direct" else {}
    assert cost == {"ranges": 1, "range_bytes": 512 * 3072} | direct and ds.stats()["maps"] == 0
    assert ds.take([1999, 3])["blob"] == [blobs[1999], blobs[3]]
    copy = pickle.loads(pickle.dumps(ds))
    copy.take([7])
    assert copy.stats()["maps"] == 0, "pickling keeps the handle's `io`"


def test_direct_reads_come_from_the_device(tmp_path):
    ds = ps.create(tmp_path / "set", {"x": ps.Tensor((None,), "uint8")})
    value = np.random.default_rng(0).integers(0, 256, 30_000_000, dtype=np.uint8)
    ds.append({"x": [value] * 2})

    def device_bytes():
        return int(
            next(line for line in pathlib.Path("/proc/self/io").read_text().splitlines() if line.startswith("read_bytes")).split()[1]
        )

    ds = ps.open(tmp_path / "set", io="direct")
    before = device_bytes()
    np.testing.assert_array_equal(ds.take([1])["x"][0], value)
    if ds.stats()["direct_bytes"] == 0:
        pytest.skip("O_DIRECT or io_uring is unavailable")
    assert 30_000_000 <= device_bytes() - before <= 30_000_000 + 3 * 4096 + 200_000, "read from the device despite the page cache"


def test_direct_reads_survive_forks_and_threads(tmp_path):
    ds = ps.create(tmp_path / "set", {"x": ps.Tensor((100_000,), "uint8")})
    ds.append({"x": np.arange(40, dtype=np.uint8)[:, None].repeat(100_000, 1)})
    ds = ps.open(tmp_path / "set", io="direct")
    ds.take([0])

    def check(position):
        assert (ds.take([position])["x"] == position).all()

    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            check(1)
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    threads = [threading.Thread(target=check, args=(position,)) for position in range(2, 40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(pathlib.Path("/proc/self/fd").iterdir())) < 200


def test_doctor(bucket, tmp_path, minio):
    done = _penstock("doctor", bucket, "--json")
    report = json.loads(done.stdout)
    found = {finding["name"]: finding for finding in report["findings"]}
    assert done.returncode == 0 and report["good"] and found["create-only put"]["good"] and found["latency"]["unit"] == "ms"
    assert set(found) == {"reach", "list", "write", "create-only put", "latency", "ranged reads", "sequential reads", "delete", "clock"}
    assert not bucket.rglob("*"), "no objects remain"
    done = _penstock("doctor", "s3://no-such-bucket/x", "--json")
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert done.returncode == 1 and "bucket" in found["reach"]["advice"]
    with servers.environment(AWS_SECRET_ACCESS_KEY="wrong"):
        done = _penstock("doctor", bucket, "--json")
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert done.returncode == 1 and "secret does not match" in found["reach"]["advice"]
    (tmp_path / "here").mkdir()
    assert _penstock("doctor", str(tmp_path / "here")).returncode == 0 and not list((tmp_path / "here").iterdir())
    assert _penstock("doctor", str(tmp_path / "nowhere")).returncode == 1
    with serving(S3Like) as port, servers.environment(AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}"):
        done = _penstock("doctor", "s3://any/x", "--json")
        found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
        assert done.returncode == 1 and not found["create-only put"]["good"] and "If-None-Match" in found["create-only put"]["advice"]


# Found by adversarial testing


def test_a_scan_continues_in_a_forked_child(cifar):
    uri, _ = cifar
    batches = ps.open(uri).scan(["label"], batch_size=500)
    next(batches)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            rows = sum(len(batch) for batch in batches)
            os._exit(0 if rows == SAMPLES - 500 else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert sum(len(batch) for batch in batches) == SAMPLES - 500


def test_reading_ahead_is_bounded_where_samples_grow(tmp_path):
    ds = ps.create(tmp_path / "set", {"blob": ps.Bytes()})
    ds.append({"blob": [None] * 2000 + [bytes([number]) * 1_000_000 for number in range(100)]})
    ds = ps.open(tmp_path / "set", io="buffered")
    largest, before = 0, ds.stats()["range_bytes"]
    for number, batch in enumerate(ds.scan(batch_size=8)):
        after = ds.stats()["range_bytes"]
        largest, before = max(largest, after - before), after
        assert len(batch) == 8 or number == 2100 // 8
    assert largest <= 1.25 * (32 << 20), f"{largest} bytes were read ahead at once"


@pytest.fixture
def small_budget():
    """Set a memory budget smaller than the test's dataset, so that takes are not cached."""
    before = ps.configure()
    ps.configure(memory_bytes=16 << 20)
    yield
    ps.configure(memory_bytes=before["memory_bytes"])


def _same(found, expected):
    assert (found is None) == (expected is None)
    if expected is not None:
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("hedge", [False, True])
def test_what_is_not_kept_is_joined_where_it_lies(bucket, small_budget, hedge):
    """Read columns, fragments, and nulls with scans and with takes in several orders. Each take exceeds half of the cache."""
    rng = np.random.default_rng(5)
    blobs = [None if number % 13 == 5 else rng.bytes(int(rng.integers(0, 120_000))) for number in range(400)]
    grids = [None if number % 17 == 3 else rng.random((int(rng.integers(0, 2000)), 3)) for number in range(400)]
    cubes = rng.random((400, 128, 128), np.float32)
    ds = ps.create(
        bucket, {"blob": ps.Bytes(), "grid": ps.Tensor((None, 3), "float64"), "cube": ps.Tensor((128, 128), "float32"), "n": "int16"}
    )
    for low, high in ((0, 150), (150, 151), (151, 400)):
        ds.append({"blob": blobs[low:high], "grid": grids[low:high], "cube": cubes[low:high], "n": np.arange(low, high, dtype=np.int16)})
    ds = ps.open(bucket, storage_options={"hedge": str(hedge).lower()})
    at = 0
    for batch in ds.scan(batch_size=7):
        assert batch["n"].to_pylist() == list(range(at, at + len(batch)))
        assert batch["blob"].to_pylist() == blobs[at : at + len(batch)]
        for index, cell in enumerate(batch["grid"]):
            value = cell.as_py()
            _same(None if value is None else np.reshape(value["data"], value["shape"]), grids[at + index])
        np.testing.assert_array_equal(batch["cube"].to_numpy_ndarray(), cubes[at : at + len(batch)])
        at += len(batch)
    assert at == 400
    for positions in (np.arange(400), np.arange(399, -1, -1), rng.permutation(400), np.repeat(np.arange(100, 300), 2)):
        batch = ds.take(positions, columns=["blob", "cube", "grid", "cube", "n", "blob"])
        np.testing.assert_array_equal(batch["cube"], cubes[positions])
        assert batch["blob"] == [blobs[position] for position in positions]
        for index, position in enumerate(positions):
            _same(batch["grid"][index], grids[position])
        assert batch["cube"].flags.writeable and batch["cube"].flags.aligned
        batch["cube"][:] = 0  # The caller owns the array.
        np.testing.assert_array_equal(ds.take(positions[:5])["cube"], cubes[positions[:5]])


def test_memory_of_a_remote_scan_is_a_few_groups(bucket):
    """Scan 200 MB under a budget of 64 MiB. Only the current and next groups, and reusable buffers, stay in memory."""
    ds = ps.create(bucket, {"blob": ps.Bytes()})
    ds.append({"blob": [np.random.default_rng(number).bytes(100_000) for number in range(2000)]})
    script = """
import sys, penstock as ps, pyarrow
from measured import peak
ps.configure(memory_bytes=64 << 20, threads=2)
ds = ps.open(sys.argv[1])
batches = ds.scan(batch_size=20)
next(batches)
before, rows = peak(), 20
for batch in batches: rows += len(batch)
print(rows, peak() - before)
"""
    rows, grown = map(int, measured.run(script, bucket).split())
    assert rows == 2000 and grown <= 48 << 20, f"{grown >> 20} MiB"


def test_a_whole_take_is_received_where_it_stays(bucket):
    """Take 128 MiB as one array, without ever making a second copy."""
    ds = ps.create(bucket, {"cube": ps.Tensor((256, 1024), "float32")})
    ds.append({"cube": np.arange(128, dtype=np.float32)[:, None, None] + np.zeros((128, 256, 1024), np.float32)})
    script = """
import sys, numpy as np, penstock as ps
from measured import peak
ps.configure(memory_bytes=64 << 20, threads=2)
ds = ps.open(sys.argv[1])
ds.take([5])
before = peak()
cubes = ds["cube"][:]
print(bool((cubes == np.arange(128)[:, None, None]).all(axis=(1, 2)).all()), peak() - before)
"""
    right, grown = measured.run(script, bucket).split()
    assert right == "True" and int(grown) <= 176 << 20, f"{int(grown) >> 20} MiB"


def test_ctrl_c_ends_a_wait(tmp_path):
    """The server accepts connections but never responds. Without Ctrl-C, the wait would last until the ten-minute deadline."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(16)
        script = """
import sys, penstock as ps
print("waiting", flush=True)
ps.open("s3://bucket/set", storage_options={"endpoint_url": sys.argv[1], "access_key_id": "a", "secret_access_key": "b", "timeout_seconds": 600})
"""
        command = [sys.executable, "-c", script, f"http://127.0.0.1:{silent.getsockname()[1]}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as waiting:
            assert waiting.stdout.readline() == "waiting\n"
            silent.accept()  # The client has connected.
            waiting.send_signal(signal.SIGINT)
            _, told = waiting.communicate(timeout=300)
        assert waiting.returncode != 0 and told.rstrip().endswith("KeyboardInterrupt"), told


def test_a_scan_without_columns_has_rows(cifar, tmp_path):
    uri, _ = cifar
    assert [batch.num_rows for batch in ps.open(uri).scan([], batch_size=3000)] == [3000, SAMPLES - 3000]
    local = ps.create(tmp_path / "set", {"n": "int8"})
    local.append({"n": [1, 2, 3]})
    assert [batch.num_rows for batch in local.scan([], batch_size=np.int64(2))] == [2, 1]
    assert [len(batch) for batch in ps.open(uri).scan(["label"], batch_size=2**70)] == [SAMPLES]


def test_ctrl_c_and_break_end_a_scan_that_waits(cifar, proxy):
    """The proxy delays every reply for longer than this test may run."""
    uri, _ = cifar
    script = """
import sys, penstock as ps
ps.configure(memory_bytes=16 << 20)
ds = ps.open(sys.argv[1])
ds.take([0])
print("ready", flush=True); sys.stdin.readline()
for batch in ds.scan(batch_size=100): pass
"""
    proxy.faults("")
    command = [sys.executable, "-c", script, str(uri)]
    with servers.environment(AWS_ENDPOINT_URL=proxy.endpoint):
        running = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with running:
        assert running.stdout.readline() == "ready\n"
        proxy.faults("delay_ms=3600000")
        running.stdin.write("go\n")
        running.stdin.flush()
        until(lambda: proxy.counts()["requests"] > 0 or running.poll() is not None, "the first request")
        assert running.poll() is None, "the process ended before its first request"
        running.send_signal(signal.SIGINT)
        try:
            _, told = running.communicate(timeout=300)
        finally:
            proxy.faults("")
    assert told.rstrip().endswith("KeyboardInterrupt"), told


@pytest.mark.parametrize("taken", [1, 3])
def test_an_unfinished_scan_does_not_keep_python_from_exiting(bucket, proxy, taken):
    """Each reply is slow, so the script ends while threads are still reading ahead."""
    ds = ps.create(bucket, {"x": ps.Tensor((4096,), "uint8")})
    ds.append({"x": np.zeros((16_000, 4096), np.uint8)})
    script = """
import sys, penstock as ps
batches = ps.open(sys.argv[1]).scan()
for _ in range(int(sys.argv[2])): next(batches)
print("read", flush=True)
"""
    proxy.faults("delay_ms=300")
    try:
        with servers.environment(AWS_ENDPOINT_URL=proxy.endpoint):
            ended = subprocess.run([sys.executable, "-c", script, str(bucket), str(taken)], capture_output=True, text=True, timeout=300)
    finally:
        proxy.faults()
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "read\n", "")


class Losing(http.server.BaseHTTPRequestHandler):
    """Forward every request to MinIO, but close the connection instead of replying to puts of records."""

    protocol_version = "HTTP/1.1"
    upstream = 0
    lost = threading.Event()

    def do_GET(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        connection = http.client.HTTPConnection("127.0.0.1", self.upstream)
        connection.request(self.command, self.path, body, dict(self.headers))
        answer = connection.getresponse()
        told = answer.read()
        connection.close()
        if self.command == "PUT" and "/log/" in self.path:
            self.lost.set()
            self.close_connection = True
            return
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection"):
                self.send_header(name, value)
        if self.command != "HEAD" and answer.getheader("Content-Length") is None and answer.status not in (204, 304):
            self.send_header("Content-Length", str(len(told)))
        self.end_headers()
        self.wfile.write(told)

    do_PUT = do_HEAD = do_POST = do_DELETE = do_GET

    def log_message(self, *_):
        pass


def test_ctrl_c_in_a_commit_reports_that_its_state_is_unknown(bucket):
    """Replies to creates are lost. Ctrl-C ends the retries, and the error reports that the outcome is unknown."""
    ps.create(bucket, {"n": "int32"})
    script = """
import sys, penstock as ps
ps.open(sys.argv[1], storage_options={"timeout_seconds": 3000}).append({"n": [1]})
"""
    Losing.upstream = bucket.server.port
    with serving(Losing) as port, servers.environment(AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}"):
        running = subprocess.Popen([sys.executable, "-c", script, str(bucket)], stderr=subprocess.PIPE, text=True)
        with running:
            assert Losing.lost.wait(300)
            running.send_signal(signal.SIGINT)
            _, told = running.communicate(timeout=300)
    assert running.returncode != 0 and "KeyboardInterrupt" in told and "cannot determine whether the commit succeeded" in told, told


def test_http_is_read_only_before_anybody_is_asked(tmp_path):
    (tmp_path / "rows.csv").write_text("n\n1\n")
    with pytest.raises(ps.PermissionDeniedError) as caught:
        ps.create("http://127.0.0.1:1/set", {"n": "int32"})
    assert caught.value.code == "read-only"
    done = _penstock("import", str(tmp_path / "rows.csv"), "http://127.0.0.1:1/set")
    assert done.returncode == 1 and "read-only" in done.stderr


def test_a_failed_import_reports_what_it_leaves(bucket, tmp_path):
    (tmp_path / "bad.csv").write_text("n,m\n1,2\n3\n")
    done = _penstock("import", str(tmp_path / "bad.csv"), str(bucket))
    assert done.returncode == 1 and "the empty dataset `" in done.stderr, done.stderr
    assert len(ps.open(bucket)) == 0


def test_early_exit_from_a_scan(cifar, monkeypatch):
    """Closing must not call `Thread.join`: the garbage collector may close a scan while Python holds a lock that `join` needs."""
    uri, _ = cifar
    batches = ps.open(uri).scan(batch_size=100)
    next(batches)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", None)
        batches.close()
    reading = [thread for thread in threading.enumerate() if thread.name == "penstock-scan"]
    for thread in reading:  # The thread may still be running Python's thread shutdown code.
        thread.join(300)
    assert not any(thread.is_alive() for thread in reading)


@pytest.mark.parametrize("name", ["exp#1 (v~2)", "données", "a b{c}*?", "100%"])
def test_names_of_prefixes_are_kept(minio, name):
    place = f"s3://{servers.BUCKET}/names/{name}/set"
    ps.create(place, {"n": "int32"}).append({"n": [1]})
    listed = minio.client().list_objects_v2(Bucket=servers.BUCKET, Prefix=f"names/{name}/set/log/")
    assert listed["KeyCount"] == 3 and ps.open(place)["n"][0] == 1


def test_foreign_names_in_the_log_are_passed_over(bucket):
    minio = bucket.server.client()
    key = str(bucket).removeprefix(f"s3://{servers.BUCKET}/")
    minio.put_object(Bucket=servers.BUCKET, Key=f"{key}/", Body=b"")  # Web consoles create folders this way.
    ds = ps.create(bucket, {"n": "int32"})
    ds.append({"n": [1]})
    for name in ("", ".DS_Store", "000"):
        minio.put_object(Bucket=servers.BUCKET, Key=f"{key}/log/0000000000000000/{name}", Body=b"x" if name else b"")
    ds = ps.open(bucket)
    assert ds["n"][0] == 1 and ds.append({"n": [2]}).row_ids.size == 1


def test_keys_and_tokens_come_from_one_place(cifar, tmp_path, minio, monkeypatch):
    uri, images = cifar
    keys = {"access_key_id": servers.KEY, "secret_access_key": servers.SECRET, "endpoint_url": minio.endpoint}
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of another login")
    np.testing.assert_array_equal(ps.open(uri, storage_options=keys)[1]["image"], images[1])
    (tmp_path / "credentials").write_text(f"[lab]\naws_access_key_id = {servers.KEY}\naws_secret_access_key = {servers.SECRET}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    np.testing.assert_array_equal(ps.open(uri, storage_options={"profile": "lab"})[1]["image"], images[1])
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    np.testing.assert_array_equal(ps.open(uri, storage_options=keys)[1]["image"], images[1])


def test_options_that_cannot_be(minio, monkeypatch):
    for options in (
        {"endpoint_url": ""},
        {"endpoint_url": "127.0.0.1:9000"},
        {"region": "x\ny"},
        {"access_key_id": "x\r", "secret_access_key": "y"},
    ):
        with pytest.raises(ps.InvalidInputError) as caught:
            ps.open(f"s3://{servers.BUCKET}/x", storage_options=options)
        assert caught.value.code == "invalid-argument"
    # This bucket cannot be part of the host name, so the create must fail without writing any object.
    with pytest.raises(ps.Error):
        ps.create(f"s3://{servers.BUCKET}/other/x", {"n": "int32"}, storage_options={"virtual_hosted": True, "timeout_seconds": 1})
    assert minio.client().list_objects_v2(Bucket=servers.BUCKET, Prefix="other/")["KeyCount"] == 0


def test_many_scattered_direct_ranges_need_few_descriptors(tmp_path):
    ds = ps.create(tmp_path / "set", {"blob": ps.Bytes()})
    ds.append({"blob": [bytes([number % 256]) * 200_000 for number in range(300)]})
    code = """
import resource, sys, numpy as np, penstock as ps
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
blobs = ps.open(sys.argv[1], io="direct").take(np.arange(0, 300, 2))["blob"]
assert [blob[0] for blob in blobs] == [number % 256 for number in range(0, 300, 2)]
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "set")], check=True)


def test_doctor_is_not_misled_by_lost_replies(bucket, proxy):
    proxy.faults("seed=1&lose=300")
    try:
        with servers.environment(AWS_ENDPOINT_URL=proxy.endpoint):
            found = {finding["name"]: finding for finding in json.loads(_penstock("doctor", bucket, "--json").stdout)["findings"]}
        assert found["create-only put"]["good"], found
    finally:
        proxy.faults()


class Endless(S3Like):
    """Claim that every object is 2^46 bytes long."""

    def do_GET(self):
        if "list-type" in self.path:
            name = f"{self.path.split('prefix=')[1].split('&')[0].replace('%2F', '/')}{2**64 - 1:020}"
            entry = f"<Contents><Key>{name}</Key><LastModified>2026-11-20T00:00:00.000Z</LastModified><Size>9</Size></Contents>"
            return self._answer(
                200, f"<?xml version='1.0'?><ListBucketResult><IsTruncated>false</IsTruncated>{entry}</ListBucketResult>".encode()
            )
        self.send_response(200)
        self.send_header("Content-Length", str(2**46))
        self.send_header("Last-Modified", "Fri, 20 Nov 2026 00:00:00 GMT")
        self.end_headers()
        with contextlib.suppress(OSError):
            while True:
                self.wfile.write(bytes(1 << 20))


def test_an_endless_object_buys_no_memory():
    with serving(Endless) as port:
        options = {"endpoint_url": f"http://127.0.0.1:{port}", "access_key_id": "x", "secret_access_key": "y", "timeout_seconds": 20}
        with pytest.raises(ps.Error) as caught:
            ps.open("s3://any/x", storage_options=options)
        assert caught.value.code in ("object-malformed", "storage-failed")


@pytest.mark.parametrize("answer", ["whole", "shifted", "no range"])
def test_servers_that_do_not_keep_to_http(tmp_path, answer):
    """One server ignores ranges, and others send wrong headers. The client reports this at once and does not retry."""
    place = tmp_path / "dataset"
    ps.create(place, {"x": ps.Tensor((1000,), "float64")}).append({"x": np.ones((100, 1000))})

    class Server(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *given):
            super().__init__(*given, directory=str(tmp_path))

        def log_message(self, *given):
            pass

        def do_GET(self):
            asked = self.headers.get("Range")
            ranges.append(asked)
            if asked is None or answer == "whole":
                return super().do_GET()
            body = pathlib.Path(self.translate_path(self.path)).read_bytes()
            begin, end = map(int, asked.removeprefix("bytes=").split("-"))
            self.send_response(206)
            if answer == "shifted":
                self.send_header("Content-Range", f"bytes {begin + 1}-{end + 1}/{len(body)}")
            self.send_header("Content-Length", str(end + 1 - begin))
            self.end_headers()
            self.wfile.write(body[begin : end + 1])

    ranges = []
    with serving(Server) as port:
        ds = ps.open(f"http://127.0.0.1:{port}/dataset")
        ranges.clear()
        with pytest.raises(ps.UnsupportedError, match="violates HTTP") as caught:
            ds.take([5])
        assert caught.value.code == "unsupported-storage" and len(ranges) == 1

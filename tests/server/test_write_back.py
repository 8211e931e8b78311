"""`penstock serve --write-back`: puts that are acknowledged before the cold store has them."""

import concurrent.futures
import os
import pathlib
import random
import subprocess
import sys
import threading
import urllib.request

import boto3
import botocore.exceptions
import numpy as np
import penstock as ps
import pytest
import servers
from botocore.config import Config
from waiting import until

MIB = 1 << 20
# Every request fails, as often as it is sent.
DOWN = "fail=1000&in_a_row=0"
KEYS = {"aws_access_key_id": servers.KEY, "aws_secret_access_key": servers.SECRET}


@pytest.fixture
def folder(tmp_path):
    return tmp_path


@pytest.fixture
def start(folder, minio, proxy):
    """Return a function that starts a server before a proxy before MinIO. The proxy has no faults at first."""
    started = []

    def begin(*options, size="100MB"):
        proxy.faults()
        environment = {**minio.environment, "AWS_ENDPOINT_URL": proxy.endpoint, "AWS_MAX_ATTEMPTS": "1"}
        options = ("--cache", f"{folder / 'cache'}:50MB", "--write-back", f"{folder / 'pending'}:{size}", *options)
        started.append(servers.Penstock(folder, "s3://", *options, environment=environment))
        client = started[-1].client()
        client.put_object(Bucket="penstock", Key=f"{folder.name}/first", Body=b"1")
        return started[-1], client

    yield begin
    proxy.faults()
    for server in started:
        server.stop()


def cold_body(minio, key):
    """Return what the cold store has of an object, or None."""
    try:
        return minio.client().get_object(Bucket="penstock", Key=key)["Body"].read()
    except botocore.exceptions.ClientError as error:
        assert error.response["Error"]["Code"] == "NoSuchKey"
        return None


def files(folder):
    """List the files in the folder of pending objects. Folders come and go meanwhile."""
    return [pathlib.Path(above) / name for above, _, names in os.walk(folder / "pending" / "penstock") for name in names]


def size_of(path):
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def test_an_object_is_read_from_the_folder_until_the_cold_store_has_it(start, folder, minio, proxy):
    _, client = start()
    key, body = f"{folder.name}/a b", random.Random(1).randbytes(3 * MIB)
    proxy.faults(DOWN)
    put = client.put_object(
        Bucket="penstock", Key=key, Body=body, ContentType="x/y", Metadata={"colour": "green"}, ChecksumAlgorithm="SHA256"
    )
    assert cold_body(minio, key) is None
    for _ in range(2):
        got = client.get_object(Bucket="penstock", Key=key)
        assert (got["Body"].read(), got["ContentType"], got["Metadata"], got["ETag"]) == (body, "x/y", {"colour": "green"}, put["ETag"])
    assert client.get_object(Bucket="penstock", Key=key, Range="bytes=5-9")["Body"].read() == body[5:10]
    assert client.head_object(Bucket="penstock", Key=key, ChecksumMode="ENABLED")["ChecksumSHA256"] == put["ChecksumSHA256"]
    # A listing would be wrong, so it is not answered.
    with pytest.raises(botocore.exceptions.ClientError, match="not in the cold store yet"):
        client.list_objects_v2(Bucket="penstock", Prefix=f"{folder.name}/")
    proxy.faults()
    assert [found["Key"] for found in client.list_objects_v2(Bucket="penstock", Prefix=f"{folder.name}/")["Contents"]] == [
        key,
        f"{folder.name}/first",
    ]
    cold = minio.client().get_object(Bucket="penstock", Key=key)
    assert (cold["Body"].read(), cold["ContentType"], cold["Metadata"], cold["ETag"]) == (body, "x/y", {"colour": "green"}, put["ETag"])
    until(lambda: not files(folder), "what was sent is removed")
    assert client.get_object(Bucket="penstock", Key=key)["Body"].read() == body


@pytest.mark.long
def test_nothing_is_lost_by_kill(start, folder, minio, proxy):
    server, client = start()
    proxy.faults(DOWN)
    bodies = {f"{folder.name}/{number}/x": random.Random(number).randbytes(number * 10_000) for number in range(20)}
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda item: client.put_object(Bucket="penstock", Key=item[0], Body=item[1]), bodies.items()))
    server.process.kill()
    server.process.wait()
    assert all(cold_body(minio, key) is None for key in bodies)
    server.restart()
    key, body = next(iter(bodies.items()))
    assert client.get_object(Bucket="penstock", Key=key)["Body"].read() == body
    proxy.faults()
    until(lambda: not files(folder), "everything is sent")
    assert all(cold_body(minio, key) == body for key, body in bodies.items())


def test_what_is_left_is_sent_before_the_end(start, folder, minio, proxy):
    server, client = start()
    proxy.faults("delay_ms=100")
    bodies = {f"{folder.name}/{number}": random.Random(number).randbytes(50_000) for number in range(12)}
    for key, body in bodies.items():
        client.put_object(Bucket="penstock", Key=key, Body=body)
    server.process.terminate()
    assert server.process.wait(300) == 0
    assert all(cold_body(minio, key) == body for key, body in bodies.items())


def test_a_put_with_a_condition_waits_for_all_that_was_acknowledged(start, folder, minio, proxy):
    _, client = start()
    proxy.faults("delay_ms=100")
    for number in range(5):
        client.put_object(Bucket="penstock", Key=f"{folder.name}/data/{number}", Body=b"%d" % number)
    client.put_object(Bucket="penstock", Key=f"{folder.name}/commit", Body=b"refers to data", IfNoneMatch="*")
    assert [cold_body(minio, f"{folder.name}/data/{number}") for number in range(5)] == [b"%d" % number for number in range(5)]
    assert cold_body(minio, f"{folder.name}/commit") == b"refers to data"
    with pytest.raises(botocore.exceptions.ClientError, match="PreconditionFailed"):
        client.put_object(Bucket="penstock", Key=f"{folder.name}/commit", Body=b"other", IfNoneMatch="*")


def test_other_operations_see_what_was_put(start, folder, minio, proxy):
    _, client = start()
    proxy.faults("delay_ms=50")
    name = folder.name
    client.put_object(Bucket="penstock", Key=f"{name}/a", Body=b"a")
    client.copy_object(Bucket="penstock", Key=f"{name}/b", CopySource=f"penstock/{name}/a")
    assert client.get_object(Bucket="penstock", Key=f"{name}/b")["Body"].read() == b"a"
    client.put_object(Bucket="penstock", Key=f"{name}/a", Body=b"new")
    client.delete_object(Bucket="penstock", Key=f"{name}/a")
    with pytest.raises(botocore.exceptions.ClientError, match="NoSuchKey"):
        client.get_object(Bucket="penstock", Key=f"{name}/a")
    client.put_object(Bucket="penstock", Key=f"{name}/c", Body=b"c")
    deleted = client.delete_objects(Bucket="penstock", Delete={"Objects": [{"Key": f"{name}/{key}"} for key in "bc"]})
    assert len(deleted["Deleted"]) == 2
    upload = client.create_multipart_upload(Bucket="penstock", Key=f"{name}/d")["UploadId"]
    client.put_object(Bucket="penstock", Key=f"{name}/d", Body=b"older")
    part = client.upload_part(Bucket="penstock", Key=f"{name}/d", UploadId=upload, PartNumber=1, Body=b"of parts")
    parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
    client.complete_multipart_upload(Bucket="penstock", Key=f"{name}/d", UploadId=upload, MultipartUpload=parts)
    proxy.faults()
    until(lambda: not files(folder), "everything is sent")
    assert [cold_body(minio, f"{name}/{key}") for key in "abcd"] == [None, None, None, b"of parts"]


def test_an_object_that_waits_to_be_sent_is_not_sent_while_it_is_deleted(start, folder, minio, proxy):
    _, client = start()
    proxy.faults("delay_ms=100")
    keys = [f"{folder.name}/{number:02}" for number in range(16)]
    for key in keys:
        client.put_object(Bucket="penstock", Key=key, Body=bytes(1000))
    for key in reversed(keys[8:]):
        client.delete_object(Bucket="penstock", Key=key)
    proxy.faults()
    until(lambda: not files(folder), "everything is sent")
    assert [cold_body(minio, key) for key in keys] == [bytes(1000)] * 8 + [None] * 8


def test_the_last_acknowledged_put_stays(start, folder, minio, proxy):
    """Writers replace, delete and read their objects while older versions are being sent, through a network that loses requests."""
    server, client = start()
    proxy.faults("seed=3&reset=50&fail=50&delay_ms=5")

    def work(number):
        choose, key, body = random.Random(number), f"{folder.name}/{number}", None
        for _ in range(40):
            if choose.random() < 0.15:
                client.delete_object(Bucket="penstock", Key=key)
                body = None
            else:
                body = choose.randbytes(choose.randrange(40_000))
                client.put_object(Bucket="penstock", Key=key, Body=body)
            if choose.random() < 0.5:
                try:
                    found = client.get_object(Bucket="penstock", Key=key)["Body"].read()
                except client.exceptions.NoSuchKey:
                    found = None
                assert found == body
        return key, body

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        last = dict(threads.map(work, range(8)))
    proxy.faults()
    until(lambda: not files(folder), "everything is sent")
    assert {key: cold_body(minio, key) for key in last} == last
    assert server.process.poll() is None


def test_what_exceeds_the_size_is_written_through(start, folder, minio, proxy):
    _, client = start(size="1MB")
    proxy.faults("delay_ms=50")
    for number in range(6):
        body = random.Random(number).randbytes(700_000)
        client.put_object(Bucket="penstock", Key=f"{folder.name}/{number}", Body=body)
        assert sum(size_of(path) + 4096 for path in files(folder)) <= 1_000_000
    big = random.Random(9).randbytes(2 * MIB)
    client.put_object(Bucket="penstock", Key=f"{folder.name}/big", Body=big)
    assert cold_body(minio, f"{folder.name}/big") == big


def test_a_bucket_that_is_missing_is_not_written_to(start, folder):
    _, client = start()
    with pytest.raises(botocore.exceptions.ClientError) as raised:
        client.put_object(Bucket="penstock-missing", Key="a", Body=b"a")
    assert raised.value.response["ResponseMetadata"]["HTTPStatusCode"] == 404
    assert not (folder / "pending" / "penstock-missing").exists()


def test_a_dataset_is_whole_in_the_cold_store_after_each_commit(start, folder, minio, proxy):
    server, _ = start()
    proxy.faults("delay_ms=20")
    through = {"endpoint_url": server.endpoint, "access_key_id": servers.KEY, "secret_access_key": servers.SECRET}
    ds = ps.create(f"s3://penstock/{folder.name}/ds", {"x": ps.Tensor((100,), "float32")}, storage_options=through)
    for number in range(5):
        ds.append({"x": np.full((50, 100), number, np.float32)})
        cold = ps.open(f"s3://penstock/{folder.name}/ds", storage_options={**through, "endpoint_url": minio.endpoint})
        assert len(cold) == 50 * (number + 1)
        assert cold[-1]["x"][0] == number and cold.verify()["problems"] == []


def test_an_object_that_is_refused_for_good_can_be_deleted(start, folder, minio, proxy):
    """Its bucket is deleted elsewhere, for example. Others continue."""
    _, client = start()
    bucket = "penstock-gone"
    minio.client().create_bucket(Bucket=bucket)
    client.put_object(Bucket=bucket, Key="a", Body=b"a")
    until(lambda: cold_keys(minio, bucket) == ["a"], "it is sent")
    minio.client().delete_object(Bucket=bucket, Key="a")
    minio.client().delete_bucket(Bucket=bucket)
    client.put_object(Bucket=bucket, Key="b", Body=b"b")
    with pytest.raises(botocore.exceptions.ClientError, match="deleting it resolves this"):
        client.list_objects_v2(Bucket=bucket)
    client.put_object(Bucket="penstock", Key=f"{folder.name}/commit", Body=b"1", IfNoneMatch="*")
    with pytest.raises(botocore.exceptions.ClientError, match="NoSuchBucket"):
        client.delete_object(Bucket=bucket, Key="b")
    assert not list((folder / "pending" / bucket).iterdir())
    minio.client().create_bucket(Bucket=bucket)
    assert client.list_objects_v2(Bucket=bucket)["KeyCount"] == 0


def cold_keys(minio, bucket):
    return [found["Key"] for found in minio.client().list_objects_v2(Bucket=bucket).get("Contents", [])]


def test_keys_that_the_cold_store_refuses_are_not_acknowledged(start, folder):
    _, client = start()
    for key in ("a//b", "a/../b", "./b", "x/" + 300 * "y"):
        with pytest.raises(botocore.exceptions.ClientError):
            client.put_object(Bucket="penstock", Key=f"{folder.name}/{key}", Body=b"1")
    assert not files(folder)


def test_commits_and_listings_do_not_wait_for_later_puts(start, folder, minio, proxy):
    server, client = start()
    proxy.faults("delay_ms=30")
    ended = threading.Event()

    def put_again_and_again():
        other = server.client()
        while not ended.is_set():
            other.put_object(Bucket="penstock", Key=f"{folder.name}/hot", Body=b"x")

    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        hot = threads.submit(put_again_and_again)
        try:
            until(lambda: cold_body(minio, f"{folder.name}/hot"), "puts are being sent")
            for number in range(3):
                client.put_object(Bucket="penstock", Key=f"{folder.name}/commit-{number}", Body=b"1", IfNoneMatch="*")
                client.list_objects_v2(Bucket="penstock", Prefix=f"{folder.name}/")
            assert not hot.done()
        finally:
            ended.set()
        hot.result()


def test_a_put_that_failed_does_not_come_back_after_later_ones(start, folder, minio):
    """The folder's sync fails after the rename, so that the file is there although the client got an error."""
    server, client = start()
    key = f"{folder.name}/z"
    until(lambda: not files(folder), "the first object is sent")
    command = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", "trace=fsync,fdatasync", "-e", "inject=fsync,fdatasync:error=EIO:when=2+"]
    tracer = subprocess.Popen([*command, "-p", str(server.process.pid)], stderr=subprocess.PIPE)
    try:
        until(lambda: is_traced(server.process.pid), "strace is attached")
        # The server itself tries short bodies again, through to the cold store. Nor must the client try again.
        once = boto3.client("s3", endpoint_url=server.endpoint, region_name="us-east-1", config=Config(retries={"max_attempts": 0}), **KEYS)
        with pytest.raises(botocore.exceptions.ClientError, match="Input/output error"):
            once.put_object(Bucket="penstock", Key=key, Body=bytes(17 * MIB))
    finally:
        tracer.terminate()
        tracer.communicate()
    client.put_object(Bucket="penstock", Key=key, Body=b"newer", Tagging="a=b")
    assert client.get_object(Bucket="penstock", Key=key)["Body"].read() == b"newer"
    server.process.kill()
    server.process.wait()
    server.restart()
    until(lambda: not files(folder), "everything is sent")
    assert cold_body(minio, key) == b"newer"


def is_traced(pid):
    return all("TracerPid:\t0" not in (task / "status").read_text() for task in pathlib.Path(f"/proc/{pid}/task").iterdir())


@pytest.mark.parametrize("keeps_time", [True, False])
def test_a_damaged_file_is_neither_sent_nor_served(start, folder, minio, proxy, keeps_time):
    _, client = start()
    proxy.faults(DOWN)
    key = f"{folder.name}/x"
    client.put_object(Bucket="penstock", Key=key, Body=bytes(100_000))
    path = folder / "pending" / "penstock" / key
    times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    with path.open("r+b") as file:
        file.seek(5000)
        file.write(b"damage")
    os.utime(path, ns=times if keeps_time else (times[0], times[1] + 5))
    if not keeps_time:
        with pytest.raises(botocore.exceptions.ClientError, match="was modified by another program"):
            client.get_object(Bucket="penstock", Key=key)
    proxy.faults()
    try:
        client.list_objects_v2(Bucket="penstock", Prefix=key)
    except botocore.exceptions.ClientError as error:
        assert "not in the cold store" in str(error) and cold_body(minio, key) is None
    else:
        # What was read before the damage was sent again.
        assert cold_body(minio, key) == bytes(100_000)
    client.delete_object(Bucket="penstock", Key=key)
    until(lambda: not files(folder), "the first object is sent, too")


def test_the_folder_belongs_to_one_cold_store(start, folder, tmp_path_factory):
    server, _ = start()
    server.process.terminate()
    server.process.wait()
    other = tmp_path_factory.mktemp("other")
    command = [sys.executable, "-m", "penstock", "serve", "--cold", str(other), "--anonymous", "--listen", "127.0.0.1:0"]
    done = subprocess.run([*command, "--write-back", f"{folder / 'pending'}:1GB"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "objects for another cold store" in done.stderr, done.stderr


def test_metrics_count_what_is_pending(start, folder, proxy):
    status = f"127.0.0.1:{servers.free_port()}"
    _, client = start("--status", status)

    def counts():
        lines = urllib.request.urlopen(f"http://{status}/metrics", timeout=300).read().decode().splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}

    until(lambda: counts()["penstock_pending_objects"] == 0, "the first object is sent")
    proxy.faults(DOWN)
    client.put_object(Bucket="penstock", Key=f"{folder.name}/x", Body=b"12345")
    until(lambda: counts()["penstock_send_failures_total"] > 0, "a try fails")
    found = counts()
    assert (found["penstock_pending_objects"], found["penstock_pending_bytes"], found["penstock_sent_back_total"]) == (1, 4101, 1)
    proxy.faults()
    until(lambda: counts()["penstock_pending_objects"] == 0, "it is sent")


@pytest.mark.parametrize("text", ["/tmp/x", "a:1GB,b:1GB", "memory:1GB", ":5GB"])
def test_the_flag_names_one_folder_and_a_size(tmp_path, text):
    command = [
        sys.executable,
        "-m",
        "penstock",
        "serve",
        "--cold",
        str(tmp_path),
        "--anonymous",
        "--listen",
        "127.0.0.1:0",
        "--write-back",
        text,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "HOME": str(tmp_path)})
    assert done.returncode == 1 and ("pending:50GB" in done.stderr or "folder name is empty" in done.stderr), done.stderr


def test_two_servers_cannot_share_the_folder(start, folder, tmp_path_factory):
    start()
    other = tmp_path_factory.mktemp("other")
    command = [sys.executable, "-m", "penstock", "serve", "--cold", str(other), "--anonymous", "--listen", "127.0.0.1:0"]
    done = subprocess.run(
        [*command, "--write-back", f"{pathlib.Path(folder) / 'pending'}:1GB"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1 and "another server serves it" in done.stderr, done.stderr

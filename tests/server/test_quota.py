"""Quotas of `penstock serve`: the most bytes of a bucket or a prefix, in every way to write, and what a full drive answers."""

import concurrent.futures
import datetime
import json
import re
import subprocess
import sys
import urllib.request
import uuid

import botocore.config
import botocore.exceptions
import pytest
import servers
from waiting import until

KB, MB = 1000, 1_000_000


class Node:
    """A server with quotas, before a folder or before MinIO. `{bucket}` in a quota is its bucket."""

    def __init__(self, folder, minio, *quotas, options=()):
        folder.mkdir()
        self.bucket = f"b{uuid.uuid4().hex}"
        self.port, self.log = servers.free_port(), folder / "access.log"
        given = [word for quota in quotas for word in ("--quota", quota.format(bucket=self.bucket))]
        options = (*given, "--status", f"127.0.0.1:{self.port}", "--access-log", str(self.log), "--lame-duck", "0", *options)
        self.cold = minio.client() if minio else None
        if minio:
            self.cold.create_bucket(Bucket=self.bucket)
        self.server = servers.Penstock(folder, "s3://" if minio else "", *options, environment=minio.environment if minio else None)
        self.client = self.server.client()
        if not minio:
            self.client.create_bucket(Bucket=self.bucket)
            self.cold = self.client
        self.settle()

    def settle(self):
        """Wait until each prefix was listed."""
        until(
            lambda: 'quota_listings_total{quota="' in self.text() and not re.search(r"quota_listings_total\{.* 0$", self.text(), re.M),
            "all is listed",
        )

    def text(self):
        return urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=300).read().decode()

    def count(self, name, quota):
        """Return a count of a quota."""
        found = re.search(rf'^{name}{{quota="{re.escape(quota.format(bucket=self.bucket))}"}} (\d+)$', self.text(), re.M)
        return int(found[1])

    def put(self, key, size, **more):
        return self.client.put_object(Bucket=self.bucket, Key=key, Body=bytes(size), **more)

    def stored(self, prefix=""):
        """Return the bytes of the objects below a prefix."""
        pages = self.cold.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix)
        return sum(entry["Size"] for page in pages for entry in page.get("Contents", ()))

    def again(self):
        """End the server and start it again."""
        self.server.process.terminate()
        self.server.process.wait(300)
        self.server.restart()
        self.settle()

    def begin(self, key):
        return {"Bucket": self.bucket, "Key": key, "UploadId": self.client.create_multipart_upload(Bucket=self.bucket, Key=key)["UploadId"]}

    def part(self, upload, number, size):
        etag = self.client.upload_part(**upload, PartNumber=number, Body=bytes(size))["ETag"]
        return {"PartNumber": number, "ETag": etag}


@pytest.fixture(params=["folder", "minio"])
def start(request, tmp_path):
    """Return a function that starts a server with quotas."""
    minio = request.getfixturevalue("minio") if request.param == "minio" else None
    started = []

    def node(*quotas, options=()):
        started.append(Node(tmp_path / f"node-{len(started)}", minio, *quotas, options=options))
        return started[-1]

    node.is_folder = minio is None
    yield node
    for one in started:
        one.server.stop()


def refused(call, *arguments, **named):
    """Return the error of a write that a quota refuses."""
    with pytest.raises(botocore.exceptions.ClientError) as raised:
        call(*arguments, **named)
    answer = raised.value.response
    assert (answer["Error"]["Code"], answer["ResponseMetadata"]["HTTPStatusCode"]) == ("QuotaExceeded", 403), answer
    return answer["Error"]["Message"]


def test_a_write_beyond_a_quota_is_refused_and_the_rest_works(start):
    node = start("{bucket}/pets/c=1MB")
    name = "{bucket}/pets/c"
    node.put("pets/cats/1", 600 * KB)
    message = refused(node.put, "pets/cats/2", 400_001)
    assert f"`{node.bucket}/pets/c` is 1MB (1000000 bytes); 600000 bytes are in use, and this needs 400001 more" in message
    node.put("pets/cats/2", 400_000)
    # A prefix is text, and other keys are not counted.
    refused(node.put, "pets/canary", 1)
    node.put("pets/dogs/1", 2 * MB)
    node.put("pets/b", 2 * MB)
    node.put("pets/cats/empty", 0)
    assert (node.count("penstock_quota_used_bytes", name), node.count("penstock_quota_limit_bytes", name)) == (MB, MB)
    assert node.count("penstock_quota_refusals_total", name) == 2
    assert node.client.get_object(Bucket=node.bucket, Key="pets/cats/1")["ContentLength"] == 600 * KB
    assert node.stored("pets/c") == MB
    denied = [json.loads(line) for line in node.log.read_text().splitlines()]
    assert [(line["path"].rpartition("/")[2], line["status"]) for line in denied if line.get("error") == "QuotaExceeded"] == [
        ("2", 403), ("canary", 403)
    ]  # fmt: skip
    top = [sys.executable, "-m", "penstock", "top", f"127.0.0.1:{node.port}", "--once"]
    assert f"quota {node.bucket}/pets/c: " in subprocess.run(top, capture_output=True, text=True, timeout=300).stdout


def test_every_way_to_write_is_counted(start):
    node = start("{bucket}/a=10MB")
    node.put("source", 3 * MB)
    copied = {"Bucket": node.bucket, "Key": "source"}
    used = lambda: node.count("penstock_quota_used_bytes", "{bucket}/a")  # noqa: E731
    node.put("a1", MB)
    node.client.copy_object(Bucket=node.bucket, Key="a2", CopySource=copied)
    assert used() == 4 * MB
    upload = node.begin("a3")
    parts = [node.part(upload, 1, 5 * MB + 242_880)]
    assert used() == 9_242_880
    refused(node.part, upload, 2, 800 * KB)
    refused(node.client.copy_object, Bucket=node.bucket, Key="a4", CopySource=copied)
    refused(node.client.upload_part_copy, **upload, PartNumber=2, CopySource=copied)
    refused(node.client.upload_part_copy, **upload, PartNumber=2, CopySource=copied, CopySourceRange="bytes=0-799999")
    etag = node.client.upload_part_copy(**upload, PartNumber=2, CopySource=copied, CopySourceRange="bytes=0-699999")["CopyPartResult"][
        "ETag"
    ]
    parts.append({"PartNumber": 2, "ETag": etag})
    assert used() == 9_942_880
    node.client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
    assert used() == 9_942_880 == node.stored("a")
    # What a source does not have is said by the operation itself.
    with pytest.raises(botocore.exceptions.ClientError) as raised:
        node.client.copy_object(Bucket=node.bucket, Key="a5", CopySource={"Bucket": node.bucket, "Key": "missing"})
    assert raised.value.response["ResponseMetadata"]["HTTPStatusCode"] == 404


def test_a_write_that_fails_gives_its_bytes_back(start):
    node = start("{bucket}=1MB")
    node.put("a", 100 * KB)
    with pytest.raises(botocore.exceptions.ClientError):
        node.put("b", 800 * KB, ContentMD5="AAAAAAAAAAAAAAAAAAAAAA==")
    with pytest.raises(botocore.exceptions.ClientError):
        node.put("a", 800 * KB, IfNoneMatch="*")
    with pytest.raises(botocore.exceptions.ClientError):
        node.client.upload_part(Bucket=node.bucket, Key="c", UploadId="0" * 32, PartNumber=1, Body=bytes(800 * KB))
    assert node.count("penstock_quota_used_bytes", "{bucket}") == 100 * KB
    node.put("b", 900 * KB)


def test_concurrent_writers_never_exceed_a_quota(start):
    node = start("{bucket}/w=1MB", "{bucket}/w1=300KB")

    def put(number):
        try:
            node.put(f"w{number % 3}/{number}", 70 * KB)
            return 1
        except botocore.exceptions.ClientError as error:
            assert error.response["Error"]["Code"] == "QuotaExceeded"
            return 0

    with concurrent.futures.ThreadPoolExecutor(12) as threads:
        written = sum(threads.map(put, range(60)))
    assert written * 70 * KB == node.stored("w") <= MB and node.stored("w1") <= 300 * KB
    # What was written while the prefix was listed again counts twice, until it is listed the next time. Then what is left can be used to the last byte.
    node.again()
    node.put("w2/rest", MB - node.stored("w"))
    refused(node.put, "w2/more", 1)
    assert node.stored("w") == MB


def test_overlapping_quotas_must_all_hold(start):
    node = start("{bucket}=1MB", "{bucket}/a=600KB", "{bucket}/a/b=500KB")
    assert "/a/b` is 500KB" in refused(node.put, "a/b/1", 500_001)
    node.put("a/b/1", 500 * KB)
    assert "/a` is 600KB" in refused(node.put, "a/c", 100_001)
    node.put("a/c", 100 * KB)
    assert f"`{node.bucket}` is 1MB" in refused(node.put, "d", 400_001)
    node.put("d", 400 * KB)
    assert [node.count("penstock_quota_used_bytes", "{bucket}" + name) for name in ("", "/a", "/a/b")] == [MB, 600 * KB, 500 * KB]


def test_a_full_prefix_is_listed_again_before_a_write_is_refused(start):
    node = start("{bucket}/a=1MB")
    node.put("a/1", 900 * KB)
    node.client.delete_object(Bucket=node.bucket, Key="a/1")
    # The bytes of the deleted object count until then.
    assert node.count("penstock_quota_used_bytes", "{bucket}/a") == 900 * KB
    node.put("a/2", 900 * KB)
    assert node.stored("a") == 900 * KB == node.count("penstock_quota_used_bytes", "{bucket}/a")


def test_what_is_there_counts_and_a_smaller_quota_is_a_note(start, tmp_path):
    node = start("{bucket}/a=1MB")
    node.put("a/1", 800 * KB)
    if not start.is_folder:
        node.cold.put_object(Bucket=node.bucket, Key="a/2", Body=bytes(800 * KB))
    else:
        (node.server.folder / "data" / node.bucket / "a" / "2").write_bytes(bytes(800 * KB))
    node.again()
    assert node.count("penstock_quota_used_bytes", "{bucket}/a") == 1_600_000
    assert f"`{node.bucket}/a` has 1600000 bytes, more than its quota of 1MB" in (node.server.folder / "log").read_text()
    refused(node.put, "a/3", 1)
    # Reads, listings and deletes work, and then writes as well.
    assert len(node.client.get_object(Bucket=node.bucket, Key="a/2")["Body"].read()) == 800 * KB
    node.client.delete_objects(Bucket=node.bucket, Delete={"Objects": [{"Key": "a/1"}, {"Key": "a/2"}]})
    node.again()
    node.put("a/3", MB)


def test_parts_of_an_earlier_run_count_when_they_become_an_object(start):
    """MinIO lists no uploads by a prefix, so that they are measured when they are completed. A folder lists them."""
    node = start("{bucket}/a=1MB")
    uploads = [node.begin(f"a/{n}") for n in range(2)]
    parts = [node.part(upload, 1, 400 * KB) for upload in uploads]
    node.again()
    used = node.count("penstock_quota_used_bytes", "{bucket}/a")
    assert used == (800 * KB if start.is_folder else 0)
    if start.is_folder:
        refused(node.put, "a/b", 300 * KB)
    else:
        node.put("a/b", 300 * KB)
        node.client.complete_multipart_upload(**uploads[0], MultipartUpload={"Parts": [parts[0]]})
        refused(node.client.complete_multipart_upload, **uploads[1], MultipartUpload={"Parts": [parts[1]]})
        node.client.abort_multipart_upload(**uploads[1])
        assert node.stored("a") == 700 * KB
        return
    for upload, part in zip(uploads, parts, strict=True):
        node.client.complete_multipart_upload(**upload, MultipartUpload={"Parts": [part]})
    assert node.stored("a") == 800 * KB


def test_an_upload_of_an_earlier_run_is_measured_also_if_it_gets_more_parts(start):
    """One new part after a restart does not make the earlier ones known."""
    node = start("{bucket}/a=16MB")
    upload, parts = node.begin("a/x"), []
    for number in (1, 2, 3):
        parts.append(node.part(upload, number, 5 << 20))
        node.again()
    if start.is_folder:
        refused(node.part, upload, 4, 5 << 20)
    else:
        parts.append(node.part(upload, 4, 5 << 20))
        refused(node.client.complete_multipart_upload, **upload, MultipartUpload={"Parts": parts})
    assert node.stored("a") == 0


def test_parts_are_measured_by_name_when_a_prefix_is_listed_again(start):
    node = start("{bucket}/a=1MB")
    upload = node.begin("a/1")
    part = node.part(upload, 1, 600 * KB)
    # The refusal lists the prefix again. The parts still count, and the object adds nothing.
    refused(node.put, "a/2", 500 * KB)
    assert node.count("penstock_quota_used_bytes", "{bucket}/a") == 600 * KB
    node.client.complete_multipart_upload(**upload, MultipartUpload={"Parts": [part]})
    assert node.count("penstock_quota_used_bytes", "{bucket}/a") == 600 * KB
    refused(node.put, "a/2", 500 * KB)


def test_an_acknowledged_put_counts_before_it_is_in_the_cold_store(tmp_path, minio):
    node = Node(tmp_path / "node", minio, "{bucket}=1MB", options=("--write-back", f"{tmp_path / 'pending'}:10MB"))
    try:
        node.put("a", 600 * KB)
        refused(node.put, "b", 400_001)
        node.put("b", 400_000)
        until(lambda: node.stored() == MB, "both are sent")
    finally:
        node.server.stop()


@pytest.fixture
def small(tmp_path):
    """Yield a file system of 4 MiB that keeps attributes."""
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)], capture_output=True).returncode:
        pytest.skip("root without the right to mount")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def started(folder, *arguments, **more):
    folder.mkdir()
    try:
        return servers.Penstock(folder, *arguments, **more)
    except RuntimeError as error:
        if "does not support extended attributes" in str(error):
            pytest.skip("tmpfs has no attributes here")
        raise


def test_a_full_drive_is_answered_with_507_and_keeps_what_it_has(tmp_path, small):
    (small / "penstock").mkdir()
    server = started(tmp_path / "node", str(small))
    client = server.client()
    try:
        client.put_object(Bucket="penstock", Key="fits", Body=bytes(MB))
        upload = {"Bucket": "penstock", "Key": "b", "UploadId": client.create_multipart_upload(Bucket="penstock", Key="b")["UploadId"]}
        source = {"Bucket": "penstock", "Key": "fits"}
        client.upload_part(**upload, PartNumber=1, Body=bytes(MB))
        for write in (
            lambda: client.put_object(Bucket="penstock", Key="a", Body=bytes(8 * MB)),
            lambda: client.put_object(Bucket="penstock", Key="a", Body=bytes(20 * MB)),
            lambda: client.upload_part(**upload, PartNumber=2, Body=bytes(8 * MB)),
            lambda: [client.copy_object(Bucket="penstock", Key=f"copy{n}", CopySource=source) for n in range(4)],
        ):
            with pytest.raises(botocore.exceptions.ClientError) as raised:
                write()
            answer = raised.value.response
            assert (answer["Error"]["Code"], answer["ResponseMetadata"]["HTTPStatusCode"]) == ("InsufficientStorage", 507)
            assert "is full" in answer["Error"]["Message"] and answer["ResponseMetadata"]["RetryAttempts"] == 0
        assert client.get_object(Bucket="penstock", Key="fits")["Body"].read() == bytes(MB)
        assert list((small / ".penstock-serve" / "temporary").iterdir()) == []
    finally:
        server.stop()


def test_puts_go_to_the_cold_store_while_the_folder_of_write_back_is_full(tmp_path, small, minio):
    server = started(tmp_path / "node", "s3://", "--write-back", f"{small}:100MB", environment=minio.environment)
    try:
        client = server.client()
        bucket = f"b{uuid.uuid4().hex}"
        minio.client().create_bucket(Bucket=bucket)
        (small / "filler").write_bytes(bytes(3 * MB))
        for key, size in (("whole", 2 * MB), ("again", 2 * MB)):
            client.put_object(Bucket=bucket, Key=key, Body=bytes(size))
            assert minio.client().head_object(Bucket=bucket, Key=key)["ContentLength"] == size
        # A long body is not held, so that the client sends it again.
        client = server.client()
        client.put_object(Bucket=bucket, Key="long", Body=bytes(20 * MB))
        assert minio.client().head_object(Bucket=bucket, Key="long")["ContentLength"] == 20 * MB
    finally:
        server.stop()


def test_conditions_of_a_copy_mean_the_same_below_a_quota(start):
    node = start("{bucket}/counted=1MB")
    etag = node.put("source", 100)["ETag"]
    past = datetime.datetime(2001, 1, 1, tzinfo=datetime.UTC)
    future = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1)
    source = {"Bucket": node.bucket, "Key": "source"}

    def copied(key, more):
        try:
            node.client.copy_object(Bucket=node.bucket, Key=key, CopySource=source, **more)
        except botocore.exceptions.ClientError as error:
            return error.response["ResponseMetadata"]["HTTPStatusCode"]
        return 200

    for more in (
        {"CopySourceIfMatch": etag},
        {"CopySourceIfMatch": '"other"'},
        {"CopySourceIfNoneMatch": etag},
        {"CopySourceIfNoneMatch": '"other"'},
        {"CopySourceIfModifiedSince": past},
        {"CopySourceIfUnmodifiedSince": past},
        {"CopySourceIfUnmodifiedSince": future},
    ):
        assert copied("counted/copy", more) == copied("other/copy", more), more


def test_a_copy_of_what_is_absent_fails_in_the_same_way_below_a_quota(start):
    node = start("{bucket}/counted=1MB")
    for bucket, code in ((node.bucket, "NoSuchKey"), ("no-such-bucket", "NoSuchBucket")):
        for key in ("counted/copy", "other/copy"):
            source = {"Bucket": bucket, "Key": "absent"}
            upload = node.begin(key)
            for call, more in (
                (node.client.copy_object, {"Bucket": node.bucket, "Key": key}),
                (node.client.upload_part_copy, {**upload, "PartNumber": 1}),
            ):
                with pytest.raises(botocore.exceptions.ClientError) as raised:
                    call(**more, CopySource=source)
                answer = raised.value.response
                assert (answer["Error"]["Code"], answer["ResponseMetadata"]["HTTPStatusCode"]) == (code, 404), key

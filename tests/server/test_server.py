"""`penstock serve` with boto3 as the client: before MinIO through a cache, before a folder, and before a folder through a cache."""

import base64
import contextlib
import hashlib
import http.client
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import boto3
import botocore.exceptions
import numpy as np
import pytest
import servers
from botocore.config import Config
from PIL import Image
from waiting import until

MIB = 1 << 20


@pytest.fixture(scope="module", params=["minio", "folder", "folder through a cache", "written back"])
def served(request, tmp_path_factory):
    """Yield a server with the bucket `penstock`."""
    folder = tmp_path_factory.mktemp("served")
    if request.param in ("minio", "written back"):
        minio = request.getfixturevalue("minio")
        back = ("--write-back", f"{folder / 'pending'}:200MB") if request.param == "written back" else ()
        server = servers.Penstock(folder, "s3://", "--cache", f"{folder / 'cache'}:200MB", *back, environment=minio.environment)
    elif request.param == "folder":
        server = servers.Penstock(folder)
    else:
        server = servers.Penstock(folder, "", "--cache", f"{folder / 'cache'}:200MB")
    yield server
    server.stop()


@pytest.fixture
def prefix(request):
    """Return the beginning of keys that no other test uses."""
    return f"{re.sub(r'[^a-z0-9_]+', '-', request.node.name)}/"


def code(raised):
    return raised.value.response["ResponseMetadata"]["HTTPStatusCode"], raised.value.response["Error"]["Code"]


def test_objects_keep_their_bytes_and_metadata(served, prefix, request):
    client = served.client()
    # An object that was acknowledged from the folder of --write-back gets the time of the cold store when it is sent.
    later = 60 if "written back" in request.node.name else 0
    for size in (0, 1, 4095, 4096, 4097, MIB, MIB + 1, 5 * MIB + 3):
        body = random.Random(size).randbytes(size)
        key = f"{prefix}{size} bytes+ü"
        put = client.put_object(
            Bucket="penstock", Key=key, Body=body, ContentType="x/y", CacheControl="no-cache", Metadata={"colour": "green"}
        )
        assert put["ETag"] == f'"{hashlib.md5(body).hexdigest()}"'
        for _ in range(3):
            got = client.get_object(Bucket="penstock", Key=key)
            assert got["Body"].read() == body
            assert (got["ContentLength"], got["ContentType"], got["CacheControl"]) == (size, "x/y", "no-cache")
            assert got["Metadata"] == {"colour": "green"} and got["ETag"] == put["ETag"]
        head = client.head_object(Bucket="penstock", Key=key)
        assert (head["ContentLength"], head["ContentType"], head["Metadata"]) == (size, "x/y", {"colour": "green"})
        assert 0 <= (head["LastModified"] - got["LastModified"]).total_seconds() <= later


def test_ranges(served, prefix):
    client = served.client()
    body = random.Random(1).randbytes(6 * MIB + 77)
    client.put_object(Bucket="penstock", Key=f"{prefix}a", Body=body)
    choose = random.Random(2)
    ranges = [(0, 0), (0, 1), (4095, 4097), (MIB - 1, MIB), (len(body) - 1, len(body) - 1), (5 * MIB, len(body) + 5)]
    ranges += [tuple(sorted((choose.randrange(len(body)), choose.randrange(len(body))))) for _ in range(30)]
    for first, last in ranges:
        got = client.get_object(Bucket="penstock", Key=f"{prefix}a", Range=f"bytes={first}-{last}")
        expected = body[first : last + 1]
        assert got["Body"].read() == expected and got["ResponseMetadata"]["HTTPStatusCode"] == 206
        assert got["ContentRange"] == f"bytes {first}-{min(last, len(body) - 1)}/{len(body)}"
    assert client.get_object(Bucket="penstock", Key=f"{prefix}a", Range="bytes=100-")["Body"].read() == body[100:]
    assert client.get_object(Bucket="penstock", Key=f"{prefix}a", Range="bytes=-100")["Body"].read() == body[-100:]
    assert client.get_object(Bucket="penstock", Key=f"{prefix}a", Range=f"bytes=-{10 * MIB}")["Body"].read() == body
    for wrong in (f"bytes={len(body)}-", "bytes=-0"):
        with pytest.raises(botocore.exceptions.ClientError) as raised:
            client.get_object(Bucket="penstock", Key=f"{prefix}a", Range=wrong)
        assert code(raised) == (416, "InvalidRange")
    # What HTTP lets a server ignore gives the whole object.
    url = client.generate_presigned_url("get_object", {"Bucket": "penstock", "Key": f"{prefix}a"}, ExpiresIn=60)
    for odd in ({"Range": "bytes=0-1,3-4"}, {"Range": "bytes=5-2"}, {"Range": "bytes=x"}, {"Range": "items=0-1"},
                {"Range": "bytes=1-2", "If-Range": '"of another version"'}):  # fmt: skip
        got = urllib.request.urlopen(urllib.request.Request(url, headers=odd), timeout=300)
        assert got.status == 200 and got.read() == body, odd
    for asked, length, found in (("bytes=0-3", 4, "bytes 0-3"), ("bytes=-5", 5, f"bytes {len(body) - 5}-{len(body) - 1}")):
        head = client.head_object(Bucket="penstock", Key=f"{prefix}a", Range=asked)
        assert (head["ContentLength"], head["ContentRange"]) == (length, f"{found}/{len(body)}")
        assert head["ResponseMetadata"]["HTTPStatusCode"] == 206
    for wrong in (f"bytes={len(body)}-", "bytes=-0"):
        with pytest.raises(botocore.exceptions.ClientError) as raised:
            client.head_object(Bucket="penstock", Key=f"{prefix}a", Range=wrong)
        assert code(raised)[0] == 416
    client.put_object(Bucket="penstock", Key=f"{prefix}empty", Body=b"")
    for wrong in ("bytes=0-", "bytes=-5"):
        with pytest.raises(botocore.exceptions.ClientError) as raised:
            client.get_object(Bucket="penstock", Key=f"{prefix}empty", Range=wrong)
        assert code(raised) == (416, "InvalidRange")


def test_reads_with_conditions(served, prefix):
    client = served.client()
    put = client.put_object(Bucket="penstock", Key=f"{prefix}a", Body=b"a")
    asked = {"Bucket": "penstock", "Key": f"{prefix}a"}
    for _ in range(2):  # The first time, the server does not know the object.
        for read in (client.get_object, client.head_object):
            assert read(**asked, IfMatch=put["ETag"])["ETag"] == put["ETag"]
            with pytest.raises(botocore.exceptions.ClientError) as raised:
                read(**asked, IfMatch='"other"')
            assert code(raised)[0] == 412
            with pytest.raises(botocore.exceptions.ClientError) as raised:
                read(**asked, IfNoneMatch=put["ETag"])
            assert code(raised)[0] == 304
            assert read(**asked, IfNoneMatch='"other"')["ETag"] == put["ETag"]


def test_one_of_many_creates_succeeds(served, prefix):
    client = served.client()
    client.put_object(Bucket="penstock", Key=f"{prefix}a", Body=b"first", IfNoneMatch="*")
    with pytest.raises(botocore.exceptions.ClientError) as raised:
        client.put_object(Bucket="penstock", Key=f"{prefix}a", Body=b"second", IfNoneMatch="*")
    assert code(raised) == (412, "PreconditionFailed")
    assert client.get_object(Bucket="penstock", Key=f"{prefix}a")["Body"].read() == b"first"

    from concurrent.futures import ThreadPoolExecutor

    def create(number):
        with contextlib.suppress(botocore.exceptions.ClientError):
            client.put_object(Bucket="penstock", Key=f"{prefix}raced", Body=str(number).encode(), IfNoneMatch="*")
            return number

    with ThreadPoolExecutor(16) as threads:
        winners = [number for number in threads.map(create, range(64)) if number is not None]
    assert [str(number).encode() for number in winners] == [client.get_object(Bucket="penstock", Key=f"{prefix}raced")["Body"].read()]


def test_a_replaced_object_is_never_read_again(served, prefix):
    client = served.client()
    for number in range(20):
        body = str(number).encode() * 10_000
        client.put_object(Bucket="penstock", Key=f"{prefix}a", Body=body)
        assert client.get_object(Bucket="penstock", Key=f"{prefix}a")["Body"].read() == body
        assert client.head_object(Bucket="penstock", Key=f"{prefix}a")["ContentLength"] == len(body)
    client.delete_object(Bucket="penstock", Key=f"{prefix}a")
    with pytest.raises(botocore.exceptions.ClientError) as raised:
        client.get_object(Bucket="penstock", Key=f"{prefix}a")
    assert code(raised) == (404, "NoSuchKey")


def test_uploads_in_parts(served, prefix, tmp_path):
    client = served.client()
    parts = [random.Random(number).randbytes(5 * MIB + number) for number in range(3)] + [b"end"]
    upload = client.create_multipart_upload(Bucket="penstock", Key=f"{prefix}a", ContentType="x/y")["UploadId"]
    asked = {"Bucket": "penstock", "Key": f"{prefix}a", "UploadId": upload}
    numbers = [1, 3, 700, 10_000]
    etags = [client.upload_part(**asked, PartNumber=number, Body=part)["ETag"] for number, part in zip(numbers, parts, strict=True)]
    listed = client.list_parts(**asked)["Parts"]
    assert [(part["PartNumber"], part["Size"]) for part in listed] == list(zip(numbers, map(len, parts), strict=True))
    assert [entry["UploadId"] for entry in client.list_multipart_uploads(Bucket="penstock", Prefix=f"{prefix}a")["Uploads"]] == [upload]
    chosen = [{"PartNumber": number, "ETag": etag} for number, etag in zip(numbers, etags, strict=True)]
    with pytest.raises(botocore.exceptions.ClientError) as raised:
        client.complete_multipart_upload(**asked, MultipartUpload={"Parts": chosen[::-1]})
    assert code(raised) == (400, "InvalidPartOrder")
    with pytest.raises(botocore.exceptions.ClientError) as raised:
        client.complete_multipart_upload(**asked, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": '"' + "0" * 32 + '"'}]})
    assert code(raised) == (400, "InvalidPart")
    done = client.complete_multipart_upload(**asked, MultipartUpload={"Parts": chosen})
    whole = b"".join(parts)
    digest = hashlib.md5(b"".join(hashlib.md5(part).digest() for part in parts)).hexdigest()
    assert done["ETag"] == f'"{digest}-4"'
    got = client.get_object(Bucket="penstock", Key=f"{prefix}a")
    assert got["Body"].read() == whole and got["ContentType"] == "x/y" and got["ETag"] == done["ETag"]
    # The transfer manager uploads and downloads in parts.
    (tmp_path / "file").write_bytes(whole)
    client.upload_file(str(tmp_path / "file"), "penstock", f"{prefix}b")
    client.download_file("penstock", f"{prefix}b", str(tmp_path / "copy"))
    assert (tmp_path / "copy").read_bytes() == whole
    aborted = client.create_multipart_upload(Bucket="penstock", Key=f"{prefix}c")["UploadId"]
    client.abort_multipart_upload(Bucket="penstock", Key=f"{prefix}c", UploadId=aborted)
    with pytest.raises(botocore.exceptions.ClientError) as raised:
        client.upload_part(Bucket="penstock", Key=f"{prefix}c", UploadId=aborted, PartNumber=1, Body=b"")
    assert code(raised) == (404, "NoSuchUpload")


def test_copies(served, prefix, request):
    client = served.client()
    body = os.urandom(6 * MIB)
    client.put_object(Bucket="penstock", Key=f"{prefix}a", Body=body, Metadata={"a": "1"})
    source = {"Bucket": "penstock", "Key": f"{prefix}a"}
    client.copy_object(Bucket="penstock", Key=f"{prefix}b", CopySource=source)
    got = client.get_object(Bucket="penstock", Key=f"{prefix}b")
    assert got["Body"].read() == body and got["Metadata"] == {"a": "1"}
    client.copy_object(Bucket="penstock", Key=f"{prefix}b", CopySource=source, MetadataDirective="REPLACE", Metadata={"b": "2"})
    assert client.head_object(Bucket="penstock", Key=f"{prefix}b")["Metadata"] == {"b": "2"}
    upload = client.create_multipart_upload(Bucket="penstock", Key=f"{prefix}c")["UploadId"]
    asked = {"Bucket": "penstock", "Key": f"{prefix}c", "UploadId": upload}
    with pytest.raises(botocore.exceptions.ClientError) as raised:
        client.upload_part_copy(**asked, PartNumber=1, CopySource=source, CopySourceRange=f"bytes=0-{6 * MIB}")
    is_folder = "folder" in request.node.callspec.params["served"]
    assert code(raised) == (400, "InvalidRange" if is_folder else "InvalidArgument")  # The code that ceph's tests expect, and MinIO's.
    part = client.upload_part_copy(**asked, PartNumber=1, CopySource=source, CopySourceRange=f"bytes=5-{5 * MIB + 10}")
    last = client.upload_part(**asked, PartNumber=2, Body=b"end")
    parts = [{"PartNumber": 1, "ETag": part["CopyPartResult"]["ETag"]}, {"PartNumber": 2, "ETag": last["ETag"]}]
    client.complete_multipart_upload(**asked, MultipartUpload={"Parts": parts})
    assert client.get_object(Bucket="penstock", Key=f"{prefix}c")["Body"].read() == body[5 : 5 * MIB + 11] + b"end"


def listing(client, **asked):
    """Return all keys and common prefixes, by pages."""
    keys, prefixes = [], []
    for page in client.get_paginator("list_objects_v2").paginate(Bucket="penstock", **asked):
        keys += [entry["Key"] for entry in page.get("Contents", ())]
        prefixes += [entry["Prefix"] for entry in page.get("CommonPrefixes", ())]
    return keys, prefixes


def test_listings_have_the_order_of_keys(served, prefix):
    client = served.client()
    names = ["a-b", "a/b/c", "a/c", "a0", "b/x", "c d+e", "z"]
    if served.cold == "":  # MinIO refuses these, or leaves them out of listings.
        names += ["a", "a/b", "b/", "", "//", "a//b", "../up", "./dot", "%41", "long" * 150]
        # Names that are too long are cut, and the rest must not be a path of its own.
        names += [f"{letter * 198}{rest}" for letter in "mn" for rest in (".", "..", "../z", "./z", ".z")]
    names = sorted(names)
    for name in names:
        client.put_object(Bucket="penstock", Key=f"{prefix}{name}", Body=name.encode())
    for size in (1, 2, 3, 1000):
        assert listing(client, Prefix=prefix, PaginationConfig={"PageSize": size}) == ([f"{prefix}{name}" for name in names], [])
        keys, prefixes = listing(client, Prefix=prefix, Delimiter="/", PaginationConfig={"PageSize": size})
        rolled = [name.partition("/") for name in names]
        assert keys == [f"{prefix}{first}" for first, sign, _ in rolled if not sign]
        assert prefixes == sorted({f"{prefix}{first}/" for first, sign, _ in rolled if sign})
    assert listing(client, Prefix=f"{prefix}a/")[0] == [f"{prefix}{name}" for name in names if name.startswith("a/")]
    after = f"{prefix}a/b"
    assert listing(client, Prefix=prefix, StartAfter=after)[0] == [f"{prefix}{name}" for name in names if f"{prefix}{name}" > after]
    old = [entry["Key"] for page in client.get_paginator("list_objects").paginate(Bucket="penstock", Prefix=prefix, PaginationConfig={"PageSize": 3})
           for entry in page["Contents"]]  # fmt: skip
    assert old == [f"{prefix}{name}" for name in names]
    for name in names:
        assert client.get_object(Bucket="penstock", Key=f"{prefix}{name}")["Body"].read() == name.encode()
    answer = client.delete_objects(Bucket="penstock", Delete={"Objects": [{"Key": f"{prefix}{name}"} for name in names]})
    assert len(answer["Deleted"]) == len(names) and listing(client, Prefix=prefix) == ([], [])


def test_objects_with_the_same_digest_are_told_apart(served, prefix):
    one = bytes.fromhex(
        "d131dd02c5e6eec4693d9a0698aff95c2fcab58712467eab4004583eb8fb7f8955ad340609f4b30283e488832571415a085125e8f7cdc99fd91dbdf280373c5b"
        "d8823e3156348f5bae6dacd436c919c6dd53e2b487da03fd02396306d248cda0e99f33420f577ee8ce54b67080a80d1ec69821bcb6a8839396f9652b6ff72a70"
    )
    other = bytes.fromhex(
        "d131dd02c5e6eec4693d9a0698aff95c2fcab50712467eab4004583eb8fb7f8955ad340609f4b30283e4888325f1415a085125e8f7cdc99fd91dbd7280373c5b"
        "d8823e3156348f5bae6dacd436c919c6dd53e23487da03fd02396306d248cda0e99f33420f577ee8ce54b67080280d1ec69821bcb6a8839396f965ab6ff72a70"
    )
    assert one != other and hashlib.md5(one).digest() == hashlib.md5(other).digest()
    client = served.client()
    for body in (one, other, one):
        client.put_object(Bucket="penstock", Key=f"{prefix}a", Body=body)
        for _ in range(2):
            assert client.get_object(Bucket="penstock", Key=f"{prefix}a")["Body"].read() == body


def test_buckets(served):
    client = served.client()
    client.create_bucket(Bucket="another-one")
    assert {"another-one", "penstock"} <= {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}
    client.head_bucket(Bucket="another-one")
    client.put_object(Bucket="another-one", Key="a", Body=b"a")
    with pytest.raises(botocore.exceptions.ClientError) as raised:
        client.delete_bucket(Bucket="another-one")
    assert code(raised) == (409, "BucketNotEmpty")
    client.delete_object(Bucket="another-one", Key="a")
    client.delete_bucket(Bucket="another-one")
    with pytest.raises(botocore.exceptions.ClientError) as raised:
        client.head_bucket(Bucket="another-one")
    assert code(raised)[0] == 404
    with pytest.raises(botocore.exceptions.ClientError) as raised:
        client.put_object(Bucket="another-one", Key="a", Body=b"a")
    assert code(raised) == (404, "NoSuchBucket")


@pytest.mark.parametrize("algorithm", ["CRC32", "SHA1", "SHA256"])
def test_checksums_of_uploads_are_compared(served, prefix, algorithm):
    client = served.client()
    for body in (b"small", os.urandom(17 * MIB)):
        client.put_object(Bucket="penstock", Key=f"{prefix}{algorithm}", Body=body, ChecksumAlgorithm=algorithm)
        got = client.get_object(Bucket="penstock", Key=f"{prefix}{algorithm}", ChecksumMode="ENABLED")
        assert got["Body"].read() == body
        if len(body) < 100 or served.cold == "":  # A long body to MinIO is sent with a checksum of its client's choice.
            assert got[f"Checksum{algorithm}"]
    wrong = base64.b64encode(bytes(4 if "CRC" in algorithm else 20 if algorithm == "SHA1" else 32)).decode()
    for body in (b"other", os.urandom(17 * MIB)):
        with pytest.raises(botocore.exceptions.ClientError) as raised:
            client.put_object(Bucket="penstock", Key=f"{prefix}{algorithm}", Body=body, **{f"Checksum{algorithm}": wrong})
        assert code(raised)[0] == 400
    assert len(client.get_object(Bucket="penstock", Key=f"{prefix}{algorithm}")["Body"].read()) == 17 * MIB


def test_signed_urls(served, prefix):
    client = boto3.client(
        "s3", endpoint_url=served.endpoint, aws_access_key_id=servers.KEY, aws_secret_access_key=servers.SECRET, region_name="us-east-1",
        config=Config(signature_version="s3v4")
    )  # fmt: skip
    url = client.generate_presigned_url("put_object", {"Bucket": "penstock", "Key": f"{prefix}a"}, ExpiresIn=60)
    urllib.request.urlopen(urllib.request.Request(url, data=b"signed", method="PUT"), timeout=300).close()
    url = client.generate_presigned_url("get_object", {"Bucket": "penstock", "Key": f"{prefix}a"}, ExpiresIn=60)
    assert urllib.request.urlopen(url, timeout=300).read() == b"signed"
    # A URL to write must not be enough to read.
    client.put_object(Bucket="penstock", Key=f"{prefix}secret", Body=b"secret")
    write = client.generate_presigned_url("put_object", {"Bucket": "penstock", "Key": f"{prefix}copy"}, ExpiresIn=60)
    copies = urllib.request.Request(write, data=b"", method="PUT", headers={"x-amz-copy-source": f"penstock/{prefix}secret"})
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(copies, timeout=300)
    assert raised.value.code == 403 and b"x-amz-copy-source" in raised.value.read()
    with pytest.raises(botocore.exceptions.ClientError):
        client.head_object(Bucket="penstock", Key=f"{prefix}copy")
    short = client.generate_presigned_url("get_object", {"Bucket": "penstock", "Key": f"{prefix}a"}, ExpiresIn=1)
    long = client.generate_presigned_url("get_object", {"Bucket": "penstock", "Key": f"{prefix}a"}, ExpiresIn=8 * 24 * 3600)
    other = url.replace(f"{prefix}a".replace("/", "%2F"), "other").replace(f"{prefix}a", "other")
    time.sleep(2.1)  # The URL is valid for a second, and clocks of signatures count seconds.
    for wrong in (short, long, other, url.partition("?")[0]):
        with pytest.raises(urllib.error.HTTPError) as raised:
            urllib.request.urlopen(wrong, timeout=300)
        assert raised.value.code == 403


def test_wrong_signatures_are_refused(served):
    for key, secret, expected in ((servers.KEY, "wrong-secret", "SignatureDoesNotMatch"), ("nobody", servers.SECRET, "InvalidAccessKeyId")):
        with pytest.raises(botocore.exceptions.ClientError) as raised:
            served.client(key=key, secret=secret).list_buckets()
        assert code(raised) == (403, expected) and len(raised.value.response["Error"]["Message"]) > 20
    anonymous = boto3.client(
        "s3", endpoint_url=served.endpoint, region_name="us-east-1", config=Config(signature_version=botocore.UNSIGNED)
    )
    with pytest.raises(botocore.exceptions.ClientError) as raised:
        anonymous.list_buckets()
    assert code(raised) == (403, "AccessDenied")


def test_each_error_has_a_message(served, prefix):
    client = served.client()
    client.put_object(Bucket="penstock", Key=f"{prefix}a", Body=b"abc")
    mine = {"Bucket": "penstock", "Key": f"{prefix}a"}
    for operation, arguments, expected in (
        ("get_object", {"Bucket": "penstock", "Key": f"{prefix}missing"}, (404, "NoSuchKey")),
        ("get_object", {"Bucket": "no-such-bucket", "Key": "a"}, (404, "NoSuchBucket")),
        ("list_objects_v2", {"Bucket": "no-such-bucket"}, (404, "NoSuchBucket")),
        ("put_object", {"Bucket": "penstock", "Key": "k" * 1025, "Body": b""}, (400, "KeyTooLongError")),
        ("get_object", {**mine, "Range": "bytes=7-"}, (416, "InvalidRange")),
        ("get_object", {**mine, "IfMatch": '"other"'}, (412, "PreconditionFailed")),
        ("put_object", {**mine, "Body": b"", "IfNoneMatch": "*"}, (412, "PreconditionFailed")),
    ):
        with pytest.raises(botocore.exceptions.ClientError) as raised:
            getattr(client, operation)(**arguments)
        assert code(raised) == expected
        assert len(raised.value.response["Error"].get("Message", "")) > 10, (operation, expected)


def sign(method, url, text):
    """Return a signed request with this body."""
    from botocore.auth import SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    headers = {"x-amz-content-sha256": hashlib.sha256(text.encode()).hexdigest()}
    signed = AWSRequest(method, url, data=text, headers=headers)
    SigV4Auth(Credentials(servers.KEY, servers.SECRET), "s3", "us-east-1").add_auth(signed)
    return signed


def batch(server, ranges):
    """Send a batch and return for each answer its status, its bytes, and the length of the object."""
    text = json.dumps({"ranges": [{"key": key, "begin": begin, "end": end} for key, begin, end in ranges]})
    signed = sign("POST", f"{server.endpoint}/penstock/-?batch=", text)
    asked = urllib.request.Request(signed.url, data=text.encode(), headers=dict(signed.headers), method="POST")
    stream = urllib.request.urlopen(asked, timeout=300)
    answers = []
    while head := stream.read(20):
        status, object_bytes, bytes_ = (int.from_bytes(head[begin:end], "little") for begin, end in ((0, 4), (4, 12), (12, 20)))
        answers.append((status, stream.read(bytes_), object_bytes))
    return answers


def test_batches_answer_many_ranges_in_order(served, prefix):
    client = served.client()
    bodies = {f"{prefix}{number}": random.Random(number).randbytes(number * 100_000) for number in range(1, 12)}
    for key, body in bodies.items():
        client.put_object(Bucket="penstock", Key=key, Body=body)
    choose = random.Random(3)
    ranges = []
    for _ in range(300):
        key = choose.choice(list(bodies))
        begin = choose.randrange(len(bodies[key]))
        ranges.append((key, begin, choose.randrange(begin, len(bodies[key])) + 1))
    ranges.insert(7, (f"{prefix}missing", 0, 10))
    ranges.insert(9, (f"{prefix}1", 99_999, 100_001))
    answers = batch(served, ranges)
    assert [status for status, _, _ in answers] == [404 if i == 7 else 416 if i == 9 else 200 for i in range(len(ranges))]
    for (key, begin, end), (status, found, object_bytes) in zip(ranges, answers, strict=True):
        assert status != 200 or found == bodies[key][begin:end]
        assert object_bytes == (0 if status == 404 else len(bodies[key]))
    with pytest.raises(urllib.error.HTTPError) as raised:
        batch(served, [(f"{prefix}1", 5, 5)])
    assert raised.value.code == 400


@pytest.fixture(params=["folder", "minio"])
def limited(tmp_path, request):
    """Yield a server with keys that may only do some things."""
    folder = tmp_path / "served"
    folder.mkdir()
    keys = [
        {"access_key": servers.KEY, "secret_key": servers.SECRET},
        {"access_key": "reader", "secret_key": "reader-secret", "read_only": True},
        {"access_key": "cats", "secret_key": "cats-secret", "prefixes": ["penstock/cats/"]},
    ]
    servers.write_secret(folder / "keys.json", json.dumps({"keys": keys}))
    if request.param == "folder":
        server = servers.Penstock(folder)
    else:
        server = servers.Penstock(folder, "s3://", environment=request.getfixturevalue("minio").environment)
    yield server
    server.stop()


def test_keys_have_limited_rights(limited):
    root = limited.client()
    for key in ("cats/1", "dogs/1"):
        root.put_object(Bucket="penstock", Key=key, Body=key.encode())
    root.create_bucket(Bucket="hidden")
    reader, cats = limited.client(key="reader", secret="reader-secret"), limited.client(key="cats", secret="cats-secret")
    assert reader.get_object(Bucket="penstock", Key="dogs/1")["Body"].read() == b"dogs/1"
    assert cats.get_object(Bucket="penstock", Key="cats/1")["Body"].read() == b"cats/1"
    cats.put_object(Bucket="penstock", Key="cats/2", Body=b"")
    assert len(cats.list_objects_v2(Bucket="penstock", Prefix="cats/")["Contents"]) == 2
    assert [bucket["Name"] for bucket in cats.list_buckets()["Buckets"]] == ["penstock"]
    deleted = cats.delete_objects(Bucket="penstock", Delete={"Objects": [{"Key": "cats/2"}, {"Key": "dogs/1"}]})
    assert [entry["Key"] for entry in deleted["Deleted"]] == ["cats/2"]
    assert [(entry["Key"], entry["Code"]) for entry in deleted["Errors"]] == [("dogs/1", "AccessDenied")]
    # MinIO follows such paths here, and nowhere else.
    paths = ["cats/../dogs/1", "cats/./../dogs/1", "cats/.."]
    deleted = cats.delete_objects(Bucket="penstock", Delete={"Objects": [{"Key": path} for path in paths]})
    assert [entry["Key"] for entry in deleted["Errors"]] == paths
    assert root.get_object(Bucket="penstock", Key="dogs/1")["Body"].read() == b"dogs/1"
    refused = [
        lambda: reader.put_object(Bucket="penstock", Key="cats/3", Body=b""),
        lambda: reader.delete_object(Bucket="penstock", Key="cats/1"),
        lambda: reader.delete_objects(Bucket="penstock", Delete={"Objects": [{"Key": "cats/1"}]}),
        lambda: reader.create_multipart_upload(Bucket="penstock", Key="cats/1"),
        lambda: reader.create_bucket(Bucket="new-one"),
        lambda: cats.get_object(Bucket="penstock", Key="dogs/1"),
        lambda: cats.head_object(Bucket="penstock", Key="dogs/1"),
        lambda: cats.list_objects_v2(Bucket="penstock"),
        lambda: cats.list_objects_v2(Bucket="penstock", Prefix="cats"),
        lambda: cats.copy_object(Bucket="penstock", Key="cats/3", CopySource="penstock/dogs/1"),
        lambda: cats.put_object(Bucket="hidden", Key="cats/1", Body=b""),
        lambda: cats.delete_bucket(Bucket="penstock"),
    ]
    for number, call in enumerate(refused):
        with pytest.raises(botocore.exceptions.ClientError) as raised:
            call()
        assert code(raised)[0] == 403, number
    # After SIGHUP, the keys are those of the new file.
    (limited.folder / "keys.json").write_text(json.dumps({"keys": [{"access_key": "new", "secret_key": "new-secret"}]}))
    limited.process.send_signal(1)

    def is_known():
        with contextlib.suppress(botocore.exceptions.ClientError):
            return bool(limited.client(key="new", secret="new-secret").list_buckets())

    until(is_known, "the new key is known")
    with pytest.raises(botocore.exceptions.ClientError):
        reader.list_buckets()
    # A file that is not valid changes nothing.
    (limited.folder / "keys.json").write_text("{")
    limited.process.send_signal(1)
    until(lambda: "the previous one remains in use" in (limited.folder / "log").read_text(), "the server complains")
    buckets = limited.client(key="new", secret="new-secret")
    assert buckets.list_buckets()["Buckets"]
    for key in ("cats/1", "dogs/1"):
        buckets.delete_object(Bucket="penstock", Key=key)
    buckets.delete_bucket(Bucket="hidden")


def test_a_folder_of_files_is_served_as_it_is(tmp_path):
    folder = tmp_path / "served"
    photos = folder / "data" / "photos" / "2026"
    photos.mkdir(parents=True)
    (photos / "one.jpg").write_bytes(b"one")
    server = servers.Penstock(folder)
    try:
        client = server.client()
        got = client.get_object(Bucket="photos", Key="2026/one.jpg")
        assert got["Body"].read() == b"one"
        (photos / "one.jpg").write_bytes(b"another")
        assert client.get_object(Bucket="photos", Key="2026/one.jpg")["ETag"] != got["ETag"]
        client.put_object(Bucket="photos", Key="2026/two.jpg", Body=b"two")
        assert (photos / "two.jpg").read_bytes() == b"two"
        # A file that was changed by other means has another ETag, and no metadata.
        (photos / "two.jpg").write_bytes(b"new")
        assert client.get_object(Bucket="photos", Key="2026/two.jpg")["ETag"] != f'"{hashlib.md5(b"two").hexdigest()}"'
        second = subprocess.run(
            server.command()[0][:-1] + [str(folder / "keys.json"), "--listen", "127.0.0.1:0"], capture_output=True, text=True
        )
        assert second.returncode == 1 and "another server serves it" in second.stderr
    finally:
        server.stop()


def test_the_domain_may_name_the_bucket(tmp_path):
    (tmp_path / "served").mkdir()
    server = servers.Penstock(tmp_path / "served", "", "--domain", "s3.example.com")
    try:
        signed = sign("PUT", f"http://penstock.s3.example.com:{server.port}/a", "virtual")
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
        host = {"Host": f"penstock.s3.example.com:{server.port}"}
        connection.request("PUT", "/a", body="virtual", headers={**dict(signed.headers), **host})
        assert connection.getresponse().status == 200
        connection.close()
        for path, expected in (("/x?batch=", 200), ("/../x?batch=", 200), ("/%2e%2e/x?batch=", 200)):
            text = json.dumps({"ranges": [{"key": "a", "begin": 0, "end": 7}]})
            signed = sign("POST", f"http://penstock.s3.example.com:{server.port}{path}", text)
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
            connection.request("POST", path, body=text, headers={**dict(signed.headers), **host})
            answer = connection.getresponse()
            # The bucket is that of the host, whatever the path is. Some paths cannot be signed in this way.
            assert answer.status in (expected, 403)
            assert answer.status == 403 or answer.read()[20:] == b"virtual"
            connection.close()
        assert (tmp_path / "served" / "data" / "penstock" / "a").read_bytes() == b"virtual"
        # An address is not a domain, so that the path names the bucket.
        assert server.client().get_object(Bucket="penstock", Key="a")["Body"].read() == b"virtual"
    finally:
        server.stop()


def test_https_with_a_new_certificate(tmp_path):
    import ssl

    import trustme

    folder = tmp_path / "served"
    folder.mkdir()
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "authority.pem")

    def issue(name):
        issued = authority.issue_cert("127.0.0.1", common_name=name)
        (tmp_path / "chain.pem").write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
        servers.write_secret(tmp_path / "key.pem", issued.private_key_pem.bytes().decode())

    def name_of_certificate(port):
        context = ssl.create_default_context(cafile=str(tmp_path / "authority.pem"))
        with socket.create_connection(("127.0.0.1", port), 300) as plain, context.wrap_socket(plain, server_hostname="127.0.0.1") as secure:
            return dict(pair for part in secure.getpeercert()["subject"] for pair in part)["commonName"]

    class Secure(servers.Penstock):
        def make_bucket(self):
            (self.folder / "data" / "penstock").mkdir()

    issue("first")
    server = Secure(folder, "", "--tls-certificate", str(tmp_path / "chain.pem"), "--tls-key", str(tmp_path / "key.pem"))
    try:
        client = boto3.client(
            "s3", endpoint_url=f"https://127.0.0.1:{server.port}", aws_access_key_id=servers.KEY, aws_secret_access_key=servers.SECRET,
            region_name="us-east-1", verify=str(tmp_path / "authority.pem")
        )  # fmt: skip
        client.put_object(Bucket="penstock", Key="a", Body=os.urandom(3 * MIB))
        assert len(client.get_object(Bucket="penstock", Key="a")["Body"].read()) == 3 * MIB
        assert name_of_certificate(server.port) == "first"
        trusted = ("-o", f"endpoint_url=https://127.0.0.1:{server.port}", "-o", f"ca_bundle={tmp_path / 'authority.pem'}")
        load = ["load", "s3://penstock/load", "--seconds", "1", "--objects", "3", "--size", "10KB"]
        command = [sys.executable, "-m", "penstock", *trusted, *load]
        keys = {"AWS_ACCESS_KEY_ID": servers.KEY, "AWS_SECRET_ACCESS_KEY": servers.SECRET, "AWS_REGION": "us-east-1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | keys)
        assert done.returncode == 0, done.stderr
        done = subprocess.run(
            [*command[:-8], "load", "s3://missing", *command[-6:]], capture_output=True, text=True, timeout=300, env=os.environ | keys
        )
        assert done.returncode == 1 and "cannot load bucket `missing`: NoSuchBucket: " in done.stderr and "Error {" not in done.stderr
        issue("second")
        server.process.send_signal(1)
        until(lambda: name_of_certificate(server.port) == "second", "the new certificate is used")
        assert client.head_object(Bucket="penstock", Key="a")["ContentLength"] == 3 * MIB
    finally:
        server.stop()


def test_status_counts_and_access_log(tmp_path, minio):
    folder = tmp_path / "served"
    folder.mkdir()
    port = servers.free_port()
    options = ("--cache", f"{folder / 'cache'}:50MB", "--status", f"127.0.0.1:{port}", "--access-log", str(folder / "access.log"))
    server = servers.Penstock(folder, "s3://", *options, environment=minio.environment)
    try:
        client = server.client()
        client.put_object(Bucket="penstock", Key="status/a", Body=bytes(MIB))
        for _ in range(3):
            client.get_object(Bucket="penstock", Key="status/a", Range="bytes=0-99999")["Body"].read()

        def page(path):
            return urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=300).read().decode()

        def sample():
            return json.loads(page("/status.json"))

        until(lambda: sample()["sent_bytes"] >= 300_000, "the sample is taken")
        assert (sample()["cold_gets"], sample()["warm_gets"]) == (1, 2)
        assert sample()["drives"][0]["folder"] == str(folder / "cache") and 100_000 <= sample()["cold_bytes"] <= MIB
        counts = page("/metrics")
        assert 'penstock_requests_total{operation="get",status="206"} 3' in counts and counts.endswith("# EOF\n")
        assert f'penstock_drive_budget_bytes{{drive="{folder / "cache"}"}} 50000000' in counts
        until(lambda: f'penstock_drive_hits_total{{drive="{folder / "cache"}"}} 2' in page("/metrics"), "hits are counted by drive")
        assert "The limit" in page("/") and page("/health") == "ok\n"
        lines = [json.loads(line) for line in (folder / "access.log").read_text().splitlines()]
        gets = [line for line in lines if line["method"] == "GET" and line["path"] == "/penstock/status/a"]
        assert [(line["status"], line["sent_bytes"], line["key"], line["is_whole"], line["operation"]) for line in gets] == [
            (206, 100_000, servers.KEY, True, "get")
        ] * 3
        assert all(line["host"] == f"127.0.0.1:{server.port}" for line in lines)
        os.rename(folder / "access.log", folder / "access.log.1")
        server.process.send_signal(1)

        def is_new():
            client.head_bucket(Bucket="penstock")
            return (folder / "access.log").exists() and "HEAD" in (folder / "access.log").read_text()

        until(is_new, "the log is opened again")
    finally:
        server.stop()


def test_wrong_use_is_refused_with_a_remedy(tmp_path):
    def run(*arguments):
        command = ["-m", "penstock", "serve", *arguments]
        return subprocess.run([os.sys.executable, *command], capture_output=True, text=True, timeout=300)

    keys = tmp_path / "keys.json"
    servers.write_secret(keys, '{"keys": [{"access_key": "a", "secret_key": "short"}]}')
    empty, cold = tmp_path / "empty.pem", str(tmp_path / "served")
    servers.write_secret(empty, "no certificate")
    os.mkdir(cold)
    cases = [
        (["--cold", cold, "--anonymous", "--listen", "0.0.0.0:0"], "give --keys FILE"),
        (["--cold", str(tmp_path / "missing"), "--anonymous"], "create it first"),
        (["--cold", "gs://bucket", "--anonymous"], "s3://bucket"),
        (["--cold", "s3://bucket/folder", "--anonymous"], "serve the whole bucket"),
        (["--cold", cold, "--keys", str(keys)], "at least 8 characters"),
        (["--cold", cold, "--anonymous", "--listen", "nowhere"], "127.0.0.1:9100"),
        (["--cold", cold, "--anonymous", "--revalidate", "sometimes"], "always, never"),
        (["--cold", cold, "--anonymous", "--cache", str(tmp_path / "cache")], "it has no size yet"),
        (["--cold", cold, "--anonymous", "--tls-certificate", str(empty), "--tls-key", str(empty)], "no certificate found"),
    ]
    for arguments, remedy in cases:
        found = run(*arguments)
        assert found.returncode == 1 and remedy in found.stderr, (arguments, found.stderr)
    assert run("--cold", cold).returncode == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.pem", "keys.json", "served"], "nothing half-made stays"


def test_links_do_not_lead_out_of_a_served_folder(tmp_path):
    folder = tmp_path / "served"
    (folder / "data" / "penstock" / "inside").mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "file").write_bytes(b"secret")
    (folder / "data" / "penstock" / "link").symlink_to(tmp_path / "secret" / "file")
    (folder / "data" / "penstock" / "folder").symlink_to(tmp_path / "secret")
    (folder / "data" / "bucket-link").symlink_to(tmp_path / "secret")

    class Filled(servers.Penstock):
        def make_bucket(self):
            pass

    server = Filled(folder)
    try:
        client = server.client()
        for bucket, key in (("penstock", "link"), ("penstock", "folder/file"), ("bucket-link", "file")):
            with pytest.raises(botocore.exceptions.ClientError) as raised:
                client.get_object(Bucket=bucket, Key=key)
            assert code(raised)[0] == 404
            if key != "link":
                with pytest.raises(botocore.exceptions.ClientError):
                    client.put_object(Bucket=bucket, Key=key, Body=b"overwritten")
        assert "Contents" not in client.list_objects_v2(Bucket="penstock")
        assert [bucket["Name"] for bucket in client.list_buckets()["Buckets"]] == ["penstock"]
        assert (tmp_path / "secret" / "file").read_bytes() == b"secret"
    finally:
        server.stop()


@pytest.mark.parametrize("options", [(), ("--anonymous",)])
def test_takes_of_a_dataset_are_batches(tmp_path, monkeypatch, options):
    import numpy as np
    import penstock as ps

    (tmp_path / "served").mkdir()
    server = servers.Penstock(tmp_path / "served", "", *options)
    try:
        (tmp_path / "served" / "data" / "penstock").mkdir(exist_ok=True)
        # Programs sign even if the server does not ask for it.
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        random = np.random.default_rng(1)
        blobs = [random.bytes(20_000) for _ in range(2000)]
        ps.create('s3://penstock/pets "quoted"', {"blob": ps.Bytes()}).append({"blob": blobs})
        ds = ps.open('s3://penstock/pets "quoted"')
        ds.take([0])
        before = ds.stats()
        order = random.permutation(2000 // 20) * 20  # Far enough from each other that gaps are not read.
        assert ds.take(order)["blob"] == [blobs[position] for position in order]
        ranges, requests = (ds.stats()[name] - before[name] for name in ("ranges", "requests"))
        assert ranges >= 50 and requests <= ranges // 10, (ranges, requests)
        # A damaged object is found by its checksum, whichever way it was read.
        (data,) = [path for path in (tmp_path / "served" / "data" / "penstock").rglob("d/*") if path.stat().st_size > 1_000_000]
        with data.open("r+b") as file:
            file.truncate(data.stat().st_size - 1)
        with pytest.raises(ps.errors.CorruptError):
            ps.open('s3://penstock/pets "quoted"').take(order)
    finally:
        server.stop()


def test_the_status_page_in_a_browser(tmp_path, minio):
    folder = tmp_path / "served"
    folder.mkdir()
    port = servers.free_port()
    options = ("--cache", f"{folder / 'cache'}:50MB", "--status", f"127.0.0.1:{port}")
    server = servers.Penstock(folder, "s3://", *options, environment=minio.environment)
    try:
        server.client().put_object(Bucket="penstock", Key="page/a", Body=bytes(MIB))
        server.client().get_object(Bucket="penstock", Key="page/a")["Body"].read()
        profile = f"--user-data-dir={tmp_path / 'profile'}"
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", profile, "--virtual-time-budget=4000", "--dump-dom"]
        dom = subprocess.run([*command, f"http://127.0.0.1:{port}/"], capture_output=True, text=True, timeout=300, check=True).stdout
        verdict = dom.partition('id="verdict"')[2].partition("</div>")[0]
        assert "Idle" in verdict or "The limit: " in verdict, dom[-3000:]
        for text in ("from the cold store", "warm reads", str(folder / "cache"), "<polyline", "50.0 MB"):
            assert text in dom.partition("<script>")[0], text
        image = tmp_path / "page.png"
        command[-1] = f"--screenshot={image}"
        subprocess.run([*command, "--window-size=1000,700", f"http://127.0.0.1:{port}/"], capture_output=True, timeout=300, check=True)
        pixels = np.asarray(Image.open(image).convert("RGB"))
        assert pixels.shape == (700, 1000, 3)
        chart = np.argwhere((pixels == (0xF6, 0xF8, 0xFA)).all(2))
        (top, left), (bottom, right) = chart.min(0), chart.max(0)
        assert bottom - top + 1 == 120 and right - left + 1 >= 900, "the chart has its size"
        line = np.argwhere(np.abs(pixels.astype(int) - (0x09, 0x69, 0xDA)).max(2) < 40)
        assert len(np.unique(line[:, 1])) >= 5 and (line >= (top, left)).all() and (line <= (bottom, right)).all(), (
            "it shows the line of samples"
        )
    finally:
        server.stop()


def test_a_server_of_one_bucket_does_not_reach_others(tmp_path, minio):
    (tmp_path / "served").mkdir()
    minio.client().create_bucket(Bucket="not-served")
    for bucket in ("not-served", "penstock"):
        minio.client().put_object(Bucket=bucket, Key="one/a", Body=bytes(6 * MIB))
    server = servers.Penstock(tmp_path / "served", "s3://penstock", environment=minio.environment)
    try:
        client = server.client()
        assert [bucket["Name"] for bucket in client.list_buckets()["Buckets"]] == ["penstock"]
        client.copy_object(Bucket="penstock", Key="one/b", CopySource="penstock/one/a")
        upload = client.create_multipart_upload(Bucket="penstock", Key="one/c")["UploadId"]
        asked = {"Bucket": "penstock", "Key": "one/c", "UploadId": upload, "PartNumber": 1}
        client.upload_part_copy(**asked, CopySource="penstock/one/a")
        refused = [
            lambda: client.get_object(Bucket="not-served", Key="one/a"),
            lambda: client.list_objects_v2(Bucket="not-served"),
            lambda: client.copy_object(Bucket="penstock", Key="one/d", CopySource="not-served/one/a"),
            lambda: client.upload_part_copy(**asked, CopySource="not-served/one/a"),
        ]
        for number, call in enumerate(refused):
            with pytest.raises(botocore.exceptions.ClientError) as raised:
                call()
            assert code(raised) == (404, "NoSuchBucket"), number
    finally:
        server.stop()

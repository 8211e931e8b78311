"""Lists of a served folder with many names, and names in it that are not those of objects."""

from __future__ import annotations

import itertools
import os
import pathlib
import re
import threading
import urllib.error
import urllib.request

import botocore.exceptions
import pytest
import servers
from test_awkward_keys import LISTINGS, listed, rolled

BUCKET = "penstock"
MIB = 1 << 20


@pytest.fixture
def served(tmp_path):
    server = servers.Penstock(tmp_path, "", "--memory-bytes", str(64 * MIB))
    yield server
    server.stop()


@pytest.fixture
def data(served):
    return served.folder / "data" / BUCKET


def peak(server):
    status = pathlib.Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024


def make(data, names):
    for name in names:
        path = data / name
        if name.endswith("/"):
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()


def test_lists_hold_few_of_the_names_of_a_long_folder(served, data):
    make(data, [f"a-rather-long-name-of-a-file-as-people-have-them-{number:06}.jpeg" for number in range(60_000)])
    client, before, found = served.client(), peak(served), []

    def one(prefix):
        found.append([entry["Key"][-11:] for entry in client.list_objects_v2(Bucket=BUCKET, MaxKeys=1, Prefix=prefix)["Contents"]])

    threads = [threading.Thread(target=one, args=("a-rather",)) for _ in range(32)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert found == [["000000.jpeg"]] * 32
    # All names of all lists would be 400 MiB.
    assert peak(served) - before < 80 * MIB, f"{(peak(served) - before) / MIB:.0f} MiB"


def test_lists_of_nested_folders_with_long_names_take_the_memory_that_they_count(served, data):
    folder = data
    for depth in range(4):
        handle = os.open(folder, os.O_RDONLY)
        for number in range(2500):
            os.close(os.open(f"z{depth}{'n' * 180}{number:06}", os.O_CREAT | os.O_WRONLY, dir_fd=handle))
        os.close(handle)
        folder /= "a" * 190
        folder.mkdir()
    (folder / "x").touch()
    client, before, found = served.client(), peak(served), []

    def one():
        listed = client.list_objects_v2(Bucket=BUCKET)
        found.append((listed["KeyCount"], listed["Contents"][0]["Key"], listed["Contents"][-1]["Key"][-6:]))

    threads = [threading.Thread(target=one) for _ in range(32)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert found == [(1000, ("a" * 190 + "/") * 4 + "x", "000998")] * 32
    # Together they may take 64 MiB, and each response has 2 MiB. Before lists counted bytes, this was several hundred.
    assert peak(served) - before < 128 * MIB, f"{(peak(served) - before) / MIB:.0f} MiB"
    # And every key is listed, however few are held.
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
    keys = [entry["Key"] for page in pages for entry in page["Contents"]]
    assert len(keys) == len(set(keys)) == 10_001 and keys == sorted(keys)


def test_a_folder_that_is_read_again_is_listed_as_any_other(served, data):
    files = [f"f-{number:05}" for number in range(5000)] + [f"d-{number:04}/x/y" for number in range(0, 5000, 7)]
    make(data, [*files, *(f"d-{number:04}/" for number in range(5000)), *(f"empty-{number:04}/below/" for number in range(4200)), "z/1"])
    keys = [*files, "z/1"]
    for number, (prefix, delimiter, after) in enumerate(
        itertools.product(["", "f", "d-0"], ["", "/", "-", "9"], ["", "d-3000/x/y", "f-04321"])
    ):
        operation, after_name = LISTINGS[number % 3]
        asked = {"Bucket": BUCKET, "Prefix": prefix, "Delimiter": delimiter, "after": after, "PaginationConfig": {"PageSize": 997}}
        found = listed(served.client(), operation, after_name, **asked)
        assert found == rolled(keys, prefix, delimiter, after), (operation, prefix, delimiter, after)


def test_lists_of_uploads_have_each_once_in_every_page_size(served):
    client, begun = served.client(), []
    for key in ("a", "b/1", "a", "b/2", "c", "a", "b/1"):
        begun.append((key, client.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"]))

    def pages(size, delimiter):
        uploads, prefixes, marker = [], [], {}
        while True:
            page = client.list_multipart_uploads(Bucket=BUCKET, MaxUploads=size, Delimiter=delimiter, **marker)
            uploads += [(upload["Key"], upload["UploadId"]) for upload in page.get("Uploads", ())]
            prefixes += [entry["Prefix"] for entry in page.get("CommonPrefixes", ())]
            if not page["IsTruncated"]:
                return uploads, prefixes
            marker = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page.get("NextUploadIdMarker", "")}

    for size in range(1, 9):
        assert pages(size, "") == (sorted(begun), [])
        assert pages(size, "/") == (sorted(one for one in begun if "/" not in one[0]), ["b/"])


def test_links_and_folders_with_the_name_of_an_object_are_none(served, data, tmp_path):
    (tmp_path / "outside").write_text("secret")
    make(data, ["a/below", "b/below", "b/%self/x"])
    (data / "a" / "%self").symlink_to(tmp_path / "outside")
    client = served.client()
    assert served.names(BUCKET, "") == ["a/below", "b/below"]
    for key in "ab":
        with pytest.raises(botocore.exceptions.ClientError, match="NoSuchKey"):
            client.get_object(Bucket=BUCKET, Key=key)
    client.put_object(Bucket=BUCKET, Key="a", Body=b"own")
    assert served.get(BUCKET, "a") == b"own" and (tmp_path / "outside").read_text() == "secret"
    with pytest.raises(botocore.exceptions.ClientError, match=r"InvalidRequest.*a folder has the name"):
        client.put_object(Bucket=BUCKET, Key="b", Body=b"own")
    os.rename(data / "b" / "%self", data / "b" / "other")
    client.put_object(Bucket=BUCKET, Key="b", Body=b"own")
    assert served.names(BUCKET, "") == ["a", "a/below", "b", "b/below", "b/other/x"]


def test_what_a_folder_does_not_have_is_refused(served):
    client = served.client()
    upload = client.create_multipart_upload(Bucket=BUCKET, Key="a")["UploadId"]
    for call, asked in (
        (client.create_bucket, {"Bucket": "locks", "ObjectLockEnabledForBucket": True}),
        (client.upload_part, {"Bucket": BUCKET, "Key": "a", "UploadId": upload, "PartNumber": 1, "Body": b"x", "SSECustomerAlgorithm": "AES256",
                              "SSECustomerKey": "k" * 32}),
    ):  # fmt: skip
        with pytest.raises(botocore.exceptions.ClientError, match="NotImplemented"):
            call(**asked)
    assert [bucket["Name"] for bucket in client.list_buckets()["Buckets"]] == [BUCKET]


@pytest.mark.parametrize("query", ["annotation", "annotation&annotationName=x", "abac", "metadataConfiguration="])
def test_reads_of_what_is_not_known_do_not_become_plain_reads(tmp_path, query):
    server = servers.Penstock(tmp_path, "", "--anonymous")
    try:
        (tmp_path / "data" / BUCKET).mkdir()
        (tmp_path / "data" / BUCKET / "a").write_text("body")
        for path in ("a", ""):
            for method in ("GET", "HEAD"):
                with pytest.raises(urllib.error.HTTPError, match="501"):
                    urllib.request.urlopen(urllib.request.Request(f"{server.endpoint}/{BUCKET}/{path}?{query}", method=method), timeout=300)
        assert b"<Key>a</Key>" in urllib.request.urlopen(f"{server.endpoint}/{BUCKET}/?list-type=2&prefix=&delimiter=", timeout=300).read()
    finally:
        server.stop()


def test_ranges_beyond_all_numbers_are_ranges(served):
    client = served.client()
    client.put_object(Bucket=BUCKET, Key="a", Body=b"0123456789")
    for number in (2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30):
        found = client.get_object(Bucket=BUCKET, Key="a", Range=f"bytes=4-{number}")
        assert found["ContentRange"] == "bytes 4-9/10" and found["Body"].read() == b"456789"
        assert client.get_object(Bucket=BUCKET, Key="a", Range=f"bytes=-{number}")["Body"].read() == b"0123456789"
        with pytest.raises(botocore.exceptions.ClientError, match="InvalidRange"):
            client.get_object(Bucket=BUCKET, Key="a", Range=f"bytes={number}-")


def test_an_object_without_a_type_has_that_of_s3(served, data):
    (data / "foreign").touch()
    url = served.client().generate_presigned_url("put_object", Params={"Bucket": BUCKET, "Key": "own"})
    urllib.request.urlopen(urllib.request.Request(url, b"x", method="PUT", headers={"Content-Type": ""}), timeout=300)
    for key in ("foreign", "own"):
        assert served.client().head_object(Bucket=BUCKET, Key=key)["ContentType"] == "binary/octet-stream"
        assert served.client().get_object(Bucket=BUCKET, Key=key)["ContentType"] == "binary/octet-stream"

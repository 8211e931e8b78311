"""Keys with letters that addresses, XML, paths or caches give a meaning of their own: through every operation of `penstock serve` and every right."""

from __future__ import annotations

import hashlib
import json
import random
import urllib.error
import urllib.parse
import urllib.request
import uuid

import botocore.auth
import botocore.awsrequest
import botocore.credentials
import botocore.exceptions
import botocore.handlers
import pytest
import servers

# Each of these is put at the beginning, in the middle and at the end of keys.
FRAGMENTS = ["+", "%", " ", "?", "&", "ü", "#", "=", ";", ":", ",", '"', "'", "<", ">", "\\", "%2F", "%25", "%zz", "a..", "..a", "😀", "&amp;", "*",
             "~", "|", "{}", "\n", "\t", "?batch", "?1-2?etag", "%self", "%_", "%~", "]]>", "e\u0301", "\u00e9"]  # fmt: skip
PLAIN_PARTS = ["/a", "a/", "//", "a//b", "/", ".", "..", "../a", "a/./b", "a/.."]
OURS = [".penstock-serve/lock", "penstock-cache", "stores/x", "log/0000000000000000/18446744073709551615", "d/" + "0" * 32, "-", "x?batch"]
LONG = ["k" * 1024, "ü" * 512, "%" * 1024, "a" * 300 + "/" + "b" * 300, "/".join(["p"] * 512)]


def alphabet():
    """Return all keys, of which no two are equal when they are decoded again or not at all."""
    keys = [form.replace("{}", fragment) for fragment in FRAGMENTS for form in ("{}", "x{}/m{}n/{}y")]
    return list(dict.fromkeys([*keys, *PLAIN_PARTS, *OURS, *LONG]))


def body_of(key):
    """Return a body that no other key has."""
    seed = key.encode()
    return hashlib.sha256(seed).digest() + random.Random(seed).randbytes(5000)


class Served:
    """A server through a cache, a client of it, and a client of what is behind it."""

    def __init__(self, kind, folder, minio):
        cache = ("--cache", f"{folder / 'cache'}:100MB")
        if kind == "minio":
            self.node = servers.Penstock(folder, "s3://", *cache, environment=minio.environment)
        else:
            self.node = servers.Penstock(folder, "", *cache)
        self.client = self.node.client()
        self.cold = minio.client() if kind == "minio" else None

    def bucket(self, keys=()):
        """Return a new bucket and its keys. MinIO refuses some keys, and then the server must, too."""
        bucket, taken = f"b{uuid.uuid4().hex}", []
        self.client.create_bucket(Bucket=bucket)
        for key in keys:
            if self.cold and key.startswith("/"):
                # MinIO takes it for the key without the slash.
                assert not is_done(self.client.put_object, Bucket=bucket, Key=key, Body=b""), key
                continue
            # AWS's client sends no requests for keys of blanks.
            if self.cold and (not key.strip() or not is_done(self.cold.put_object, Bucket=bucket, Key=key, Body=body_of(key))):
                assert not is_done(self.client.put_object, Bucket=bucket, Key=key, Body=b""), key
                continue
            self.client.put_object(Bucket=bucket, Key=key, Body=body_of(key))
            taken.append(key)
        assert len(taken) > 60 or not keys
        return bucket, taken


def is_done(call, **asked):
    """Return whether a call succeeds."""
    try:
        call(**asked)
    except botocore.exceptions.ClientError as error:
        assert error.response["ResponseMetadata"]["HTTPStatusCode"] < 500, error
        return False
    return True


@pytest.fixture(scope="module", params=["folder", "minio"])
def served(request, tmp_path_factory):
    minio = request.getfixturevalue("minio") if request.param == "minio" else None
    started = Served(request.param, tmp_path_factory.mktemp("served"), minio)
    yield started
    started.node.stop()


def opened(url, method="GET", body=None, headers=None):
    """Return the status and the body of the answer to a request with exactly this address."""
    try:
        answer = urllib.request.urlopen(urllib.request.Request(url, data=body, method=method, headers=headers or {}), timeout=300)
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    return answer.status, answer.read()


def batch(node, bucket, ranges, key=servers.KEY, secret=servers.SECRET):
    """Return the status of a batch and its answers: a status and a body each."""
    text = json.dumps({"ranges": [{"key": name, "begin": begin, "end": end} for name, begin, end in ranges]})
    headers = {"x-amz-content-sha256": hashlib.sha256(text.encode()).hexdigest()}
    signed = botocore.awsrequest.AWSRequest("POST", f"{node.endpoint}/{bucket}/-?batch=", data=text, headers=headers)
    botocore.auth.SigV4Auth(botocore.credentials.Credentials(key, secret), "s3", "us-east-1").add_auth(signed)
    status, stream = opened(signed.url, "POST", text.encode(), dict(signed.headers))
    answers = []
    while status == 200 and stream:
        found, length = int.from_bytes(stream[:4], "little"), int.from_bytes(stream[12:20], "little")
        answers.append((found, stream[20 : 20 + length]))
        stream = stream[20 + length :]
    return status, answers


@pytest.mark.long
def test_every_key_is_read_in_every_way(served):
    bucket, keys = served.bucket(alphabet())
    client = served.client
    for key in keys:
        asked, body = {"Bucket": bucket, "Key": key}, body_of(key)
        for _ in range(2):  # The first time, the server does not know the object.
            assert client.get_object(**asked)["Body"].read() == body, key
            assert client.get_object(**asked, Range="bytes=30-40")["Body"].read() == body[30:41], key
            assert client.head_object(**asked)["ContentLength"] == len(body), key
        attributes = client.get_object_attributes(**asked, ObjectAttributes=["ETag", "ObjectSize", "StorageClass"])
        assert (attributes["ETag"], attributes["ObjectSize"]) == (hashlib.md5(body).hexdigest(), len(body)), key
        assert attributes["StorageClass"] == "STANDARD", key
        assert opened(client.generate_presigned_url("get_object", asked)) == (200, body), key
        if served.cold:
            assert served.cold.get_object(**asked)["Body"].read() == body, key
    status, answers = batch(served.node, bucket, [(key, 1, 33) for key in keys])
    assert status == 200 and answers == [(200, body_of(key)[1:33]) for key in keys]


@pytest.mark.long
def test_every_key_is_written_in_every_way_and_read_anew(served):
    """What the cache has of the object before each write must not be read again."""
    bucket, keys = served.bucket(alphabet())
    client = served.client
    client.put_object(Bucket=bucket, Key="source", Body=b"copied")

    def put(asked):
        client.put_object(**asked, Body=b"put")
        return b"put"

    def signed(asked):
        url = client.generate_presigned_url("put_object", asked)
        assert opened(url, "PUT", b"signed", {"Content-Type": ""})[0] == 200
        return b"signed"

    def copied(asked):
        client.copy_object(**asked, CopySource={"Bucket": bucket, "Key": "source"})
        return b"copied"

    def uploaded(asked):
        upload = {**asked, "UploadId": client.create_multipart_upload(**asked)["UploadId"]}
        uploads = client.list_multipart_uploads(Bucket=bucket, Prefix=asked["Key"]).get("Uploads", [])
        assert (asked["Key"], upload["UploadId"]) in [(entry["Key"], entry["UploadId"]) for entry in uploads]
        etag = client.upload_part(**upload, PartNumber=1, Body=b"x")["ETag"]
        again = client.upload_part_copy(**upload, PartNumber=1, CopySource={"Bucket": bucket, "Key": "source"})["CopyPartResult"]["ETag"]
        assert [part["ETag"] for part in client.list_parts(**upload)["Parts"]] == [again] != [etag]
        done = client.complete_multipart_upload(**upload, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": again}]})
        assert done["Key"] == asked["Key"]
        aborted = {**asked, "UploadId": client.create_multipart_upload(**asked)["UploadId"]}
        client.abort_multipart_upload(**aborted)
        assert not is_done(client.list_parts, **aborted)
        return b"copied"

    for number, key in enumerate(keys):
        asked = {"Bucket": bucket, "Key": key}
        if served.cold and key.endswith("/"):
            continue  # MinIO uploads no such objects in parts.
        # Each fragment has two keys.
        for write in [(put, uploaded), (signed, copied)][number % 2]:
            assert client.get_object(**asked)["Body"].read()
            expected = write(asked)
            assert client.get_object(**asked)["Body"].read() == expected, (key, write)
        client.copy_object(Bucket=bucket, Key="target", CopySource={"Bucket": bucket, "Key": key})
        assert client.get_object(Bucket=bucket, Key="target")["Body"].read() == b"copied"
    for key in keys[::2]:
        client.delete_object(Bucket=bucket, Key=key)
    deleted = client.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": key} for key in keys[1::2]]})
    assert sorted(entry["Key"] for entry in deleted["Deleted"]) == sorted(keys[1::2]) and not deleted.get("Errors")
    for key in keys:
        assert not is_done(client.get_object, Bucket=bucket, Key=key), key
    left = client.list_objects_v2(Bucket=bucket)["Contents"]
    assert [entry["Key"] for entry in left] == ["source", "target"]


def test_a_write_touches_no_other_key(served):
    """Keys that are equal once they are encoded, decoded or normalised."""
    client = served.client
    for group in (["a b", "a+b", "a%20b", "a%2Bb"], ["é", "e\u0301", "%C3%A9"], ["a%2Fb", "a/b", "a%252Fb"], ["a?b", "a%3Fb", "a%253Fb"],
                  ["a\nb", "a%0Ab", "a%0ab"], ["a&b", "a&amp;b", "a&#38;b"], ["A", "a"], ["p/self", "p/%self", "p/%25self"]):  # fmt: skip
        bucket, _ = served.bucket()
        for key in group:
            client.put_object(Bucket=bucket, Key=key, Body=body_of(key))
        for gone in group:
            for key in group:
                assert client.get_object(Bucket=bucket, Key=key)["Body"].read() == body_of(key), (gone, key)
            client.delete_object(Bucket=bucket, Key=gone)
            assert not is_done(client.get_object, Bucket=bucket, Key=gone)
            listed = client.list_objects_v2(Bucket=bucket).get("Contents", [])
            assert [entry["Key"] for entry in listed] == sorted(set(group) - {gone})
            client.put_object(Bucket=bucket, Key=gone, Body=body_of(gone))


def rolled(keys, prefix="", delimiter="", after=""):
    """Return the keys and common prefixes of a listing. Source: the reference of ListObjectsV2."""
    found, prefixes = [], []
    for key in sorted(keys):
        if not key.startswith(prefix) or key <= after:
            continue
        rest = key[len(prefix) :]
        if delimiter and delimiter in rest:
            common = prefix + rest[: rest.index(delimiter) + len(delimiter)]
            # A page that ended with a common prefix has listed all of its keys.
            if common != after and common not in prefixes:
                prefixes.append(common)
        else:
            found.append(key)
    return found, prefixes


def listed(client, operation, after_name, **asked):
    """Return the keys and common prefixes of all pages, or the code of an error."""
    keys, prefixes = [], []
    after = {after_name: asked.pop("after")} if asked.get("after") else {}
    asked.pop("after", None)
    name = "Versions" if "versions" in operation else "Contents"
    try:
        for page in client.get_paginator(operation).paginate(**after, **asked):
            keys += [entry["Key"] for entry in page.get(name, ())]
            prefixes += [entry["Prefix"] for entry in page.get("CommonPrefixes", ())]
    except botocore.exceptions.ClientError as error:
        return error.response["Error"]["Code"]
    return keys, prefixes


LISTINGS = [("list_objects_v2", "StartAfter"), ("list_objects", "Marker"), ("list_object_versions", "KeyMarker")]


@pytest.mark.long
def test_every_key_is_listed_in_every_way(served):
    bucket, keys = served.bucket(alphabet())
    choose = random.Random(3)
    queries = [{}, {"delimiter": "/"}]
    for number, key in enumerate(keys):
        begin = key[: choose.randrange(len(key) + 1)]
        # Each fragment has two keys, and so all of these.
        if number % 2:
            queries += [{"prefix": key}, {"prefix": begin, "delimiter": choose.choice(FRAGMENTS)}]
        else:
            queries += [{"after": key, "prefix": begin[:1]}, {"prefix": begin, "delimiter": "/", "after": choose.choice(keys)}]
    for number, query in enumerate(queries):
        operation, after_name = LISTINGS[number % 3]
        names = {"prefix": "Prefix", "delimiter": "Delimiter", "after": "after"}
        asked = {
            "Bucket": bucket,
            "PaginationConfig": {"PageSize": choose.choice([3, 20, 1000])},
            **{names[name]: value for name, value in query.items()},
        }
        found = listed(served.client, operation, after_name, **asked)
        if served.cold:
            assert found == listed(served.cold, operation, after_name, **asked), (operation, query)
        else:
            assert found == rolled(keys, **query), (operation, query)


def test_listings_are_encoded_only_if_that_is_asked_for(served):
    bucket, keys = served.bucket(alphabet())
    # MinIO leaves some objects out.
    expected = listed(served.cold or served.client, "list_objects_v2", "", Bucket=bucket)[0]
    assert set(expected) <= set(keys) and len(expected) > 60
    plain = served.node.client()
    for operation in ("ListObjects", "ListObjectsV2", "ListObjectVersions"):
        plain.meta.events.unregister(f"before-parameter-build.s3.{operation}", botocore.handlers.set_list_objects_encoding_type_url)
    for operation, _ in LISTINGS:
        name = "Versions" if "versions" in operation else "Contents"
        found = getattr(plain, operation)(Bucket=bucket, EncodingType="url")[name]
        assert [urllib.parse.unquote_plus(entry["Key"]) for entry in found] == expected
        assert all(entry["Key"].isascii() and " " not in entry["Key"] and "\n" not in entry["Key"] for entry in found)
        found = getattr(plain, operation)(Bucket=bucket)[name]
        assert [entry["Key"] for entry in found] == expected


def is_deleted(boto, bucket, key):
    """Delete an object by a list. A key without rights on it is named in the answer."""
    try:
        answer = boto.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": key}]})
    except botocore.exceptions.ClientError:
        return False
    assert [entry["Key"] for entry in [*answer.get("Deleted", ()), *answer.get("Errors", ())]] == [key]
    return not answer.get("Errors")


# Operations on a key, which a client with rights on it may call: each returns whether it is allowed.
def operations(limited, client, key):
    bucket, names = limited.bucket, {"access": client.meta_key, "secret": client.meta_secret}
    asked = {"Bucket": bucket, "Key": key}
    upload = {**asked, "UploadId": limited.root.create_multipart_upload(**asked)["UploadId"]}
    limited.root.put_object(**asked, Body=b"content")
    etag = limited.root.upload_part(**upload, PartNumber=1, Body=b"content")["ETag"]
    boto = client.boto
    writes = {
        "put": lambda: is_done(boto.put_object, **asked, Body=b"content"),
        "copy to": lambda: is_done(boto.copy_object, **asked, CopySource={"Bucket": bucket, "Key": client.own}),
        "copy from": lambda: is_done(boto.copy_object, Bucket=bucket, Key=f"{client.own}-copy", CopySource={"Bucket": bucket, "Key": key}),
        "part": lambda: is_done(boto.upload_part, **upload, PartNumber=1, Body=b"content"),
        "part from": lambda: is_done(boto.upload_part_copy, **client.upload, PartNumber=1, CopySource={"Bucket": bucket, "Key": key}),
        "create": lambda: is_done(boto.create_multipart_upload, **asked),
        "complete": lambda: is_done(boto.complete_multipart_upload, **upload, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": etag}]}),
        "delete many": lambda: is_deleted(boto, bucket, key),
        "delete": lambda: is_done(boto.delete_object, **asked),
        "signed put": lambda: opened(boto.generate_presigned_url("put_object", asked), "PUT", b"content", {"Content-Type": ""})[0] == 200,
    }
    reads = {
        "parts": lambda: is_done(boto.list_parts, **upload),
        "get": lambda: is_done(boto.get_object, **asked),
        "range": lambda: is_done(boto.get_object, **asked, Range="bytes=0-1"),
        "head": lambda: is_done(boto.head_object, **asked),
        "attributes": lambda: is_done(boto.get_object_attributes, **asked, ObjectAttributes=["ETag"]),
        "signed get": lambda: opened(boto.generate_presigned_url("get_object", asked))[0] == 200,
        "batch": lambda: batch(limited.node, bucket, [(client.own, 0, 1), (key, 0, 1)], *names.values())[0] == 200,
        "list": lambda: is_done(boto.list_objects, Bucket=bucket, Prefix=key),
        "list 2": lambda: is_done(boto.list_objects_v2, Bucket=bucket, Prefix=key),
        "versions": lambda: is_done(boto.list_object_versions, Bucket=bucket, Prefix=key),
        "uploads": lambda: is_done(boto.list_multipart_uploads, Bucket=bucket, Prefix=key),
    }
    return reads, writes


class Limited:
    """A server with a key for each awkward prefix, and one with that prefix that may only read."""

    class Client:
        def __init__(self, limited, name, fragment):
            self.meta_key, self.meta_secret = name, f"secret-of-{name}"
            self.boto = limited.node.client(key=self.meta_key, secret=self.meta_secret)
            self.own = f"{fragment}/own"
            limited.root.put_object(Bucket=limited.bucket, Key=self.own, Body=b"content")
            asked = {"Bucket": limited.bucket, "Key": self.own}
            self.upload = {**asked, "UploadId": limited.root.create_multipart_upload(**asked)["UploadId"]}

    def __init__(self, kind, folder, minio):
        self.bucket, self.half = f"b{uuid.uuid4().hex}", int(kind == "minio")
        keys = [{"access_key": servers.KEY, "secret_key": servers.SECRET}]
        for number, fragment in enumerate(FRAGMENTS):
            for name, is_reader in ((f"key-{number}", False), (f"reader-{number}", True)):
                rights = {"prefixes": [f"{self.bucket}/{fragment}/"], "read_only": is_reader}
                keys.append({"access_key": name, "secret_key": f"secret-of-{name}", **rights})
        servers.write_secret(folder / "keys.json", json.dumps({"keys": keys}))
        cache = ("--cache", f"{folder / 'cache'}:100MB")
        self.node = servers.Penstock(folder, "s3://" if minio else "", *cache, environment=minio and minio.environment)
        self.root = self.node.client()
        self.root.create_bucket(Bucket=self.bucket)


@pytest.fixture(scope="module", params=["folder", "minio"])
def limited(request, tmp_path_factory):
    minio = request.getfixturevalue("minio") if request.param == "minio" else None
    started = Limited(request.param, tmp_path_factory.mktemp("limited"), minio)
    yield started
    started.node.stop()


def neighbours(fragment):
    """Return keys that begin with a prefix only for a server that decodes, encodes or normalises keys."""
    quoted = urllib.parse.quote(fragment, safe="")
    texts = [quoted, urllib.parse.quote(quoted, safe=""), urllib.parse.unquote(fragment), urllib.parse.unquote_plus(fragment),
             fragment.replace(" ", "+"), fragment.upper(), fragment.swapcase()]  # fmt: skip
    return [text for text in dict.fromkeys(texts) if text != fragment and text]


@pytest.mark.long
def test_rights_on_awkward_prefixes_allow_what_they_say_and_nothing_else(limited):
    turn = 0
    # Rights are checked before the cold store is asked, so each store has half of the fragments.
    for at, fragment in list(enumerate(FRAGMENTS))[limited.half :: 2]:
        writer, reader = (Limited.Client(limited, f"{name}-{at}", fragment) for name in ("key", "reader"))
        reads, writes = operations(limited, writer, f"{fragment}/in")
        # Each operation is tried with every third fragment, and each fragment with a third of the operations. Reads come before deletes.
        for name, call in list({**reads, **writes}.items())[at % 3 :: 3]:
            assert call(), (fragment, name)
        reads, writes = operations(limited, reader, f"{fragment}/in")
        for name in list(writes)[at % 3 :: 3]:
            assert not writes[name](), (fragment, name)
        for other in [f"{fragment}-out", *(f"{text}/out" for text in neighbours(fragment))]:
            reads, writes = operations(limited, writer, other)
            calls = list({**reads, **writes}.items())
            for name, call in calls[turn % 5 :: 5]:
                assert not call(), (fragment, other, name)
            turn += 1
            assert limited.root.get_object(Bucket=limited.bucket, Key=other)["Body"].read() == b"content"


def test_keys_that_begin_with_a_slash_are_refused_where_stores_ignore_it(tmp_path, minio):
    """MinIO takes `/k` for `k`. A cache, a quota and the order of puts would see two objects."""
    bucket = f"b{uuid.uuid4().hex}"
    minio.client().create_bucket(Bucket=bucket)
    options = (
        "--cache",
        f"{tmp_path / 'cache'}:100MB",
        "--revalidate",
        "never",
        "--quota",
        f"{bucket}/dir/=1MB",
        "--write-back",
        f"{tmp_path / 'back'}:100MB",
    )
    (tmp_path / "served").mkdir()
    node = servers.Penstock(tmp_path / "served", "s3://", *options, environment=minio.environment)
    client = node.client()
    client.put_object(Bucket=bucket, Key="dir/a", Body=b"a")
    assert client.get_object(Bucket=bucket, Key="dir/a")["Body"].read() == b"a"
    for key in ("/dir/a", "//dir/a", "/", "dir/a__XLDIR__", "a__XLDIR__/b"):
        own = {"Bucket": bucket, "Key": key}
        calls = [
            lambda own: client.put_object(**own, Body=b"b" * 2_000_000), lambda own: client.get_object(**own), lambda own: client.head_object(**own),
            lambda own: client.delete_object(**own), lambda own: client.create_multipart_upload(**own),
            lambda own: client.copy_object(**own, CopySource={"Bucket": bucket, "Key": "dir/a"}),
            lambda own: client.copy_object(Bucket=bucket, Key="other", CopySource=own),
            lambda own: client.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": "dir/a"}, {"Key": own["Key"]}]}),
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(botocore.exceptions.ClientError, match=r"with another one|400|QuotaExceeded"):
                call(own)
    assert client.get_object(Bucket=bucket, Key="dir/a")["Body"].read() == b"a"
    assert [found["Key"] for found in minio.client().list_objects_v2(Bucket=bucket)["Contents"]] == ["dir/a"]
    node.stop()

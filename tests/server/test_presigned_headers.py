"""Headers `x-amz-…` in the query of an address, where presigners of SDKs put them (JavaScript v3, Go v2)."""

from __future__ import annotations

import urllib.error
import urllib.parse
import urllib.request

import boto3
import botocore.exceptions
import pytest
import servers
from botocore import UNSIGNED
from botocore.auth import S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials
from signed import Signer, answer

BODY = b"precious"


@pytest.fixture(scope="module", params=["minio", "folder", "anonymous"])
def served(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    if request.param == "minio":
        minio = request.getfixturevalue("minio")
        server = servers.Penstock(folder, "s3://", environment=minio.environment)
    elif request.param == "folder":
        server = servers.Penstock(folder, "", "--signature-v2")
    else:
        (folder / "data" / "penstock").mkdir(parents=True)
        server = servers.Penstock(folder, "", "--anonymous")
        server.client = lambda: client_of(server, UNSIGNED)
    server.kind = request.param
    yield server
    server.stop()


def client_of(server, version):
    return boto3.client(
        "s3", endpoint_url=server.endpoint, aws_access_key_id=servers.KEY, aws_secret_access_key=servers.SECRET, region_name="us-east-1",
        config=Config(signature_version=version),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def objects(served):
    served.put("penstock", "other", b"other")
    served.client().put_object(Bucket="penstock", Key="own", Body=BODY, Metadata={"old": "1"})


def presigned(served, method, query, headers=None, key="own"):
    """Return a request whose address is signed with these parameters, which may be repeated."""
    url = f"{served.endpoint}/penstock/{key}?{urllib.parse.urlencode(query)}"
    request = AWSRequest(method=method, url=url, headers=headers or {})
    S3SigV4QueryAuth(Credentials(servers.KEY, servers.SECRET), "s3", "us-east-1", expires=60).add_auth(request)
    return request.prepare()


def ask(served, method, query, body=b"", headers=None, key="own"):
    """Send such a request, and return the status and the code of the error."""
    prepared = presigned(served, method, query, headers, key)
    given = {name: value for name, value in prepared.headers.items() if name.lower() != "content-length"}
    request = urllib.request.Request(prepared.url, data=body if method in ("PUT", "POST") else None, method=method, headers=given)
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        text = error.read().decode()
        return error.code, text.partition("<Code>")[2].partition("</Code>")[0]


def now(served):
    found = served.client().get_object(Bucket="penstock", Key="own")
    return found["Body"].read(), found["Metadata"]


REFUSED = [
    ("DELETE", {"x-amz-if-match-size": "1"}, (501, "NotImplemented"), (412, "PreconditionFailed")),
    ("DELETE", {"X-Amz-If-Match-Size": "1"}, (501, "NotImplemented"), (412, "PreconditionFailed")),
    ("DELETE", {"x-amz-expected-bucket-owner": "111111111111"}, None, (403, "AccessDenied")),
    ("PUT", {"X-Amz-Expected-Bucket-Owner": "111111111111"}, None, (403, "AccessDenied")),
    ("GET", {"x-amz-expected-bucket-owner": "111111111111"}, None, (403, "AccessDenied")),
    ("PUT", {"x-amz-write-offset-bytes": "8"}, (501, "NotImplemented"), (501, "NotImplemented")),
    ("PUT", {"x-amz-tagging": "a=b"}, None, (501, "NotImplemented")),
    ("PUT", {"x-amz-server-side-encryption": "AES256"}, None, (501, "NotImplemented")),
    ("PUT", {"x-amz-copy-source": "/penstock/absent"}, (404, "NoSuchKey"), (404, "NoSuchKey")),
    ("PUT", {"x-amz-copy-source": "/penstock/other", "x-amz-copy-source-if-match": '"0"'}, (412, "PreconditionFailed"), (412, "PreconditionFailed")),
    ("PUT", [("x-amz-meta-a", "1"), ("X-Amz-Meta-A", "2")], (400, "InvalidArgument"), (400, "InvalidArgument")),
    ("PUT", {"x-amz-meta-a": "1\n2"}, (400, "InvalidArgument"), (400, "InvalidArgument")),
    ("PUT", {"x-amz-meta a": "1"}, (400, "InvalidArgument"), (400, "InvalidArgument")),
    ("PUT", {"X-Amz-Content-Sha256": "0" * 64}, (400, None), (400, None)),
]  # fmt: skip


@pytest.mark.parametrize("asked", REFUSED, ids=[f"{method} {' '.join(dict(query))}" for method, query, *_ in REFUSED])
def test_every_check_sees_them(served, asked):
    """What an account checks itself, and what of a signature an anonymous server does not read, is answered in some way."""
    method, query, before_account, before_folder = asked
    expected = before_account if served.kind == "minio" else before_folder
    if expected is None or (served.kind == "anonymous" and "X-Amz-Content-Sha256" in query):
        assert ask(served, method, query, b"new")[0] not in (500, 502, 503)
        return
    status, code = ask(served, method, query, b"new")
    assert (status, code if expected[1] else None) == expected
    assert now(served) == (BODY, {"old": "1"})


def test_they_are_what_headers_are(served):
    assert ask(served, "PUT", {"x-amz-meta-a": "1", "X-Amz-Meta-B": "two words"}, b"new")[0] == 200
    assert now(served) == (b"new", {"a": "1", "b": "two words"})
    assert ask(served, "PUT", {"x-amz-meta-empty": ""}, b"new")[0] == 200
    assert now(served) == (b"new", {"empty": ""})
    assert ask(served, "PUT", {"x-amz-copy-source": "/penstock/other"})[0] == 200
    assert now(served)[0] == b"other"
    if served.kind != "minio":
        assert ask(served, "DELETE", {"x-amz-if-match-size": "5", "x-amz-expected-bucket-owner": "penstock"})[0] == 204
        with pytest.raises(botocore.exceptions.ClientError, match="NoSuchKey"):
            now(served)


def test_the_same_header_and_parameter_agree_or_are_refused(served):
    assert ask(served, "PUT", {"x-amz-meta-a": "1"}, b"new", {"x-amz-meta-a": "1"})[0] == 200
    assert now(served) == (b"new", {"a": "1"})
    assert ask(served, "PUT", {"x-amz-meta-a": "1"}, b"not", {"x-amz-meta-a": "2"}) == (400, "InvalidArgument")
    assert now(served) == (b"new", {"a": "1"})


def test_checksums_in_addresses_are_ignored_as_in_s3(served):
    """The SDK for JavaScript signs that of an empty body, because it does not know the body yet."""
    query = {"x-amz-checksum-crc32": "AAAAAA==", "x-amz-sdk-checksum-algorithm": "CRC32", "X-Amz-Content-Sha256": "UNSIGNED-PAYLOAD"}
    assert ask(served, "PUT", {**query, "x-amz-meta-a": "1"}, b"new")[0] == 200
    assert now(served) == (b"new", {"a": "1"})


def test_they_cannot_be_added_to_an_address(served):
    url = presigned(served, "PUT", {}).url
    request = urllib.request.Request(f"{url}&x-amz-copy-source=/penstock/other", data=b"", method="PUT")
    if served.kind == "anonymous":  # Signatures are not verified, and everybody may do everything.
        urllib.request.urlopen(request, timeout=300).close()
        assert now(served)[0] == b"other"
        return
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(request, timeout=300)
    assert now(served) == (BODY, {"old": "1"})


@pytest.mark.parametrize("served", ["folder"], indirect=True)
def test_an_address_of_version_2_has_them_too(served):
    """boto3 puts headers there."""
    client = client_of(served, "s3")
    url = client.generate_presigned_url("put_object", {"Bucket": "penstock", "Key": "own", "Metadata": {"a": "1"}})
    assert "x-amz-meta-a=1" in url
    with urllib.request.urlopen(
        urllib.request.Request(url, data=b"new", method="PUT", headers={"Content-Type": ""}), timeout=300
    ) as response:
        assert response.status == 200
    assert now(served) == (b"new", {"a": "1"})
    forged = urllib.request.Request(f"{url}&x-amz-copy-source=/penstock/other", data=b"", method="PUT", headers={"Content-Type": ""})
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(forged, timeout=300)


def test_beside_a_signature_in_a_header_they_are_refused(served):
    """S3 does not say what they are there. Ignored, they would be a condition that nobody checks."""
    for method, query in (("PUT", "x-amz-meta-a=1"), ("DELETE", "x-amz-if-match-size=1"), ("GET", "x-amz-expected-bucket-owner=1")):
        path = f"/penstock/own?{query}"
        headers = {} if served.kind == "anonymous" else Signer().headers(served, method, path)
        status, text = answer(served, method, path, headers, b"new" if method == "PUT" else b"")
        assert (status, b"<Code>InvalidArgument</Code>" in text) == (400, True), text
    assert now(served) == (BODY, {"old": "1"})

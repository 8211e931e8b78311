"""How requests to `penstock serve` are signed: by one signature that covers what is checked, and by version 2 only if it is asked for."""

from __future__ import annotations

import base64
import datetime
import email.utils
import hmac
import itertools
import urllib.parse

import boto3
import pytest
import servers
from botocore.config import Config
from signed import Signer, answer

SECRET_BODY = b"the secret of somebody else"


@pytest.fixture(scope="module", params=["minio", "folder"])
def served(request, tmp_path_factory):
    """Yield a server that takes both versions of signatures, with the bucket `penstock` and an object `private/key`."""
    folder = tmp_path_factory.mktemp("served")
    if request.param == "minio":
        minio = request.getfixturevalue("minio")
        server = servers.Penstock(folder, "s3://", "--cache", f"{folder / 'cache'}:200MB", "--signature-v2", environment=minio.environment)
    else:
        server = servers.Penstock(folder, "", "--signature-v2")
    server.client().put_object(Bucket="penstock", Key="private/key", Body=SECRET_BODY)
    yield server
    server.stop()


def client_of(server, version):
    return boto3.client(
        "s3", endpoint_url=server.endpoint, aws_access_key_id=servers.KEY, aws_secret_access_key=servers.SECRET, region_name="us-east-1",
        config=Config(signature_version=version, retries={"max_attempts": 1, "mode": "standard"}),
    )  # fmt: skip


def version_4(server, method, path, covered, headers):
    """Sign a request in its header, covering only these headers."""
    return Signer().headers(server, method, path, covered, **headers)


def version_2(method, path, headers):
    """Sign a request in its header by version 2, with the dates in `headers`."""
    date = "" if "x-amz-date" in headers else headers.get("date", "")
    lines = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()) if name.startswith("x-amz-"))
    signature = base64.b64encode(hmac.digest(servers.SECRET.encode(), f"{method}\n\n\n{date}\n{lines}{path}".encode(), "sha1")).decode()
    return {**headers, "authorization": f"AWS {servers.KEY}:{signature}"}


def has(server, key):
    return server.client().list_objects_v2(Bucket="penstock", Prefix=key).get("KeyCount", 0) > 0


FORGED = [
    "SignedHeaders=x-amz-copy-source", "AWS4-HMAC-SHA256 Credential=a/b/c/s3/aws4_request, SignedHeaders=host;x-amz-copy-source, Signature=0",
    "AWS nobody:signature", "Bearer x", "",
]  # fmt: skip


@pytest.mark.parametrize("version", ["s3v4", "s3"])
def test_a_forged_header_beside_a_signed_address_is_refused(served, version):
    for number, forged in enumerate(FORGED):
        key = f"forged-{version}-{number}"
        url = urllib.parse.urlsplit(client_of(served, version).generate_presigned_url("put_object", {"Bucket": "penstock", "Key": key}))
        target = f"{url.path}?{url.query}"
        for more in ({"x-amz-copy-source": "penstock/private/key"}, {"x-amz-meta-a": "b"}, {}):
            status, text = answer(served, "PUT", target, {"authorization": forged, **more})
            assert status == 400 and b"several signatures" in text, (forged, more, text)
            # The other half: without the forged header, the address alone does not permit a copy.
            status, text = answer(served, "PUT", target, more)
            assert status == (200 if not more else 403), (more, text)
        assert served.client().get_object(Bucket="penstock", Key=key)["Body"].read() == b""


def test_several_signatures_are_refused_in_every_pair_of_forms(served):
    urls = {
        version: client_of(served, version).generate_presigned_url("get_object", {"Bucket": "penstock", "Key": "private/key"})
        for version in ("s3v4", "s3")
    }
    queries = {version: urllib.parse.urlsplit(url).query for version, url in urls.items()}
    date = {"date": email.utils.format_datetime(datetime.datetime.now(datetime.UTC), usegmt=True)}
    headers = {
        "s3v4": version_4(served, "GET", "/penstock/private/key", ["host", "x-amz-date"], {}),
        "s3": version_2("GET", "/penstock/private/key", date),
    }
    for version in ("s3v4", "s3"):
        assert answer(served, "GET", f"/penstock/private/key?{queries[version]}", {}) == (200, SECRET_BODY)
        assert answer(served, "GET", "/penstock/private/key", headers[version]) == (200, SECRET_BODY)
    for first, second in itertools.product(("s3v4", "s3"), repeat=2):
        status, text = answer(served, "GET", f"/penstock/private/key?{queries[first]}", headers[second])
        assert (status, b"InvalidArgument" in text) == (400, True), (first, second, text)
        twice = {**headers[first], "authorization": [headers[first]["authorization"], headers[second]["authorization"]]}
        assert answer(served, "GET", "/penstock/private/key", twice)[0] == 400
    assert answer(served, "GET", f"/penstock/private/key?{queries['s3v4']}&{queries['s3']}", {})[0] == 400
    # A name that is decoded counts as well.
    hidden = queries["s3"].replace("Signature", "Signat%75re")
    assert answer(served, "GET", f"/penstock/private/key?{queries['s3v4']}&{hidden}", {})[0] == 400
    assert answer(served, "GET", f"/penstock/private/key?{hidden}", headers["s3v4"])[0] == 400


def test_a_signature_covers_the_host_and_the_headers_of_s3(served):
    def status(covered, headers):
        signed = version_4(served, "PUT", "/penstock/covered", covered, headers)
        return answer(served, "PUT", "/penstock/covered", signed)

    copies = {"x-amz-copy-source": "penstock/private/key"}
    assert status(["host", "x-amz-date"], {})[0] == 200
    assert status(["host", "x-amz-copy-source", "x-amz-date"], copies)[0] == 200
    assert served.client().get_object(Bucket="penstock", Key="covered")["Body"].read() == SECRET_BODY
    for covered, headers, name in (
        (["x-amz-date"], {}, b"host"), (["x-amz-content-sha256", "x-amz-date"], {}, b"host"), (["host", "x-amz-date"], copies, b"x-amz-copy-source"),
        (["host", "x-amz-date"], {"x-amz-meta-a": "b"}, b"x-amz-meta-a"), (["host"], {}, b"x-amz-date"),
    ):  # fmt: skip
        code, text = status(covered, headers)
        assert code == 403 and b"does not cover the " + name + b" header" in text, text


def test_a_signature_of_version_2_ends_after_some_minutes(served):
    """A captured request is not valid for ever."""
    now = datetime.datetime.now(datetime.UTC)
    dates = {0: 200, -14: 200, 14: 200, -16: 403, 16: 403, -60 * 24 * 365: 403}
    for (minutes, expected), name in itertools.product(dates.items(), ("date", "x-amz-date")):
        date = email.utils.format_datetime(now + datetime.timedelta(minutes=minutes), usegmt=True)
        code, text = answer(served, "GET", "/penstock/private/key", version_2("GET", "/penstock/private/key", {name: date}))
        assert code == expected, (minutes, name, text)
        assert (text == SECRET_BODY) == (expected == 200) and (expected == 200 or b"RequestTimeTooSkewed" in text)
    # The date that the signature covers counts, not the one beside it.
    old, new = (email.utils.format_datetime(now + datetime.timedelta(minutes=minutes), usegmt=True) for minutes in (-60, 0))
    signed = version_2("GET", "/penstock/private/key", {"x-amz-date": old})
    assert answer(served, "GET", "/penstock/private/key", {**signed, "date": new})[0] == 403
    assert (
        answer(served, "GET", "/penstock/private/key", {**version_2("GET", "/penstock/private/key", {"x-amz-date": new}), "date": old})[0]
        == 200
    )


def test_signatures_of_version_2_must_be_asked_for(tmp_path):
    server = servers.Penstock(tmp_path)
    try:
        server.client().put_object(Bucket="penstock", Key="a", Body=b"1")
        date = {"date": email.utils.format_datetime(datetime.datetime.now(datetime.UTC), usegmt=True)}
        url = urllib.parse.urlsplit(client_of(server, "s3").generate_presigned_url("get_object", {"Bucket": "penstock", "Key": "a"}))
        for target, headers in ((f"{url.path}?{url.query}", {}), ("/penstock/a", version_2("GET", "/penstock/a", date))):
            status, text = answer(server, "GET", target, headers)
            assert status == 400 and b"--signature-v2" in text
    finally:
        server.stop()


def test_a_signature_of_version_2_does_not_allow_lists(served):
    """It covers neither the query `batch` nor the body: somebody who sees a request could read or delete other objects with it."""
    date = email.utils.formatdate(usegmt=True)
    batch = b'{"ranges": [{"key": "private/key", "begin": 0, "end": 5}]}'
    deletes = b"<Delete><Object><Key>private/key</Key></Object></Delete>"
    for signed, sent, body in (
        ("/penstock/own?uploads", "/penstock/own?uploads", b""),
        ("/penstock/own?uploads", "/penstock/own?uploads&batch", batch),
        ("/penstock?delete", "/penstock?delete", deletes),
    ):
        status, text = answer(served, "POST", sent, version_2("POST", signed, {"date": date}), body)
        assert status == (403 if body else 200) and SECRET_BODY[:5] not in text, (sent, text)
    assert has(served, "private/key")


def test_a_body_in_chunks_needs_version_4(served):
    """Its framing would be stored as if it were the object."""
    for name, value in (("content-encoding", "aws-chunked"), ("x-amz-content-sha256", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD")):
        headers = version_2("PUT", "/penstock/framed", {"date": email.utils.formatdate(usegmt=True), name: value})
        status, text = answer(served, "PUT", "/penstock/framed", headers, b"3\r\nabc\r\n0\r\n\r\n")
        assert status == 400 and b"version 4" in text, name
    assert not has(served, "framed")

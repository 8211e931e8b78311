"""Requests that S3 takes although they are odd: regions with capitals, and signed ranges that S3 ignores."""

from __future__ import annotations

import base64
import itertools
import random
import urllib.request
import zlib

import boto3
import pytest
import servers
from botocore.config import Config
from signed import Signer, answer, signature_of

REGIONS = ["RegionOne", "US", "EU-West", "us-east-1"]
BODY = random.Random(1).randbytes(300_000)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    server = servers.Penstock(tmp_path_factory.mktemp("served"))
    server.client().put_object(Bucket="penstock", Key="a b/ü+&", Body=b"abc")
    yield server
    server.stop()


def client_of(server, region, secret=servers.SECRET):
    return boto3.client(
        "s3", endpoint_url=server.endpoint, aws_access_key_id=servers.KEY, aws_secret_access_key=secret, region_name=region,
        config=Config(retries={"max_attempts": 1, "mode": "standard"}, signature_version="s3v4"),
    )  # fmt: skip


@pytest.mark.parametrize("region", REGIONS)
def test_a_region_is_only_a_part_of_the_signature(served, region):
    client = client_of(served, region)
    client.put_object(Bucket="penstock", Key="own", Body=BODY, Metadata={"of": "this test"})
    assert client.get_object(Bucket="penstock", Key="own", Range="bytes=5-9")["Body"].read() == BODY[5:10]
    assert client.get_object(Bucket="penstock", Key="a b/ü+&")["Body"].read() == b"abc"
    assert client.list_objects_v2(Bucket="penstock", Prefix="a b/ü+&", Delimiter="/")["KeyCount"] == 1
    client.copy_object(Bucket="penstock", Key="copy of+", CopySource={"Bucket": "penstock", "Key": "a b/ü+&"})
    assert "Errors" not in client.delete_objects(Bucket="penstock", Delete={"Objects": [{"Key": "copy of+"}]})
    url = client.generate_presigned_url("get_object", {"Bucket": "penstock", "Key": "a b/ü+&", "ResponseContentType": "a/b +c"})
    with urllib.request.urlopen(url) as response:
        assert (response.read(), response.headers["content-type"]) == (b"abc", "a/b +c")


def test_a_wrong_signature_is_refused_in_every_region(served):
    for region in REGIONS:
        with pytest.raises(boto3.exceptions.botocore.exceptions.ClientError, match="SignatureDoesNotMatch"):
            client_of(served, region, "another secret").list_objects_v2(Bucket="penstock")
        url = client_of(served, region).generate_presigned_url("get_object", {"Bucket": "penstock", "Key": "a b/ü+&"})
        for wrong in (url.replace("a%20b", "a%20c"), url[:-1] + ("0" if url[-1] != "0" else "1"), url.replace(region, "Other")):
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(wrong)
        signer = Signer(region)
        headers = signer.headers(served, "GET", "/penstock/own")
        for name, value in [
            ("authorization", headers["authorization"].replace(signer.region, "Other")),
            ("x-amz-date", "20200101T000000Z"),
        ]:
            assert answer(served, "GET", "/penstock/own", {**headers, name: value})[0] == 403, (region, name)


@pytest.mark.parametrize("odd", ["bytes=5-2", "bytes=x", "bytes=0-1,3-4", "items=0-1", "bytes=-", "bytes=+1-2", "bytes=--1", "0-1"])
def test_an_odd_range_is_ignored_whether_it_is_signed_or_not(served, odd):
    served.client().put_object(Bucket="penstock", Key="ranged", Body=BODY[:100])
    for region, method, is_signed in itertools.product(("us-east-1", "US"), ("GET", "HEAD"), (True, False)):
        covered = ["host", *["range"][:is_signed], "x-amz-content-sha256", "x-amz-date"]
        headers = Signer(region).headers(served, method, "/penstock/ranged", covered, range=odd)
        assert answer(served, method, "/penstock/ranged", headers) == (200, BODY[:100] if method == "GET" else b""), (region, is_signed)
        if is_signed:
            changed = {**headers, "range": "bytes=7-3"}
            assert answer(served, method, "/penstock/ranged", changed)[0] in (400, 403), "the range is not what was signed"
    url = served.client().generate_presigned_url("get_object", {"Bucket": "penstock", "Key": "ranged", "Range": odd})
    with urllib.request.urlopen(urllib.request.Request(url, headers={"range": odd})) as response:
        assert (response.status, response.read()) == (200, BODY[:100])


@pytest.mark.parametrize("region", ["us-east-1", "US"])
@pytest.mark.parametrize("is_signed", [True, False])
def test_dates_of_conditions_are_read_as_http_writes_them(served, region, is_signed):
    """All three forms of dates count, and what is none is ignored: RFC 9110, sections 5.6.7, 13.1.3 and 13.1.4."""
    served.client().put_object(Bucket="penstock", Key="dated", Body=b"abc")
    old = ["Sun, 06 Nov 1994 08:49:37 GMT", "Sunday, 06-Nov-94 08:49:37 GMT", "Sun Nov  6 08:49:37 1994"]
    cases = [("if-unmodified-since", date, 412) for date in old] + [("if-modified-since", date, 200) for date in old]
    cases += [(name, odd, 200) for name in ("if-modified-since", "if-unmodified-since") for odd in ("yesterday", "0", "1994-11-06")]
    for name, date, status in cases:
        covered = ["host", *[name][:is_signed], "x-amz-content-sha256", "x-amz-date"]
        # The signature has single spaces.
        headers = Signer(region).headers(served, "GET", "/penstock/dated", covered, **{name: " ".join(date.split())})
        assert answer(served, "GET", "/penstock/dated", {**headers, name: date})[0] == status, (name, date)


@pytest.mark.parametrize("is_signed", [True, False])
def test_several_lines_of_a_condition_are_one_list(served, is_signed):
    served.client().put_object(Bucket="penstock", Key="listed", Body=b"abc")
    etag = served.client().head_object(Bucket="penstock", Key="listed")["ETag"]
    for lines, status in ([['"a"', etag], 304], [[etag, 'W/"b"'], 304], [['"a"', '"b"'], 200]):
        covered = ["host", *["if-none-match"][:is_signed], "x-amz-content-sha256", "x-amz-date"]
        headers = Signer().headers(served, "GET", "/penstock/listed", covered, if_none_match=",".join(lines))
        assert answer(served, "GET", "/penstock/listed", {**headers, "if-none-match": lines})[0] == status, lines


def test_metadata_may_have_any_letters(served):
    for region in ("us-east-1", "RegionOne"):
        headers = Signer(region).headers(served, "PUT", "/penstock/letters", x_amz_meta_a="ü")
        headers["x-amz-meta-a"] = "ü".encode()
        assert answer(served, "PUT", "/penstock/letters", headers)[0] == 200, region
        assert served.client().head_object(Bucket="penstock", Key="letters")["Metadata"]


KINDS = ["STREAMING-AWS4-HMAC-SHA256-PAYLOAD", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER", "STREAMING-UNSIGNED-PAYLOAD-TRAILER"]


def in_chunks(served, region, kind, lengths):
    """Return the headers and the parts of a body in chunks."""
    signer, cuts = Signer(region), list(itertools.accumulate(lengths, initial=0))
    chunks = [BODY[begin:end] for begin, end in itertools.pairwise(cuts)]
    trailer = {"x-amz-trailer": "x-amz-checksum-crc32"} if kind.endswith("TRAILER") else {}
    headers = signer.headers(
        served, "PUT", "/penstock/chunks", **{"x-amz-content-sha256": kind, "x-amz-decoded-content-length": str(cuts[-1]), **trailer}
    )
    line = f"x-amz-checksum-crc32:{base64.b64encode(zlib.crc32(BODY[: cuts[-1]]).to_bytes(4, 'big')).decode()}" if trailer else ""
    if "UNSIGNED" in kind:
        return headers, [*(f"{len(chunk):X}\r\n".encode() + chunk + b"\r\n" for chunk in chunks), f"0\r\n{line}\r\n\r\n".encode()]
    return headers, signer.in_chunks(signature_of(headers), chunks, line)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("region", ["RegionOne", "us-east-1"])
def test_bodies_in_chunks_are_whole_or_refused(served, region, kind):
    """The last chunk is required, and so is each signature. Nothing is written of a body that is refused."""
    client = served.client()
    for lengths in ([], [1], [70_000, 3, 131_072]):
        headers, sent = in_chunks(served, region, kind, lengths)
        status, text = answer(served, "PUT", "/penstock/chunks", headers, b"".join(sent))
        assert (status, text) == (200, b""), lengths
        assert client.get_object(Bucket="penstock", Key="chunks")["Body"].read() == BODY[: sum(lengths)]
    client.delete_object(Bucket="penstock", Key="chunks")
    tail = 2 if kind.endswith("PAYLOAD-TRAILER") and "UNSIGNED" not in kind else 1
    wrong = {"no last chunk": sent[:-tail], "nothing": [], "half a line": [*sent[:-tail], sent[-tail][:1]], "half a chunk": [sent[0][:500]]}
    wrong["another byte"] = [sent[0][:200] + bytes([sent[0][200] ^ 1]) + sent[0][201:], *sent[1:]]
    wrong["a longer chunk"] = [sent[0][:-2] + b"x\r\n", *sent[1:]]
    wrong["another form of the length"] = [b"+" + sent[0], *sent[1:]]
    if "UNSIGNED" not in kind:
        wrong["chunks in another order"] = [sent[1], sent[0], *sent[2:]]
        wrong["a chunk twice"] = [sent[0], *sent]
        wrong["the chunks of another region"] = in_chunks(served, "Other", kind, lengths)[1]
    if kind.endswith("TRAILER"):
        wrong["another sum"] = [*sent[:-1], sent[-1].replace(b"crc32:", b"crc32:A")]
    for name, parts in wrong.items():
        status, text = answer(served, "PUT", "/penstock/chunks", headers, b"".join(parts))
        assert status in (400, 403) and b"<Message>" in text, (name, status, text)
    assert client.list_objects_v2(Bucket="penstock", Prefix="chunks")["KeyCount"] == 0

"""Bodies and names that a server must refuse with a reason, or take without much memory."""

from __future__ import annotations

import contextlib
import http.client
import pathlib
import re
import xml.dom.minidom

import pytest
import servers
from signed import Signer, answer

MIB = 1 << 20


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    server = servers.Penstock(tmp_path_factory.mktemp("served"), "", "--memory-bytes", str(64 * MIB))
    yield server
    server.stop()


def code(text):
    return re.search(rb"<Code>(.*?)</Code>", text)[1].decode()


LISTS = [("POST", "/penstock?delete="), ("POST", "/penstock/a?uploadId=x"), ("PUT", "/newbucket")]


@pytest.mark.parametrize(("method", "target"), LISTS)
def test_a_list_that_is_too_long_is_the_fault_of_the_client(served, method, target):
    body = b"<Delete>" + b"<Object><Key>a</Key></Object>" * 400_000 + b"</Delete>"
    headers = Signer().headers(served, method, target)
    status, text = answer(served, method, target, headers, body)
    assert (status, code(text)) == (400, "MaxMessageLengthExceeded") and b"8 MiB" in text
    # Its length is not known before it comes.
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=300)
    connection.request(method, target, iter([body[: 5 * MIB], body[5 * MIB :]]), headers, encode_chunked=True)
    response = connection.getresponse()
    assert response.status in (400, 411), "S3 wants a length before all"
    connection.close()


@pytest.mark.parametrize(("method", "target"), LISTS)
def test_a_list_that_is_not_the_signed_one_is_the_fault_of_the_client(served, method, target):
    headers = Signer().headers(served, method, target, x_amz_content_sha256="0" * 64)
    status, text = answer(served, method, target, headers, b"<Delete><Object><Key>a</Key></Object></Delete>")
    assert status == 400 and b"<Message>" in text


@pytest.mark.parametrize("target", ["/penstock/a%00b", "/penstock/%00", "/penstock?list-type=2&prefix=a%00", "/penstock?prefix=%00a"])
@pytest.mark.parametrize("method", ["GET", "PUT", "HEAD", "DELETE"])
def test_a_name_with_a_null_is_refused(served, method, target):
    """XML has no way to write it, so no list could show such an object."""
    status, text = answer(served, method, target, Signer().headers(served, method, target))
    assert status == 400 and (method == "HEAD" or code(text) == "InvalidArgument")


def test_a_null_in_a_list_of_objects_deletes_nothing(served):
    served.client().put_object(Bucket="penstock", Key="kept", Body=b"")
    for null in (b"\0", b"&#0;", b"&#x0;"):
        body = b"<Delete><Object><Key>kept</Key></Object><Object><Key>a" + null + b"</Key></Object></Delete>"
        status, text = answer(served, "POST", "/penstock?delete=", Signer().headers(served, "POST", "/penstock?delete="), body)
        assert (status, code(text)) == (400, "MalformedXML")
    assert served.has("penstock", "kept")


def test_other_control_characters_are_written_as_s3_does(served):
    """Clients ask for encoded names. For others, the XML has references: parsers of XML 1.1, and lenient ones, read them."""
    client, names = served.client(), [f"odd/{chr(code)}" for code in range(1, 32)]
    for name in names:
        client.put_object(Bucket="penstock", Key=name, Body=b"")
    assert [found["Key"] for found in client.list_objects_v2(Bucket="penstock", Prefix="odd/")["Contents"]] == names
    target = "/penstock?list-type=2&prefix=odd%2F"
    status, text = answer(served, "GET", target, Signer().headers(served, "GET", target))
    assert status == 200 and not re.search(rb"[\0-\x08\x0b-\x1f]", text)
    found = re.findall(r"<Key>odd/(.*?)</Key>", text.decode(), re.S)
    assert [chr(int(name[3:-1], 16)) if name.startswith("&#x") else name for name in found] == [name[4:] for name in names]
    read = xml.dom.minidom.parseString(re.sub(rb"&#x(?!d;)\w+;", b"?", text))
    assert [key.firstChild.data[4:] for key in read.getElementsByTagName("Key")].count("\r") == 1
    status, text = answer(served, "GET", "/penstock/none%01", Signer().headers(served, "GET", "/penstock/none%01"))
    assert status == 404 and b"none&#x1;" in text
    served.client().delete_objects(Bucket="penstock", Delete={"Objects": [{"Key": name} for name in names], "Quiet": True})
    # The content of an object stays as it is, also if it is said to be XML.
    client.put_object(Bucket="penstock", Key="own", Body=b"<a>\x01</a>", ContentType="application/xml")
    assert client.get_object(Bucket="penstock", Key="own")["Body"].read() == b"<a>\x01</a>"


def test_one_long_chunk_is_not_held_in_memory(served):
    """Some clients send a body as one chunk. It is as long as the body, and cannot be held until it is whole."""
    size = 300 * MIB
    kind = {"x-amz-content-sha256": "STREAMING-UNSIGNED-PAYLOAD-TRAILER", "x-amz-trailer": "x-amz-checksum-crc32"}
    headers = Signer().headers(served, "PUT", "/penstock/long", **kind, **{"x-amz-decoded-content-length": str(size)})
    part = bytes(MIB)
    tail = b"\r\n0\r\nx-amz-checksum-crc32:/h2kdQ==\r\n\r\n"
    begin = f"{size:x}\r\n".encode()
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=300)
    connection.putrequest("PUT", "/penstock/long", skip_host=True, skip_accept_encoding=True)
    for name, value in {**headers, "content-length": str(size + len(begin) + len(tail))}.items():
        connection.putheader(name, value)
    connection.endheaders(begin)
    for _ in range(size // MIB):
        connection.send(part)
    connection.send(tail)
    response = connection.getresponse()
    text = response.read()
    # The sum is wrong on purpose, so nothing is written. It is known only after all bytes.
    assert (response.status, code(text)) == (400, "BadDigest"), text
    peak = int(re.search(r"VmHWM:\s+(\d+) kB", pathlib.Path(f"/proc/{served.process.pid}/status").read_text())[1]) * 1024
    assert peak < 200 * MIB, f"{peak / MIB:.0f} MiB"
    assert not served.has("penstock", "long")


def test_a_signed_chunk_has_a_limit(served):
    """Its signature is known only when it is whole, so it must be held."""
    signer = Signer()
    headers = signer.headers(
        served,
        "PUT",
        "/penstock/long",
        x_amz_content_sha256="STREAMING-AWS4-HMAC-SHA256-PAYLOAD",
        x_amz_decoded_content_length=str(17 * MIB),
    )
    status, text = answer(
        served, "PUT", "/penstock/long", headers, f"{17 * MIB:x};chunk-signature={'0' * 64}\r\n".encode() + bytes(17 * MIB)
    )
    assert status == 400 and b"16 MiB" in text


def test_held_chunks_count_as_memory(served):
    """Chunks that are held until they are whole: with 64 MiB for bodies, 24 of 16 MiB at once would need 384."""
    connections = []
    for number in range(24):
        signer = Signer()
        target = f"/penstock/held{number}"
        headers = signer.headers(
            served, "PUT", target, x_amz_content_sha256="STREAMING-AWS4-HMAC-SHA256-PAYLOAD", x_amz_decoded_content_length=str(16 * MIB)
        )
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=300)
        connection.putrequest("PUT", target, skip_host=True, skip_accept_encoding=True)
        for name, value in {**headers, "content-length": str(16 * MIB + 200)}.items():
            connection.putheader(name, value)
        connection.endheaders(f"{16 * MIB:x};chunk-signature={'0' * 64}\r\n".encode())
        connection.sock.settimeout(0.1)
        with contextlib.suppress(TimeoutError):
            for _ in range(15):
                connection.send(bytes(MIB))
        connections.append(connection)
    peak = int(re.search(r"VmHWM:\s+(\d+) kB", pathlib.Path(f"/proc/{served.process.pid}/status").read_text())[1]) * 1024
    for connection in connections:
        connection.close()
    assert peak < 250 * MIB, f"{peak / MIB:.0f} MiB"

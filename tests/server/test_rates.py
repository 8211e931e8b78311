"""Rates of keys: requests beyond them are refused with 503, and bodies wait without being cut."""

import concurrent.futures
import json
import re
import signal
import subprocess
import sys
import time
import urllib.request

import boto3
import botocore.config
import botocore.exceptions
import pytest
import servers
from waiting import until

KB = 1000
SECRET = "a-long-secret"


class Node:
    """A server before a folder, with the keys `one` and `two`, which have these rates."""

    def __init__(self, folder, one, two, *options):
        folder.mkdir()
        self.port, self.log = servers.free_port(), folder / "access.log"
        self.folder = folder
        self.write({"one": one, "two": two})
        options = ("--status", f"127.0.0.1:{self.port}", "--access-log", str(self.log), "--lame-duck", "0", *options)
        self.server = servers.Penstock(folder, "", *options)

    def write(self, rates):
        own = {"access_key": servers.KEY, "secret_key": servers.SECRET}
        keys = [{"access_key": name, "secret_key": SECRET, **rates} for name, rates in rates.items()]
        servers.write_secret(self.folder / "keys.json", json.dumps({"keys": [own, *keys]}))

    def client(self, key):
        config = botocore.config.Config(
            signature_version="s3v4", retries={"total_max_attempts": 1}, read_timeout=300, max_pool_connections=20
        )
        return boto3.client(
            "s3", endpoint_url=self.server.endpoint, aws_access_key_id=key, aws_secret_access_key=SECRET, region_name="us-east-1",
            config=config
        )  # fmt: skip

    def count(self, name):
        counts = urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=300).read().decode()
        return int(re.search(rf"^penstock_{name} (\d+)$", counts, re.M)[1])


@pytest.fixture
def start(tmp_path):
    started = []

    def node(one, two=None, *options):
        started.append(Node(tmp_path / f"node-{len(started)}", one, two or {}, *options))
        return started[-1]

    yield node
    for one in started:
        one.server.stop()


def status(call, **named):
    """Return the status of a request, and the error."""
    try:
        return call(**named)["ResponseMetadata"]["HTTPStatusCode"], None
    except botocore.exceptions.ClientError as error:
        return error.response["ResponseMetadata"]["HTTPStatusCode"], error.response


def test_requests_beyond_the_rate_of_a_key_are_refused_and_others_are_not(start):
    node = start({"requests_per_second": 1})
    one, two = node.client("one"), node.client("two")

    def burst(client):
        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            return list(threads.map(lambda _: status(client.list_objects_v2, Bucket="penstock"), range(40)))

    answers = []

    def is_refused():
        answers.extend(burst(one))
        return any(code == 503 for code, _ in answers)

    until(is_refused, "requests are refused")
    assert 200 in [code for code, _ in answers]
    for code, answer in answers:
        assert code in (200, 503)
        if code == 503:
            assert answer["Error"]["Code"] == "SlowDown" and int(answer["ResponseMetadata"]["HTTPHeaders"]["retry-after"]) >= 1
    assert {code for code, _ in burst(two)} == {200}
    until(lambda: status(one.list_objects_v2, Bucket="penstock")[0] == 200, "one request is free again")
    assert node.count("rate_refusals_total") >= sum(code == 503 for code, _ in answers)
    lines = [json.loads(line) for line in node.log.read_text().splitlines()]
    denied = [line for line in lines if line["status"] == 503]
    assert denied and {(line["key"], line["error"]) for line in denied} == {("one", "SlowDown")}


def test_a_wrong_secret_uses_nothing_of_the_rate_of_a_key(start):
    node = start({"requests_per_second": 1})
    wrong = node.server.client(key="one", secret="another-secret")
    for _ in range(20):
        assert status(wrong.list_objects_v2, Bucket="penstock")[0] == 403
    assert status(node.client("one").list_objects_v2, Bucket="penstock")[0] == 200


def test_bodies_wait_and_are_not_cut(start):
    """At this rate, each body takes longer than a client may be idle, and less arrives in that time than a client must send."""
    rate = 50 * KB
    node = start({"bytes_per_second": rate}, {}, "--idle-seconds", "1")
    body = bytes(range(250)) * 800
    client = node.client("one")
    began = time.monotonic()
    client.put_object(Bucket="penstock", Key="a", Body=body)
    waits = node.count("rate_waits_total")
    assert waits > 0
    assert node.server.get("penstock", "a") == body
    assert node.count("rate_waits_total") == waits, "the body of another key does not wait"
    assert client.get_object(Bucket="penstock", Key="a")["Body"].read() == body
    got = lambda begin: client.get_object(Bucket="penstock", Key="a", Range=f"bytes={begin}-{begin + 29_999}")["Body"].read()  # noqa: E731
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        assert list(threads.map(got, range(0, 90_000, 30_000))) == [body[begin : begin + 30_000] for begin in range(0, 90_000, 30_000)]
    # A burst, the rate, and the last frames, which are paid for afterwards. A slow machine only allows more.
    allowed_bytes = rate * (1 + time.monotonic() - began) + 90_000
    assert 2 * len(body) + 90_000 <= allowed_bytes
    assert node.count("rate_waits_total") > waits
    lines = [json.loads(line) for line in node.log.read_text().splitlines()]
    assert all(line["is_whole"] and line["status"] in (200, 206) for line in lines if line["key"] == "one")


def test_a_long_upload_is_paced_on_its_way_to_the_cold_store(tmp_path, minio):
    """It is sent on while it arrives, for longer than the cold store may take to answer."""
    folder = tmp_path / "node"
    folder.mkdir()
    keys = [{"access_key": servers.KEY, "secret_key": servers.SECRET, "bytes_per_second": 6_000_000}]
    servers.write_secret(folder / "keys.json", json.dumps({"keys": keys}))

    class Impatient(servers.Penstock):
        def command(self):
            command, environment = super().command()
            at = command.index("serve")
            return [*command[:at], "--option", "timeout_seconds=1", *command[at:]], environment

    server = Impatient(folder, "s3://", "--idle-seconds", "1", environment=minio.environment)
    try:
        body = bytes(20_000_000)
        client = server.client()
        answer = client.put_object(Bucket="penstock", Key="paced", Body=body)
        assert answer["ResponseMetadata"]["RetryAttempts"] == 0
        assert minio.client().head_object(Bucket="penstock", Key="paced")["ContentLength"] == len(body)
    finally:
        server.stop()


def test_new_rates_count_after_a_reload(start):
    node = start({})
    client = node.client("one")
    assert all(status(client.list_objects_v2, Bucket="penstock")[0] == 200 for _ in range(5))
    node.write({"one": {"requests_per_second": 1}, "two": {}})
    node.server.process.send_signal(signal.SIGHUP)
    until(lambda: status(client.list_objects_v2, Bucket="penstock")[0] == 503, "the new rate counts")
    node.write({"one": {}, "two": {}})
    node.server.process.send_signal(signal.SIGHUP)
    until(lambda: all(status(client.list_objects_v2, Bucket="penstock")[0] == 200 for _ in range(20)), "there is no rate any more")


@pytest.mark.parametrize("name", ["requests_per_second", "bytes_per_second"])
@pytest.mark.parametrize("value", ["0", "-1", "1.5", '"5"', "true", "1e30", "[1]"])
def test_wrong_rates_are_refused_with_the_name_of_the_key(tmp_path, name, value):
    (tmp_path / "cold").mkdir()
    servers.write_secret(tmp_path / "keys.json", f'{{"keys": [{{"access_key": "me", "secret_key": "{SECRET}", "{name}": {value}}}]}}')
    command = [
        sys.executable,
        "-m",
        "penstock",
        "serve",
        "--cold",
        str(tmp_path / "cold"),
        "--keys",
        str(tmp_path / "keys.json"),
        "--check",
    ]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert found.returncode == 1 and found.stdout == ""
    assert re.search(rf"`{name}` of key `me` is .*, expected a whole number of 1 or more", " ".join(found.stderr.split()))

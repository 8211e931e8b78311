"""`penstock cache warm s3://bucket/prefix`: reads of all objects through a node, so that it has them."""

import http.server
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import urllib.parse
import uuid

import penstock as ps
import pytest
import servers
from waiting import until

AWKWARD = ["cats/a b", "cats/a+b", "cats/50%", "cats/what?", "cats/größe/ü", "cats/&=", "cats/empty", "c"]


@pytest.fixture
def served(tmp_path, minio):
    """Yield a node with a cache before a bucket of MinIO, behind a proxy that counts what the node asks MinIO for."""
    folder = tmp_path / "node"
    folder.mkdir()
    proxy = servers.Proxy(minio.port)
    environment = {**minio.environment, "AWS_ENDPOINT_URL": proxy.endpoint}
    node = servers.Penstock(folder, "s3://", "--cache", f"{folder / 'cache'}:100MB", "--revalidate", "never", environment=environment)
    node.proxy, node.cold, node.name = proxy, minio.client(), f"b{uuid.uuid4().hex}"
    node.cold.create_bucket(Bucket=node.name)
    yield node
    node.stop()
    proxy.stop()


def warm(node, prefix, *more, key=servers.KEY, options=(), **environment):
    command = [sys.executable, "-m", "penstock", "-o", f"endpoint_url={node.endpoint}", *options, "cache", "warm", prefix, *more]
    keys = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": servers.SECRET, "AWS_REGION": "us-east-1", "PENSTOCK_CACHE": ""}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | keys | environment)


def fill(node):
    """Put objects into the cold store, and return those that begin with `c`."""
    choose = random.Random(3)
    bodies = {key: choose.randbytes(choose.choice([1, 5000, 300_000])) for key in AWKWARD} | {"cats/empty": b""}
    bodies |= {f"cats/many/{n:04d}": b"%d" % n for n in range(1100)} | {"cats/large": choose.randbytes(9_000_000)}
    for key, body in [*bodies.items(), ("dogs/a", b"not this one"), ("b", b"nor this one")]:
        node.cold.put_object(Bucket=node.name, Key=key, Body=body)
    return bodies


@pytest.mark.long
def test_each_object_of_a_prefix_is_read_once_and_then_served_warm(served):
    bodies = fill(served)
    served.proxy.faults()
    done = warm(served, f"s3://{served.name}/c", "--json", "--workers", "8")
    size = sum(map(len, bodies.values()))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "uri": f"s3://{served.name}/c", "objects": len(bodies), "bytes": size, "failed": 0, "failures": []
    }  # fmt: skip
    # Listings have bodies, too: less than half a KB for each key.
    assert size <= served.proxy.counts()["body_bytes"] < size + 500 * len(bodies)
    served.proxy.faults()
    assert all(served.get(served.name, key) == body for key, body in list(bodies.items())[::50])
    assert served.proxy.counts()["body_bytes"] == 0
    done = warm(served, f"s3://{served.name}/dogs/")
    assert (done.returncode, done.stdout) == (0, "read 1 object, 12 B; 0 failed\n")
    assert json.loads(warm(served, f"s3://{served.name}", "--json").stdout)["objects"] == len(bodies) + 2


def test_nothing_below_a_prefix_is_an_error(served):
    done = warm(served, f"s3://{served.name}/nothing")
    assert done.returncode == 1 and done.stdout == ""
    assert f"cannot warm `s3://{served.name}/nothing`: no key begins with this" in done.stderr and "hint: " in done.stderr
    done = warm(served, "s3://no-such-bucket/a")
    assert done.returncode == 1 and "NoSuchBucket" in done.stderr and "hint: " in done.stderr
    done = warm(served, f"s3://{served.name}/a", key="nobody")
    assert done.returncode == 1 and "error[" in done.stderr
    for wrong in ("s3://", "s3:///a"):
        assert warm(served, wrong).returncode in (1, 2)
    assert warm(served, f"s3://{served.name}/a", "--workers", "0").returncode == 2


class Store(http.server.BaseHTTPRequestHandler):
    """A store with the objects a/0 to a/8 in two pages. `faults` of its server says how it fails: by key, a status, `breaks` or `hangs`."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        key, code, body = url.path.removeprefix("/bucket/"), 200, b"x" * 1000
        if "list-type" in query:
            body = self.page(query)
        elif not re.fullmatch(r"a/[0-8]", key):
            code, body = 404, b"<Error><Code>NoSuchKey</Code><Message>no</Message></Error>"
        else:
            fault = self.server.faults.get(key, 200)
            self.server.reads.append(key)
            if fault == "hangs":
                self.server.ended.wait()
                return
            if isinstance(fault, int) and fault != 200:
                code, body = fault, b"<Error><Code>AccessDenied</Code><Message>not this one</Message></Error>"
            elif fault == "breaks" and self.server.reads.count(key) < 2:
                self.close_connection = True
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:300] if self.close_connection else body)

    do_HEAD = do_GET

    def page(self, query):
        first = "continuation-token" not in query
        keys = [f"a/{n}" for n in (range(5) if first else range(5, 9)) if f"a/{n}".startswith(query.get("prefix", ""))]
        contents = "".join(f"<Contents><Key>{key}</Key><Size>1000</Size></Contents>" for key in keys)
        is_truncated = first or self.server.repeats
        more = "<IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken>" if is_truncated else ""
        return f"<ListBucketResult>{contents}{more}</ListBucketResult>".encode()

    def log_message(self, *_):
        """Print nothing."""


@pytest.fixture
def store():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", servers.free_port()), Store)
    server.daemon_threads = True
    server.endpoint = f"http://127.0.0.1:{server.server_port}"
    server.faults, server.reads, server.ended, server.repeats = {}, [], threading.Event(), False
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.ended.set()
    server.shutdown()
    server.server_close()


def test_failures_end_with_an_error_and_the_first_are_named(store):
    store.faults = {f"a/{n}": 403 for n in range(2, 9)}
    found = warm(store, "s3://bucket/a/")
    assert (found.returncode, found.stdout) == (1, "read 2 objects, 2.0 KiB; 7 failed\n")
    named = re.findall(r"cannot read `a/(\d)`: (.+)", found.stderr)
    assert len({key for key, _ in named}) == 5 and {why for _, why in named} == {"AccessDenied: not this one"}
    assert "and 2 more" in found.stderr
    found = json.loads(warm(store, "s3://bucket/a/", "--json").stdout)
    assert (found["objects"], found["bytes"], found["failed"], len(found["failures"])) == (2, 2000, 7, 5)


def test_a_body_that_breaks_off_is_read_again_and_counted_once(store):
    store.faults = {"a/3": "breaks"}
    found = warm(store, "s3://bucket/a/", "--json")
    assert found.returncode == 0 and json.loads(found.stdout)["bytes"] == 9000
    assert sorted(store.reads) == sorted([f"a/{n}" for n in range(9)] + ["a/3"])


def test_a_store_that_repeats_a_page_is_not_listed_for_ever(store):
    store.repeats = True
    found = warm(store, "s3://bucket/a/")
    assert found.returncode == 1 and "keeps returning the same page" in found.stderr


def test_a_warm_run_that_hangs_can_be_stopped(store):
    store.faults = {f"a/{n}": "hangs" for n in range(9)}
    command = [sys.executable, "-m", "penstock", "-o", f"endpoint_url={store.endpoint}", "cache", "warm", "s3://bucket/a/"]
    keys = {"AWS_ACCESS_KEY_ID": servers.KEY, "AWS_SECRET_ACCESS_KEY": servers.SECRET, "AWS_REGION": "us-east-1", "PENSTOCK_CACHE": ""}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | keys) as process:
        until(lambda: store.reads, "an object is read")
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 130


def test_a_dataset_is_warmed_as_before(served, tmp_path):
    options = {"endpoint_url": served.endpoint, "access_key_id": servers.KEY, "secret_access_key": servers.SECRET}
    uri = f"s3://{served.name}/pets"
    ds = ps.create(uri, {"n": "int64"}, storage_options=options)
    ds.append({"n": range(50_000)})
    found = warm(served, uri)
    assert found.returncode == 2 and "is a dataset: give --cache" in " ".join(re.sub("[│╭╮╰╯─]", " ", found.stderr).split())
    cache = tmp_path / "cache"
    for given, environment in ((("--cache", f"{cache}:50MB"), {}), ((), {"PENSTOCK_CACHE": f"{cache}:50MB"})):
        found = warm(served, uri, "--json", *given, **environment)
        assert found.returncode == 0, found.stderr
        report = json.loads(found.stdout)
        assert report["data_files"] >= 1 and report["snapshot"] == ds.snapshot and report["cached_bytes"] >= report["data_bytes"] > 0
    # Its data files are objects, too.
    assert json.loads(warm(served, f"{uri}/d/", "--json").stdout)["objects"] == report["data_files"]
    # What only a dataset has is not ignored.
    for given in (("--tag", "v1"), ("--branch", "exp"), ("--cache", f"{cache}:50MB")):
        found = warm(served, f"s3://{served.name}/none", *given, **({} if "--cache" in given else {"PENSTOCK_CACHE": f"{cache}:50MB"}))
        assert found.returncode == 1 and "dataset-not-found" in found.stderr

"""`penstock load` against good servers and bad ones: what it counts, what it reports, and that it leaves nothing behind."""

import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import servers

LOAD = [sys.executable, "-m", "penstock", "load", "s3://penstock/load"]
COMMON = ("--objects", "4", "--size", "10KB", "--workers", "5")


@pytest.mark.long
def test_load_counts_requests_and_finds_the_knee(tmp_path):
    server = servers.Penstock(tmp_path)
    try:

        def run(*more):
            command = [*LOAD, "--json", *COMMON, *more]
            return json.loads(
                subprocess.run(command, capture_output=True, check=True, timeout=300, env=os.environ | server.environment).stdout
            )

        def kept():
            return [row["Size"] for row in server.client().list_objects_v2(Bucket="penstock")["Contents"]]

        rows = {row["operation"]: row for row in run("--seconds", "1", "--puts", "0.5", "--verify", "--keep")}
        assert set(rows) == {"get", "put"}
        for row in rows.values():
            assert row["requests"] > 0 and row["errors"] == 0 and row["bytes"] == row["requests"] * 10_000
        assert kept() == [10_000] * 4
        tuned = run("--seconds", "2", "--tune")
        assert kept() == [10_000] * 4, "a load deletes only its own objects"
        counts = [step["workers"] for step in tuned["steps"]]
        assert counts == sorted(counts) and {1, 2, 4, 5} <= set(counts)
        (step,) = (step for step in tuned["steps"] if step["workers"] == tuned["workers"])
        assert (tuned["workers"], tuned["bytes_per_second"], tuned["mean_ms"]) == tuple(step.values())
        (row,) = run("--seconds", "0.5", "--existing", "--verify")
        assert row["requests"] > 0 and row["errors"] == 0 and kept() == [10_000] * 4
        server.client().delete_object(Bucket="penstock", Key="load/penstock-load/00000003")
        command = [*LOAD, *COMMON, "--seconds", "0.5", "--existing"]
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, env=os.environ | server.environment)
        assert "some requests failed, such as: NoSuchKey" in found.stderr
        total = [line.split() for line in found.stdout.splitlines() if " get " in line][-1]
        assert int(total[3].replace(",", "")) > 0 and int(total[-1].replace(",", "")) > 0
    finally:
        server.stop()


class Store(http.server.BaseHTTPRequestHandler):
    """A store that has every object, and fails as its server's `faults` say: by method, a status, or `hangs`."""

    protocol_version = "HTTP/1.1"

    def do(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path, fault = self.path.partition("?")[0], self.server.faults.get(self.command, 200)
        if fault == "hangs":
            self.server.hanging.set()
            self.server.ended.wait()
            return
        answer = b""
        if self.command == "PUT" and fault == 200:
            self.server.objects[path] = body
        elif self.command == "DELETE" and fault == 200:
            self.server.objects.pop(path, None)
        elif self.command == "GET":
            with self.server.turns:
                time.sleep(0.04 if self.server.is_slow else 0)  # As long as a request takes in this store.
            answer = self.server.objects.get(path, b"") if fault == 200 else b"<Error><Code>Odd</Code><Message>so it is</Message></Error>"
        self.send_response(fault)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_PUT = do_DELETE = do

    def log_message(self, *_):
        pass


@pytest.fixture
def store():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", servers.free_port()), Store)
    server.daemon_threads = True
    server.turns, server.is_slow = threading.Semaphore(1000), False
    server.faults, server.objects, server.hanging, server.ended = {}, {}, threading.Event(), threading.Event()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.ended.set()
    server.shutdown()
    server.server_close()
    thread.join()


def environment(store):
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "a", "AWS_REGION": "us-east-1"}
    return os.environ | keys | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{store.server_port}"}


@pytest.mark.long
def test_the_knee_is_where_a_store_is_busy(store):
    """A store answers four requests at once, each after 40 ms. Its knee is at four workers, or a few more that keep it busy: many more on a
    loaded machine, where it is then slower than that."""
    store.turns, store.is_slow = threading.Semaphore(4), True
    command = [*LOAD, *COMMON, "--workers", "32", "--seconds", "8", "--tune", "--json"]
    for _ in range(5):
        tuned = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=300, env=environment(store)).stdout)
        if 3 <= tuned["workers"] <= 8:
            return
        # Four workers at 40 ms a request do a hundred requests a second, less what waits for a processor.
        of_four = [step["mean_ms"] for step in tuned["steps"] if step["workers"] == 4]
        assert of_four and of_four[0] >= 44, tuned


@pytest.mark.parametrize("tune", [(), ("--tune",)])
@pytest.mark.parametrize("status", [403, 503])
def test_a_load_of_which_all_fails_fails(store, status, tune):
    store.faults = {"GET": status}
    command = [*LOAD, *COMMON, "--seconds", "0.5", *tune]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment(store))
    assert found.returncode == 1 and re.search(
        r"none of the requests from \d workers succeeded: Odd: so it is", " ".join(found.stderr.split())
    )
    assert "knee" not in found.stdout
    assert store.objects == {}


@pytest.mark.parametrize("faults, said", [({"DELETE": 403}, "were not deleted"), ({"PUT": 403}, "must allow writes")])
def test_what_is_left_or_refused_is_reported(store, faults, said):
    store.faults = faults
    found = subprocess.run([*LOAD, *COMMON, "--seconds", "0.2"], capture_output=True, text=True, timeout=300, env=environment(store))
    assert found.returncode == 1 and said in " ".join(found.stderr.split())
    assert len(store.objects) == (4 if "DELETE" in faults else 0)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_a_load_that_hangs_can_be_stopped(store, method):
    store.faults = {method: "hangs"}
    command = [*LOAD, *COMMON, "--seconds", "0.2" if method == "DELETE" else "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(store)) as process:
        assert store.hanging.wait(300)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=300)
    assert process.returncode == (1 if method == "DELETE" else 130), said
    assert ("were not deleted" in said) == (method == "DELETE")
    assert len(store.objects) == (4 if method == "DELETE" else 0)


@pytest.mark.parametrize(
    "wrong",
    [
        ("--seconds", "inf"),
        ("--seconds", "nan"),
        ("--seconds", "0"),
        ("--seconds", "1e-300"),
        ("--size", "0", "--tune"),
        ("--objects", "0"),
        ("--size", "1XB"),
        ("--objects", "9" * 30),
    ],
)
def test_wrong_numbers_are_refused(wrong):
    found = subprocess.run([*LOAD, *wrong], capture_output=True, text=True, timeout=300)
    assert found.returncode == 2 and wrong[0].strip("-") in found.stderr + "size"

"""Writes that fail, and that the cold store carries out later nevertheless: every later read has what they wrote, also after a restart."""

import contextlib
import os
import re
import shutil
import signal
import threading

import botocore.exceptions
import pytest
from test_shared_drives import BUCKET, POLICIES, Answer, Store, known, marks_of, starting

FAILS = b"<Error><Code>InternalError</Code><Message>We encountered an internal error. Please try again.</Message></Error>"


class Late(Answer):
    """Writes nothing while `is_late`, and keeps what `carry_out` then does."""

    def later(self, key, body):
        self.server.late[key] = body

    def do_PUT(self):
        key, source = self.path.partition("?")[0].removeprefix(f"/{BUCKET}/"), self.headers["x-amz-copy-source"]
        if not self.server.is_late:
            return super().do_PUT()
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.later(key, self.server.objects[source.rpartition("/")[2]] if source else body)
        self.server.began.set()
        if self.server.hangs:
            assert self.server.may_end.wait(300)
        # The response to a copy may have begun before it failed.
        self.answer(200 if source else 504, FAILS)

    def do_POST(self):
        keys = re.findall("<Key>(.*?)</Key>", self.rfile.read(int(self.headers["Content-Length"])).decode())
        code = self.server.code
        for key in keys:
            self.later(key, None)
        errors = "".join(f"<Error><Key>{key}</Key><Code>{code}</Code><Message>no</Message></Error>" for key in keys if key != "gone")
        gone = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys if key == "gone")
        self.answer(200, f"<DeleteResult>{errors}{gone}</DeleteResult>".encode())


@pytest.fixture
def start(tmp_path):
    """Return a cold store that is late, and a function that starts a server before it."""
    store = Store()
    store.RequestHandlerClass = Late
    store.late, store.is_late, store.hangs, store.code = {}, False, False, "InternalError"
    yield from starting(tmp_path, store)


def carry_out(store):
    for key, body in store.late.items():
        store.objects.pop(key, None) if body is None else store.objects.update({key: body})


def fail(store, write, **asked):
    store.is_late = True
    with pytest.raises(botocore.exceptions.ClientError):
        write(Bucket=BUCKET, **asked)
    store.is_late = False


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", ["without a cache", "the mark is gone", "a drive is away", "the mark is gone twice"])
def test_a_later_server_knows_of_it(start, tmp_path, policy, way):
    store, node = start
    cache = tmp_path / "cache"
    options = ("--cache", f"{cache}:1GB", "--revalidate", policy)
    one = node(*options)
    known(one, cache, "ab")
    marks = marks_of(one)
    if way == "without a cache":
        one.again("--lame-duck", "0")
    fail(store, one.server.client().put_object, Key="a", Body=b"new")
    if way == "a drive is away":
        cache.rename(tmp_path / "away")
        one.put("b", b"other")
        shutil.rmtree(cache, ignore_errors=True)
        (tmp_path / "away").rename(cache)
    one.kill()
    for _ in range(2 if way.endswith("twice") else 1):
        if way.startswith("the mark is gone"):
            [os.unlink(mark) for mark in marks]
        one.server.options = options
        one.server.restart()
        assert [one.get("a") for _ in range(3)] == [b"old"] * 3
        one.kill()
    one.server.restart()
    assert one.get("a") == b"old"
    carry_out(store)
    assert one.get("a") == b"new"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("code", ["InternalError", "SlowDown", "Unheard", "AccessDenied"])
def test_deletes_of_many_that_fail_for_some_of_them(start, tmp_path, policy, code):
    store, node = start
    one = node("--cache", f"{tmp_path / 'cache'}:1GB", "--revalidate", policy)
    known(one, tmp_path / "cache", ["a", "gone"])
    store.code = code
    answer = one.server.client().delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": "a"}, {"Key": "gone"}]})
    assert [error["Code"] for error in answer["Errors"]] == [code] and [gone["Key"] for gone in answer["Deleted"]] == ["gone"]
    assert [one.get(key) for key in ("a", "gone")] == [b"old"] * 2
    # What is known is asked for with one request, if at all. What is uncertain is read anew, and asked for its checksums.
    is_certain, requests = code == "AccessDenied", 1 if policy == "always" else 0
    for key, expected in (("a", requests if is_certain else 2), ("gone", requests)):
        store.reads = 0
        assert one.get(key) == b"old" and store.reads == expected
    if not is_certain:
        carry_out(store)
        assert one.get("a") is None


@pytest.mark.parametrize("policy", POLICIES)
def test_a_copy_that_fails_after_its_response_began(start, tmp_path, policy):
    store, node = start
    one = node("--cache", f"{tmp_path / 'cache'}:1GB", "--revalidate", policy)
    known(one, tmp_path / "cache", ["a"])
    store.objects["b"] = b"new"
    fail(store, one.server.client().copy_object, Key="a", CopySource={"Bucket": BUCKET, "Key": "b"})
    assert [one.get("a") for _ in range(3)] == [b"old"] * 3
    carry_out(store)
    assert one.get("a") == b"new"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_write_that_is_cut_when_the_server_ends(start, tmp_path, policy):
    store, node = start
    one = node("--cache", f"{tmp_path / 'cache'}:1GB", "--revalidate", policy, "--drain-seconds", "1", "--lame-duck", "0")
    known(one, tmp_path / "cache", ["a"])
    store.is_late = store.hangs = True

    def write():
        with contextlib.suppress(botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError):
            one.put("a", b"new")

    store.began.clear()
    writer = threading.Thread(target=write)
    writer.start()
    assert store.began.wait(300)
    one.server.process.send_signal(signal.SIGTERM)
    one.server.process.wait(300)
    store.is_late = False
    one.server.restart()
    writer.join()
    # The client sends it again, to the server that follows.
    store.objects["a"] = b"old"
    assert [one.get("a") for _ in range(3)] == [b"old"] * 3
    carry_out(store)
    assert one.get("a") == b"new"

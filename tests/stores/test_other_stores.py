"""Stores that Penstock is not tuned for, and deliberately broken stores.

Every acknowledged commit must be readable, unless Penstock refuses the store.
"""

import json
import multiprocessing
import os
import subprocess
import sys
import uuid

import penstock as ps
import pytest
import servers
import wrong_s3
from racing import race_to_create

WRITERS, COMMITS = 4, 25


def append_many(uri, options, commits, writer, barrier, acknowledged):
    ds = ps.open(uri, storage_options=options)
    barrier.wait()
    for number in range(commits):
        ds.append({"n": [writer * 1000 + number], "word": [f"w{number}"]})
        acknowledged.put(writer * 1000 + number)


def storm(uri, options=None, commits=COMMITS):
    """Commit from several processes at once. A fresh reader must find each acknowledged number exactly once."""
    ps.create(uri, {"n": "int64", "word": ps.Category()}, storage_options=options)
    context = multiprocessing.get_context("spawn")
    barrier, acknowledged = context.Barrier(WRITERS), context.Queue()
    writers = [
        context.Process(target=append_many, args=(uri, options, commits, writer, barrier, acknowledged)) for writer in range(WRITERS)
    ]
    for writer in writers:
        writer.start()
    told = sorted(acknowledged.get(timeout=300) for _ in range(WRITERS * commits))
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    ds = ps.open(uri, storage_options=options)
    assert sorted(ds["n"][:].tolist()) == told and len(set(told)) == WRITERS * commits
    assert len(ds.log()) == len(told) + 1 and not ds.verify()["problems"] and len(ds.vocabulary("word")) == commits


def refused(change):
    with pytest.raises(ps.UnsupportedError) as caught:
        change()
    assert caught.value.code == "unsupported-storage" and "If-None-Match" in str(caught.value)


@pytest.mark.local
@pytest.mark.parametrize("creates", [wrong_s3.IGNORED, wrong_s3.UNSAFE])
def test_a_store_without_safe_creates_is_refused(creates, tmp_path):
    with wrong_s3.serving(creates=creates) as (state, options):
        refused(lambda: ps.create("s3://bucket/new", {"n": "int32"}, storage_options=options))
        assert not [name for name in state.objects if "/log/" in name]


COPIED = """
import sys, json, penstock as ps
options = json.loads(sys.argv[1])
ds = ps.open("s3://bucket/copied", storage_options=options)
assert ds["n"][:].tolist() == [1, 2, 3]
for change in (lambda: ds.append({"n": [4]}), lambda: ds._snapshot.pin("kept"), lambda: ds.loader(batch_size=1, pin=True)):
    try:
        change()
    except ps.UnsupportedError as error:
        assert error.code == "unsupported-storage", error
    else:
        raise AssertionError("acknowledged")
print("refused")
"""


@pytest.mark.local
@pytest.mark.parametrize("creates", [wrong_s3.IGNORED, wrong_s3.UNSAFE])
def test_a_dataset_that_was_copied_to_a_store_without_safe_creates_is_only_read(creates, tmp_path):
    ds = ps.create(tmp_path / "good", {"n": "int32"})
    ds.append({"n": [1, 2, 3]})
    with wrong_s3.serving(creates=creates) as (state, options):
        for path in (tmp_path / "good").rglob("*"):
            if path.is_file():
                state.objects[f"bucket/copied/{path.relative_to(tmp_path / 'good')}"] = path.read_bytes()
        before = {name for name in state.objects if "/log/" in name or "/refs/" in name}
        done = subprocess.run([sys.executable, "-c", COPIED, json.dumps(options)], capture_output=True, text=True)
        assert done.stdout.strip() == "refused", done.stderr
        assert {name for name in state.objects if "/log/" in name or "/refs/" in name} == before
        assert not [name for name in state.objects if "probe-" in name], "every probe was deleted"


CREATED = """
import sys, json, penstock as ps
ps.create("s3://bucket/made", {"n": "int32"}, storage_options=json.loads(sys.argv[1]))
"""


@pytest.mark.local
def test_creating_never_removes_the_last_object_of_a_folder():
    """MinIO then removes the folder too, and answers 403 to another process that puts its first object there at that moment."""
    with wrong_s3.serving() as (state, options):
        subprocess.run([sys.executable, "-c", CREATED, json.dumps(options)], check=True)
    assert [name for name in state.deleted if "probe-" in name], "the new process checked the store"
    assert not state.last_of_folder


@pytest.mark.local
@pytest.mark.parametrize("listing", [wrong_s3.SHUFFLED, wrong_s3.REVERSED])
def test_a_store_that_lists_in_no_order_loses_nothing(listing):
    with wrong_s3.serving(listing=listing) as (state, options):
        # Each process commits only eight times, because finding the newest record takes many slow look-ups.
        storm("s3://bucket/storm", options, commits=8)
        assert not state.overwritten
        ds = ps.open("s3://bucket/storm", storage_options=options)
        for number in range(10):  # A single writer also works once the listing exceeds one page.
            ds.append({"n": [number]})
            assert len(ps.open("s3://bucket/storm", storage_options=options)) == WRITERS * 8 + number + 1
        for number in range(15):
            ds._snapshot.pin(f"pin{number}")
        assert len(ds.pins()) == 15


@pytest.mark.local
def test_a_listing_of_a_while_ago_ends_no_commit(proxy, bucket):
    """A listing that ends before a record known to exist is stale, so the search continues with look-ups."""
    ds = ps.create(bucket, {"n": "int32"})
    other = ps.open(bucket)
    with servers.environment(AWS_ENDPOINT_URL=proxy.endpoint):
        late = ps.open(bucket)
        late.refresh()  # The proxy has now recorded a listing, which it repeats below.
        for number in range(12):
            other.append({"n": [number]})
        proxy.faults("stale=1000&in_a_row=0")
        try:
            for number in range(3):
                late.append({"n": [number]})
        finally:
            proxy.faults()
    assert ds.refresh()["n"][:].tolist() == [*range(12), *range(3)]


@pytest.mark.local
def test_a_store_is_tried_once_a_process(bucket):
    ds = ps.create(bucket, {"n": "int32"})
    again = ps.create(bucket.with_name("again"), {"n": "int32"})
    before = again.stats()["requests"]
    again.append({"n": [1]})
    assert again.stats()["requests"] - before <= 5, "data file, listing, record, hint"
    assert not [path for path in ds.uri and bucket.parent.rglob("probe-*")]


@pytest.fixture(scope="module", params=["azurite", "versitygw"])
def running(request, tmp_path_factory):
    server = {"azurite": servers.Azurite, "versitygw": servers.VersityGateway}[request.param](tmp_path_factory.mktemp(request.param))
    yield server
    server.stop()


@pytest.fixture
def other(running):
    """Point the environment at Azurite or Versity's gateway during the test."""
    with servers.environment(**running.environment):
        yield running


@pytest.mark.long
@pytest.mark.local
def test_storms_on_other_servers(other):
    storm(f"{other.root}/{uuid.uuid4().hex}/dataset")


@pytest.mark.local
def test_storm_on_minio(bucket):
    storm(str(bucket))


@pytest.mark.local
def test_creation_races_on_other_servers(other):
    race_to_create([f"{other.root}/{uuid.uuid4().hex}" for _ in range(10)], racers=3)


@pytest.mark.local
def test_a_lost_answer_to_a_create_on_other_servers(other):
    """Penstock recognises that a name is taken, regardless of how the server words its response."""
    place = f"{other.root}/{uuid.uuid4().hex}"
    ds = ps.create(place, {"n": "int32"})
    ds.append({"n": [1]})
    with pytest.raises(ps.AlreadyExistsError):
        ps.create(place, {"n": "int32"})
    stale = ps.open(place, snapshot=ds.log()[-1].snapshot)
    with stale.transaction() as tx:
        tx.append({"n": [2]})
    assert tx.receipt.row_ids.tolist() == [1], "the create found another writer's record, so the append used the next number"
    assert ps.open(place)["n"][:].tolist() == [1, 2] and os.environ  # The fixture points the environment at this server.

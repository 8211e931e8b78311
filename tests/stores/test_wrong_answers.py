"""An object store whose responses are corrupt, short, late, or missing."""

import json
import subprocess
import sys
import threading

import numpy as np
import penstock as ps
import pytest
import wrong_s3
from waiting import until


@pytest.mark.local
def test_a_corrupt_range_is_requested_again():
    """If only the first response is corrupt, the read uses the second one. If all are corrupt, the read raises an error."""
    with wrong_s3.serving() as (state, options):
        ds = ps.create("s3://bucket/set", {"v": ps.Tensor((50_000,), "uint8"), "t": ps.Text()}, storage_options=options)
        values = np.random.default_rng(0).integers(0, 256, (20, 50_000), dtype=np.uint8)
        ds.append({"v": values, "t": [f"text {i}" for i in range(20)]})
        # The first range is the tail, and the second contains blocks. Blocks are cached, so no block is requested twice.
        for place in range(9):
            fresh = ps.open("s3://bucket/set", storage_options=options)
            state.spoil, state.good_before_spoil = 1, place % 2
            batch = fresh.take([place, place + 10])
            assert state.spoil == 0, "the fault occurred"
            assert np.array_equal(batch["v"], values[[place, place + 10]]) and batch["t"] == [f"text {place}", f"text {place + 10}"]
        fresh = ps.open("s3://bucket/set", storage_options=options)
        state.spoil, state.good_before_spoil = 1_000, 0
        with pytest.raises(ps.CorruptError):
            fresh.take([9])
        state.spoil = 0
        assert np.array_equal(fresh.take([9])["v"], values[9:10]), "corrupt bytes are not cached"


@pytest.mark.local
def test_a_corrupt_small_object_is_requested_again():
    """One at a time, corrupt the objects that are requested whole: the first record, hints, records, roots, pages, and words."""
    with wrong_s3.serving() as (state, options):
        made = ps.create("s3://bucket/set", {"n": "int64", "c": ps.Category()}, storage_options=options)
        for part in range(70):
            made.append({"n": range(part * 3, part * 3 + 3), "c": [f"word {part}"] * 3})

        def work(number):
            ds = ps.open("s3://bucket/set", storage_options=options)
            assert len(ds) == 210 + number and ds["n"][:].tolist()[:210] == list(range(210))
            assert ds.vocabulary("c")[:70] == [f"word {part}" for part in range(70)] and len(ds.log()) == 71 + number
            ds.append({"n": [-1], "c": ["word 3"]})

        state.whole = 0
        work(0)
        asked = state.whole
        assert asked > 70, "reading the log alone requests 71 records"
        for place in (*range(1, 10), *range(10, asked, 17), asked):
            state.whole, state.spoilt_whole = 0, place
            work(len(ps.open("s3://bucket/set", storage_options=options)) - 210)
            assert state.whole > place, "the fault occurred"


@pytest.mark.local
def test_a_short_answer_is_completed_or_refused():
    """If a connection breaks, the client requests the rest of the range. It refuses chunked replies, and replies with the wrong range."""
    values = [bytes([i]) * 150_000 for i in range(5)]
    with wrong_s3.serving() as (state, options):
        ps.create("s3://bucket/set", {"v": ps.Bytes()}, storage_options=options).append({"v": values})
        state.shorten, state.how = 3, wrong_s3.LONGER  # The connection breaks after the last byte.
        fresh = ps.open("s3://bucket/set", storage_options={**options, "timeout_seconds": 5})
        assert fresh.take([1, 3])["v"] == [values[1], values[3]] and state.shorten <= 1
        state.shorten, state.how = 3, wrong_s3.BROKEN
        fresh = ps.open("s3://bucket/set", storage_options={**options, "timeout_seconds": 5})
        assert fresh.take([1, 3])["v"] == [values[1], values[3]] and state.shorten == 0
        for how in (wrong_s3.HALF, wrong_s3.CHUNKED):
            state.shorten, state.how = 1, how
            fresh = ps.open("s3://bucket/set", storage_options={**options, "timeout_seconds": 5})
            with pytest.raises(ps.UnsupportedError, match="violates HTTP"):
                fresh.take([1])


@pytest.mark.local
@pytest.mark.parametrize("count", range(1, 6))
def test_a_tail_that_arrives_damaged_several_times_is_read_or_reported(count):
    with wrong_s3.serving() as (state, options):
        values = np.arange(64_000).reshape(1000, 64)
        ps.create("s3://bucket/set", {"v": ps.Tensor((64,), "int64")}, storage_options=options).append({"v": values})
        fresh = ps.open("s3://bucket/set", storage_options=options)
        state.spoil = count
        try:
            assert np.array_equal(fresh.take([500])["v"], values[[500]])
        except ps.CorruptError as error:
            assert error.code == "object-checksum"
        state.spoil = 0
        assert np.array_equal(fresh.take([500])["v"], values[[500]])


@pytest.mark.local
@pytest.mark.parametrize(
    ("reply", "refused_reads"),
    [
        ((400, "BadRequest"), 0),
        ((400, "BadRequest"), 1),
        ((400, "RequestTimeout"), 1),
        ((403, "AccessDenied"), 0),
        ((404, "NoSuchKey"), 1),
        ((507, "Full"), 1),
    ],
)
def test_a_commit_that_was_stored_but_refused_succeeds(reply, refused_reads):
    """A refused read does not prove that the record does not exist, except for credentials that may neither read nor write."""
    with wrong_s3.serving() as (state, options):
        ds = ps.create("s3://bucket/set", {"n": "int64"}, storage_options=options)
        ds.append({"n": [1]})
        state.refused_but_stored, state.refused_reads = reply, refused_reads
        ds.append({"n": [2, 3]})
        state.refused_but_stored = None
        state.on_create = lambda name: (403, "AccessDenied") if "/log/" in name else None
        with pytest.raises(ps.PermissionDeniedError):
            ds.append({"n": [4]})
        state.on_create = None
        ds.append({"n": [5]})
        assert ps.open("s3://bucket/set", storage_options=options)["n"][:].tolist() == [1, 2, 3, 5]
        assert ds.verify()["problems"] == [] and len(ds.log()) == 4


@pytest.mark.local
def test_an_upload_that_cannot_be_completed_leaves_no_parts():
    """If an upload is neither completed nor aborted, its parts appear in no listing but cost money."""
    with wrong_s3.serving() as (state, options):
        ds = ps.create("s3://bucket/set", {"v": ps.Bytes()}, storage_options=options)
        ds.append({"v": [bytes(20 << 20)]})
        assert len(ds.take([0])["v"][0]) == 20 << 20 and not state.uploads
        state.refuse_complete = True
        with pytest.raises(ps.Error, match=r"AccessDenied|403"):
            ds.append({"v": [bytes(20 << 20)]})
        assert not state.uploads and len(ds.refresh()) == 1


@pytest.mark.local
def test_an_upload_succeeds_if_only_its_last_answer_is_lost():
    """On retry, the store reports that the upload does not exist. The client then checks that an object of the uploaded length exists."""
    with wrong_s3.serving() as (state, options):
        ds = ps.create("s3://bucket/set", {"v": ps.Bytes()}, storage_options=options)
        state.unanswered = "/d/"
        ds.append({"v": [bytes([number]) * (9 << 20) for number in range(3)]})
        state.unanswered = None
        assert ps.open("s3://bucket/set", storage_options=options).take([2])["v"] == [bytes([2]) * (9 << 20)]


@pytest.mark.local
def test_a_create_without_an_answer_deletes_nothing():
    """Commit 0 exists, but the replies to its creation were lost. The objects it references must not be deleted as leftovers."""
    with wrong_s3.serving() as (state, options):
        state.unanswered = "/log/"
        with pytest.raises(ps.Error) as caught:
            ps.create("s3://bucket/set", {"v": "int64"}, storage_options={**options, "timeout_seconds": 1})
        assert caught.value.code == "commit-state-unknown" and "check whether the object exists" in caught.value.hint
        state.unanswered = None
        ds = ps.open("s3://bucket/set", storage_options=options)
        ds.append({"v": [1]})
        assert ds.verify()["problems"] == [] and ds["v"][:].tolist() == [1]


@pytest.mark.local
def test_a_commit_that_was_refused_under_a_taken_number_gets_the_next_one():
    with wrong_s3.serving() as (state, options):
        ds = ps.create("s3://bucket/set", {"n": "int64"}, storage_options=options)
        other = ps.open("s3://bucket/set", storage_options=options)

        def overtaken(name):
            if "/log/" not in name or len(other.refresh()):
                return None
            other.append({"n": [1]})
            return 501, "NotImplemented"

        state.on_create = overtaken
        ds.append({"n": [2]})
        assert ps.open("s3://bucket/set", storage_options=options)["n"][:].tolist() == [1, 2]


@pytest.mark.local
@pytest.mark.parametrize("reply", [(409, "ConditionalRequestConflict"), (400, "RequestTimeout")])
def test_a_transient_refusal_of_a_create_only_put_is_retried(reply):
    """S3 may return 409 when two create-only puts of the same name collide. Neither put has succeeded yet, so the client retries."""
    with wrong_s3.serving() as (state, options):
        refused = []

        def conflict(name):
            if name in refused:
                return None
            refused.append(name)
            return reply

        state.on_create = conflict
        ds = ps.create("s3://bucket/set", {"v": "int64"}, storage_options=options)
        for number in range(3):
            ds.append({"v": [number]})
        assert len([name for name in refused if "/log/" in name]) >= 4
        assert ps.open(ds.uri, storage_options=options)["v"][:].tolist() == [0, 1, 2]


RIVAL = """
import json, sys
import penstock as ps
ds = ps.open("s3://bucket/set", storage_options=json.loads(sys.argv[1]))
for line in sys.stdin:
    ds.append({"n": [int(line)]})
    print("done", flush=True)
"""


@pytest.mark.local
def test_a_commit_that_loses_a_race_describes_the_newer_parent():
    """A rival commits just before each commit creates its record. The records contain one to six deltas."""
    with wrong_s3.serving() as (state, options):
        columns = {f"w{index}": ps.Category() for index in range(5)}
        ds = ps.create("s3://bucket/set", {"n": "int64", **columns}, storage_options=options)
        rival = subprocess.Popen(
            [sys.executable, "-c", RIVAL, json.dumps(options)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        races = []

        def race(name):
            if "/log/" in name and len(races) <= len(expected):  # Race once per commit.
                races.append(name)
                rival.stdin.write(f"{10_000 + len(races)}\n")
                rival.stdin.flush()
                assert rival.stdout.readline() == "done\n"

        expected, state.on_create = [], race
        for number in range(60):
            words = {name: [f"{name}-{number}"] for name in list(columns)[: number % 6]}
            ds.append({"n": [number], **words})
            expected.append((number, words))
        state.on_create = None
        rival.stdin.close()
        assert rival.wait(300) == 0
        ds = ps.open(ds.uri, storage_options=options)
        batch = ds[:]
        place = {int(n): row for row, n in enumerate(batch["n"])}
        assert len(races) == 60 and len(ds) == 60 + len(races) and not ds.verify()["problems"]
        for number, words in expected:
            for name, [word] in words.items():
                assert ds.vocabulary(name)[int(batch[name][place[number]])] == word


@pytest.mark.local
def test_a_thread_reads_a_block_that_another_thread_failed_to_read():
    """Two threads need the same block. The first to fetch it gets only corrupt responses, but the other then gets a good one."""
    values = np.random.default_rng(0).integers(0, 256, (20, 50_000), dtype=np.uint8)
    with wrong_s3.serving() as (state, options):
        ps.create("s3://bucket/set", {"v": ps.Tensor((50_000,), "uint8")}, storage_options=options).append({"v": values})
        ds, told = ps.open("s3://bucket/set", storage_options=options), {}
        ds.take([19])
        state.delay_seconds, state.spoil, before = 0.2, 3, state.ranged

        def read(name):
            try:
                told[name] = np.array_equal(ds.take([5])["v"], values[[5]])
            except ps.Error as error:
                told[name] = error.code

        readers = [threading.Thread(target=read, args=(name,)) for name in ("first", "second")]
        for reader in readers:
            reader.start()
            until(lambda: state.ranged > before, "the first thread requests the block")
        for reader in readers:
            reader.join()
        assert sorted(map(str, told.values())) == ["True", "block-checksum"] and state.spoil == 0


@pytest.mark.local
def test_a_failure_after_a_lost_race_is_certain(separate_files):
    """The outcome of the first create is unknown until a rival's record is found. After that, a refusal is a definite failure."""
    with wrong_s3.serving() as (state, options):
        ds = ps.create("s3://bucket/set", {"n": "int64"}, storage_options=options)
        rival, answers = ps.open("s3://bucket/set", storage_options=options), [(500, "InternalError"), None, (403, "AccessDenied")]

        def race(name):
            if "/log/" not in name:
                return None
            if len(answers) == 3:
                rival.append({"n": [1]})
            return answers.pop(0) if answers else None

        state.on_create = race
        before = {name for name in state.objects if "/d/" in name}
        with pytest.raises(ps.PermissionDeniedError) as caught:
            ds.append({"n": [2]})
        state.on_create = None
        assert caught.value.code == "permission-denied" and not answers
        assert len({name for name in state.objects if "/d/" in name} - before) == 1, "only the rival's data file remains"
        assert ps.open("s3://bucket/set", storage_options=options)["n"][:].tolist() == [1]

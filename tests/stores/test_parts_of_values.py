"""What parts of a value cost: requests, bytes and memory. A film is neither read nor written whole."""

import io
import random

import measured
import penstock as ps
import pytest
from counting import Dataset, asked_pages
from extents import PAGE_BYTES
from handles import spent

UNIT, MB = 64 << 10, 1 << 20
LENGTH = 40 * MB + 1000
pytestmark = pytest.mark.local


def covering(start, end, length=LENGTH):
    """Return how many bytes the checksum units have that overlap a part of a value."""
    return min(-(-end // UNIT) * UNIT, length) - start // UNIT * UNIT


# Begin, middle, end, within a unit, across two, and longer than a request. The block cache keeps units of short parts, so these come last, and
# no two of them are in the same unit.
PARTS = [
    (MB, 2 * MB), (MB + 1, 2 * MB + 1), (5 * MB, 25 * MB), (5 * MB + 1, 25 * MB + 1), (LENGTH - MB, LENGTH), (0, LENGTH),
    (0, 1), (UNIT, 2 * UNIT), (2 * UNIT, 3 * UNIT + 1), (5 * UNIT - 1, 5 * UNIT + 1), (LENGTH // 2, LENGTH // 2 + 100),
    (LENGTH - UNIT - 5000, LENGTH - UNIT), (LENGTH - 1, LENGTH),
]  # fmt: skip


@pytest.fixture(scope="module")
def film():
    return random.Random(0).randbytes(LENGTH)


def check(ds, film, start, end):
    assert ds["film"].read(1, start, end) == film[start:end]


def test_requests_and_bytes_on_an_object_store(bucket, proxy, film, monkeypatch):
    ps.create(bucket, {"film": ps.Bytes()}).append({"film": [b"small", io.BytesIO(film), bytes(3 * MB)]})
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    ds = ps.open(bucket)
    first = spent(ds, lambda: ds["film"].read(2, 0, MB))
    assert first["requests"] == 2, "the tail and the part"
    assert first["received_bytes"] - MB <= 4 * LENGTH / UNIT + 512
    for start, end in PARTS:
        proxy.faults()  # Resets the counts.
        cost = spent(ds, lambda start=start, end=end: check(ds, film, start, end))
        # A request has at most 8 MiB. The reader holds 32 MiB, a sixteenth of its budget.
        requests = -(-covering(start, end) // (8 * MB))
        assert (cost["requests"], cost["received_bytes"]) == (requests, covering(start, end))
        assert end - start < MB or cost["received_bytes"] <= 1.1 * (end - start)
        counts = proxy.counts()
        assert (counts["requests"], counts["body_bytes"]) == (requests, covering(start, end))
        # Units of short parts are kept.
        again = spent(ds, lambda start=start, end=end: check(ds, film, start, end))
        assert again.get("requests", 0) == (requests if covering(start, end) >= MB else 0)


@pytest.mark.parametrize("io_", ["buffered", "direct", "mapped"])
def test_bytes_on_a_local_disk(tmp_path, film, io_):
    ps.create(tmp_path / "set", {"film": ps.Bytes()}).append({"film": [None, io.BytesIO(film)]})
    ds = ps.open(tmp_path / "set", io=io_)
    ds["film"].open(1)
    for start, end in PARTS:
        cost = spent(ds, lambda start=start, end=end: check(ds, film, start, end))
        assert cost.get("range_bytes", 0) == (0 if io_ == "mapped" else covering(start, end))
        assert set(cost) <= {"ranges", "range_bytes", "direct_bytes"}


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_a_compressed_value_is_read_whole_and_a_source_is_not_compressed(tmp_path, codec):
    text = b"abcdefgh" * (MB // 8)
    ps.create(tmp_path / "set", {"film": ps.Bytes(codec=codec)}).append({"film": [text, text]})
    ds = ps.open(tmp_path / "set", io="buffered")
    stored = ds.layout()["film"]["stored_bytes"] // 2
    assert stored < MB / 50 and ds["film"].read(1, 5, 9) == text[5:9]
    cost = spent(ds, lambda: ds["film"].read(0, 5, 9))
    assert cost.get("range_bytes", 0) in (0, stored), "0 if the whole file is in memory"
    ds.append({"film": [iter([text] * 3), text[:9]]})
    assert ds.layout()["film"]["stored_bytes"] == 2 * stored + 3 * MB + 9
    ds.append({"film": [text]})
    assert ds.layout()["film"]["stored_bytes"] == 3 * stored + 3 * MB + 9, "values in memory are compressed again"
    assert ds["film"].read(2, MB, MB + 5) == text[:5] and ds["film"][:] == [text, text, text * 3, text[:9], text]


def test_a_cache_fetches_the_pages_of_a_part(tmp_path):
    made = Dataset(tmp_path / "cache", [3 * MB, 12 * MB])
    try:
        [name], blob = made.names, made.blobs[1]
        whole = len(made.state.objects[name])
        ds = ps.open(made.uri, cache=str(tmp_path / "cache") + ":100MB", storage_options=made.options)
        ds["blob"].read(1, 0, 1)
        for start, end in ((7 * MB, 8 * MB), (10 * MB - 1, 11 * MB), (5 * MB + 3, 5 * MB + 10), (len(blob) - 5, len(blob))):
            del made.state.asked[:]
            assert ds["blob"].read(1, start, end) == blob[start:end]
            asked = asked_pages(made.state, name, whole) if made.state.asked else set()
            assert 0 < len(asked) * PAGE_BYTES <= covering(start, end, len(blob)) + 2 * PAGE_BYTES
            del made.state.asked[:]
            assert ds["blob"].read(1, start, end) == blob[start:end] and not made.state.asked
    finally:
        made.stop()


@pytest.mark.parametrize("io_", ["buffered", "direct", "mapped"])
def test_only_damage_in_the_part_matters(tmp_path, film, io_):
    film = film[: 5 * MB]
    ids = ps.create(tmp_path / "set", {"film": ps.Bytes()}).append({"film": [None, io.BytesIO(film)]}).row_ids
    [path] = [path for path in (tmp_path / "set").rglob("d/*") if path.stat().st_size > MB]
    content, at = bytearray(path.read_bytes()), 2 * MB + 100
    begin = content.index(film[:100])
    content[begin + at] ^= 1
    path.write_bytes(content)
    ds = ps.open(tmp_path / "set", io=io_)
    unit = at // UNIT * UNIT
    for start, end in ((0, unit), (unit + UNIT, len(film)), (unit - 5, unit), (at - UNIT // 2 - UNIT, unit)):
        check(ds, film, start, end)
    for start, end in ((at, at + 1), (unit, unit + 1), (0, len(film)), (unit - 1, unit + 1), (unit + UNIT - 1, unit + UNIT)):
        with pytest.raises(ps.CorruptError, match=f"bytes {begin + unit}..{begin + unit + UNIT}") as caught:
            ds["film"].read(1, start, end)
        error = caught.value
        assert "cannot read sample 1 of column `film`" in str(error) and path.name in str(error)
        assert (error.code, error.column, error.row_ids) == ("block-checksum", "film", [ids[1]])


def test_a_failed_upload_leaves_no_parts(bucket, minio):
    def breaks():
        yield bytes(20 * MB)
        raise ConnectionResetError("the other side hung up")

    ds = ps.create(bucket, {"film": ps.Bytes()})
    with pytest.raises(ConnectionResetError):
        ds.append({"film": [breaks()]})
    assert ds.stats()["requests"] > 4, "parts were sent"
    assert not list((minio.folder / "data" / ".minio.sys" / "multipart").rglob("xl.meta"))
    assert not bucket.glob("d/*")


def test_values_that_follow_a_source_are_compressed(tmp_path):
    text = b"abcdefgh" * (MB // 8)
    ds = ps.create(tmp_path / "set", {"film": ps.Bytes(codec="zstd")})
    with ds.transaction() as tx:
        tx.append({"film": [iter([text, text])]})
        tx.append({"film": [text] * 3})
        tx.append({"film": [io.BytesIO(text * 2)]})
    assert 4 * MB < ds.layout()["film"]["stored_bytes"] < 4.1 * MB and ds["film"][:] == [text * 2, text, text, text, text * 2]


HEAD = """
import os, sys, penstock as ps
from measured import Grown
place, size = sys.argv[1], int(sys.argv[2])
BLOCK = os.urandom(1 << 20) * 2
class Film:
    def __init__(self):
        self.at = 0
    def read(self, count):
        begin, count = self.at % (1 << 20), min(count, size - self.at)
        self.at += count
        return BLOCK[begin * 7 % (1 << 20):][:count]
ds = ps.create(place, {"film": ps.Bytes(), "n": "int32"})
ds.append({"film": [b"x"], "n": [1]})
ds[0]
"""

WRITE_AND_READ = """
with Grown() as writing:
    receipt = ds.append({"film": [Film()], "n": [2]})
ds = ps.open(place)
ds["film"].read(1, 0, 1)
before, read = ds.stats(), 0
with Grown() as reading:
    for length in (1 << 20, (1 << 20) + 1, 3 << 20, 8 << 20):
        for start in (0, 1, 65535, size // 2 + 17, size - length):
            part = ds["film"].read(1, start, start + length)
            assert len(part) == length
            assert all(part[at] == BLOCK[0] for at in range(-start % (1 << 20), length, 1 << 20))
            read += length
            del part
received = ds.stats()["received_bytes"] - before["received_bytes"]
print(writing.peak, reading.peak, received / read, ds["film"].open(1).seek(0, 2))
"""

LIMIT = 64_000_000


@pytest.mark.parametrize("size", [300_000_000, pytest.param(3_000_000_000, marks=pytest.mark.soak)])
def test_a_film_is_held_in_parts_on_an_object_store(bucket, size):
    writing, reading, ratio, length = map(float, measured.run(HEAD + WRITE_AND_READ, bucket, size).split())
    assert length == size and writing <= LIMIT and reading <= LIMIT and ratio <= 1.1, (writing, reading, ratio)


@pytest.mark.parametrize("size", [300_000_000, pytest.param(5_000_000_000, marks=pytest.mark.soak)])
def test_a_film_is_held_in_parts_on_a_local_disk(tmp_path, size):
    """The long one has offsets beyond 4 GiB."""
    writing, reading, _, length = map(float, measured.run(HEAD + WRITE_AND_READ, tmp_path / "set", size).split())
    assert length == size and writing <= LIMIT and reading <= LIMIT, (writing, reading)


AGAIN = """
with ds.transaction() as tx:
    ids = tx.append({"film": [None, Film()], "n": [3, 4]})
    tx.update({"film": [Film()]}, row_ids=ids[:1])
ds.create_branch("other")
other = ps.open(place, branch="other")
film = Film()
other.update({"film": [film]}, row_ids=[0])
ds.append({"n": [5]})
with Grown() as merging:
    ds.merge("other")
# Both sides changed the last sample, so the merge copies the values that it takes.
third = ds.create_branch("third")
film = Film()
film.at = 1
third.update({"film": [film, b"theirs"]}, row_ids=[0, 3])
ds.update({"film": [b"ours"]}, row_ids=[3])
before = ds.structure()["data_bytes"]
with Grown() as copying:
    ds.merge("third", on_conflict="ours")
assert ds.structure()["data_bytes"] >= before + size - 1 and ds["film"].read(3, 0, 9) == b"ours"
with ds.transaction() as tx:
    tx.delete(row_ids=ds.take([1], columns=["_row_id"])["_row_id"])
with Grown() as compacting:
    done = ds.compact()
assert done.written_bytes > size and [ds["film"].open(at).seek(0, 2) for at in (0, 1)] == [size - 1, size], done
with Grown() as looking:
    problems = ds.verify()["problems"]
    differences = [found.row_ids.tolist() for found in ds.diff("third") if found.kind == "changed"]
assert differences == [[3]], differences
print(merging.peak, copying.peak, compacting.peak, looking.peak, len(problems))
"""


def test_compaction_and_merges_hold_a_film_in_parts(tmp_path):
    *peaks, problems = map(int, measured.run(HEAD + AGAIN, tmp_path / "set", 300_000_000).split())
    assert problems == 0 and max(peaks) <= LIMIT, peaks


FILE = """
import pathlib
with Grown() as writing:
    ds.append({"film": [pathlib.Path(sys.argv[3])], "n": [2]})
print(writing.peak, ds["film"].open(1).seek(0, 2))
"""


def test_a_large_file_is_read_while_it_is_written(tmp_path):
    path = tmp_path / "film.mp4"
    with path.open("wb") as file:
        file.truncate(300_000_000)
    writing, length = map(int, measured.run(HEAD + FILE, tmp_path / "set", 0, path).split())
    assert length == 300_000_000 and writing <= LIMIT
    ds = ps.open(tmp_path / "set")
    with pytest.raises(ps.NotFoundError, match=r"row 0 is `.*gone`, which cannot be read"):
        ds.append({"film": [tmp_path / "gone"]})

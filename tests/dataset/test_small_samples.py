"""How many bytes and requests it takes to read small samples from unmapped files, as counted by the store and the kernel."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys
import textwrap

import measured
import numpy as np
import penstock as ps
import pytest
from handles import spent

pytestmark = pytest.mark.local
ROWS = 400_000
KIB_SAMPLES = 12_000


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Return a dataset with values of 8, 64 and about 40 bytes. The 40-byte values are stored both plain and compressed."""
    rng = np.random.default_rng(0)
    words = np.array([f"w{number}" for number in range(1000)])
    texts = [" ".join(part) for part in words[rng.integers(0, 1000, (ROWS // 4, 8))]] * 4
    schema = {"number": "int64", "vector": ps.Tensor((16,), "float32"), "text": ps.Text(), "packed": ps.Text(codec="zstd")}
    ds = ps.create(tmp_path_factory.mktemp("rows") / "dataset", schema)
    ds.append({"number": np.arange(ROWS), "vector": rng.random((ROWS, 16), np.float32), "text": texts, "packed": texts})
    return ds


@pytest.mark.parametrize(("column", "most"), [("number", 4 << 10), ("vector", 4 << 10), ("text", 8 << 10), ("packed", 8 << 10)])
@pytest.mark.parametrize("access", ["buffered", "direct"])
def test_a_cold_row_costs_one_small_block(rows, access, column, most):
    ds, cold = ps.open(rows.uri, io=access), ROWS // 2 if access == "direct" else ROWS // 3  # The modes share a cache, so the rows differ.
    ds.take([0], columns=[column])  # Load the tail.
    counts = spent(ds, lambda: ds.take([cold], columns=[column]))
    assert counts["ranges"] == 1
    assert 0 < counts["range_bytes"] <= most


@pytest.mark.parametrize("access", ["buffered", "direct"])
def test_random_rows_move_a_quarter_of_what_whole_units_would(rows, access):
    chosen = np.random.default_rng(["buffered", "direct"].index(access)).choice(ROWS, 100, replace=False)
    ds = ps.open(rows.uri, io=access)
    columns = ["number", "vector", "text"]
    ds.take([0], columns=columns)
    moved = spent(ds, lambda: ds.take(chosen, columns=columns))["range_bytes"]
    stored = {name: column["stored_bytes"] for name, column in rows.layout().items()}
    in_units = sum(len(np.unique(chosen * stored[name] // ROWS // (64 << 10))) for name in columns) * (64 << 10)
    assert moved <= in_units / 4, (moved, in_units)


def test_tails_stay_below_a_mebibyte(rows):
    def tail_bytes(path):
        return int.from_bytes(path.read_bytes()[-24:-20], "little")

    paths = list(pathlib.Path(rows.uri).glob("d/*"))
    assert paths
    assert all(tail_bytes(path) <= 1 << 20 for path in paths)


READ = """
import json, sys
import numpy as np
import penstock as ps

uri, access, cache = sys.argv[1], sys.argv[2], int(sys.argv[3])
ps.configure(memory_bytes=cache)
ds = ps.open(uri, io=access)
loader = ds.loader(batch_size=256, shuffle=True, seed=1, columns=["body", "_position"])

def kernel():
    return int(next(line for line in open("/proc/self/io") if line.startswith("read_bytes")).split()[1])

told, answer = loader.explain(), []
for epoch in range(3):
    before, began = ds.stats(), kernel()
    positions, good = [], True
    for batch in loader.stream(1):
        positions += batch["_position"].tolist()
        good &= all((body[:8].view(np.int64)[0] == position) for body, position in zip(batch["body"], batch["_position"]))
    after = ds.stats()
    whole = sorted(positions) == list(range(len(ds))) and bool(good)
    answer.append((after["ranges"] - before["ranges"], after["range_bytes"] - before["range_bytes"], kernel() - began, whole))
print(json.dumps([told, answer]))
"""


def epochs(uri, access, cache):
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(READ), str(uri), access, str(cache)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told, answer = json.loads(done.stdout)
    assert all(whole for *_, whole in answer)
    return told, answer


def of_kibibytes(uri):
    """Create a dataset whose 1 KiB samples each begin with their position. Return the total size of these samples in bytes."""
    body = np.random.default_rng(0).integers(0, 256, (KIB_SAMPLES, 1024), dtype=np.uint8)
    body[:, :8] = np.arange(KIB_SAMPLES, dtype=np.int64)[:, None].view(np.uint8)
    ds = ps.create(uri, {"body": ps.Tensor((1024,), "uint8"), "other": ps.Tensor((700,), "uint8")})
    ds.append({"body": body, "other": np.zeros((KIB_SAMPLES, 700), np.uint8)})
    return KIB_SAMPLES << 10


def told_bytes(told):
    count, unit = re.search(r"which transfer ([\d.e+]+) (\w+)", told).groups()
    return float(count) * {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]


@pytest.mark.parametrize("access", ["buffered", "direct"])
def test_a_full_order_reads_what_the_cache_holds_about_once(tmp_path, access):
    stored = of_kibibytes(tmp_path / "dataset")
    told, ((requests, first, kernel, _), *later) = epochs(tmp_path / "dataset", access, 256 << 20)
    assert stored <= first <= 1.25 * stored
    assert requests <= 2 * stored / (8 << 10)
    assert kernel <= 2 * stored
    assert all((requests, moved) == (0, 0) for requests, moved, *_ in later)
    assert 0.99 * stored <= told_bytes(told) <= 1.25 * stored


@pytest.mark.parametrize("access", ["buffered", "direct"])
def test_a_full_order_wastes_little_where_the_cache_is_too_small(tmp_path, access):
    stored = of_kibibytes(tmp_path / "dataset")
    told, answer = epochs(tmp_path / "dataset", access, 8 << 20)
    assert all(0.4 * stored <= moved <= 2 * stored for _, moved, *_ in answer)
    assert answer[0][1] / 1.3 <= told_bytes(told) <= 1.3 * answer[0][1]


def test_a_full_order_on_a_store_far_away_reads_what_the_cache_holds_about_once(bucket, proxy, monkeypatch):
    stored = of_kibibytes(bucket)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    proxy.faults("delay_ms=20")
    try:
        told, ((requests, first, _, _), *later) = epochs(bucket, "auto", 256 << 20)
    finally:
        proxy.faults("")
    assert stored <= first <= 1.5 * stored
    assert requests <= 2 * stored / (128 << 10)
    assert all((requests, moved) == (0, 0) for requests, moved, *_ in later)
    assert 0.99 * stored <= told_bytes(told) <= 1.25 * stored


def test_neighbours_that_are_damaged_hurt_only_who_wants_them(tmp_path):
    of_kibibytes(tmp_path / "dataset")
    (path,) = (tmp_path / "dataset" / "d").iterdir()
    sample = ps.open(tmp_path / "dataset").take([77], columns=["body"])["body"].tobytes()
    body = bytearray(path.read_bytes())
    body[body.index(sample) + 100] ^= 1
    path.write_bytes(body)
    ds = ps.open(tmp_path / "dataset", io="buffered")
    loader = ds.loader(batch_size=64, shuffle=True, seed=3, columns=["body", "_position"], on_corrupt="substitute")
    positions = np.concatenate([batch["_position"] for batch in loader.stream(1)])
    assert len(positions) == KIB_SAMPLES
    assert sorted(set(range(KIB_SAMPLES)) - set(positions.tolist())) == [77]


def test_a_window_is_sized_by_the_columns_that_are_read(rows):
    window = ps.Window(bytes=1 << 20)
    for columns, most in ((["number"], 8.2), (["vector"], 64.5), (["text"], 43), (["number", "vector"], 72.5)):
        order = rows.loader(batch_size=64, shuffle=window, columns=columns).state_dict()["sources"][0]["order"]
        assert (1 << 20) / most <= order["window_samples"] <= (1 << 20) / (most - 4), (columns, order)
    told = ps.open(rows.uri, io="buffered").loader(batch_size=64, shuffle=True, columns=["number"]).explain()
    stored = re.search(r"bytes +about ([\d.]+) MiB", told)
    assert stored, told
    assert float(stored.group(1)) == pytest.approx(ROWS * 8 / 2**20, rel=0.01)


@pytest.mark.local
def test_explain_reports_the_requests_of_a_column_among_others(tmp_path):
    """The request estimate depends on how far a column is spread across the file, not on the size of that column or of all columns."""
    ps.create(tmp_path / "ds", {"v": ps.Tensor((256,), "float32"), "s": ps.Tensor((16,), "float32"), "t": ps.Text()}).append(
        {"v": np.zeros((20_000, 256), np.float32), "s": np.zeros((20_000, 16), np.float32), "t": ["x" * 300] * 20_000}
    )
    program = """
import json, sys
import penstock as ps
ps.configure(memory_bytes=int(sys.argv[3]) << 20)
ds = ps.open(sys.argv[1], io="buffered")
loader = ds.loader(batch_size=250, shuffle=True, columns=[sys.argv[2]], memory_bytes=64 << 20)
told = next(line for line in loader.explain().splitlines() if line.startswith("requests"))
before = ds.stats()["ranges"]
for batch in loader:
    pass
print(json.dumps([int(told.split("about ")[1].split()[0].replace(",", "")), ds.stats()["ranges"] - before]))
"""
    packed = np.random.default_rng(0).random((40_000, 64), dtype=np.float32)
    # The cache gets half of the memory budget. The column fits in half of the cache, fits only in the whole cache, or exceeds it.
    ps.create(tmp_path / "packed", {"w": ps.Tensor((64,), "float32", codec="lz4")}).append({"w": packed})
    for column, memory in (("v", 256), ("s", 256), ("t", 256), ("v", 32), ("w", 64), ("w", 32), ("w", 16)):
        out = subprocess.run(
            [sys.executable, "-c", program, tmp_path / ("packed" if column == "w" else "ds"), column, str(memory)],
            capture_output=True,
            text=True,
            check=True,
        )
        told, made = json.loads(out.stdout)
        # Concurrent batches may request the same blocks, or only the gaps between other batches' blocks.
        assert 0.4 * made <= told <= 2 * made, (column, memory, told, made)


@pytest.mark.long
@pytest.mark.parametrize("io", ["buffered", "direct"])
def test_a_long_scan_holds_the_same_memory_as_a_short_one(tmp_path, io):
    """A block shared by two groups stays cached, but must not keep alive the whole buffer that it was read into."""
    ds = ps.create(tmp_path / "ds", {"x": ps.Tensor((250,), "uint8")})
    with ds.transaction() as tx:
        for number in range(6):
            tx.append({"x": np.full((1 << 18, 250), number, np.uint8)})
    program = """
import sys
import penstock as ps
from measured import anonymous
ps.configure(memory_bytes=64 << 20)
peaks = []
for batch in ps.open(sys.argv[1], io=sys.argv[2]).scan(batch_size=1000):
    peaks.append(anonymous())
print(max(peaks[: len(peaks) // 3]), max(peaks))
"""
    early, late = map(int, measured.run(program, ds.uri, io).split())
    assert late <= early + (16 << 20), f"{late - early >> 20} MiB more memory after reading 375 MiB than after 125 MiB"


def test_small_files_that_are_held_whole_count_in_the_budget(tmp_path):
    """If files are not mapped, small data files are read and cached whole. Here, hundreds of such files exceed the budget."""
    ds = ps.create(tmp_path / "ds", {"x": ps.Tensor((200, 1000), "uint8")})
    for number in range(600):
        ds.append({"x": np.full((1, 200, 1000), number % 256, np.uint8)})
    program = """
import sys
import penstock as ps
from measured import anonymous
ps.configure(memory_bytes=32 << 20)
ds = ps.open(sys.argv[1], io="buffered")
before, peak = anonymous(), 0
for position in range(len(ds)):
    assert ds.take([position])["x"][0, 0, 0] == position % 256
    peak = max(peak, anonymous())
print(peak - before)
"""
    grown = int(measured.run(program, ds.uri))
    assert grown <= 64 << 20, f"{grown >> 20} MiB"


FAULTS = """
import os, pathlib, resource, sys, numpy as np, penstock as ps

ps.configure(threads=1)
for path in pathlib.Path(sys.argv[1]).rglob("*"):
    if path.is_file():
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)
ds = ps.open(sys.argv[1])
ds[0]
rng, count = np.random.default_rng(0), len(ds)
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_majflt
before = faults()
for _ in range(8):
    ds.take(rng.choice(count, 256, replace=False))
print(faults() - before)
"""


@pytest.mark.parametrize(
    "column",
    [ps.Tensor((32, 32, 3), "uint8"), ps.Tensor((64,), "float32"), ps.Bytes(), ps.Tensor((768,), "float32", codec="lz4")],
    ids=["3 KB", "256 B", "bytes", "compressed"],
)
def test_cold_small_samples_are_announced_rather_than_awaited_one_by_one(tmp_path, column):
    """Without an announcement, nearly each of the 2,048 samples would wait for a page fault of its own."""
    rng, count = np.random.default_rng(0), 40_000
    values = [rng.bytes(2000 + index % 1000) for index in range(count)]
    if isinstance(column, ps.Tensor):
        values = rng.integers(0, 100, (count, *column.shape)).astype(column.dtype)
    ps.create(tmp_path / "dataset", {"x": column}).append({"x": values})
    assert int(measured.run(FAULTS, tmp_path / "dataset")) <= 8 * 256 // 8

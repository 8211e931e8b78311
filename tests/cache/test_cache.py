"""The cache through Python and the command line: each byte is fetched once, whatever process reads it, and a failing cache never fails a read."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import penstock as ps
import pytest
from typer.testing import CliRunner

SAMPLES, LENGTH = 120, 40_000


def samples():
    random = np.random.default_rng(5)
    return [random.bytes(LENGTH + int(random.integers(20_000))) for _ in range(SAMPLES)]


@pytest.fixture
def filled(bucket):
    """Return the place of a dataset in MinIO with 120 samples of 40 to 60 kB, and their bytes."""
    ds = ps.create(bucket, {"blob": ps.Bytes(), "number": "int32"})
    blobs = samples()
    ds.append({"blob": blobs, "number": range(SAMPLES)})
    return bucket, blobs


def received(ds, work):
    """Run `work` and return how many bytes this handle received from the store."""
    before = ds.stats()["received_bytes"]
    work()
    return ds.stats()["received_bytes"] - before


def check(ds, blobs):
    assert ds[:]["blob"] == blobs
    order = np.random.default_rng(1).permutation(SAMPLES)
    assert ds[order]["blob"] == [blobs[position] for position in order]


def counts(cache):
    """Return the counts of a cache's first drive."""
    result = CliRunner().invoke(_app(), ["cache", "status", "--cache", str(cache), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)[0]


def _app():
    from penstock.cli import app

    return app


def test_another_process_reads_from_the_cache(filled, tmp_path, empty_cache):
    uri, blobs = filled
    cache = f"{tmp_path / 'cache'}:50MB"
    check(ps.open(uri, cache=cache), blobs)
    first = counts(tmp_path / "cache")
    total = sum(map(len, blobs))
    assert total <= first["cold_bytes"] <= total + 100_000
    program = """
import sys, penstock as ps
ds = ps.open(sys.argv[1], cache=sys.argv[2])
before = ds.stats()
print(sum(map(len, ds[:]["blob"])), ds.stats()["ranges"] - before["ranges"], ds.stats()["reads"] - before["reads"])
"""
    found = subprocess.run([sys.executable, "-c", program, uri, cache], capture_output=True, text=True, check=True)
    assert found.stdout.split() == [str(total), "0", "0"]
    assert counts(tmp_path / "cache")["cold_bytes"] == first["cold_bytes"]


def test_epochs_after_the_first_fetch_nothing(filled, tmp_path, empty_cache):
    uri, blobs = filled
    ps.configure(memory_bytes=16 << 20)  # The block cache must not hide the cache.
    ds = ps.open(uri, cache=f"{tmp_path / 'cache'}:50MB")
    loader = ds.loader(batch_size=16, shuffle=True, seed=3, columns=["blob", "number"])

    def epoch():
        for batch in loader:
            assert all(blob == blobs[number] for blob, number in zip(batch["blob"], batch["number"], strict=True))

    assert received(ds, epoch) >= sum(map(len, blobs))
    assert [received(ds, epoch) for _ in range(2)] == [0, 0]
    loader.close()
    ps.configure(memory_bytes=512 << 20)


def test_explain_says_where_the_next_epoch_is(filled, tmp_path, empty_cache):
    uri, blobs = filled
    total = sum(map(len, blobs))
    program = """
import sys, penstock as ps
ps.configure(memory_bytes=int(sys.argv[3]) << 20)
loader = ps.open(sys.argv[1], cache=sys.argv[2]).loader(batch_size=16, shuffle=True, seed=3, columns=["blob"])
(line,) = [line for line in loader.explain().splitlines() if line.startswith("cache ")]
print(line.removeprefix("cache").strip())
"""

    def explained(cache, mebibytes):
        command = [sys.executable, "-c", program, uri, str(cache), str(mebibytes)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        found = re.findall(r"([\d.]+) (B|KiB|MiB) (?:of|will)", text)
        return text, [float(number) * {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20}[unit] for number, unit in found]

    _, (cached, cold) = explained(f"{tmp_path / 'cache'}:50MB", 16)
    assert cached == 0 and 0.99 * total <= cold <= 1.02 * total
    assert CliRunner().invoke(_app(), ["cache", "warm", uri, "--cache", str(tmp_path / "cache")]).exit_code == 0
    for mebibytes in (16, 512):
        # The process may already hold all of it in its own memory.
        text, amounts = explained(tmp_path / "cache", mebibytes)
        assert amounts[-1] == 0 and 0.99 * total <= sum(amounts) <= 1.02 * total, text


def test_a_small_cache_keeps_within_its_budget(filled, tmp_path, empty_cache):
    uri, blobs = filled
    ds = ps.open(uri, cache=f"{tmp_path / 'cache'}:1MB")
    for _ in range(3):
        check(ds, blobs)
        found = counts(tmp_path / "cache")
        assert found["bytes"] <= found["budget_bytes"] == 1_000_000
        used = sum(path.stat().st_blocks * 512 for path in (tmp_path / "cache" / "stores").rglob("*") if path.is_file())
        assert used <= 1_000_000


def test_the_limit_of_a_dataset_holds(filled, tmp_path, empty_cache):
    uri, blobs = filled
    check(ps.open(uri, cache=f"{tmp_path / 'cache'}:50MB?dataset=2MB"), blobs)
    (store,) = counts(tmp_path / "cache")["stores"]
    assert store["bytes"] <= store["budget_bytes"] == 2_000_000
    assert store["bytes"] > 1_000_000


def test_flipped_bits_and_lost_files_are_fetched_again(filled, tmp_path, empty_cache):
    uri, blobs = filled
    cache = tmp_path / "cache"
    check(ps.open(uri, cache=f"{cache}:50MB"), blobs)
    random = np.random.default_rng(2)
    for path in [path for path in (cache / "stores").rglob("*") if path.is_file()]:
        body = bytearray(path.read_bytes())
        for at in random.integers(len(body), size=40):
            body[at] ^= 1 << int(random.integers(8))
        path.write_bytes(body)
    check(ps.open(uri, cache=str(cache)), blobs)
    for path in [path for path in (cache / "stores").rglob("*") if path.is_file()]:
        path.unlink()
    check(ps.open(uri, cache=str(cache)), blobs)


def test_a_cache_that_fails_is_a_warning(filled):
    uri, blobs = filled
    with pytest.warns(RuntimeWarning, match="reads go to the store"):
        ds = ps.open(uri, cache="/proc/penstock/cache:1MB")
    check(ds, blobs)


@pytest.mark.parametrize("text", ["", "/a:", ":1GB", "/a:1GB,/a:1GB", "/a:1XB"])
def test_wrong_caches_are_refused(filled, tmp_path, text):
    uri, blobs = filled
    if not text:
        return check(ps.open(uri, cache=text), blobs)
    with pytest.raises(ps.InvalidInputError, match="cannot use cache"):
        ps.open(uri, cache=text)
    with pytest.raises(ps.InvalidInputError, match="it has no size yet"):
        ps.open(uri, cache=str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ps.InvalidInputError, match="the folder contains other files"):
        ps.open(uri, cache=f"{tmp_path}:1MB")


def test_the_variable_caches_stores_but_not_folders(filled, tmp_path, monkeypatch, empty_cache):
    uri, blobs = filled
    cache = tmp_path / "cache"
    monkeypatch.setenv("PENSTOCK_CACHE", f"{cache}:50MB")
    local = ps.create(tmp_path / "local", {"number": "int32"})
    local.append({"number": range(1000)})
    assert ps.open(tmp_path / "local")[5]["number"] == 5
    assert not cache.exists()
    check(ps.open(uri), blobs)
    assert counts(cache)["cold_bytes"] > 0


def test_verify_reads_the_store_and_not_the_cache(filled, tmp_path, minio, empty_cache):
    uri, blobs = filled
    ds = ps.open(uri, cache=f"{tmp_path / 'cache'}:50MB")
    check(ds, blobs)
    assert ds.verify()["problems"] == []
    bucket, prefix = str(uri).removeprefix("s3://").split("/", 1)
    for name in minio.names(bucket, f"{prefix}/d/"):
        minio.remove(bucket, name)
    check(ds, blobs)
    assert ds.verify()["problems"]


READER = """
import sys, numpy as np, penstock as ps
ps.configure(memory_bytes=16 << 20)
ds = ps.open(sys.argv[1], cache=sys.argv[2])
random = np.random.default_rng(int(sys.argv[3]))
print("open", flush=True)
while True:
    for batch in ds.loader(batch_size=8, shuffle=True, seed=int(random.integers(100)), columns=["blob"]):
        pass
    ds.take(random.permutation(len(ds))[:20])
"""


@pytest.mark.long
def test_killed_readers_leave_a_cache_that_needs_no_repair(filled, tmp_path, empty_cache):
    uri, blobs = filled
    random = np.random.default_rng(3)
    for kill in range(12):
        # Small enough that pages are evicted all the time, or large enough for everything.
        cache = tmp_path / f"cache {kill % 2}"
        spec = f"{cache}:{2 + 20 * (kill % 2)}MB"
        readers = [
            subprocess.Popen([sys.executable, "-c", READER, str(uri), spec, str(2 * kill + number)], stdout=subprocess.PIPE)
            for number in range(2)
        ]
        assert all(reader.stdout.readline() for reader in readers)
        time.sleep(float(random.random()) * 0.2)  # The sleep chooses the moment.
        for reader in readers:
            reader.kill()
            reader.communicate()
        check(ps.open(uri, cache=spec), blobs)
        found = counts(cache)
        assert found["bytes"] <= found["budget_bytes"]
    for number in range(2):
        verified = CliRunner().invoke(_app(), ["cache", "verify", "--cache", str(tmp_path / f"cache {number}"), "--json"])
        (found,) = json.loads(verified.stdout)
        # Processes that were killed may leave bytes that are counted but not used, and never the opposite.
        assert found["counted_bytes"] >= found["bytes"] == counts(tmp_path / f"cache {number}")["bytes"] > 0


def test_forks_share_the_cache(filled, tmp_path, empty_cache):
    uri, blobs = filled
    ds = ps.open(uri, cache=f"{tmp_path / 'cache'}:50MB")
    assert ds[3]["blob"] == blobs[3]
    children = []
    for number in range(4):
        child = os.fork()
        if child == 0:
            order = np.random.default_rng(number).permutation(SAMPLES)
            os._exit(0 if ds[order]["blob"] == [blobs[position] for position in order] else 1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0, 0]
    check(ds, blobs)
    total = sum(map(len, blobs))
    assert total <= counts(tmp_path / "cache")["cold_bytes"] <= total + 100_000


def test_what_fits_is_fetched_once_by_all_loaders(filled, tmp_path, empty_cache):
    uri, blobs = filled
    program = READER.replace("while True:", "for _ in range(2):")
    spec = f"{tmp_path / 'cache'}:50MB"
    readers = [subprocess.Popen([sys.executable, "-c", program, str(uri), spec, str(seed)], stdout=subprocess.DEVNULL) for seed in range(3)]
    assert [reader.wait() for reader in readers] == [0, 0, 0]
    total = sum(map(len, blobs))
    assert total <= counts(tmp_path / "cache")["cold_bytes"] <= total + 100_000


def test_a_pinned_dataset_stays(filled, tmp_path, empty_cache):
    uri, blobs = filled
    cache = f"{tmp_path / 'cache'}:7MB"
    check(ps.open(uri, cache=cache), blobs)
    run = CliRunner()
    assert run.invoke(_app(), ["cache", "pin", str(uri), "--cache", cache]).output == "pinned\n"
    other = ps.create(f"{uri}-other", {"blob": ps.Bytes()})
    other.append({"blob": blobs})
    assert ps.open(f"{uri}-other", cache=cache)[:]["blob"] == blobs

    def evicted():
        return {store["store"].split(" at ")[0]: store["evicted_bytes"] for store in counts(tmp_path / "cache")["stores"]}[str(uri)]

    assert evicted() == 0
    assert run.invoke(_app(), ["cache", "pin", str(uri), "--cache", cache, "--remove"]).output == "unpinned\n"
    program = READER.replace("while True:", "for _ in range(1):")
    subprocess.run([sys.executable, "-c", program, f"{uri}-other", cache, "1"], check=True, stdout=subprocess.DEVNULL)
    assert evicted() > 0


def test_the_command_line_warms_verifies_and_evicts(filled, tmp_path, empty_cache):
    uri, blobs = filled
    cache = tmp_path / "cache"
    run = CliRunner()
    warmed = run.invoke(_app(), ["cache", "warm", uri, "--cache", f"{cache}:50MB", "--json"])
    assert warmed.exit_code == 0, warmed.output
    report = json.loads(warmed.stdout)
    assert report["data_files"] >= 1 and report["data_bytes"] >= sum(map(len, blobs))
    ds = ps.open(uri, cache=str(cache))
    assert received(ds, lambda: check(ds, blobs)) == 0
    (path, *_) = sorted((path for path in (cache / "stores").rglob("*") if path.is_file()), key=lambda path: -path.stat().st_size)
    body = bytearray(path.read_bytes())
    body[10_000] ^= 1
    path.write_bytes(body)
    verified = run.invoke(_app(), ["cache", "verify", "--cache", str(cache), "--json"])
    assert verified.exit_code == 1 and "health of the drive" in verified.stderr
    (found,) = json.loads(verified.stdout)
    assert (found["corrupt_pages"], found["counted_bytes"] - found["bytes"]) == (1, 4096)
    assert found["bytes"] == counts(cache)["bytes"]
    assert counts(cache)["corrupt_pages"] == 1, "the counts of the drive say so, too"
    assert run.invoke(_app(), ["cache", "verify", "--cache", str(cache)]).exit_code == 0
    text = run.invoke(_app(), ["cache", "status", "--cache", str(cache)])
    assert text.exit_code == 0 and "corrupt pages" in text.output and "fetched" in text.output
    (store,) = [
        row["store"] for row in json.loads(run.invoke(_app(), ["cache", "status", "--cache", str(cache), "--json"]).stdout)[0]["stores"]
    ]
    # The dataset need not be reached.
    pinned = run.invoke(_app(), ["cache", "pin", store, "--cache", str(cache)])
    assert (pinned.exit_code, pinned.output) == (0, "pinned\n")
    mistyped = run.invoke(_app(), ["cache", "evict", "s3://bucket at http://nowhere", "--cache", str(cache)])
    assert mistyped.exit_code == 1 and "this cache has no store" in mistyped.stderr and store in mistyped.stderr
    assert isinstance(mistyped.exception, ps.InvalidInputError | SystemExit) and counts(cache)["bytes"] > 0
    evicted = run.invoke(_app(), ["cache", "evict", store, "--cache", str(cache)])
    assert evicted.exit_code == 0 and counts(cache)["bytes"] == 0
    assert run.invoke(_app(), ["cache", "status"]).exit_code == 2


JOB = """
import sys, time, penstock as ps
ps.configure(memory_bytes=16 << 20)  # The block cache must not hide the cache.
ds = ps.open(sys.argv[1], cache=sys.argv[2])
before = ds.stats()["received_bytes"]
loader = ds.loader(batch_size=2, shuffle=True, seed=4, columns=["blob"])
order = []
for epoch in range(3):
    for batch in loader:
        order += [len(blob) for blob in batch["blob"]]
        time.sleep(0.005)  # A step of the training.
        if epoch == 0 and len(order) == 40 and len(sys.argv) > 3:
            print("stops", flush=True)
            time.sleep(3600)  # Until it is killed.
print(ds.stats()["received_bytes"] - before, *order)
"""


def jobs(uri, cache, *more):
    """Run jobs at the same time, and return for each the bytes that it received and the lengths that it read."""
    commands = [[sys.executable, "-c", JOB, str(uri), cache, *arguments] for arguments in more]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    for process, arguments in zip(running, more, strict=True):
        if arguments:
            assert process.stdout.readline() == "stops\n"
            process.kill()
    found = [process.communicate()[0].split() for process in running]
    return [[int(number) for number in numbers] for numbers in found]


@pytest.mark.parametrize("part", [0.1, 0.5])
def test_a_stream_fetches_nothing_for_epochs_that_it_does_not_read(filled, tmp_path, empty_cache, part):
    """A training that is slower than the store leaves time to fetch early."""
    uri, blobs = filled
    ps.configure(memory_bytes=16 << 20)  # The block cache must not hide the cache.
    total = sum(map(len, blobs))
    ds = ps.open(uri, cache=f"{tmp_path / 'cache'}:{int(total * part)}B")
    loader = ds.loader(batch_size=8, shuffle=True, seed=3, columns=["blob"])

    def stream(epochs):
        for _ in loader.stream(epochs):
            time.sleep(0.03)  # A step of the training.

    # Whole pages are fetched: samples share those at their borders.
    assert total <= received(ds, lambda: stream(1)) <= 1.25 * total
    # The next stream begins with what was kept for it, and ends as exactly.
    assert received(ds, lambda: stream(2)) <= 2 * 1.25 * total - part * total
    loader.close()
    ps.configure(memory_bytes=512 << 20)


def test_jobs_of_one_order_fetch_each_byte_once(filled, tmp_path):
    """Three epochs of data of which half fits: two jobs receive together what one job receives, and have the same batches."""
    uri, _ = filled
    ((alone, *order),) = jobs(uri, f"{tmp_path / 'alone'}:3MB", [])
    (one, *first), (other, *second) = jobs(uri, f"{tmp_path / 'shared'}:3MB", [], [])
    assert first == second == order
    # Their plans may begin a few steps after they do, and what passes needs room on the drive.
    assert one + other <= 1.5 * alone, (one, other, alone)


@pytest.mark.long
def test_jobs_that_fill_a_cache_which_just_holds_all_evict_nothing(filled, tmp_path):
    uri, _ = filled
    ((alone, *order),) = jobs(uri, f"{tmp_path / 'alone'}:100MB", [])
    bytes_of_all = counts(tmp_path / "alone")["bytes"]
    for attempt in range(3):
        cache = tmp_path / f"shared-{attempt}"
        (one, *first), (other, *second) = jobs(uri, f"{cache}:{bytes_of_all * 6 // 5}", [], [])
        assert first == second == order
        assert one + other <= 1.05 * alone and counts(cache)["evicted_bytes"] == 0, (one, other, alone)


def test_a_job_whose_company_is_killed_continues(filled, tmp_path):
    uri, _ = filled
    (alone, *order), _ = jobs(uri, f"{tmp_path / 'cache'}:3MB", [], ["stops"])
    assert len(order) == 3 * SAMPLES and alone > 0


@pytest.mark.soak
def test_a_job_whose_company_is_stopped_continues(filled, tmp_path):
    """A stopped process keeps its locks. The other job waits for it once, for ten seconds."""
    uri, _ = filled
    cache = f"{tmp_path / 'cache'}:3MB"
    stopped = subprocess.Popen([sys.executable, "-c", JOB, str(uri), cache, "stops"], stdout=subprocess.PIPE, text=True)
    assert stopped.stdout.readline() == "stops\n"
    stopped.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    try:
        ((_, *order),) = jobs(uri, cache, [])
    finally:
        stopped.kill()
        stopped.wait()
    print(f"{time.monotonic() - began:.0f} seconds for three epochs")
    assert len(order) == 3 * SAMPLES

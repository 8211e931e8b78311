"""Benchmarks of changed datasets: what an update or a deletion writes, how fast the dataset is read afterwards,
and how fast readers of a snapshot are beside a writer (E25).

Limits are the same dataset before the change, read in turns with it in the same process.
"""

from __future__ import annotations

import itertools
import multiprocessing
import pathlib
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import penstock as ps
from harness import bar, interleaved, stored_bytes, synced_file
from serving import touch

Result = dict[str, Any]
FRAGMENTS, EACH, TAKE = 1000, 200, 512
COLUMNS = ["label", "vector"]


def _scan(ds: ps.Dataset) -> Callable[[], None]:
    def read() -> None:
        for batch in ds.scan(COLUMNS, batch_size=4096):
            touch(batch.column("vector").storage.flatten().to_numpy())

    return read


def _takes(ds: ps.Dataset) -> Callable[[], None]:
    order = np.random.default_rng(1).permutation(len(ds))

    def read() -> None:
        for begin in range(0, len(order), TAKE):
            touch(ds.take(order[begin : begin + TAKE], columns=COLUMNS)["vector"])

    return read


def _epoch(ds: ps.Dataset) -> Callable[[], None]:
    loader = ds.loader(batch_size=256, shuffle=True, seed=0, columns=COLUMNS)

    def read() -> None:
        for batch in loader:
            touch(batch["vector"])

    return read


def overlays(folder: pathlib.Path, _photos: pathlib.Path | None) -> Result:
    """Change 1 % of the samples of 1,000 fragments, then delete 30 % of the samples. Read both columns before and after."""
    place, rng = folder / "set", np.random.default_rng(0)
    ds = ps.create(place, {"label": "int64", "vector": ps.Tensor((128,), "float32"), "image": ps.Bytes()})
    image = rng.bytes(2000)
    for number in range(FRAGMENTS):
        vectors = rng.random((EACH, 128), dtype=np.float32)
        ds.append({"label": np.full(EACH, number), "vector": vectors, "image": [image] * EACH})
    samples, size = FRAGMENTS * EACH, stored_bytes(place)
    handles = {"before": ds}
    for name in ("updated", "deleted"):
        shutil.copytree(place, folder / name)
        handles[name] = ps.open(folder / name)
    changed = rng.choice(samples, samples // 100, replace=False)
    with handles["updated"].transaction() as tx:
        tx.update({"label": np.zeros(len(changed), np.int64), "vector": np.zeros((len(changed), 128), np.float32)}, row_ids=changed)
    with handles["deleted"].transaction() as tx:
        tx.delete(row_ids=rng.choice(samples, samples * 3 // 10, replace=False))
    written = {name: stored_bytes(folder / name) - size for name in ("updated", "deleted")}
    bars, lines, times = [], [], {}
    for what, make in (("full scan", _scan), ("shuffled takes of 512", _takes), ("loader epoch", _epoch)):
        reads = {name: make(handle) for name, handle in handles.items()}
        for read in reads.values():
            read()
        spent = times[what] = interleaved(reads)
        each = {name: spent[name]["median_seconds"] / len(handles[name]) for name in reads}
        lines.append(f"{what}: " + ", ".join(f"{name} {seconds * 1e6:.2f} µs/sample" for name, seconds in each.items()))
        for name in ("updated", "deleted"):
            bars.append(bar(f"{what}: time per live sample, {name} / before", each[name] / each["before"], at_most=1.2))
    allowed = {"updated": len(changed) * (8 + 512 + 4), "deleted": samples * 3 // 10 * 4}
    for name, needed in allowed.items():
        value = written[name] / (needed + (32 << 10))
        bars.append(bar(f"bytes written, {name} / (values + 4 bytes a sample + 32 KiB)", value, at_most=2))
    return {"what": f"{samples} samples in {FRAGMENTS} fragments", "written": written, "times": times, "lines": lines, "bars": bars}


CHANGES = COMMITS = 10_000


def branches(folder: pathlib.Path, _photos: pathlib.Path | None) -> Result:
    """Create branches, merge 10,000 disjoint changes of each side, made in one commit or in 10,000, and open any of thousands of snapshots.

    The limit of each is a small file, synced with its folder, which is what a commit cannot do without.
    """
    rng, number = np.random.default_rng(0), itertools.count()
    functions: dict[str, Callable[[], None]] = {}
    for commits in (1, COMMITS):
        ds = ps.create(folder / f"{commits}", {"n": "int64", "vector": ps.Tensor((16,), "float32")})
        ids = ds.append({"n": np.arange(100_000), "vector": rng.random((100_000, 16), dtype=np.float32)}).row_ids
        exp, order = ds.create_branch("exp"), rng.permutation(ids)[: 2 * CHANGES].reshape(2, commits, -1)
        for handle, groups in zip((ds, exp), order, strict=True):
            for rows in groups:
                with handle.transaction() as tx:
                    tx.update({"n": -rows}, row_ids=rows)
                    tx.append({"n": rows[:1]})
        functions |= _merges(ds, exp, f"{commits} commits" if commits > 1 else "1 commit", number)
    snapshots = [commit.snapshot for commit in ds.log()]
    functions["open a snapshot"] = lambda: touch(ps.open(ds.uri, snapshot=snapshots[rng.integers(len(snapshots))])["n"][:1])
    functions["create a branch"] = lambda: ds.create_branch(f"new {next(number)}").refresh() and None
    functions["a synced file"] = lambda: synced_file(folder / f"file{next(number)}", 600)
    times = interleaved(functions)
    seconds = {name: spent["median_seconds"] for name, spent in times.items()}
    bars = [bar(f"{name}: seconds", seconds[name], at_most=1) for name in seconds if name.startswith("merge")]
    bars.append(bar("open any snapshot, and read one value: seconds", seconds["open a snapshot"], at_most=0.05))
    bars.append(bar("create a branch / two synced files", seconds["create a branch"] / seconds["a synced file"] / 2, at_most=2))
    lines = [f"{name}: {spent * 1e3:.2f} ms" for name, spent in seconds.items()]
    return {"what": f"{CHANGES} changes on each side of 100,000 samples", "times": times, "lines": lines, "bars": bars}


def _merges(ds: ps.Dataset, exp: ps.Dataset, made: str, number: Iterator[int]) -> dict[str, Callable[[], None]]:
    """Merge `exp` into new branches that begin at `ds`. The time includes the creation of the branch."""
    ours, theirs = ds.snapshot, exp.snapshot

    def merge() -> None:
        side = ds.create_branch(f"side {next(number)}", ours)
        side.merge(theirs)
        if len(side.log()[0].parents) != 2:
            raise AssertionError("nothing was merged")

    return {f"merge, {made} on each side": merge}


SAMPLES, WIDTH, BATCH, SECONDS = 50_000, 1024, 256, 4.0
WRITER_COMMITS, WRITER_BYTES = 5, 20_000_000  # per second


def _reader(uri: str, snapshot: str, seed: int, begin: float, answers: Any) -> None:
    """Run epochs over a snapshot for a while. Answer how many samples were read, and the sums of all epochs."""
    ds = ps.open(uri, snapshot=snapshot)
    loader = ds.loader(batch_size=BATCH, shuffle=True, seed=seed, threads=1)
    read, sums, sum_so_far = 0, [], 0
    while time.time() < begin:
        time.sleep(0.001)  # All readers begin at once.
    while time.time() < begin + SECONDS:
        for batch in loader:
            sum_so_far += int(batch["x"].sum(dtype=np.int64))
            read += len(batch["x"])
            if time.time() >= begin + SECONDS:
                break
        else:
            sums.append(sum_so_far)
            sum_so_far = 0
    answers.put((read, sums))


def _writer(uri: str, limited: bool, begin: float, answers: Any) -> None:
    """Append and change samples, at most as fast as the limits allow. Answer how many commits and bytes were written."""
    ds, commits, written, rng = ps.open(uri), 0, 0, np.random.default_rng(0)
    count = WRITER_BYTES // WRITER_COMMITS // WIDTH
    values = rng.integers(0, 255, (count, WIDTH), np.uint8)
    while time.time() < begin:
        time.sleep(0.001)
    while time.time() < begin + SECONDS:
        with ds.transaction("the next generation") as tx:
            tx.append({"x": values[count // 2 :]})
            tx.update({"x": values[: count // 2]}, row_ids=rng.choice(SAMPLES, count // 2, replace=False))
        commits, written = commits + 1, written + values.nbytes
        if limited:
            time.sleep(max(0.0, begin + commits / WRITER_COMMITS - time.time()))
    answers.put((commits, written))


def _run(folder: pathlib.Path, readers: int, writer: str) -> dict[str, Any]:
    place = folder / f"{time.time_ns()}"
    rng = np.random.default_rng(0)
    ds = ps.create(place, {"x": ps.Tensor((WIDTH,), "uint8")})
    values = rng.integers(0, 255, (SAMPLES, WIDTH), np.uint8)
    ds.append({"x": values})
    context = multiprocessing.get_context("spawn")
    answers, wrote, begin = context.Queue(), context.Queue(), time.time() + 3 + readers / 4
    running = [context.Process(target=_reader, args=(str(place), ds.snapshot, seed, begin, answers)) for seed in range(readers)]
    if writer != "off":
        running.append(context.Process(target=_writer, args=(str(place), writer == "limited", begin, wrote)))
    for process in running:
        process.start()
    found = [answers.get() for _ in range(readers)]
    done = wrote.get() if writer != "off" else (0, 0)
    for process in running:
        process.join()
    expected = int(values.sum(dtype=np.int64))
    changed = sum(total != expected for _, sums in found for total in sums)
    epochs = sum(len(sums) for _, sums in found)
    return {
        "samples_per_second": sum(read for read, _ in found) / SECONDS,
        "epochs": epochs,
        "changed_epochs": changed,
        "commits": done[0],
        "bytes": done[1],
    }


def beside(folder: pathlib.Path, _photos: pathlib.Path | None) -> Result:
    """Compare readers beside a writer with readers alone, in turns."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for _ in range(3):
        for readers, writer in ((2, "off"), (2, "limited"), (2, "unlimited")):
            runs.setdefault(f"{readers} readers, writer {writer}", []).append(_run(folder, readers, writer))
    for writer in ("off", "limited"):
        runs[f"16 readers, writer {writer}"] = [_run(folder, 16, writer)]
    rates = {name: statistics.median(one["samples_per_second"] for one in all) for name, all in runs.items()}
    changed = sum(one["changed_epochs"] for all in runs.values() for one in all)
    epochs = sum(one["epochs"] for all in runs.values() for one in all)
    wrote = runs["2 readers, writer limited"][0]
    kept = {readers: rates[f"{readers} readers, writer limited"] / rates[f"{readers} readers, writer off"] for readers in (2, 16)}
    return {
        "what": f"loader epochs over {SAMPLES} samples of {WIDTH} bytes, beside a writer of {WRITER_BYTES / 1e6:.0f} MB/s and {WRITER_COMMITS} commits/s",
        "runs": runs,
        "lines": [
            *(f"{name}: {rate:,.0f} samples/s" for name, rate in rates.items()),
            f"the limited writer made {wrote['commits']} commits and wrote {wrote['bytes'] / 1e6:.0f} MB in {SECONDS:.0f} s",
            f"16 readers keep {kept[16]:.2f} of their rate",
            f"{epochs} epochs were summed, {changed} of them had other values",
        ],
        "bars": [
            bar("2 readers: rate beside the limited writer / alone", kept[2], at_least=0.9),
            bar("epochs whose samples changed under a snapshot", changed, at_most=0),
        ],
    }

"""A benchmark of readers beside a writer (E25): a limited writer prepares the next data while readers train on a fixed snapshot."""

from __future__ import annotations

import multiprocessing
import pathlib
import statistics
import time
from typing import Any

import numpy as np
import penstock as ps

Result = dict[str, Any]
SAMPLES, WIDTH, BATCH, SECONDS = 50_000, 1024, 256, 6.0
COMMITS, BYTES = 5, 20_000_000  # per second


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
    count = BYTES // COMMITS // WIDTH
    values = rng.integers(0, 255, (count, WIDTH), np.uint8)
    while time.time() < begin:
        time.sleep(0.001)
    while time.time() < begin + SECONDS:
        with ds.transaction("the next generation") as tx:
            tx.append({"x": values[count // 2 :]})
            tx.update({"x": values[: count // 2]}, row_ids=rng.choice(SAMPLES, count // 2, replace=False))
        commits, written = commits + 1, written + values.nbytes
        if limited:
            time.sleep(max(0.0, begin + commits / COMMITS - time.time()))
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
        "what": f"loader epochs over {SAMPLES} samples of {WIDTH} bytes, beside a writer of {BYTES / 1e6:.0f} MB/s and {COMMITS} commits/s",
        "runs": runs,
        "lines": [
            *(f"{name}: {rate:,.0f} samples/s" for name, rate in rates.items()),
            f"the limited writer made {wrote['commits']} commits and wrote {wrote['bytes'] / 1e6:.0f} MB in {SECONDS:.0f} s",
            f"16 readers keep {kept[16]:.2f} of their rate",
            f"{epochs} epochs were summed, {changed} of them had other values",
        ],
        "bars": [
            {"what": "2 readers: rate beside the limited writer / alone", "value": kept[2], "at_least": 0.9},
            {"what": "epochs whose samples changed under a snapshot", "value": changed, "at_most": 0},
        ],
    }

"""Run one workload of one adapter in this process, in turns: `python -P -c "import serving; serving.serve()" ADAPTER WORKLOAD OPTIONS`.

An adapter is a file of bench/adapters for one system. Its header (PEP 723) pins the packages of its own environment; without a header, the
system runs in Penstock's. The file has a function for each workload that the system can run. The function gets the options as attributes,
prepares whatever a turn must not pay for, and returns the turn: a function that reads or writes once. A turn returns how many samples it
read or wrote, or the batches themselves, whose values are then touched here: each cache line of arrays and bytes, each text.

This process prints one line of JSON when it is ready, and one for each turn, which begins when a line arrives on standard input. A turn is
reported when this process and its workers are idle again, or after 5 s, so that no system prefetches in another's turn.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import gc
import hashlib
import itertools
import json
import operator
import os
import pathlib
import re
import resource
import sys
import time
import tomllib
import types
import zlib
from collections.abc import Iterable, Iterator
from importlib import metadata
from typing import Any

MASK = (1 << 64) - 1
TICKS = os.sysconf("SC_CLK_TCK")


def header(path: pathlib.Path) -> dict[str, Any]:
    """Return the inline metadata (PEP 723) of an adapter."""
    found = re.search(r"^# /// script\n(.*?)^# ///$", path.read_text(), re.S | re.M)
    return tomllib.loads(re.sub(r"^# ?", "", found[1], flags=re.M)) if found else {}


def digest(path: pathlib.Path) -> str:
    """Return what an environment is made from: the header of an adapter, and our Python."""
    return hashlib.sha256(json.dumps([header(path), sys.version]).encode()).hexdigest()


def versions(path: pathlib.Path) -> dict[str, str]:
    """Return the installed versions of the packages that an adapter names."""
    pinned = header(path)
    names = [
        re.split(r"[\[=<>!~ ]", one)[0]
        for one in (*pinned.get("dependencies", []), *pinned.get("tool", {}).get("bench", {}).get("build", []))
    ]
    found = {}
    for name in names or ["penstock", "numpy"]:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def touch(values: Any) -> int:
    """Read 8 of every 64 bytes of arrays and bytes, which loads each cache line, and all of each text. Return a digest of what was read."""
    import numpy as np

    if isinstance(values, dict):
        return functools.reduce(operator.xor, map(touch, values.values()), 0)
    if isinstance(values, list | tuple):
        if values and isinstance(values[0], str):
            return sum(map(hash, values)) & MASK
        return functools.reduce(operator.xor, map(touch, values), 0)
    if isinstance(values, bytes | bytearray | memoryview):
        values = np.frombuffer(values, np.uint8)
    elif not hasattr(values, "ravel"):
        return hash(values) & MASK
    # In order of memory, so that no system pays for a copy into another order.
    flat = np.asarray(values).ravel("K").view(np.uint8)
    return (
        int(np.bitwise_xor.reduce(flat[: len(flat) // 8 * 8].view(np.uint64)[::8])) if len(flat) >= 8 else int(np.bitwise_xor.reduce(flat))
    )


def check(values: Any, digest: int = 0) -> int:
    """Return a digest of all values, which depends on their order."""
    import numpy as np

    if isinstance(values, dict):
        return functools.reduce(lambda so_far, name: check(values[name], so_far), sorted(values), digest)
    if isinstance(values, list | tuple):
        return functools.reduce(lambda so_far, value: check(value, so_far), values, digest)
    if isinstance(values, str):
        values = values.encode()
    if not isinstance(values, bytes | bytearray | memoryview):
        values = np.ascontiguousarray(np.asarray(values))
    return zlib.crc32(values, digest)


def length(batch: Any) -> int:
    return length(next(iter(batch.values()))) if isinstance(batch, dict) else len(batch)


def tree(root: int) -> list[int]:
    """Return a process and its descendants. Those of a parent that has ended are missing."""
    parents = {}
    for folder in pathlib.Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])

    def descends(process: int) -> bool:
        while process not in (0, root):
            process = parents.get(process, 0)
        return process == root

    return [process for process in parents if descends(process)]


def resident_bytes(root: int) -> int:
    """Return the memory of a process and its descendants. What several of them share counts once, in parts (PSS)."""
    total = 0
    for process in tree(root):
        with contextlib.suppress(OSError):  # It has ended.
            found = re.search(r"^Pss:\s+(\d+) kB", pathlib.Path(f"/proc/{process}/smaps_rollup").read_text(), re.M)
            total += int(found[1]) << 10 if found else 0
    return total


def processor_seconds() -> float:
    """Return the processor seconds of this process and its descendants, including those that have ended."""
    spent = sum(one.ru_utime + one.ru_stime for one in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))
    for process in tree(os.getpid()):
        if process != os.getpid():
            with contextlib.suppress(OSError):
                fields = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
                spent += (int(fields[11]) + int(fields[12])) / TICKS
    return spent


def own_seconds() -> float:
    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime


def rest(longest_seconds: float = 5.0) -> bool:
    """Wait until this process and its workers use less than a tenth of a core for 0.1 s. Return whether they do."""
    end = time.monotonic() + longest_seconds
    before = processor_seconds()
    while time.monotonic() < end:
        time.sleep(0.1)
        now = processor_seconds()
        if now - before < 0.01:
            return True
        before = now
    return False


def device_bytes() -> int:
    """Return how many bytes this process and its descendants have read from devices, including those that have ended."""
    total = 0
    for process in tree(os.getpid()):
        with contextlib.suppress(OSError):
            found = re.search(r"^read_bytes: (\d+)", pathlib.Path(f"/proc/{process}/io").read_text(), re.M)
            total += int(found[1]) if found else 0
    return total


class Parallel(list[Any]):
    """Iterables of batches that are consumed at the same time, each in a thread."""


def consume(result: Any, read: Any, most: int | None = None) -> tuple[int, int, Any]:
    """Read the samples of a turn, or the first `most` batches. Return their number, a digest, and the shape and dtype of the first array."""
    if result is None or isinstance(result, int):
        return int(result or 0), 0, None
    if isinstance(result, Parallel):
        with concurrent.futures.ThreadPoolExecutor(len(result)) as pool:
            parts = list(pool.map(lambda part: consume(part, read, most), result))
        return sum(part[0] for part in parts), functools.reduce(operator.xor, (part[1] for part in parts)), parts[0][2]
    assert isinstance(result, Iterable)
    samples, digest, kind = 0, 0, None
    for batch in itertools.islice(result, most):
        digest ^= read(batch)
        kind = kind or [str(part) for part in (getattr(batch, "shape", None), getattr(batch, "dtype", None)) if part is not None]
        samples += length(batch)
    return samples, digest, kind


def sync(place: pathlib.Path) -> None:
    """Sync everything at `place`: all files, all folders, and the parent folder."""
    for path in [place, *place.rglob("*"), place.parent]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def turns(work: Any, durable: pathlib.Path | None) -> Iterator[dict[str, Any]]:
    """Run turns. With `durable`, what is in this folder is synced as part of each.

    A line is `go`, `go N` for the first N batches only, or `check`, which reads everything and is not timed by anyone.
    """
    for line in sys.stdin:
        read, most = (check if line.startswith("check") else touch), int(line.split()[1]) if len(line.split()) > 1 else None
        gc.collect()
        device, workers = device_bytes(), processor_seconds() - own_seconds()
        spent, began = own_seconds() + workers, time.perf_counter()
        samples, digest, kind = consume(work(), read, most)
        if durable:
            sync(durable)
        seconds = time.perf_counter() - began
        answer = {
            "seconds": seconds, "cpu_seconds": processor_seconds() - spent, "samples": samples, "digest": digest, "kind": kind,
            "device_bytes": device_bytes() - device,
        }  # fmt: skip
        answer["rested"] = rest()
        yield answer


def serve() -> None:
    """Run a workload of an adapter in turns: `ADAPTER WORKLOAD OPTIONS`."""
    del sys.argv[0]
    # The adapter is the main module, so that new processes that a system starts find its functions there.
    main = sys.modules["__main__"]
    main.__file__ = sys.argv[0]
    exec(compile(pathlib.Path(sys.argv[0]).read_text(), sys.argv[0], "exec", dont_inherit=True), vars(main))
    work, options = vars(main)[sys.argv[1]], types.SimpleNamespace(**json.loads(sys.argv[2]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What a system prints must not be read as an answer.
    turn = work(options)
    rest()
    print(json.dumps({"ready": versions(pathlib.Path(sys.argv[0]))}), file=answers, flush=True)
    for answer in turns(turn, pathlib.Path(options.place) if getattr(options, "durable", False) else None):
        print(json.dumps(answer), file=answers, flush=True)

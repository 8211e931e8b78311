"""Wait for other processes and threads. Tests sleep only here, or with a comment that explains why."""

import multiprocessing
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any


def until(condition: Callable[[], object], what: str, seconds: float = 300) -> None:
    """Return once the condition holds. If it does not hold in time, raise a TimeoutError that names the expected event."""
    last = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > last:
            raise TimeoutError(f"timed out after {seconds} s, waiting for: {what}")
        time.sleep(0.01)


def at_once(target: Callable[..., None], uri: object, calls: Iterable[object]) -> Iterator[Any]:
    """Call `target(uri, call, go, answers)` in a process for each call. All wait for `go`, and each puts one answer, which is yielded."""
    context = multiprocessing.get_context("fork" if str(uri).startswith("/") else "spawn")
    go, answers = context.Event(), context.Queue()
    workers = [context.Process(target=target, args=(str(uri), call, go, answers)) for call in calls]
    for worker in workers:
        worker.start()
    go.set()
    for _ in workers:
        yield answers.get(timeout=300)
    for worker in workers:
        worker.join()


def lines(process: subprocess.Popen[str], count: int) -> list[str]:
    """Return the next `count` lines that a process prints. The process awaits a reply after each line, so it cannot outrun the test."""
    found = []
    for _ in range(count):
        found.append(process.stdout.readline())
        process.stdin.write("next\n")
        process.stdin.flush()
    return found

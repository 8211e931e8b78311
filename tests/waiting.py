"""Waits for what another process or thread does. Tests sleep only here, or with a comment that says why."""

import subprocess
import time
from collections.abc import Callable


def until(condition: Callable[[], object], what: str, seconds: float = 60) -> None:
    """Return once the condition holds. If it does not hold in time, raise a TimeoutError that says what did not happen."""
    last = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > last:
            raise TimeoutError(f"{what}: not within {seconds} s")
        time.sleep(0.01)


def lines(process: subprocess.Popen[str], count: int) -> list[str]:
    """Return the next lines that a process prints. The process waits for an answer after each, so it is never further than that."""
    found = []
    for _ in range(count):
        found.append(process.stdout.readline())
        process.stdin.write("next\n")
        process.stdin.flush()
    return found

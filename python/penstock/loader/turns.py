"""Tracks which iteration of a loader is the current one."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from penstock.errors import ClosedError


class Turns:
    """Counts iterations. If two threads iterate at once, both are stopped, because each batch would reach only one of them."""

    def __init__(self) -> None:
        self.current = 0
        self._why = _replaced
        self._inside: set[tuple[int, int]] = set()  # (process, thread) pairs that are waiting for a batch.

    def end(self) -> None:
        """End the current iteration, if any, because the loader was closed or got another position."""
        self._why = _closed
        self.current += 1

    def begin(self) -> int:
        """End the current iteration, if any, and begin another."""
        self._why = _replaced
        self.current += 1
        return self.current

    def check_alone(self) -> None:
        """Raise ClosedError if another thread in this process is waiting for a batch."""
        me = (os.getpid(), threading.get_ident())
        if any(pid == me[0] and thread != me[1] for pid, thread in self._inside):
            self._why = _two_threads
            self.current += 1  # Stop the other thread too, because each batch would reach only one of the two.
            raise _two_threads()

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Mark this thread as waiting for a batch."""
        me = (os.getpid(), threading.get_ident())
        self._inside.add(me)
        try:
            yield
        finally:
            self._inside.discard(me)

    def check(self, turn: int) -> None:
        """Raise ClosedError if this turn is over."""
        if turn != self.current:
            raise self._why()


def _closed() -> ClosedError:
    return ClosedError("this loader was closed, or given another epoch or state, during iteration", code="loader-closed")


def _replaced() -> ClosedError:
    return ClosedError("this iteration is over: another iteration of the same loader has begun", code="loader-closed")


def _two_threads() -> ClosedError:
    text = "two threads are iterating over this loader at once: each batch would reach only one of them"
    return ClosedError(text, code="loader-closed", hint="give each thread its own loader, or pass batches through a queue")

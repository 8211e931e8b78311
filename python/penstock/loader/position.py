"""Where a loader is, and which iteration is the current one."""

from __future__ import annotations

import dataclasses
import os
import threading

from penstock import _core
from penstock.errors import ClosedError
from penstock.loader.recipe import Recipe


@dataclasses.dataclass
class Position:
    """What a loader reads, and how far it is.

    A loader that gets another epoch or state gets another position. An iteration keeps the position with which it began, so a thread that
    changes the position never mixes two of them.
    """

    recipe: Recipe
    core: _core.Loader
    base: tuple[int, int] = (0, 0)
    """The epoch and draw at which step 0 begins."""
    step: int = 0
    """The next step to deliver, counted from step 0."""
    in_hand: bool = False
    """Whether the consumer still has the last delivered batch, because it has not asked for the next one."""
    resumes: bool = True
    """Whether the next iteration resumes at `step`. An iteration that does not resume begins the next epoch."""


class Turns:
    """Counts iterations. If two threads iterate at once, both are stopped, because each batch would reach only one of them."""

    def __init__(self) -> None:
        self.current = 0
        self._why = _replaced
        self.inside: dict[tuple[int, int], bool] = {}
        """The threads that are beginning an iteration or waiting for a batch. A thread enters before it checks whether it is alone, so of
        two threads at least one notices the other."""

    def end(self) -> None:
        """End the current iteration, if any, because the loader was closed or got another position."""
        self._why = _closed
        self.current += 1

    def begin(self) -> int:
        """End the current iteration, if any, and begin another."""
        self._why = _replaced
        self.current += 1
        return self.current

    def check_alone(self, me: tuple[int, int]) -> None:
        """Raise ClosedError if another thread in this process is in `inside`."""
        if any(pid == me[0] and thread != me[1] for pid, thread in tuple(self.inside)):
            self._why = _two_threads
            self.current += 1  # Stop the other thread too, because each batch would reach only one of the two.
            raise _two_threads()

    def check(self, turn: int) -> None:
        """Raise ClosedError if this turn is over."""
        if turn != self.current:
            raise self._why()


def this_thread() -> tuple[int, int]:
    """Return this process and thread."""
    return os.getpid(), threading.get_ident()


def _closed() -> ClosedError:
    return ClosedError("this loader was closed, or given another epoch or state, during iteration", code="loader-closed")


def _replaced() -> ClosedError:
    return ClosedError("this iteration is over: another iteration of the same loader has begun", code="loader-closed")


def _two_threads() -> ClosedError:
    text = "two threads are iterating over this loader at the same time: each batch would reach only one of them"
    return ClosedError(text, code="loader-closed", hint="give each thread its own loader, or pass batches through a queue")

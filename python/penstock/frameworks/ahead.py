"""Reads rows ahead in a separate thread. Only `arrow.scan` uses this module."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from penstock import _core

Result = TypeVar("Result")
_live: weakref.WeakSet[Ahead[Any]] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Stop the threads while Python still runs them. During shutdown, threads cannot take the GIL, so waiting for one would hang.
    Scans in later exit handlers start no threads.
    """
    Ahead.exiting = True
    for ahead in list(_live):
        ahead.stop()


class Ahead(Generic[Result]):
    """Runs `read` in a separate thread and holds its result. If that thread does not exist, as in a forked child, `result` calls `read`."""

    exiting = False

    def __init__(self, read: Callable[[], Result]) -> None:
        self._read, self._process = read, os.getpid()
        self._done: list[Result] = []
        self._error: BaseException | None = None
        self._stop = _core.Stop()
        self._worker: int | None = None
        self._at_work = threading.Lock()
        self._at_work.acquire()
        _live.add(self)
        try:
            if Ahead.exiting:
                raise RuntimeError("the interpreter is exiting")
            threading.Thread(target=self._run, name="penstock-scan", daemon=True).start()
        except RuntimeError:  # The thread could not be started, so `result` calls `read`.
            self._at_work.release()

    def _run(self) -> None:
        self._worker = threading.get_ident()
        try:
            self._stop.heed()
            self._done.append(self._read())
        except BaseException as error:
            self._error = error
        finally:
            self._at_work.release()

    def stop(self) -> None:
        """Cancel the read and wait for its thread to stop."""
        self._stop.set()
        self._wait()

    def _wait(self) -> None:
        """Wait for a lock instead of calling `join`: garbage collection may call this method while Python is starting a thread
        and holding a lock that `join` needs.
        """
        if os.getpid() == self._process and threading.get_ident() != self._worker:
            with self._at_work:
                pass

    def result(self) -> Result:
        """Wait for the result. Re-raises any error from `read`."""
        self._wait()
        if self._error is not None:
            raise self._error
        return self._done[0] if self._done else self._read()

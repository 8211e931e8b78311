"""Calls that change a transaction: a commit must not contain half of one."""

from __future__ import annotations

from types import TracebackType
from typing import Literal, Self

from penstock import _core
from penstock.errors import ClosedError


class Calls:
    """The calls that began to change a transaction and have not ended. While there are any, the transaction cannot be committed.

    A call that raises an error before it changed anything ends. A call that was interrupted, or that failed after it had changed something, never
    does. So whatever interrupts a call, even in the lines below, the transaction cannot be committed with half of it.
    """

    def __init__(self, core: _core.Transaction) -> None:
        self.core = core
        self.under_way: set[Call] = set()
        self.failed: BaseException | None = None
        # Commits that were not refused. Later calls are.
        self.commits: set[object] = set()

    def begin(self) -> Call:
        """Begin a call, in a `with` statement."""
        return Call(self)

    def close(self) -> None:
        """Refuse later calls. Raises: ClosedError if a call has not ended."""
        commit = object()
        self.commits.add(commit)  # Before the check, so that a call of another thread sees it or is seen.
        if not self.under_way:
            return
        if self.failed is not None:
            why = str(self.failed) or type(self.failed).__name__
            raise ClosedError(f"cannot commit: an earlier change failed ({why})", hint="begin another transaction; nothing was committed")
        self.commits.discard(commit)
        raise ClosedError(
            "cannot commit: a change in this transaction is in progress or was interrupted",
            hint="commit after the call returns; if it was interrupted, begin another transaction",
        )


class Call:
    """One call. The core counts what each thread has changed, because an interrupt may arrive as soon as a change is made."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._before = calls.core.changes()

    def __enter__(self) -> Self:
        self._calls.under_way.add(self)
        if self._calls.commits:  # Another thread may have begun to commit in the meantime.
            self._calls.under_way.discard(self)
            raise ClosedError("cannot use this transaction: it has already been committed or aborted, or a call was interrupted")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> Literal[False]:
        if error is None or self._calls.core.changes() == self._before:
            self._calls.under_way.discard(self)
        else:
            self._calls.failed = error
        return False

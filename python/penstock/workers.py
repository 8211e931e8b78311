"""Processes for the user's Python stage: `loader(python_workers=N)`. Each runs the core on every N-th step and hands finished batches back.

Spawned, never forked. A batch comes as a pickle whose arrays lie in a file without a name (memfd), which the consumer maps: nothing is copied
on its side, nothing is left behind when any process dies. Which samples make a step, and their random numbers, are the loader's.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import traceback
from multiprocessing import reduction
from typing import TYPE_CHECKING, Any

from penstock.errors import InternalError, InvalidInputError
from penstock.view import Batch

if TYPE_CHECKING:
    from penstock.loader import Loader

# Finished batches that wait at a worker, beside the one it makes.
WAITING = 2
# Smaller batches are sent through the pipe.
MAPPED_FROM_BYTES = 256 << 10
PAGE_BYTES = mmap.PAGESIZE
WHY_IT_DIED = {
    -signal.SIGKILL: "SIGKILL mostly comes from the kernel's out-of-memory killer: less memory_bytes or fewer workers",
    1: 'its traceback stands above; a script that starts workers needs `if __name__ == "__main__":`, since they import it',
}


class Pool:
    """Workers that make steps begin, begin + 1, … in turn."""

    def __init__(self, loader: Loader, workers: int, begin: int, end: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.processes: list[Any] = []
        self.pipes: list[Any] = []
        self.begin = self.step = begin
        self.owner = os.getpid()
        try:
            packed = pickle.dumps(loader.parcel(workers))
        except Exception as error:
            raise InvalidInputError(
                f"cannot send this loader to python_workers: {error}", code="invalid-argument",
                hint="functions must stand at the top of a module that workers can import; datasets not in memory://",
            ) from error  # fmt: skip
        for number in range(min(workers, max(1, end - begin))):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=work, args=(theirs, packed, begin + number, end, workers), daemon=True, name=f"penstock-worker-{number}"
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def goes_on(self, step: int) -> bool:
        """Whether `step` is what it gives next."""
        return bool(self.processes) and self.step == step and os.getpid() == self.owner

    def next(self) -> tuple[Batch, dict[str, Any]] | None:
        """Give the next batch, finished but for its output type, and what is known of it."""
        if not self.processes:
            return None
        number = (self.step - self.begin) % len(self.processes)
        pipe = self.pipes[number]
        try:
            kind, body, places = pipe.recv()
            if kind == "mapped":
                handle = reduction.recv_handle(pipe)
        except (EOFError, OSError):  # A worker that was killed mostly resets the connection.
            self.processes[number].join(5)
            code = self.processes[number].exitcode
            self.close()
            raise InternalError(f"a python worker died, exit code {code}", hint=WHY_IT_DIED.get(code)) from None
        self.step += 1
        with contextlib.suppress(OSError):
            pipe.send(None)  # Room for another.
        if kind == "error":
            self.close()
            raise _raised(body, places)
        if kind == "plain":
            return pickle.loads(body, buffers=places)  # type: ignore[no-any-return]
        try:
            memory = memoryview(mmap.mmap(handle, places[-1][1], access=mmap.ACCESS_COPY))
        finally:
            os.close(handle)
        return pickle.loads(body, buffers=[memory[begin:end] for begin, end in places])  # type: ignore[no-any-return]

    def close(self) -> None:
        """End all workers; one that does not end by itself within two seconds is killed."""
        if os.getpid() != self.owner:
            return
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
        self.processes, self.pipes = [], []


def _raised(body: bytes, text: str) -> BaseException:
    try:
        error: BaseException = pickle.loads(body)
    except Exception:
        return InternalError(f"a python worker failed:\n{text}")
    error.add_note(f"in a python worker:\n{text}")
    return error


def work(pipe: multiprocessing.connection.Connection, packed: bytes, begin: int, end: int, stride: int) -> None:
    """Run a worker until its pipe is closed, or its steps are over."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the consumer's, who ends its workers.
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        credits = WAITING
        try:
            loader = pickle.loads(packed).unpacked()
            loader._core.start(begin, end, stride)
            for step in range(begin, end, stride):
                given = loader._core.next()
                batch, about = given
                loader._step = step + 1
                before = loader._function_seconds
                finished = loader._staged(batch, about), {name: about[name] for name in ("valid", "bytes", "refused")}
                finished[1]["function_seconds"] = loader._function_seconds - before
                while credits == 0 or pipe.poll():
                    pipe.recv()
                    credits += 1
                send(pipe, finished)
                credits -= 1
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise
        except BaseException as error:
            text = traceback.format_exc()
            try:
                body = pickle.dumps(error)
            except Exception:
                body = b""
            pipe.send(("error", body, text))
        while True:  # Until the consumer has taken what waits.
            pipe.recv()


def send(pipe: Any, value: Any) -> None:
    """Send a value; large arrays in a file without a name."""
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    raw = [buffer.raw() for buffer in buffers]
    if sum(part.nbytes for part in raw) < MAPPED_FROM_BYTES:
        pipe.send(("plain", body, [bytearray(part) for part in raw]))
        return
    handle, places, at = os.memfd_create("penstock-batch", os.MFD_CLOEXEC), [], 0
    try:
        for part in raw:
            places.append((at, at + part.nbytes))
            written = 0
            while written < part.nbytes:
                written += os.pwrite(handle, part[written:], at + written)
            at = -(-(at + part.nbytes) // PAGE_BYTES) * PAGE_BYTES
        places[-1] = (places[-1][0], max(places[-1][1], 1))
        pipe.send(("mapped", body, places))
        reduction.send_handle(pipe, handle, None)
    finally:
        os.close(handle)

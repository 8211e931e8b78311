"""Worker processes for the user's Python stages: `loader(python_workers=N)`.

Each worker runs the core for every N-th step and sends its batches back. Workers are new processes, never forks, and they do not import the
program's own script. Functions of modules are sent by name; those of scripts, notebooks and `python -c`, and lambdas, with their code, by
cloudpickle. A batch arrives as a pickle whose arrays are in an unnamed file (memfd). The consumer maps this file, so nothing is copied, and
no file remains if a process dies. The samples of a step and their random numbers do not depend on the worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import inspect
import mmap
import multiprocessing.connection
import multiprocessing.spawn
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import traceback
import weakref
from collections.abc import Iterator
from typing import Any

from penstock import _core
from penstock.errors import ClosedError, InternalError, InvalidInputError
from penstock.loader.recipe import Recipe
from penstock.views.readable import Batch

# How many finished batches may be queued by a worker, in addition to the batch in progress.
WAITING = 2
# Smaller batches are sent through the pipe.
MAPPED_FROM_BYTES = 256 << 10
PAGE_BYTES = mmap.PAGESIZE
# Before Python 3.13, each mapped batch that is kept also keeps a descriptor open.
UNTRACKED: Any = {"trackfd": False} if sys.version_info >= (3, 13) else {}
WHY_IT_DIED = {
    -signal.SIGKILL: "SIGKILL usually comes from the kernel's out-of-memory killer: reduce memory_bytes or python_workers",
    1: "see its traceback above",
}


class Process(subprocess.Popen[bytes]):
    """A Python process that runs `run` on its end of a pipe. Unlike those of multiprocessing, it does not import the program's script, so a
    script needs no `if __name__ == "__main__":`.
    """

    def __init__(self, pipe: Any) -> None:
        code = f"import sys; sys.path[:] = {sys.path!r}; from penstock.loader.workers import run; run({pipe.fileno()})"
        command = [os.fsdecode(multiprocessing.spawn.get_executable()), *subprocess._args_from_interpreter_flags(), "-c", code]  # type: ignore[attr-defined]
        super().__init__(command, pass_fds=[pipe.fileno()], stdin=subprocess.DEVNULL)

    @property
    def exitcode(self) -> int | None:
        """The exit code, or minus the signal that ended the process. None while it runs."""
        return self.poll()

    def is_alive(self) -> bool:
        return self.exitcode is None

    def join(self, seconds: float | None = None) -> None:
        """Wait until the process ends, at most this long."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(seconds)


def _kill(processes: list[Process], owner: int) -> None:
    """Kill the processes that still run when their pool or the program ends. A fork of their owner leaves them alone."""
    for process in processes if os.getpid() == owner else ():
        if process.is_alive():
            process.kill()
            process.join()


class Pool:
    """Workers that take turns making batches, one step each, starting from step `begin`."""

    def __init__(self, recipe: Recipe, base: tuple[int, int], begin: int, end: int) -> None:
        """Start workers. Step 0 begins at `base`, an epoch and a draw."""
        stride = recipe.processes
        # Each worker's process and our end of its pipe. Empty once the pool is closed.
        self.workers: list[tuple[Any, Any]] = []
        self.begin = begin
        # The step whose batch comes next. None while a batch is being received: after an interrupt, the pipes are in an unknown state.
        self.step: int | None = begin
        # Times and storage operations per worker so far.
        self.spent: dict[int, dict[str, int]] = {}
        self.read: dict[int, dict[str, int]] = {}
        self.owner = os.getpid()
        packed = _sendable(recipe.for_worker(stride), base)
        started: list[Process] = []
        self._ending = weakref.finalize(self, _kill, started, self.owner)
        for _ in range(min(stride, max(1, end - begin))):
            ours, theirs = multiprocessing.connection.Pipe()
            before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
            try:
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Inherited: Ctrl-C must not end a worker that is starting.
                started.append(Process(theirs))
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
            self.workers.append((started[-1], ours))
        for number, (_, pipe) in enumerate(self.workers):
            with contextlib.suppress(OSError):  # `next` reports a worker that died.
                pipe.send(((packed, begin + number, end, stride, _core.configure()), sys.argv))

    def continues_with(self, step: int) -> bool:
        """Return whether the next batch from the pool is that of `step`."""
        return bool(self.workers) and self.step == step and os.getpid() == self.owner

    def next(self) -> tuple[Batch, dict[str, Any]] | None:
        """Return the next batch, finished except for the output conversion, and its statistics."""
        if os.getpid() != self.owner:
            raise ClosedError(
                "cannot continue this loader: its workers belong to the process that began to iterate, and this process is a fork of it",
                code="loader-closed", hint="start a new iteration here",
            )  # fmt: skip
        step, self.step = self.step, None
        workers = self.workers  # Another thread may close this pool at any time.
        if not workers or step is None:
            return None
        number = (step - self.begin) % len(workers)
        process, pipe = workers[number]
        try:
            kind, body, places = pipe.recv()
            if kind == "mapped":
                handle = _received(pipe)
        except (EOFError, OSError) as error:  # A killed worker usually resets the connection.
            if not self.workers:
                return None
            if getattr(error, "errno", None) == errno.EMFILE:
                self.close()
                raise InternalError(
                    "cannot receive a batch from a python worker: this process has too many open files",
                    hint="keep fewer batches, or raise the limit (`ulimit -n`)",
                ) from None
            process.join(5)
            code = process.exitcode
            self.close()
            raise InternalError(f"a python worker died with exit code {code}", hint=WHY_IT_DIED.get(code)) from None
        with contextlib.suppress(OSError):
            pipe.send(None)  # Signals that the worker may send another batch.
        if kind == "error":
            self.close()
            raise _raised(body, places)
        buffers = places
        if kind == "mapped":
            try:
                memory = memoryview(mmap.mmap(handle, places[-1][1], access=mmap.ACCESS_COPY, **UNTRACKED))
            finally:
                os.close(handle)
            buffers = [memory[begin:end] for begin, end in places]
        batch, about = pickle.loads(body, buffers=buffers)
        self.spent[number], self.read[number] = about.pop("spent"), about.pop("read")
        self.step = step + 1
        return batch, about

    def close(self) -> None:
        """Stop all workers. A worker that does not exit within two seconds is killed."""
        if os.getpid() != self.owner:
            return
        workers, self.workers = self.workers, []
        for _, pipe in workers:
            # End the connection at both ends. The descriptor is closed with the last reference: another thread may be reading from it.
            ctypes.CDLL(None).shutdown(pipe.fileno(), socket.SHUT_RDWR)  # Needs no second descriptor, unlike the method of a socket.
        last = time.monotonic() + 2
        for process, _ in workers:
            process.join(max(0, last - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._ending.detach()


def _sendable(recipe: Recipe, base: tuple[int, int]) -> bytes:
    """Return a recipe as bytes for workers. Raises InvalidInputError, which says what cannot be sent."""
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps((recipe, base)))
    except Exception as error:
        for fn in (*recipe.stages.per_sample, *recipe.stages.per_batch):
            text = _unsendable(getattr(fn, "fn", fn))
            if text is not None:
                raise InvalidInputError(
                    f"cannot send {fn!r} to python_workers: {text}",
                    hint="make such objects inside the function; or move it to a module that workers can import, which is sent by name",
                ) from error  # fmt: skip
        raise InvalidInputError(f"cannot send this loader to python_workers: {error}", hint="memory:// datasets cannot be sent") from error


def _unsendable(fn: Any) -> str | None:
    """Return why a function cannot be sent, or None if it can be."""
    why = _refusal(fn)
    if why is None:
        return None
    used: dict[str, Any] = dict(getattr(fn, "__dict__", {}))
    with contextlib.suppress(TypeError):  # Only functions of Python have variables.
        found = inspect.getclosurevars(getattr(fn, "__func__", fn))
        used |= {**found.globals, **found.nonlocals}
    for name, value in used.items():
        if _refusal(value) is not None:
            return f"it uses `{name}`, a {type(value).__name__}, which cannot be pickled"
    return why


def _refusal(value: Any) -> str | None:
    import cloudpickle

    try:
        cloudpickle.dumps(value)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _dumped(value: Any, **options: Any) -> bytes:
    """Pickle a value. Objects whose classes came from the program's script are pickled with their classes, which the program knows again."""
    try:
        return pickle.dumps(value, **options)
    except Exception:
        import cloudpickle

        if buffers := getattr(options.get("buffer_callback"), "__self__", None):
            buffers.clear()
        return bytes(cloudpickle.dumps(value, **options))


@contextlib.contextmanager
def _socket(pipe: Any) -> Iterator[socket.socket]:
    with socket.fromfd(pipe.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as ours:
        ours.setblocking(True)  # A default timeout of the program's sockets would apply to the pipe too.
        yield ours


def _received(pipe: Any) -> int:
    """Receive a descriptor. Raises OSError with EMFILE if this process may not open another one."""
    with _socket(pipe) as ours:
        message, handles, _, _ = socket.recv_fds(ours, 1, 1)
    if not message:
        raise EOFError
    if not handles:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return handles[0]


def _raised(body: bytes, text: str) -> BaseException:
    try:
        error = pickle.loads(body)
    except Exception:
        error = None
    if not isinstance(error, BaseException):
        return InvalidInputError(
            f"a python worker failed with an exception that cannot be pickled:\n{text}",
            code="invalid-value",
            hint="raise an exception that can be pickled",
        )
    error.add_note(f"in a python worker:\n{text}")
    return error


def run(handle: int) -> None:
    """Run a worker, which is a new process with this end of a pipe."""
    pipe = multiprocessing.connection.Connection(handle)
    with contextlib.suppress(EOFError, ConnectionResetError):
        arguments, sys.argv[:] = pipe.recv()
        work(pipe, *arguments)


def work(
    pipe: multiprocessing.connection.Connection, packed: bytes, begin: int, end: int, stride: int, budgets: tuple[int, int, int, int]
) -> None:
    """Run a worker with the budgets of the consumer process, until the consumer closes the pipe."""
    _core.configure(*budgets)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The consumer handles Ctrl-C and stops its workers.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    owner, steps = os.getpid(), range(begin, end, stride)
    made = _made(packed, begin, end, stride)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        credits = WAITING
        for _ in steps:
            try:
                finished = next(made)
            except BaseException as error:
                if os.getpid() != owner:
                    raise  # A user's function forked this process. The child must not use the pipe.
                pipe.send(("error", *_packed(error)))
                break
            if os.getpid() != owner:
                os._exit(1)
            try:
                sendable = pickled(finished)
            except Exception as error:
                what = f"a function returned a value that cannot be sent from a python worker: {type(error).__name__}: {error}"
                hint = "return arrays, tensors, numbers or text; python_workers=0 runs functions in this process"
                pipe.send(("error", *_packed(InvalidInputError(what, code="invalid-value", hint=hint))))
                break
            while credits == 0 or pipe.poll():
                pipe.recv()
                credits += 1
            send(pipe, *sendable)
            credits -= 1
        while True:  # Wait until the consumer has read all batches and closed the pipe.
            pipe.recv()


def _made(packed: bytes, begin: int, end: int, stride: int) -> Iterator[tuple[Batch, dict[str, Any]]]:
    """Yield batches, finished except for the output conversion, each with its statistics and this worker's totals."""
    try:
        recipe, base = pickle.loads(packed)
    except Exception as error:
        raise InvalidInputError(
            f"cannot load this loader in a python worker: {type(error).__name__}: {error}",
            hint="workers must be able to import the modules that functions come from; set PYTHONPATH, or install them",
        ) from error  # fmt: skip
    before, core = recipe.counted(), recipe.open(base)
    core.start(begin, end, stride)
    for step in range(begin, end, stride):
        given = core.next()
        if given is None:
            raise InternalError(f"the core of a python worker ended before step {step}")
        about = given[1]
        finished = recipe.finished(core, *given)
        spent = {**core.stats(), "function_ns": int(recipe.stages.seconds * 1e9)}
        read = {name: value - before.get(name, 0) for name, value in recipe.counted().items() if value != before.get(name, 0)}
        yield finished, {**{name: about[name] for name in ("valid", "bytes", "refused")}, "spent": spent, "read": read}


def _packed(error: BaseException) -> tuple[bytes, str]:
    text = traceback.format_exc()
    try:
        return _dumped(error), text
    except Exception:
        return b"", text


def pickled(value: Any) -> tuple[bytes, list[memoryview]]:
    """Return a value as a pickle, and the memory of its arrays separately."""
    buffers: list[pickle.PickleBuffer] = []
    body = _dumped(value, protocol=5, buffer_callback=buffers.append)
    return body, [buffer.raw() for buffer in buffers]


def send(pipe: Any, body: bytes, raw: list[memoryview]) -> None:
    """Send the result of `pickled`. On Linux, large arrays are sent in an unnamed file."""
    if sys.platform != "linux" or sum(part.nbytes for part in raw) < MAPPED_FROM_BYTES:
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
        os.ftruncate(handle, places[-1][1])  # The last arrays may be empty, so that their place lies beyond what was written.
        pipe.send(("mapped", body, places))
        with _socket(pipe) as ours:
            socket.send_fds(ours, [b"d"], [handle])
    finally:
        os.close(handle)

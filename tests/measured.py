"""Measure memory as reported by the kernel. Programs run in fresh processes, so other tests do not affect the results."""

import os
import pathlib
import subprocess
import sys
import threading


def anonymous():
    """Return the size of this process's anonymous resident memory in bytes."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon:"))


def peak():
    """Return this process's peak resident memory so far, in bytes."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM:"))


class Grown:
    """A context manager that measures the peak growth of anonymous memory in bytes. A thread samples the memory every millisecond."""

    def __enter__(self):
        self.peak, self.before, self._over = 0, anonymous(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self):
        while not self._over.wait(0.001):
            self.peak = max(self.peak, anonymous() - self.before)

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()


def run(program, *arguments, **variables):
    """Run a program with extra environment variables, and return its output. The program can import what tests can import."""
    folder = pathlib.Path(__file__).parent
    paths = [str(folder), str(folder.parent / "tools"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout


def peak_growth(program, *arguments):
    """Run a program under a memory budget of 64 MiB, and return the number printed. The first argument is a path for a new dataset."""
    head = """
import sys, numpy as np, penstock as ps
from measured import peak
from penstock import importers
from penstock.frameworks import arrow
ps.configure(memory_bytes=64 << 20, threads=2)
tiny = ps.create(sys.argv[1] + "-warm", {"x": "int8"}); tiny.append({"x": [1]}); tiny[0]
"""
    # In some runs, Arrow's default allocator allocates another 32 MiB.
    return int(run(head + program, *arguments, ARROW_DEFAULT_MEMORY_POOL="jemalloc"))

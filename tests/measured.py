"""Measures anonymous memory by the kernel's count. Programs run in a fresh process, so that other tests have no effect."""

import os
import pathlib
import subprocess
import sys
import threading


def anonymous():
    """Return the resident bytes of this process that are not pages of files."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon:"))


class Grown:
    """Context manager that measures how far anonymous memory grows, as `peak` bytes. A thread samples it every millisecond."""

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


def run(program, *arguments):
    """Run a program, which can import this module, and return its output."""
    paths = [str(pathlib.Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
    return done.stdout

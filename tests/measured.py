"""Anonymous memory by the kernel's count, measured in a process of its own, which nothing else of the tests has touched."""

import os
import pathlib
import subprocess
import sys
import threading


def anonymous():
    """Bytes that this process holds and that are not pages of files."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon:"))


class Grown:
    """What a block of code takes at most, beyond what there was: `peak` bytes; looked at every millisecond by a thread."""

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
    """What a program prints; it can import this file."""
    paths = [str(pathlib.Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
    return done.stdout

"""One stored value as a file that can be read and sought."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any


class ValueFile(io.RawIOBase):
    """A value of `size` bytes, of which `read(start, end)` returns a part."""

    def __init__(self, size: int, read: Callable[[int, int], bytes]) -> None:
        self._size, self._read, self._at = size, read, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}.get(whence)
        if begin is None or begin + offset < 0:
            raise ValueError(f"cannot seek to {offset} with whence={whence}")
        self._at = begin + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = memoryview(buffer).cast("B")
        found = self._read(self._at, self._at + len(wanted))
        wanted[: len(found)] = found
        self._at += len(found)
        return len(found)

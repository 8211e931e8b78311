"""Extents of a cache as its files have them, for tests that change them behind the back of a reader. See `crates/cache/src/extent`."""

from __future__ import annotations

import contextlib
import pathlib
import struct

PAGE_BYTES, BLOCK_BYTES = 4096, 1 << 20


class Extent:
    """A file of a cache with the pages of an object of at most 1 GiB. Raises ValueError if the end of the file is damaged."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        body = path.read_bytes()
        if len(body) < 32:
            raise ValueError("too short")
        _, self.object_bytes, number, self.identity_bytes, self.note_bytes, _ = struct.unpack("<8sQIIII", body[-32:])
        self.pages = -(-self.object_bytes // PAGE_BYTES)
        self.table = -(-self.object_bytes // 8) * 8
        self.stamps = self.table + 4 * self.pages
        self.identity = self.stamps + 4 * -(-self.object_bytes // BLOCK_BYTES)
        self.note = self.identity + self.identity_bytes
        self.footer = self.note + self.note_bytes
        if number != 0 or len(body) != self.footer + 32:
            raise ValueError("another length")
        # The store, the name of the object, and its version.
        self.name = body[self.identity : self.note].decode().split("\n")[1]

    def cached(self) -> set[int]:
        """Return the numbers of the pages that are stored."""
        table = self.path.read_bytes()[self.table : self.stamps]
        return {page for page, (crc,) in enumerate(struct.iter_unpack("<I", table)) if crc}

    def flip(self, at: int, bit: int = 0) -> None:
        with self.path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ (1 << bit)]))

    def set_stamps(self, times: dict[int, int]) -> None:
        """Set when blocks were used last, in seconds since 1970."""
        with self.path.open("r+b") as file:
            for block, seconds in times.items():
                file.seek(self.stamps + 4 * block)
                file.write(struct.pack("<I", seconds))


def extents_of(cache: pathlib.Path) -> list[Extent]:
    """Return the sound extents of a cache's drive, in the order of their names."""
    found = []
    for path in (cache / "stores").rglob("*"):
        if path.is_file():
            with contextlib.suppress(ValueError):
                found.append(Extent(path))
    return sorted(found, key=lambda extent: extent.name)


def pages_of(begin: int, end: int) -> set[int]:
    """Return the numbers of the pages with these bytes."""
    return set(range(begin // PAGE_BYTES, -(-end // PAGE_BYTES)))

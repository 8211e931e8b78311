"""Finds out whether an import ran already, by a digest of its source that is in the properties of its commit."""

from __future__ import annotations

import hashlib
import itertools
import pathlib
from collections.abc import Sequence
from typing import Any

from penstock.dataset import Dataset
from penstock.history.log import Commit

PROPERTY = "imported"
# How many commits of a branch are looked at, newest first.
COMMITS = 1000
# Files up to this size are read whole. Of larger ones, the digest has pieces of `PIECE_BYTES`, and of many files, it has `PIECES` files.
WHOLE_BYTES, PIECE_BYTES, PIECES = 4 << 10, 64 << 10, 256
# A single file up to this size is read whole.
LONE_BYTES = PIECES * PIECE_BYTES


def digest_of(folder: pathlib.Path, files: Sequence[pathlib.Path], options: dict[str, Any]) -> str:
    """Return a digest of the names and sizes of files, of parts of their contents, and of the options that choose samples.

    Cost: at most 16 MiB are read, and all files of up to 4 KiB.
    """
    made = hashlib.blake2b(repr(sorted(options.items())).encode(), digest_size=16)
    sizes = [file.stat().st_size if file.exists() else 0 for file in files]
    large = [place for place, size in enumerate(sizes) if size > WHOLE_BYTES]
    some = set(large if len(large) <= PIECES else [large[at * len(large) // PIECES] for at in range(PIECES)])
    for place, (file, size) in enumerate(zip(files, sizes, strict=True)):
        name = file.relative_to(folder).as_posix() if len(files) > 1 else ""
        made.update(f"{len(name)} {size} ".encode() + name.encode("utf-8", "surrogateescape"))
        if size <= WHOLE_BYTES or (len(files) == 1 and size <= LONE_BYTES):
            made.update(file.read_bytes() if file.is_file() else b"")
        elif place in some:
            count = max(2, PIECES // len(large))
            with file.open("rb") as opened:
                for piece in range(count):
                    opened.seek((size - min(size, PIECE_BYTES)) * piece // (count - 1))
                    made.update(opened.read(PIECE_BYTES))
    return made.hexdigest()


def find(dataset: Dataset, digest: str) -> Commit | None:
    """Return the newest commit that imported a source with this digest, among the newest 1,000 of the branch. Cost: reads their records.

    Commits that a reset has undone do not count.
    """
    counted = {dataset.snapshot}
    for commit in itertools.islice(dataset.log(), COMMITS):
        if commit.snapshot not in counted:
            continue
        counted.update(commit.parents[1:] if commit.kind == "reset" else commit.parents)
        for entry in commit.transactions:
            noted = entry.properties.get(PROPERTY)
            if isinstance(noted, dict) and noted.get("digest") == digest:
                return commit
    return None

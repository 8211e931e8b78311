"""Finds out what a dataset has already of a source: samples by their keys, such as paths, and tables by a digest in a commit's properties."""

from __future__ import annotations

import dataclasses
import decimal
import hashlib
import itertools
import os
import pathlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.dataset import Dataset
from penstock.errors import AlreadyExistsError, InvalidInputError
from penstock.history.log import Commit
from penstock.importers.shared.chunks import contents_of, part_of
from penstock.importers.shared.content import Content
from penstock.importers.shared.source import Chunk, Refusal, Report
from penstock.values.checks import is_arrow

PROPERTY = "imported"
# How many commits of a branch are looked at, newest first.
COMMITS = 1000
# Files up to this size are read whole. Of larger ones, the digest has pieces of `PIECE_BYTES`, and of many files, it has `PIECES` files.
WHOLE_BYTES, PIECE_BYTES, PIECES = 4 << 10, 64 << 10, 256
# A single file up to this size is read whole.
LONE_BYTES = PIECES * PIECE_BYTES
# The column with the paths of images, and how many keys are read at a time.
PATH, KEYS_AT_ONCE = "path", 1 << 16
# How many images are compared at a time, and with how many samples of one key.
IMAGES_AT_ONCE, COPIES = 64, 64
HINT = 'mode="append" (--mode append) imports them again, and "skip-existing" leaves them out'


def digest_of_text(*texts: str) -> str:
    """Return a digest of texts, for a source that is not a file."""
    return hashlib.blake2b("\0".join(texts).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def digest_of(folder: pathlib.Path, files: Sequence[pathlib.Path], root: pathlib.Path | None) -> str:
    """Return a digest of the names and sizes of files, of parts of their contents, and of the folder of the files that they name.

    Cost: at most 16 MiB are read, and all files of up to 4 KiB.
    """
    made = hashlib.blake2b(str(root and root.resolve()).encode("utf-8", "surrogateescape"), digest_size=16)
    sizes = [file.stat().st_size if file.exists() else 0 for file in files]
    large = [place for place, size in enumerate(sizes) if size > WHOLE_BYTES]
    some = set(large if len(large) <= PIECES else [large[at * len(large) // PIECES] for at in range(PIECES)])
    alone = len(files) == 1
    for place, (file, size) in enumerate(zip(files, sizes, strict=True)):
        name = "" if alone else os.path.relpath(file, folder)
        made.update(f"{len(name)} {size} ".encode() + name.encode("utf-8", "surrogateescape"))
        if size <= WHOLE_BYTES or (alone and size <= LONE_BYTES):
            made.update(file.read_bytes() if file.is_file() else b"")
        elif place in some:
            count = max(2, PIECES // len(large))
            with file.open("rb") as opened:
                for piece in range(count):
                    opened.seek((size - min(size, PIECE_BYTES)) * piece // (count - 1))
                    made.update(opened.read(PIECE_BYTES))
    return made.hexdigest()


def place_of(source: pathlib.Path) -> str:
    """Return a digest of the absolute path of a source."""
    return hashlib.blake2b(os.fsencode(source.resolve()), digest_size=8).hexdigest()


@dataclasses.dataclass
class Earlier:
    """An earlier import of a source. `same` says whether the source had the same contents, and `whole` whether the dataset still has all of its
    rows.
    """

    commit: Commit
    same: bool
    whole: bool


def find(dataset: Dataset, note: Mapping[str, Any], limit: int | None, content: Content | None) -> Earlier | None:
    """Return the newest import of a source with this note's digest, or else of one from its place. Returns None if the newest 1,000 commits
    of the branch have neither. Cost: reads their records.

    Commits that a reset has undone do not count. An import with another limit is a part. Rows in memory are the same if they begin with all
    those that were noted, since there may be more by now.
    """

    def begins_with(noted: Mapping[str, Any]) -> bool:
        rows = noted.get("rows")
        if "rows" not in note or content is None or type(rows) is not int or not 0 < rows < content.rows:
            return False
        digest = content.digest(rows)
        return digest is not None and noted.get("digest") == digest_of_text(repr(None), digest)

    counted, deleted = {dataset.snapshot}, False
    other: Earlier | None = None
    for commit in itertools.islice(dataset.log(), COMMITS):
        if commit.snapshot not in counted:
            continue
        counted.update(commit.parents[1:] if commit.kind == "reset" else commit.parents)
        for entry in commit.transactions:
            noted = entry.properties.get(PROPERTY)
            if isinstance(noted, dict) and (noted.get("digest") == note["digest"] or begins_with(noted)):
                enough = noted.get("limit") in (None, limit)
                return Earlier(commit, True, enough and not deleted and noted.get("left_out") == 0)
            if isinstance(noted, dict) and note["place"] and noted.get("place") == note["place"]:
                other = other or Earlier(commit, False, False)
        deleted = deleted or commit.samples_deleted > 0
    return other


class Known:
    """The keys of a dataset's samples, and the contents of its images. Holds 16 bytes per sample. Cost: reads the column of keys.

    `unique` says whether two samples of the dataset must not have one key.
    """

    def __init__(self, dataset: Dataset, key: str, image: str | None, unique: bool) -> None:
        self.dataset, self.key, self.image, self.unique = dataset, key, image, unique
        batches = dataset.select_columns([key]).batches(KEYS_AT_ONCE)
        keys = itertools.chain.from_iterable(keys_of(batch[key]) for batch in batches)
        hashes = np.fromiter(map(hash, keys), np.int64, len(dataset))
        self._order = np.argsort(hashes, kind="stable")
        self._hashes = hashes[self._order]

    def _places(self, key: Any) -> npt.NDArray[np.int64]:
        if key is None:
            return np.empty(0, np.int64)
        low, high = (int(np.searchsorted(self._hashes, hash(key), side)) for side in ("left", "right"))
        return self._order[low : min(high, low + COPIES)]

    def find(self, keys: Sequence[Any], images: Sequence[Any]) -> list[bool | None]:
        """Return for each key whether the dataset has the sample: True, False for another image with this key, or None.

        Raises: InvalidInputError (key-not-unique).
        """
        places = [self._places(key) for key in keys]
        rows = np.repeat(np.arange(len(keys)), [len(place) for place in places])
        wanted = np.concatenate(places) if places else np.empty(0, np.int64)
        found: list[bool | None] = [None] * len(keys)
        step = IMAGES_AT_ONCE if self.image else KEYS_AT_ONCE
        for start in range(0, len(wanted), step):
            columns = [self.key, *([self.image] if self.image else [])]
            batch = self.dataset.take(wanted[start : start + step], columns=columns, decode=False)
            there = keys_of(batch[self.key])
            for at, row in enumerate(rows[start : start + step].tolist()):
                if there[at] != keys[row]:  # Other keys may have the same hash.
                    continue
                if self.unique and found[row] is not None:
                    text = f"`{self.key}` is not a key: two samples in the dataset have {keys[row]!r}"
                    raise InvalidInputError(text, code="key-not-unique", hint="delete one of the samples, or use another key")
                # Only bytes can be compared with what is stored.
                same = self.image is None or not isinstance(images[row], bytes) or batch[self.image][at] == images[row]
                found[row] = bool(found[row] or same)
        return found


def without(chunks: Iterable[Chunk], known: Known, skip: bool, report: Report) -> Generator[Chunk, None, None]:
    """Leave out the samples that the dataset has, and count them in the report. Refuses other images with a known key.

    Raises: AlreadyExistsError, unless `skip` is true.
    """
    for chunk in chunks:
        keys = keys_of(chunk.columns.get(known.key, [None] * chunk.rows))
        given = chunk.columns.get(known.image or "", [None] * chunk.rows)
        images = [contents_of(value) for value in (given.to_pylist() if is_arrow(given) else given)]
        images = [bytes(value) if isinstance(value, bytearray | memoryview) else value for value in images]
        found = known.find(keys, images)
        if not skip and (first := next((key for key, there in zip(keys, found, strict=True) if there is not None), None)) is not None:
            text = f"cannot import `{first}`: the dataset already has a sample with this {known.key}"
            raise AlreadyExistsError(text, code="already-imported", hint=HINT)
        rows = [row for row, there in enumerate(found) if there is None]
        report.skipped += sum(there is True for there in found)
        if len(rows) == chunk.rows:
            yield chunk
            continue
        why = f"the dataset has a different image with this {known.key}; import this one with mode append, or under another {known.key}"
        others = [Refusal(chunk.name(row), "already-imported", why) for row, there in enumerate(found) if there is False]
        part = part_of(chunk, rows)
        part.refused = [*chunk.refused, *others]
        yield part


def keys_of(values: Any) -> list[Any]:
    """Return keys as text and int, or None for a null.

    >>> keys_of([np.int64(3), b"a", None]), keys_of(np.ma.MaskedArray([1, 2], [False, True]))
    ([3, 'a', None], [1, None])
    """
    listed = values.to_pylist() if is_arrow(values) else values.tolist() if isinstance(values, np.ndarray) else values
    return [_plain(value) for value in listed]


def _plain(value: Any) -> Any:
    if hasattr(value, "item") and not isinstance(value, str):  # A number of NumPy or torch, or an array of no dimensions.
        value = value.item() if getattr(value, "ndim", 0) == 0 else None
    if isinstance(value, bytes | bytearray | memoryview):
        try:
            return bytes(value).decode()
        except ValueError:  # The core refuses it.
            return None
    return value if isinstance(value, str | int | float | decimal.Decimal) else None

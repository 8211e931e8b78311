"""`ps.files`: load folders of NPY arrays or images in place, without conversion or a copy on disk. Unlike datasets, files have no
checksums.
"""

from __future__ import annotations

import glob
import hashlib
import json
import math
import os
import pathlib
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock import _core
from penstock.columns.category import Category
from penstock.columns.column_type import ColumnType
from penstock.columns.image import Image
from penstock.columns.tensor import Tensor
from penstock.columns.text import Text
from penstock.dataset import create
from penstock.errors import InvalidInputError, NotFoundError, UnsupportedError
from penstock.schema import Schema
from penstock.values.checks import is_utf8
from penstock.values.dtypes import dtype_name
from penstock.views.view import View

IMAGES = (".jpg", ".jpeg", ".png", ".webp")


class Files(View):
    """Files as samples, with the columns `array` (NPY) or `image`, `path` (relative to the common folder) and `label` (the parent folder).

    Supports `loader(…)` like a view; other reads require a dataset (`penstock import`). `labels` lists the label names in code order.
    Files must not change while they are read. Only their lengths are verified, so damage is found only if decoding fails.
    """

    def __init__(self, root: pathlib.Path, names: Sequence[str], sizes: Sequence[int], io: str) -> None:
        paths = [name.replace(os.sep, "/") for name in names]
        about = create(f"memory://penstock-files-{uuid.uuid4().hex}", {"path": Text(), "label": Category()})
        about.append({"path": paths, "label": [pathlib.PurePosixPath(path).parent.name for path in paths]})
        super().__init__(about._snapshot, about._view)
        self.labels = about.vocabulary("label")
        self.root, self._bytes = root, sum(sizes)
        self._given = (root, names, sizes, io)
        listing = json.dumps(list(zip(paths, sizes, strict=True)))
        self._hash = hashlib.sha256(listing.encode()).hexdigest()[:32]
        npy = paths[0].lower().endswith(".npy")
        self._kind: ColumnType
        if npy:
            self._kind, places = _arrays(root, paths)
        else:
            self._kind, places = Image(), [(0, [])] * len(paths)
        self._name = "array" if npy else "image"
        entries = [(path, size, begin, free) for path, size, (begin, free) in zip(paths, sizes, places, strict=True)]
        self._files = _core.Files(str(root), io, json.dumps({"name": self._name, **self._kind.spec()}), entries)

    @property
    def uri(self) -> str:
        """The folder that contains all files."""
        return str(self.root)

    @property
    def snapshot(self) -> str:
        """A hash of the file names and sizes."""
        return self._hash

    @property
    def _identity(self) -> str:
        return self._hash

    def _pin(self, name: str) -> None:
        raise UnsupportedError("cannot pin files in place: they have no snapshots", hint="omit pin=")

    def _other(self, what: str, samples: int) -> str:
        return f"a state depends on the names and sizes of its files: the state has {samples} files, but {self.root} has {len(self)}"

    @property
    def schema(self) -> Schema:
        """The column types by name."""
        return Schema({self._name: self._kind, **super().schema})

    def _column_bytes(self, columns: Sequence[str]) -> tuple[int, int, float]:
        if self._name not in columns:
            return super()._column_bytes(columns)
        return self._bytes, 0, self._bytes / max(1, len(self._snapshot))

    def _counts(self) -> int:
        return id(self._files)

    def _kept_bytes(self, columns: Sequence[str]) -> tuple[int, int, int]:
        return super()._kept_bytes([name for name in columns if name != self._name])

    def stats(self) -> dict[str, int]:
        """Return counts of the storage operations so far."""
        return dict(self._files.counters()) if self._files else {}

    def _unsupported(self, *_: Any, **__: Any) -> Any:
        """Refuse all reads except those through a loader."""
        raise UnsupportedError("files in place can be read only through a loader", hint="`penstock import` makes a dataset from them")

    def __reduce__(self) -> tuple[Any, ...]:
        return (Files, self._given)

    take = select = select_columns = scan = torch = __getitem__ = __iter__ = __arrow_c_stream__ = _unsupported
    _repr_html_: Any = None


def files(pattern: str | os.PathLike[str], *, io: str = "auto") -> Files:
    """Find files to load in place: `.npy` files of the same dtype and rank, or JPEG, PNG and WebP images. `**` matches nested folders.

    `io`: "direct" bypasses the page cache (io_uring, O_DIRECT) and "buffered" uses plain reads; by default, large files are mapped.
    A loader state depends on the file sizes and the names relative to the common folder, so the state also works for a copy elsewhere.
    Cost: one stat per file and, for NPY files, one read of the header.

    >>> import numpy as np, pathlib, tempfile, penstock as ps
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> for number in range(4): np.save(folder / f"{number}.npy", np.full((2, 3), number, np.float32))
    >>> batch = next(iter(ps.files(folder / "*.npy").loader(batch_size=4)))
    >>> batch["array"].shape, batch["path"]
    ((4, 2, 3), ['0.npy', '1.npy', '2.npy', '3.npy'])
    """
    if not isinstance(pattern, str | os.PathLike):
        raise InvalidInputError(f"cannot load {pattern!r}: expected a glob", hint='for example "folder/*.npy"')
    text = os.fspath(pattern)
    found = sorted(path for path in glob.glob(text, recursive=True) if os.path.isfile(path))
    kinds = {pathlib.Path(path).suffix.lower() for path in found}
    if not found:
        hint = "match the files, not their folder: `/*.jpg`, or `/**/*.jpg`" if os.path.isdir(text) else None
        hint = "use glob.escape for names that contain *, ? or [" if hint is None and os.path.exists(text) else hint
        raise NotFoundError(f"no files match `{text}`", code="source-not-found", hint=hint)
    if kinds != {".npy"} and not kinds <= set(IMAGES):
        raise InvalidInputError(
            f"cannot load `{text}`: it matches {', '.join(sorted(kinds))} files",
            hint="match only .npy files, or only .jpg, .jpeg, .png and .webp files",
        )
    absolute = [os.path.abspath(path) for path in found]
    root = pathlib.Path(os.path.commonpath([os.path.dirname(path) for path in absolute]))
    names = [os.path.relpath(path, root) for path in absolute]
    odd = [name for name in names if not is_utf8(name)]
    if odd:
        raise InvalidInputError(f"cannot load {os.fsencode(odd[0])!r}: its name is not UTF-8", hint="rename it")
    return Files(root, names, [os.stat(path).st_size for path in absolute], io)


def _refused(dtype: np.dtype[Any], shape: tuple[int, ...], fortran: bool) -> tuple[str, str] | None:
    """Return why such arrays cannot be loaded and how to fix them, or None if they can be loaded."""
    if fortran and len(shape) > 1:
        return "it is in Fortran order", "np.save(path, np.ascontiguousarray(a))"
    if dtype.hasobject:
        return "it contains Python objects", "save arrays of numbers"
    if not dtype.isnative:
        return f"{dtype} is not in native byte order", f"np.save(path, a.astype({dtype.newbyteorder('=').str!r}))"
    if dtype.kind in "mM" and np.datetime_data(dtype) != ("us", 1):
        return (
            f"{dtype} does not count microseconds",
            f'np.save(path, a.astype("{"datetime64" if dtype.kind == "M" else "timedelta64"}[us]"))',
        )
    try:
        dtype_name(dtype)
    except InvalidInputError as error:
        return error.message, error.hint or ""
    return None


def _arrays(root: pathlib.Path, paths: Sequence[str]) -> tuple[Tensor, list[tuple[int, list[int]]]]:
    """Read the headers. Return the column type and, for each file, the offset of its values and the sizes of its free dimensions."""
    found = []
    for path in paths:
        try:
            with open(root / path, "rb") as file:
                version = np.lib.format.read_magic(file)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, fortran, dtype = read(file)
                begin, size = file.tell(), os.fstat(file.fileno()).st_size
        except Exception as error:  # For a malformed header, NumPy propagates any exception that Python's parser raises.
            text = error if isinstance(error, EOFError | OSError) else "its header is not an NPY header of at most 10,000 characters"
            raise InvalidInputError(f"cannot load `{root / path}`: {text}") from error
        refused = _refused(dtype, shape, fortran)
        if refused:
            text, hint = refused
            raise UnsupportedError(f"cannot load `{root / path}`: {text}", hint=hint)
        if any(side < 0 for side in shape) or size - begin != dtype.itemsize * math.prod(shape):
            raise InvalidInputError(
                f"cannot load `{root / path}`: its header declares {dtype} of shape {shape}, which does not fit its {size} bytes"
            )
        found.append((begin, shape, dtype))
    _, first, dtype = found[0]
    for path, (_, shape, other) in zip(paths, found, strict=True):
        if other != dtype or len(shape) != len(first):
            raise InvalidInputError(
                f"cannot load `{root / path}`: it is {other} with {len(shape)} dimensions, but `{paths[0]}` is {dtype} with {len(first)}"
            )
    sizes = tuple(size if all(shape[axis] == size for _, shape, _ in found) and size else None for axis, size in enumerate(first))
    places = [(begin, [size for size, fixed in zip(shape, sizes, strict=True) if fixed is None]) for begin, shape, _ in found]
    return Tensor(sizes, dtype_name(dtype)), places

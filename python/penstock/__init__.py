"""Penstock: a versioned, transactional, columnar store for multimodal datasets that feeds training at memory speed.

>>> import penstock as ps
>>> ds = ps.create("memory://tour", {"text": ps.Text(), "label": ps.Label(["cat", "dog"])})
>>> receipt = ds.append({"text": ["purrs", "barks"], "label": ["cat", "dog"]})
>>> ds[1]["text"], int(ds[1]["label"])
('barks', 1)
"""

from __future__ import annotations

import importlib
import logging as _logging  # noqa: F401 - its fork hook must run after `_load`, which waits for imports that need logging's lock.
import os
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock import importers as importers
    from penstock import torch as torch
    from penstock import transforms as transforms
    from penstock._core import VERSION as __version__
    from penstock.changes.receipt import Receipt
    from penstock.changes.stage import Stage
    from penstock.columns.blob import Bytes
    from penstock.columns.boxes import Boxes
    from penstock.columns.category import Category
    from penstock.columns.image import Image
    from penstock.columns.json_text import Json
    from penstock.columns.keypoints import Keypoints
    from penstock.columns.label import Label, Labels
    from penstock.columns.mask import Mask
    from penstock.columns.scalar import Scalar
    from penstock.columns.tensor import Tensor
    from penstock.columns.text import Text
    from penstock.dataset import Dataset, configure, create, open
    from penstock.errors import (
        AlreadyExistsError,
        ClosedError,
        ConflictError,
        CorruptError,
        Error,
        InternalError,
        InvalidInputError,
        NotFoundError,
        OutOfRangeError,
        PermissionDeniedError,
        UnavailableError,
        UnsupportedError,
    )
    from penstock.history.log import Commit, Compaction, Difference, Log
    from penstock.loader import Loader
    from penstock.loader.files import Files, files
    from penstock.loader.mixture import Mix, mix
    from penstock.loader.order import Replacement, Window
    from penstock.ragged import Ragged
    from penstock.transaction import Transaction
    from penstock.views.column import Column
    from penstock.views.concat import Concat, concat
    from penstock.views.view import View

__all__ = [
    "AlreadyExistsError",
    "Boxes",
    "Bytes",
    "Category",
    "ClosedError",
    "Column",
    "Commit",
    "Compaction",
    "Concat",
    "ConflictError",
    "CorruptError",
    "Dataset",
    "Difference",
    "Error",
    "Files",
    "Image",
    "InternalError",
    "InvalidInputError",
    "Json",
    "Keypoints",
    "Label",
    "Labels",
    "Loader",
    "Log",
    "Mask",
    "Mix",
    "NotFoundError",
    "OutOfRangeError",
    "PermissionDeniedError",
    "Ragged",
    "Receipt",
    "Replacement",
    "Scalar",
    "Stage",
    "Tensor",
    "Text",
    "Transaction",
    "UnavailableError",
    "UnsupportedError",
    "View",
    "Window",
    "__version__",
    "concat",
    "configure",
    "create",
    "files",
    "mix",
    "open",
]

# Maps each module to its public names. Names are imported on first use, so that `import penstock` and `penstock --help` are fast.
_NAMES = {
    "penstock.changes.receipt": "Receipt",
    "penstock.changes.stage": "Stage",
    "penstock.columns.blob": "Bytes",
    "penstock.columns.boxes": "Boxes",
    "penstock.columns.category": "Category",
    "penstock.columns.image": "Image",
    "penstock.columns.json_text": "Json",
    "penstock.columns.keypoints": "Keypoints",
    "penstock.columns.label": "Label Labels",
    "penstock.columns.mask": "Mask",
    "penstock.columns.scalar": "Scalar",
    "penstock.columns.tensor": "Tensor",
    "penstock.columns.text": "Text",
    "penstock.dataset": "Dataset configure create open",
    "penstock.transaction": "Transaction",
    "penstock.history.log": "Commit Compaction Difference Log",
    "penstock.errors": "AlreadyExistsError ClosedError ConflictError CorruptError Error InternalError InvalidInputError NotFoundError OutOfRangeError PermissionDeniedError UnavailableError UnsupportedError",
    "penstock.loader": "Loader",
    "penstock.loader.files": "Files files",
    "penstock.loader.mixture": "Mix mix",
    "penstock.loader.order": "Replacement Window",
    "penstock.ragged": "Ragged",
    "penstock.views.column": "Column",
    "penstock.views.concat": "Concat concat",
    "penstock.views.view": "View",
}
_PLACES = {name: module for module, names in _NAMES.items() for name in names.split()}
# Leaf modules: `ps.torch` needs PyTorch and `ps.importers` needs pyarrow, so `from penstock import *` leaves them out.
_MODULES = ("torch", "importers", "transforms")


# What to write instead of names that are elsewhere, or that other libraries have.
_INSTEAD = {
    "import_data": "ps.importers.import_data(source, destination)",
    "load_dataset": "ps.open(uri), or ps.importers.import_data(source, destination)",
    "read": "ps.open(uri)",
    "write_dataset": "ps.create(uri, schema), and ds.append(table)",
    "DataLoader": "ds.loader(batch_size=…)",
    "concatenate_datasets": "ps.concat([one, other])",
    "interleave_datasets": "ps.mix([one, other])",
}


def _public(name: str) -> Any:
    """Import a public name on first use."""
    if name in _MODULES:
        try:
            return importlib.import_module(f"penstock.{name}")
        except ModuleNotFoundError as error:
            raise AttributeError(f"cannot import `penstock.{name}`: {error}") from error
    if name == "__version__":
        value: Any = importlib.import_module("penstock._core").VERSION
    elif name in _PLACES:
        value = getattr(importlib.import_module(_PLACES[name]), name)
    else:
        instead = _INSTEAD.get(name)
        raise AttributeError(f"module 'penstock' has no attribute {name!r}" + (f"; write {instead}" if instead else ""))
    globals()[name] = value
    return value


if not TYPE_CHECKING:  # A type checker must know which names exist.
    __getattr__ = _public


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})


# Packages that this one imports on first use.
_LAZY = ("penstock", "pandas", "pyarrow", "torch", "jax", "numpy", "ml_dtypes", "PIL")
# How long a fork waits for imports in other threads. The wait must end, because such an import may itself wait for the forking thread.
_IMPORT_SECONDS = 5.0


def _load() -> None:
    """Import everything except leaf modules, and wait for leaf modules and libraries that other threads are importing. A child forked
    during such an import would wait forever for it to finish.
    """
    for module in ("numpy.ma", "numpy.random", *_NAMES):
        importlib.import_module(module)
    until, checks = time.monotonic() + _IMPORT_SECONDS, 2  # Check twice after a wait: the other thread may be between two imports.
    if _imports_elsewhere():
        while checks > 0 and time.monotonic() < until:
            time.sleep(0.001)  # Python does not signal when an import ends.
            checks = 2 if _imports_elsewhere() else checks - 1


def _imports_elsewhere() -> bool:
    """Return whether another thread is importing a module of this package, or of a library that it imports on first use."""
    names = [name for name in sys.modules.copy() if name.partition(".")[0] in _LAZY]
    if not any(getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False) is True for name in names):
        return False
    frame = sys._getframe()
    while frame.f_back is not None and "importlib._bootstrap" not in frame.f_code.co_filename:
        frame = frame.f_back
    return "importlib._bootstrap" not in frame.f_code.co_filename  # If found, this thread is forking during its own import.


os.register_at_fork(before=_load)

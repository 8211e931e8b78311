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
    from penstock.changes.receipt import Receipt as Receipt
    from penstock.changes.stage import Stage as Stage
    from penstock.columns import *  # noqa: F403
    from penstock.dataset import Dataset as Dataset
    from penstock.dataset import configure as configure
    from penstock.dataset import create as create
    from penstock.dataset import open as open
    from penstock.errors import AlreadyExistsError as AlreadyExistsError
    from penstock.errors import ClosedError as ClosedError
    from penstock.errors import ConflictError as ConflictError
    from penstock.errors import CorruptError as CorruptError
    from penstock.errors import Error as Error
    from penstock.errors import InternalError as InternalError
    from penstock.errors import InvalidInputError as InvalidInputError
    from penstock.errors import NotFoundError as NotFoundError
    from penstock.errors import OutOfRangeError as OutOfRangeError
    from penstock.errors import PermissionDeniedError as PermissionDeniedError
    from penstock.errors import UnavailableError as UnavailableError
    from penstock.errors import UnsupportedError as UnsupportedError
    from penstock.history.log import Commit as Commit
    from penstock.history.log import Compaction as Compaction
    from penstock.history.log import Difference as Difference
    from penstock.history.log import Log as Log
    from penstock.loader import Loader as Loader
    from penstock.loader.files import Files as Files
    from penstock.loader.files import files as files
    from penstock.loader.mixture import Mix as Mix
    from penstock.loader.mixture import mix as mix
    from penstock.loader.order import Replacement as Replacement
    from penstock.loader.order import Window as Window
    from penstock.ragged import Ragged as Ragged
    from penstock.transaction import Transaction as Transaction
    from penstock.views.column import Column as Column
    from penstock.views.concat import Concat as Concat
    from penstock.views.concat import concat as concat
    from penstock.views.view import View as View

# Maps each module to its public names. Names are imported on first use, so that `import penstock` and `penstock --help` are fast.
_NAMES = {
    "penstock.changes.receipt": "Receipt",
    "penstock.changes.stage": "Stage",
    "penstock.columns": "Boxes Bytes Category Image Json Keypoints Label Labels Mask Scalar Tensor Text",
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
__all__ = ["__version__", *_PLACES]  # noqa: PLE0604
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

"""Penstock: a versioned, transactional, columnar store for multimodal datasets that feeds training at memory speed.

>>> import penstock as ps
>>> ds = ps.create("memory://tour", {"text": ps.Text(), "label": ps.Label(["cat", "dog"])})
>>> receipt = ds.append({"text": ["purrs", "barks"], "label": ["cat", "dog"]})
>>> ds[1]["text"], int(ds[1]["label"])
('barks', 1)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from penstock._core import VERSION as __version__
from penstock.columns.blob import Bytes
from penstock.columns.boxes import Boxes
from penstock.columns.category import Category
from penstock.columns.image import Image
from penstock.columns.json_text import Json
from penstock.columns.keypoints import Keypoints
from penstock.columns.label import Label
from penstock.columns.mask import Mask
from penstock.columns.scalar import Scalar
from penstock.columns.tensor import Tensor
from penstock.columns.text import Text
from penstock.dataset import Commit, Dataset, Receipt, Transaction, configure, create, open
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
from penstock.files import Files, files
from penstock.loader import Loader
from penstock.loader.mixture import Mix, mix
from penstock.loader.order import Replacement, Window
from penstock.ragged import Ragged
from penstock.view import Column, View

if TYPE_CHECKING:
    from penstock import importers, torch, transforms

__all__ = [
    "AlreadyExistsError",
    "Boxes",
    "Bytes",
    "Category",
    "ClosedError",
    "Column",
    "Commit",
    "ConflictError",
    "CorruptError",
    "Dataset",
    "Error",
    "Files",
    "Image",
    "InternalError",
    "InvalidInputError",
    "Json",
    "Keypoints",
    "Label",
    "Loader",
    "Mask",
    "Mix",
    "NotFoundError",
    "OutOfRangeError",
    "PermissionDeniedError",
    "Ragged",
    "Receipt",
    "Replacement",
    "Scalar",
    "Tensor",
    "Text",
    "Transaction",
    "UnavailableError",
    "UnsupportedError",
    "View",
    "Window",
    "__version__",
    "configure",
    "create",
    "files",
    "importers",
    "mix",
    "open",
    "torch",
    "transforms",
]


def __getattr__(name: str) -> Any:
    """Import leaf modules on first use: `ps.torch` needs PyTorch and `ps.importers` needs pyarrow."""
    if name in ("torch", "importers", "transforms"):
        return importlib.import_module(f"penstock.{name}")
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")

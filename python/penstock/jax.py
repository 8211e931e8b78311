"""The JAX leaf: batches as JAX arrays. Nothing else of Penstock imports jax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from penstock.errors import InvalidInputError
from penstock.view import Batch


def arrays(batch: Batch) -> Batch:
    """Put the arrays of a batch on JAX's default device; lists, text and `Ragged` stay as they are. Timestamps become int64 microseconds.

    Cost: one copy. JAX makes 32-bit numbers of 64-bit ones unless `jax_enable_x64` is set: floats keep fewer digits then; whole numbers that
    would not be the same, which times never are, and floats beyond its range are an InvalidInputError.
    """
    return {
        name: _array(values, name) if isinstance(values, np.ndarray) and values.dtype.kind in "biufcMV" else values
        for name, values in batch.items()
    }


def _array(values: Any, name: str) -> Any:
    values = values.view(np.int64) if values.dtype.kind == "M" else values
    if values.dtype.itemsize >= 8 and values.dtype.kind in "iufc" and values.dtype != np.complex64 and not jax.config.jax_enable_x64:
        narrow = np.dtype(f"{values.dtype.kind}{values.dtype.itemsize // 2}")
        with np.errstate(over="ignore"):
            made = values.astype(narrow)
        changed = made != values if values.dtype.kind in "iu" else ~np.isfinite(made) & np.isfinite(values)
        if changed.any():
            raise InvalidInputError(
                f"column `{name}` has values beyond {4 * values.dtype.itemsize} bits, which JAX would change", code="invalid-value",
                hint="set JAX_ENABLE_X64=1 for 64-bit numbers, or leave the column out",
            )  # fmt: skip
        values = made
    return jnp.array(values)

"""The JAX leaf module: converts batches to JAX arrays. No other module imports jax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from penstock.errors import InvalidInputError
from penstock.views.readable import Batch


def arrays(batch: Batch) -> Batch:
    """Put the arrays of a batch on JAX's default device. Lists, text and `Ragged` are left unchanged; times become int64 microseconds.

    Cost: one copy. Unless `jax_enable_x64` is set, JAX narrows 64-bit numbers to 32 bits, and floats lose precision. Raises:
    InvalidInputError if narrowing would overflow a float or change a whole number, such as any recent timestamp.
    """
    return {
        name: _array(values, name) if isinstance(values, np.ndarray) and values.dtype.kind in "biufcmMV" else values
        for name, values in batch.items()
    }


def _array(values: Any, name: str) -> Any:
    values = values.view(np.int64) if values.dtype.kind in "mM" else values
    if values.dtype.itemsize >= 8 and values.dtype.kind in "iufc" and values.dtype != np.complex64 and not jax.config.jax_enable_x64:
        narrow = np.dtype(f"{values.dtype.kind}{values.dtype.itemsize // 2}")
        with np.errstate(over="ignore"):
            made = values.astype(narrow)
        changed = made != values if values.dtype.kind in "iu" else ~np.isfinite(made) & np.isfinite(values)
        if changed.any():
            raise InvalidInputError(
                f"column `{name}` has values that do not fit {4 * values.dtype.itemsize} bits, so JAX would change them",
                code="invalid-value",
                hint="set JAX_ENABLE_X64=1 for 64-bit numbers, or leave out the column",
            )  # fmt: skip
        values = made
    return jnp.array(values)

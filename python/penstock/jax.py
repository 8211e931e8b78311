"""The JAX leaf: batches as JAX arrays. Nothing else of Penstock imports jax."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from penstock.view import Batch


def arrays(batch: Batch) -> Batch:
    """Put the arrays of a batch on JAX's default device; lists, text and `Ragged` stay as they are. Timestamps become int64 microseconds.

    Cost: one copy. JAX makes 32-bit numbers of 64-bit ones unless `jax_enable_x64` is set.
    """
    return {
        name: _array(values) if isinstance(values, np.ndarray) and values.dtype.kind in "biufcMV" else values
        for name, values in batch.items()
    }


def _array(values: Any) -> Any:
    return jnp.array(values.view(np.int64) if values.dtype.kind == "M" else values)

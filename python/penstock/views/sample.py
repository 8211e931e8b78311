"""`Sample`: one sample as a dict."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import numpy as np

# Larger arrays, and longer text and bytes, are shortened when a sample is printed.
_SHOWN_ELEMENTS, _SHOWN_LETTERS = 8, 80


class Sample(dict[str, Any]):
    """One sample as a dict. Prints the shapes of large arrays instead of their values. `forms` shows `ps.torch.collate` which columns are
    images, ragged, or of fixed shape ("fixed").

    >>> Sample(image=np.zeros((45, 60, 3), np.uint8), label=1)
    {'image': <uint8 (45, 60, 3)>, 'label': 1}
    """

    forms: Mapping[str, str] = types.MappingProxyType({})

    @classmethod
    def of(cls, batch: Mapping[str, Any], index: int, forms: Mapping[str, str]) -> Sample:
        """Return one sample of a batch."""
        sample = cls((name, unwrap(values, index)) for name, values in batch.items())
        sample.forms = forms
        return sample

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{name!r}: {brief(value)}" for name, value in self.items()) + "}"


def brief(value: Any) -> str:
    """Describe a value in a few words.

    >>> brief(b"0" * 5000), brief("ab" * 100)[-5:]
    ('<5,000 bytes>', "bab…'")
    """
    if isinstance(value, np.ndarray) and value.size > _SHOWN_ELEMENTS:
        return f"<{value.dtype} {value.shape}>"
    if isinstance(value, bytes) and len(value) > _SHOWN_LETTERS:
        return f"<{len(value):,} bytes>"
    if isinstance(value, str) and len(value) > _SHOWN_LETTERS:
        return repr(f"{value[:_SHOWN_LETTERS]}…")
    text = repr(value)
    return text if len(text) <= 2 * _SHOWN_LETTERS else f"{text[:_SHOWN_LETTERS]}…"


def unwrap(values: Any, index: int = 0) -> Any:
    """Return one value from a batch column, or None for a null."""
    value = values[index]
    if isinstance(values, np.ma.MaskedArray):
        masked = np.ma.getmaskarray(values)[index]
        if np.all(masked) and np.size(masked):
            return None
        return values.data[index]
    return value

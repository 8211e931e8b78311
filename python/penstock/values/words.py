"""Converts text and words in bulk, to Arrow arrays or to indices into a list of words."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock import _core
from penstock.values.checks import Prepared, fail, is_arrow, is_null_word, is_whole, without_dimensions
from penstock.values.containers import items_of, without_torch
from penstock.values.dense import fixed
from penstock.values.dtypes import cast
from penstock.values.from_arrow import flat_from_arrow
from penstock.values.scalars import plain_numbers, whole_number

# With this many texts or more, an Arrow array is faster than checking texts one by one, and importing pyarrow is worthwhile.
MANY = 1000
# Lists with more bytes of text are converted in parts.
WHOLE_BYTES = 256 << 20


class SharedWords:
    """Samples that are indices into one list of words. The core reads the list only once, no matter how many slices there are."""

    def __init__(self, words: _core.Words, places: npt.NDArray[np.int64], validity: npt.NDArray[np.bool_] | None) -> None:
        self.words, self.places, self.validity = words, places, validity
        self.nbytes = places.nbytes

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, key: slice) -> SharedWords:
        return SharedWords(self.words, self.places[key], None if self.validity is None else self.validity[key])

    def prepared(self) -> Prepared:
        return ("coded", self.words, self.places.view(np.uint8), self.validity)


def coded_from_arrow(values: Any) -> SharedWords | None:
    """Keep dictionary-encoded Arrow words as a list of words and an index per sample. Returns None for other types."""
    if not is_arrow(values):
        return None
    import pyarrow as pa

    if not pa.types.is_dictionary(values.type):
        return None
    if isinstance(values, pa.ChunkedArray):
        if any(chunk.dictionary.null_count for chunk in values.chunks):
            return None
        values = values.unify_dictionaries().combine_chunks()
        values = values.chunk(0) if isinstance(values, pa.ChunkedArray) and values.num_chunks == 1 else values
    words = flat_from_arrow(values.dictionary) if isinstance(values, pa.DictionaryArray) else None
    if words is None or words[4] is not None:
        return None  # Words that are numbers or null are decoded and checked one by one.
    indices = values.indices
    validity = None if indices.null_count == 0 else np.asarray(indices.is_valid())
    filled = indices if validity is None else indices.fill_null(0)
    return SharedWords(_core.Words(words[1], words[2]), np.asarray(filled).astype(np.int64), validity)


def strings(values: Any) -> Any:
    """Convert a long list of texts and None to Arrow in one call. Returns None if that fails."""
    found = _core.texts(values) if isinstance(values, list) and len(values) >= MANY else None
    if found is None:
        return None
    import pyarrow as pa

    data, offsets, validity = found
    bits = None if validity is None else pa.py_buffer(np.packbits(validity, bitorder="little"))
    return pa.LargeStringArray.from_buffers(len(values), pa.py_buffer(offsets), pa.py_buffer(data), bits)


def short_strings(values: Any) -> Any:
    """Convert texts as `strings` does, if two copies of the texts fit in memory. Cost: first measures about a thousand texts."""
    some = values[:: len(values) // 1000 + 1] if isinstance(values, list) else []
    lengths = [len(value) for value in some if isinstance(value, str)]
    most = min(WHOLE_BYTES, _core.configure()[0] // 4)
    return strings(values) if lengths and sum(lengths) / len(lengths) * len(values) <= most else None


def coded_from_strings(values: Any) -> SharedWords | None:
    """Convert a long list of words and None to indices into the distinct words. Returns None if that fails."""
    words = short_strings(values)
    return None if words is None else coded_from_arrow(words.dictionary_encode())


def codes_or_words(values: Any) -> Prepared:
    """Prepare the values of a label or category column: words, or whole numbers."""
    coded = values if isinstance(values, SharedWords) else coded_from_arrow(values)
    if coded is not None:
        return coded.prepared()
    if is_arrow(values) and hasattr(values.type, "value_type") and hasattr(values.type, "index_type"):
        values = values.cast(values.type.value_type)
    flat = flat_from_arrow(values)
    if flat is not None:
        return flat
    if isinstance(values, np.ndarray) and values.dtype.kind in "iu" and values.ndim == 1 and not isinstance(values, np.ma.MaskedArray):
        return fixed(cast(values, "int64"), None)
    items = items_of(values)
    texts = flat_from_arrow(strings(items))
    if texts is not None:
        return texts
    quick = plain_numbers(items, "int64")
    if quick is not None:
        return fixed(*quick)
    items = [None if is_null_word(value) else without_dimensions(value) for value in without_torch(items)]
    if any(isinstance(value, str) for value in items):
        for row, value in enumerate(items):
            if value is not None and not isinstance(value, str):
                raise fail(f"is a {type(value).__name__}, but other values are words", row)
        return ("items", items)
    for row, value in enumerate(items):
        if value is not None and not is_whole(value):
            raise fail(f"is {str(value)[:80]!r}, expected a word or a whole number", row)
    validity = np.array([value is not None for value in items], dtype=bool)
    codes = [0 if value is None else whole_number(value, row, "int64") for row, value in enumerate(items)]
    return fixed(np.array(codes, dtype=np.int64), validity)

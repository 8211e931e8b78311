"""Converts columns of text, as CSV files have them, to values. Values that would lose information are refused by their row."""

from __future__ import annotations

import contextlib
import re
from functools import reduce
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute

from penstock.values.arrow.to_arrow import element_type
from penstock.values.dtypes import is_exact, whole_bits
from penstock.values.text.json_text import parse_json
from penstock.values.times import TIMES, is_fine

# Text of a whole number.
WHOLE = "^[+-]?[0-9]+$"
# The texts of a null. In a column of floats, those of `NANS` are numbers.
NULLS = ["", "NA", "NaN", "nan", "null", "NULL", "None"]
NANS = ["NaN", "nan"]
# Whole numbers with leading zeros count as words, because they are usually postal codes or identifiers.
FRONT_ZEROS = "^[+-]?0[0-9]+$"
HEXADECIMAL = "^[+-]?0[xX]"


def _begins_with_zero(texts: pa.Array) -> pa.Array:
    """Return a mask of the texts longer than one character that begin with a zero, signed or not. Eight times faster than a regex."""
    zero = reduce(compute.or_, (compute.starts_with(texts, start) for start in ("0", "+0", "-0")))
    return compute.and_(zero, compute.greater(compute.binary_length(texts), 1))


def rounded(texts: pa.Array, dtype: str) -> list[int]:
    """Return the rows whose text is a whole number that a dtype of floats does not represent exactly."""
    long = compute.greater_equal(compute.binary_length(texts), len(str(2 ** whole_bits(dtype))))
    rows = compute.indices_nonzero(compute.and_(compute.match_substring_regex(texts, WHOLE), long).fill_null(False)).to_pylist()
    return [row for row in rows if not is_exact_text(texts[row].as_py(), dtype)]


def texts_of(values: pa.Array) -> tuple[pa.Array, list[int]]:
    """Decode bytes to text. Values that are not UTF-8 become null, and their rows are also returned."""
    try:
        return values.cast(pa.string()), []
    except pa.ArrowInvalid:
        each = [_text_of(value.as_py()) for value in values]
        return pa.array(each, pa.string()), [row for row, text in enumerate(each) if text is None]


def _text_of(value: bytes) -> str | None:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def nulled(texts: pa.Array, keep_nan: bool = False) -> pa.Array:
    """Replace the texts in `NULLS` with null. In columns of floats, NaN is a number, which is kept."""
    nulls = [text for text in NULLS if not (keep_nan and text in NANS)]
    return compute.if_else(compute.is_in(texts, pa.array(nulls)), pa.scalar(None, texts.type), texts)


def parsed(texts: pa.Array) -> tuple[list[Any], list[tuple[int, str]]]:
    """Parse texts as JSON. Also returns the rows that are not JSON, each with the reason."""
    values: list[Any] = []
    bad: list[tuple[int, str]] = []
    for row, text in enumerate(texts.to_pylist()):
        try:
            values.append(None if text is None else parse_json(text))
        except (ValueError, RecursionError) as error:
            values.append(None)
            bad.append((row, f"{text[:80]!r} is not JSON: {error}"))
    return values, bad


def converted(texts: pa.Array, dtype: str, is_given: bool) -> tuple[pa.Array, list[int]]:
    """Convert texts to numbers or times of a dtype. Also returns the rows that cannot be converted."""
    # All floats are read as float64. Later, appending refuses values that a smaller type cannot represent.
    floats = "float" in dtype
    texts = nulled(compute.utf8_trim_whitespace(texts), keep_nan=floats)
    if dtype == "timestamp":
        return timestamps(texts)
    if dtype == "time":
        texts = compute.replace_substring_regex(texts, ZEROS, r"\1\2")
    wanted = pa.float64() if floats else element_type(dtype)
    bad: list[int] = []
    # Arrow reads hexadecimal digits as a bit pattern: 0xff is -1 as int8.
    lost = [HEXADECIMAL] * (not floats) + [FRONT_ZEROS] * (not is_given)
    if lost and compute.any(_begins_with_zero(texts)).as_py():
        words = compute.match_substring_regex(texts, "|".join(lost))
        bad = compute.indices_nonzero(words).to_pylist()
        texts = compute.if_else(words, pa.scalar(None, texts.type), texts)
    numbers = _cast(texts, wanted)
    if numbers is None and "int" in dtype:  # Arrow accepts a plus sign for floats only.
        texts = compute.replace_substring_regex(texts, r"^\+([0-9])", r"\1")
        numbers = _cast(texts, wanted)
    if numbers is None:
        values = []
        for row, text in enumerate(texts):
            try:
                values.append(text.cast(wanted).as_py())
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError):
                values.append(None)
                bad.append(row)
        numbers = pa.array(values, wanted)
        bad.sort()
    if floats:
        beyond = compute.and_not(compute.is_inf(numbers), compute.match_substring(texts, "inf", ignore_case=True))
        if compute.any(compute.greater_equal(compute.abs(numbers), float(2 ** whole_bits(dtype)))).as_py():
            beyond = compute.or_(beyond, pa.array(np.isin(np.arange(len(texts)), rounded(texts, dtype))))
        if compute.any(beyond).as_py():
            numbers = compute.if_else(beyond, pa.scalar(None, wanted), numbers)
            bad = sorted(bad + compute.indices_nonzero(beyond).to_pylist())
    return numbers, bad


def _cast(texts: pa.Array, wanted: pa.DataType) -> pa.Array | None:
    """Cast all texts to a numeric type. Returns None if Arrow refuses any of them."""
    try:
        return texts.cast(wanted)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None


def timestamps(texts: pa.Array) -> tuple[pa.Array, list[int]]:
    """Convert time strings to microseconds in UTC. Also returns the rows that are not times, or have digits below a microsecond."""
    times = _times(texts)
    if times is None:
        times = _times(compute.replace_substring_regex(texts, ZEROS, r"\1\2"))
    if times is not None:
        return times, []
    if len(texts) == 1:
        return pa.nulls(1, pa.timestamp("us")), [0]
    each = [timestamps(texts[row : row + 1]) for row in range(len(texts))]
    return pa.concat_arrays([value for value, _ in each]), [row for row, (_, bad) in enumerate(each) if bad]


# Zeros below a microsecond, after the digits that count.
ZEROS = r"(\.\d{6})0{1,3}(\D|$)"


def _times(texts: pa.Array) -> pa.Array | None:
    """Cast time strings to microseconds in UTC. Returns None if Arrow refuses any of them."""
    for zone in (None, "UTC"):
        with contextlib.suppress(pa.ArrowInvalid):
            return texts.cast(pa.timestamp("us", tz=zone)).cast(pa.timestamp("us"))
    return None


def unlike(value: str, dtype: str) -> str:
    """Return why a text is none of a dtype."""
    why = f"expected {dtype}"
    if dtype in TIMES and is_fine(value):
        why = "which has digits below a microsecond: cut them off first, or import the column as text"
    elif whole_bits(dtype) < 64 and re.fullmatch(WHOLE, value.strip()) and not is_exact_text(value.strip(), dtype):
        why = f"which {dtype} does not represent exactly: import the column as text"
    return f"{value[:80]!r}, {why}"


def is_exact_text(text: str, dtype: str) -> bool:
    """Return whether a dtype of floats represents the whole number in a text exactly. float64 has at most a sign and 309 digits."""
    return len(text) <= 310 and is_exact(int(text), dtype)

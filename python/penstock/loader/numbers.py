"""Numbers of options and states, checked."""

from __future__ import annotations

from typing import Any

from penstock.errors import InvalidInputError
from penstock.values.checks import is_whole


def whole(value: Any, what: str, least: int, below: int = 2**62) -> int:
    """Return a whole number from `least` to below `below`. Raises: InvalidInputError for anything else."""
    if not is_whole(value) or not least <= value < below:
        power = below.bit_length() - 1
        raise InvalidInputError(
            f"{what}={value!r}, expected a whole number of at least {least} and less than 2^{power}", code="invalid-argument"
        )
    return int(value)


def whole_seed(value: Any) -> int:
    """Return a seed: any unsigned 64-bit number, as torch accepts."""
    return whole(value, "seed", 0, 2**64)

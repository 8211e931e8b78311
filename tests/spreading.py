"""Random splits and samples as they were defined first, in NumPy: a second implementation, which the core must agree with."""

import numpy as np

SAMPLE, SPLIT, GROUP = 1, 2, 3


def hashed(*parts):
    """Hash whole numbers, or arrays of them, to 64 bits. Source: SplitMix64 (Steele, Lea and Flood, 2014)."""
    state = np.zeros(1, np.uint64)
    with np.errstate(over="ignore"):
        for part in parts:
            given = np.asarray(part)
            state = state + np.uint64(0x9E3779B97F4A7C15) + (given.view(np.uint64) if given.dtype == np.int64 else given.astype(np.uint64))
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
    return state


def unit(hashes):
    """Convert hashes to numbers in [0, 1)."""
    return (hashes >> np.uint64(11)).astype(np.float64) / 2**53


def spread(ids, seed):
    """Hash row ids to [0, 1) such that each ten, hundred and thousand consecutive ids is spread evenly."""
    drawn = np.zeros(len(ids), np.int64)
    for level in range(3):
        digit, higher = ids // 10**level % 10, ids // 10 ** (level + 1)
        key = hashed(SPLIT, seed, level, higher, drawn)
        own = hashed(key, digit)
        drawn = drawn * 10 + sum((hashed(key, other) < own).astype(np.int64) for other in range(10))
    return (drawn + unit(hashed(SPLIT, seed, 3, ids))) / 1000


def parts(ids, shares, seed):
    """Return the part of each sample of a split."""
    return np.searchsorted(np.cumsum(shares)[:-1], spread(ids, seed), side="right")


def ranked(classes, ids, shares, seed):
    """Return the part of each sample of a split by class."""
    kinds, own, counts = np.unique(classes, return_inverse=True, return_counts=True)
    order = np.lexsort((hashed(GROUP, seed, ids), own))
    begins = np.cumsum(counts) - counts
    places = np.empty(len(ids))
    places[order] = (np.arange(len(ids)) - begins[own[order]] + unit(hashed(SPLIT, seed, kinds))[own[order]]) / counts[own[order]]
    return np.searchsorted(np.cumsum(shares)[:-1], places, side="right")


def sampled(ids, count, seed):
    """Return the places of the samples with the smallest hashes."""
    return np.argsort(hashed(SAMPLE, seed, ids), kind="stable")[:count]

"""Converts the user's input to forms that the core accepts. Covers containers, nulls, casts and ragged arrays.

The column types in `columns/` call this package. Every refusal is an InvalidInputError, which names the bad row if there is one.
"""

"""Convert the user's input to forms for the core: containers, nulls, casts that change no value, ragged arrays.

The column types of `columns/` call this package. Every refusal is an InvalidInputError, which names the bad row if there is one.
"""

"""Arrow: what its types mean, and conversions of values from it and to it."""

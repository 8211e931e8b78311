"""Column types, one per file: the schema entry, and how values are prepared for the core."""

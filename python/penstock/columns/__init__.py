"""Column types, one per file. Each defines its schema entry and prepares values for the core."""

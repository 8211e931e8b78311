"""What the verbs share: options, tables, and texts."""

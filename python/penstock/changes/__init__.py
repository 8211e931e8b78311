"""What transactions are made of: changes of the schema, staged samples and backfills."""

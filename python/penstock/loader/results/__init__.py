"""What a loader does with the values of a batch: nulls, and the kind of each column."""

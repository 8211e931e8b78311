"""SQL over the scalar columns of a dataset, with DuckDB."""

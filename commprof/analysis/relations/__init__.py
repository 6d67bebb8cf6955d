"""Relations derived from the tables of a run: SQL texts that DuckDB and Spark both evaluate."""

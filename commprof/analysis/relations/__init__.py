"""Relations: what is derived from the tables of a run, each one SQL text that DuckDB and Spark both run."""

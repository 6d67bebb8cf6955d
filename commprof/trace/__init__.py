"""The run directory: manifest, binary records, Parquet tables, reader."""

"""Builds plotly figures from tables. This package neither reads runs nor computes answers."""

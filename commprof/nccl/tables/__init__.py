"""Builds the tables of a log, and notes on data that the log lacks."""

"""The tables of a log, and notes on its missing evidence."""

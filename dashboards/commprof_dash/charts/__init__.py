"""Charts: a table in, a plotly figure out. Nothing here reads a run or computes an answer."""

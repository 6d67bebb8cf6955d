"""Align the same collective across ranks: numbering, agreement, arrivals on one clock."""

"""The levels held against each other: attribution, orders, splits, and the result in rows and sentences."""

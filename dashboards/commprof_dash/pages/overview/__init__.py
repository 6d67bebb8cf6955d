"""The Overview page."""

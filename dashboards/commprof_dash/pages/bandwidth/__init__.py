"""The Bandwidth page."""

"""The Buckets page."""

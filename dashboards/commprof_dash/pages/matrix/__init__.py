"""The Traffic matrix page."""

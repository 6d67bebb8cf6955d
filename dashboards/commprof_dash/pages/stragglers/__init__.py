"""The Stragglers page."""

"""Startup: from a configuration to an engine."""

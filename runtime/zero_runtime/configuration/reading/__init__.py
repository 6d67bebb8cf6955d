"""Reads config files and checks single values."""

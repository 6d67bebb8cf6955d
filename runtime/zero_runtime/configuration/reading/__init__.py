"""Functions that read configuration files and check single values."""

"""The blocks of a configuration, checked and typed, with all defaults."""

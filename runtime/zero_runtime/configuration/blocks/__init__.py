"""The blocks of a configuration, checked and typed, with every default filled in."""

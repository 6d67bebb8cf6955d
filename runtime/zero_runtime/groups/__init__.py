"""Process groups and the collectives in them: axes, timing, logging."""

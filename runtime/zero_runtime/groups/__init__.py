"""Process groups and the collectives in them: plain, logged, timed."""

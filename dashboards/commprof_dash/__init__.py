"""The commprof dashboard (Dash)."""

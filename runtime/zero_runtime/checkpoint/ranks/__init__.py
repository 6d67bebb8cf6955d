"""Checkpoints whose parts were saved by several ranks or stages, merged or split again."""

"""What a configuration should send, by rules alone: the second opinion."""

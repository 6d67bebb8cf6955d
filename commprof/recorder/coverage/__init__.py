"""Checks that all collectives are recorded: the self-check, trials of each layer, detection of unseen traffic."""

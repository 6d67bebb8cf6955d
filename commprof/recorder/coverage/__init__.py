"""Checks that all collectives are recorded: self-check, trial of each layer, detection of unseen traffic."""

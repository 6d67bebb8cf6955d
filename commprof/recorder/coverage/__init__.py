"""Whether everything is recorded: the self-check, trials of each layer, and what is out of sight."""

"""Records completion times of collectives: with events on GPUs, and with sampled backend callbacks on CPUs."""

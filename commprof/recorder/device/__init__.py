"""Completion times of collectives: events on GPUs, a sample of backend callbacks on CPUs."""

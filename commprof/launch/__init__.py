"""Starts programs with the recorder: the command line, the injection, the ranks, the job, and sweeps."""

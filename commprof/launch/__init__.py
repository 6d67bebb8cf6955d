"""Starting programs under the recorder: which program, its ranks, the injection, the job, sweeps."""

"""Interception of torch's ProcessGroup and Work: wrappers, signatures of calls, process groups."""

"""Interception of torch's ProcessGroup and Work: the wrappers, what they note, and which groups there are."""

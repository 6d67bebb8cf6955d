"""When collectives end: on GPUs by events, on CPUs by a sample that the backend reports."""

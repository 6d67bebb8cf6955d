"""Training state in the recorder: steps, phases, models, buckets, wrappers, waits in C++."""

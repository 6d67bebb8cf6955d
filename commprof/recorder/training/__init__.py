"""Where the training is: steps, phases, models, buckets, wrappers, waits in C++."""

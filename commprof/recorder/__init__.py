"""Recording inside the training process: interception, records, clocks, counters."""

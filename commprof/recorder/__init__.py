"""The recorder, which runs inside the training process: interception, records, clocks, counters."""

"""The other three levels, from the records, the logs and the counters: issued, executed, moved."""

"""Calibration: times collectives over a range of sizes and fits latency and bandwidth, the ceiling of the machine."""

"""Calibration of a machine: times collectives at several sizes and fits their latency and bandwidth."""

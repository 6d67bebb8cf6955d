"""Schedules of pipelines, in which order and when each rank computes. Pure."""

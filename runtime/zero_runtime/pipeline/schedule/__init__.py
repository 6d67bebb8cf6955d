"""Schedules of pipelines, which define in which order and when each rank computes."""

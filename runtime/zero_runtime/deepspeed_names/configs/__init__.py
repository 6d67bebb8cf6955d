"""DeepSpeed's names for configurations and schedules as objects."""

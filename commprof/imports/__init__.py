"""Importers of other tools' recordings: Flight Recorder, Kineto, NCCL Inspector, DeepSpeed's comms logger."""

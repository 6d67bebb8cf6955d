"""Importers for recordings of other tools: Flight Recorder, Kineto, NCCL Inspector, DeepSpeed's comms logger."""

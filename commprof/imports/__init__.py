"""What other tools recorded, made a run: Flight Recorder dumps, Kineto traces, NCCL Inspector, DeepSpeed's comms logger."""

"""What collectives cost in time: steps, exposed and overlapped communication, transfers, bandwidth."""

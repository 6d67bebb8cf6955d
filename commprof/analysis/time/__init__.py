"""Times: steps, exposed and overlapped communication, transfers, bandwidth."""

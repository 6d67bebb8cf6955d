"""Records beside NCCL lines, and the same collective across ranks."""

"""Gradient reduction of ZeRO stages 0 to 2: buckets, reductions, clipping, loss scale."""

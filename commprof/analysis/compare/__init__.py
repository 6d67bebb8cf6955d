"""Comparison of settings: how runs differ, the cost of each setting, and the advice."""

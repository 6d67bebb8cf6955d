"""Comparison of settings: how runs differ, what each cost, and the advice."""

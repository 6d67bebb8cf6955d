"""Tracks state while a log is parsed: communicators, their ranks, grouped calls, choices of algorithms."""

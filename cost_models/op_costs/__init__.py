"""Seconds of one kernel and of one collective."""

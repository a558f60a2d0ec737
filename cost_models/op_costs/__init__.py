"""Seconds of one kernel and of one collective: flops, bytes and link rates."""

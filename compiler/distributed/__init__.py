"""Collectives of one rank, start and wait; local gloo processes."""

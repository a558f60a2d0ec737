"""Seconds of a typed program: conversions of layouts, ops, what parameters and their groups move,
what is recomputed, regions, the step; bytes are in memory."""

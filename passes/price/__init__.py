"""Seconds of a typed program: conversions, ops, parameter traffic, regions, steps."""

"""Bytes over time: of one op, of a region, and of a whole step."""

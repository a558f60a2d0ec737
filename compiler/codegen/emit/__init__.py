"""Typed graphs become fx graphs with collectives: what is emitted for each op, parameter groups,
what cannot run, checks after every pass."""

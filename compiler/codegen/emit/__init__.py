"""Typed graphs become fx graphs with collectives; every pass is checked."""

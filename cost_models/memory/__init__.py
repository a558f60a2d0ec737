"""Bytes over time, from plain sizes: live ranges of a local program, what recomputation saves, the
peak of a step; passes.memory asks it."""

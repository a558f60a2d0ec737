"""Divides a chain of layers into pipeline stages, with bounds on every division: numbers only, no
graphs."""

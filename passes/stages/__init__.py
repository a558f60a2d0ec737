"""Divides a chain of layers into pipeline stages, each with its schedule: numbers only."""

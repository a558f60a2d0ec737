"""Divisions a chain of layers into pipeline stages: numbers only."""

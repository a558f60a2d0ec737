"""Measures the machine that it runs on: kernels, pieces of models, collectives, contention."""

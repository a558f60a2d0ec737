"""Gradients that a model takes inside of its forward."""

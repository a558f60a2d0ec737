"""Choices of a plan that need the emitted, simulated program."""

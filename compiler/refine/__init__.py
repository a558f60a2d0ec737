"""Choices of a plan that need the emitted program, simulated: micro-chunks, collective matmuls,
exact events, what fits as emitted."""

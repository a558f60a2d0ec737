"""Checkpoints of a compiled model and its optimizer, from plan to plan."""

"""Optimizer states in fewer bits than parameters: how numbers are packed, and the optimizer that
keeps its states so."""

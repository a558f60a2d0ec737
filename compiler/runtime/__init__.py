"""Executes an emitted program, in one pass or as a pipeline."""

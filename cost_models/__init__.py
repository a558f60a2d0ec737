"""Costs: compute, collectives, memory, and device presets as data. No torch import here."""

"""Capture: an nn.Module becomes a folded op graph."""

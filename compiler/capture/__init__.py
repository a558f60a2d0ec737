"""From an nn.Module to a folded op graph."""

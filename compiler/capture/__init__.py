"""The passes of capture in order: an nn.Module becomes a folded op graph."""

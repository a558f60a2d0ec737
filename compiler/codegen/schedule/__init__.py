"""The graph of a region in segments, and the order in which they run."""

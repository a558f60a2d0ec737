"""Patterns of captured programs (causal masks, draws, experts) become shardable ops, or are
refused."""

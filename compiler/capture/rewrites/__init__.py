"""Patterns of captured programs become shardable ops, or are refused."""

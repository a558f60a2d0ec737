"""Ops of the user's code: which dims ranks may share, proven on probes, or as a rule says."""

"""The plan of a folded graph on a cluster: the searches, baselines, assembly, re-pricing."""

"""From a folded graph and a cluster to a plan: the searches, baselines, assembly, re-pricing."""

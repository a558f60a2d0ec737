"""Facts of a folded or typed graph: who reads what, boundaries, variants. No prices."""

"""Facts of a folded or typed graph without prices: who reads what, boundaries, variants of a
region, the same graph without dropout."""

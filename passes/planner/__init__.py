"""The Plan of a folded graph: the searches are called, the plan written down, checked, priced."""

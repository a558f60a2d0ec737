"""The cheapest typing of a region, by variable elimination."""

"""The cheapest typing of a region: a rule per op and a layout per value, by variable elimination,
given the role of each mesh axis."""

"""Op graphs and single ops with their tensors; samples, layouts and mutations for rules."""

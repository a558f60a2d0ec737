"""Rows that a mask selects, whose number depends on values, in ops of fixed shape."""

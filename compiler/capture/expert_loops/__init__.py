"""Loops over experts, whose shapes depend on values, in forms that a graph can hold."""

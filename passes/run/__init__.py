"""The fastest strategy candidates of a chain of layers under a memory budget: numbers only, no
graphs."""

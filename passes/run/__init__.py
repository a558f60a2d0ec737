"""The fastest strategies of a chain of layers under a memory budget: numbers only."""

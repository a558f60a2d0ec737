"""Finds the regions that repeat and writes the program as their instances."""

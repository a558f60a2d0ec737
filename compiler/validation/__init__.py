"""Is the program right (verify), and does it run as predicted (measure)."""

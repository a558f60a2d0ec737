"""The program of one rank, written from a plan."""

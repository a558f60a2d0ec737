"""The order of tasks on one compute stream and its links: numbers only."""

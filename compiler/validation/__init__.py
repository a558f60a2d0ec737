"""Is the program right (verify), does it run as predicted (measure): runs on local processes, and
the reports of both."""

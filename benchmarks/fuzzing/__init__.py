"""Bad inputs of the command line, and the promise that each of them ends in."""

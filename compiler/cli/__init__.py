"""The commands and their arguments; texts they print are in report and validation; torch is
imported in torch_commands only."""

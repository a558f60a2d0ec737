"""The commands; torch is imported in torch_commands only."""

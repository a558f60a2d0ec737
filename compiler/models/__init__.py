"""The MODEL argument of commands, and shrunk configurations."""

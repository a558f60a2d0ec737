"""The emitted program as data and as text."""

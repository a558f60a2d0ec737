"""The only files that touch torch's private modules, and names of torch objects."""

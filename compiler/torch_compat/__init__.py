"""The only files that touch torch's private modules (fake tensors, DTensor, pytrees, process
groups, symmetric memory), and names of torch objects."""

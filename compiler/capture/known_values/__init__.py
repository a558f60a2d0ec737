"""Tensors whose values are known in a trace: fixed inputs, and what is made of them."""

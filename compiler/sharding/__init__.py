"""How tensors are sharded and put together, and which indices are local to a rank."""

"""CompiledModel, what a training loop holds: the module tree with shards in place of tensors."""

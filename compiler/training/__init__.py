"""CompiledModel and its state, what a training loop holds: parameters, optimizer state, gradients,
saving and loading, other batch sizes."""

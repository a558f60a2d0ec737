"""CompiledModel and its state: what a training loop holds."""

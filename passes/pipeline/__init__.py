"""The search with stages and microbatches: the tree of degrees, costs of a layer per microbatch,
what of its parameters is stored and sent, best-first over degrees."""

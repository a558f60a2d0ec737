"""What one rank holds of a model: shards of parameters and buffers, their first values, their
gradients, and the state that goes out and comes back in."""

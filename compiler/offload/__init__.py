"""What lives in the host's memory. Parameters that are stored and updated there: copies for the
device with every forward, gradients to the host as they become final. Activations that wait there
for their backward."""

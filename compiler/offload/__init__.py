"""Parameters that are stored and updated in the host's memory: copies for the device with every
forward, gradients to the host as they become final."""

"""The fx graph of a region in segments between collectives, their costs, the order in which they
run, weight gradients split off."""

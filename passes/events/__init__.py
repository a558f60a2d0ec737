"""A typed program as events for the simulator, and collectives bucketed by simulation."""

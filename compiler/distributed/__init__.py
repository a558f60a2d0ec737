"""The mesh of one rank and its collectives, start and wait; agreement of ranks and ranks that are
lost; what ops know of the step; local gloo processes."""

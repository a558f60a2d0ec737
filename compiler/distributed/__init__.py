"""The mesh of one rank and its collectives, start and wait; lost ranks; what a step remembers
between forward and backward; local gloo processes."""

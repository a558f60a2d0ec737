"""What an emitted graph calls, forward and backward, one file per op: conversions
(collectives and their backward), experts, attention, losses, draws, norms."""

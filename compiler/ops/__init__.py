"""What an emitted graph calls, forward and backward, one file per op: conversions, experts,
attention, losses, draws, norms."""

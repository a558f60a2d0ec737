"""The functions that an emitted graph calls."""

"""From a graph to a Plan and back: calls the searches, writes their answer down beside baselines,
checks and prices plans that come from a file."""

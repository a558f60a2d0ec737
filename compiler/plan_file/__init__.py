"""plan.json and cluster.json, both directions, and the JSON Schema of a plan."""

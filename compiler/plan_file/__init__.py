"""Files in and out, without torch: plan.json and cluster.json both ways, the JSON Schema, reading
within limits, writing whole or not at all."""

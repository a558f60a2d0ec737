"""What a graph of one call cannot hold of a model's Python: state that forward changes, calls that
a trace loses, and what forward asks of the world outside."""

"""Chained chunks, the search: which values of a chunked region can cross its boundaries in chunks,
and the order of tasks in a chain of equal regions. meshfold.codegen.chained_chunks says what this
is, what it gains and how to leave it out."""

"""What tests share, by what it makes.

models      modules to capture and train: Hugging Face families, vision, experts, stacks
graphs      op graphs, single ops and samples for the rule table
programs    captured, planned, emitted and simulated programs
search      problems of the run and stage search, triples of small plans
processes   functions that run on the ranks of a pool, and the pool itself
readme, commands, tables   sessions, commands and tables of README.md and docs/
"""

"""How single ops may be sharded, a file per family (attention, contraction, loss, ...): a function
per op labels its dims."""

"""The pool of gloo processes, and what its ranks run."""

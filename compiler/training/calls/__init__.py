"""One call of a compiled model: its arguments, which program runs it, what ranks compare before
it, what it returns."""

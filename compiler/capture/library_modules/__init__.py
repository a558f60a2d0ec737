"""Modules and functions of torch and transformers that a trace takes in another form."""

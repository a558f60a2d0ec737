"""Modules of torch and transformers that a trace takes in another form than they have."""
